"""Attaches our reducer to ``DistributedDataParallel`` objects, and detaches it.

The reducer is imported when the first model is wrapped: its import takes longer than everything
else that ``apply()`` does, and a script may wrap no model.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import torch.distributed as dist

from ovpatch.hookspecs import note_failures, refuse_option
from ovpatch_plugins.ddp import ddp_report as report
from ovpatch_plugins.ddp.ddp_report import COUNTERS, note

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ovpatch.overlap.data_parallel.grad_reducer import ReducerConfig
    from ovpatch_plugins.ddp.reducer_stub import WrapperCalls


_REASON_RPC: Final = "RPC is in use, whose distributed autograd keeps gradients in its own contexts"


def find_reason_for_stock(
    ddp: DistributedDataParallel, params: Sequence[torch.nn.Parameter]
) -> str:
    """Return the reason for which this model keeps the stock reducer; "" if there is none."""
    from ovpatch.overlap.comm.lifetimes import group_store

    if ddp._use_python_reducer:
        return "torch._dynamo.config.optimize_ddp is 'python_reducer'"
    if ddp.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=...) brings its own hooks"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params has its own reduction"
    # A copy that is made inside `join()` keeps notifying the ranks that have joined, through the
    # C++ reducer, because stock PyTorch copies this setting as well.
    if ddp._join_config.enable:
        return "it is a copy of a model inside join(), which shadows the collectives of the C++ reducer"
    if any(_is_dtensor(param) for param in params):
        return "parameters are DTensors"
    if group_store(ddp.process_group) is None:
        # Ranks compare their settings through the store.
        return "its process group has no store, through which ranks would compare their settings"
    if _has_rpc():
        return _REASON_RPC
    return ""


def _has_rpc() -> bool:
    api = sys.modules.get("torch.distributed.rpc.api")
    return api is not None and bool(api._is_current_rpc_agent_set())


def _is_dtensor(param: torch.nn.Parameter) -> bool:
    # The test goes by the name, because an import of DTensor would cost every script half a second.
    return any(cls.__name__ == "DTensor" for cls in type(param).__mro__)


# A `DistributedDataParallel` object. Its annotations know the C++ reducer only.
Wrapper: TypeAlias = Any

_MIB: Final = 1024 * 1024

InitHelper = Callable[..., None]

# Key of a value that is attached to wrappers with our reducer: the function that builds the stock
# one.
_STOCK_HELPER: Final = "ddp: stock helper"
# Key of a value that is attached to every wrapper: the ids of its parameters, which its reducer
# keeps alive.
_PARAMETERS: Final = "ddp: parameters"
# True while all ranks construct a wrapper together.
_ranks_are_together: ContextVar[bool] = ContextVar("ovpatch_ddp_ranks_are_together", default=False)


class DDPAttachment:
    """The feature's patches, for one set of options.

    [Note: when ranks agree] While ``DistributedDataParallel(...)`` is constructed, stock PyTorch
    has just compared shapes over all ranks, so ranks compare their settings immediately, with a
    short timeout. A wrapper that comes from ``copy.deepcopy``, ``pickle`` or ``init_sync=False``
    may exist on one rank alone. Its ranks agree in the first backward that is reduced, which needs
    all of them anyway, with the timeout of the process group.

    Args:
        options: Resolved options of the feature.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``DistributedDataParallel.__init__``, to note whether ranks construct together."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(self: Wrapper, *args: Any, **kwargs: Any) -> None:
            for wrapper in _list_wrappers():
                # A model that is wrapped again after a failed backward must not meet the
                # collectives of the old wrapper. A model of another thread issues its collectives
                # in that thread's order.
                if not wrapper.reducer.is_of_another_thread():
                    wrapper.reducer.grad_reducer.recover()
            given = signature.bind(self, *args, **kwargs).arguments
            token = _ranks_are_together.set(bool(given.get("init_sync", True)))
            try:
                model = type(given.get("module")).__name__
                with note_failures("ddp", f"wrapping {model} in DistributedDataParallel"):
                    original(self, *args, **kwargs)
            finally:
                _ranks_are_together.reset(token)

        return init

    def wrap_init_helper(self, original: InitHelper) -> InitHelper:
        """Wrap ``DistributedDataParallel._ddp_init_helper``, to build our reducer."""
        attachment = self

        @functools.wraps(original)
        def init_helper(
            self: Wrapper,
            parameters: Sequence[torch.nn.Parameter],
            expect_sparse_gradient: Sequence[bool],
            param_to_name_mapping: Mapping[int, str],
            static_graph: bool,
        ) -> None:
            ddp = self
            stock = functools.partial(
                original,
                ddp,
                parameters,
                expect_sparse_gradient,
                param_to_name_mapping,
                static_graph,
            )
            if ddp.process_group.size() == 1:
                stock()
                note("a model is wrapped for one rank, so there is nothing to reduce")
                _note_sharing(ddp, parameters)
                return
            from ovpatch.overlap.comm.consensus import check_consistent
            from ovpatch.overlap.comm.lifetimes import group_store
            from ovpatch.overlap.data_parallel.grad_sharder import is_chosen
            from ovpatch_plugins.ddp.reducer_stub import WrapperCalls

            reason = find_reason_for_stock(ddp, parameters)
            config = attachment._make_config(ddp, parameters, expect_sparse_gradient)
            max_ctas = attachment._options["max_ctas"]
            terms = _make_terms(
                parameters, config, max_ctas, attachment._options["hierarchical"], static_graph
            )
            together = _ranks_are_together.get()
            if together and group_store(ddp.process_group) is not None:
                reason = check_consistent(
                    ddp.process_group,
                    "ddp",
                    terms,
                    objection=reason,
                    timeout_s=attachment._options["agreement_timeout_s"],
                )
            if reason:
                stock()
                _report_stock(ddp, reason)
            else:
                sparse = [i for i, is_sparse in enumerate(config.sparse) if is_sparse]
                is_sharded = is_chosen(
                    ddp.module, parameters, ddp.process_group, sparse=sparse, together=together
                )
                calls = WrapperCalls(
                    max_ctas,
                    can_save_memory=not (ddp.gradient_as_bucket_view or config.sums_in_fp32),
                )
                if not together:
                    # See [Note: when ranks agree].
                    reference = weakref.ref(ddp)
                    calls.before_first_backward = functools.partial(_agree_late, reference, terms)
                config = dataclasses.replace(config, sharded=is_sharded)
                if together:
                    config = attachment._place_on_hosts(ddp, config)
                _install(ddp, parameters, config, calls)
                _get_values(ddp)[_STOCK_HELPER] = original
                if together:
                    _identify(ddp)
            _note_sharing(ddp, parameters)

        return init_helper

    def wrap_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DistributedDataParallel._post_forward``, to watch the user's outputs."""

        @functools.wraps(original)
        def post_forward(self: Wrapper, output: Any) -> Any:
            reducer = vars(self).get("reducer")
            if reducer is None or isinstance(reducer, dist.Reducer):
                return original(self, output)
            facts = reducer.grad_reducer.facts
            if facts.is_static and not facts.has_learned:
                # Stock PyTorch queues the callback of the first backward once, even if that
                # backward raises. Another first backward needs another callback.
                self._static_graph_delay_allreduce_enqueued = False
            output = original(self, output)
            if reducer.mesh_grads is not None:
                reducer.mesh_grads.hasten(self.module)
            reducer.watch_output(output)
            return output

        return post_forward

    def wrap_autograd_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.distributed.autograd.context.__enter__``, to restore the stock reducers.

        No backward in such a context gives a gradient to a parameter.
        """

        @functools.wraps(original)
        def enter(self: Any) -> Any:
            for ddp in _list_wrappers():
                # The backward of another thread began outside of the context.
                if not ddp.reducer.grad_reducer.is_in_backward():
                    restore_stock(ddp, _REASON_RPC)
            return original(self)

        return enter

    def wrap_needs_stock(self, original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        """Wrap a method that works on the C++ reducer, to restore that reducer before."""

        @functools.wraps(original)
        def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
            if _STOCK_HELPER in _get_values(self):
                restore_stock(self, reason)
            return original(self, *args, **kwargs)

        return method

    def _make_config(
        self, ddp: Wrapper, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[bool]
    ) -> ReducerConfig:
        from ovpatch.overlap.data_parallel.backward_plan import PlanFacts
        from ovpatch.overlap.data_parallel.grad_reducer import ReducerConfig
        from ovpatch_plugins.ddp.nccl_budget import averages, check_budget

        options = self._options
        # Limits that the script sets come before the option.
        script_limits = tuple(getattr(ddp, "bucket_bytes_cap_list", ()))
        limits = script_limits or (ddp.bucket_bytes_cap,)
        if ddp.bucket_bytes_cap_default and not script_limits:
            bucket_mb = options["bucket_cap_mb"]
            if bucket_mb is None and ddp.device_type == "cuda":
                bucket_mb = _choose_bucket_mb(parameters)
            cap = ddp.bucket_bytes_cap if bucket_mb is None else bucket_mb * _MIB
            limits = (dist._DEFAULT_FIRST_BUCKET_BYTES, int(cap))
        in_fp32: bool = options["grad_reduce_in_fp32"]
        summed = set() if in_fp32 else {param.dtype for param in parameters}
        check_budget(ddp.process_group, ddp.device, options["max_ctas"])
        return ReducerConfig(
            facts=PlanFacts(
                should_overlap=options["overlap_grad_reduce"],
                finds_unused=ddp.find_unused_parameters,
            ),
            bucket_limits=limits,
            granularity=options["bucket_granularity"],
            sparse=tuple(sparse),
            skips_unused=ddp.find_unused_parameters
            and getattr(ddp, "skip_all_reduce_unused_params", False),
            in_fp32=in_fp32,
            sums_in_fp32=options["grad_accumulate_in_fp32"],
            average=averages(
                ddp.process_group, ddp.device, options["average_in_collective"], summed
            ),
        )

    def _place_on_hosts(self, ddp: Wrapper, config: ReducerConfig) -> ReducerConfig:
        """Return the settings of a model on the hosts of its ranks, which all call this."""
        from ovpatch.overlap.comm.hosts import find_hierarchy_objection, find_host_layout
        from ovpatch_plugins.ddp.ddp_options import OPTIONS

        wanted = self._options["hierarchical"]
        layout = find_host_layout(ddp.process_group)
        if wanted == "off" or not layout.is_hierarchical:
            return dataclasses.replace(config, layout=layout)
        objection = find_hierarchy_objection(ddp.process_group, ddp.device)
        if objection and wanted == "on":
            refuse_option("ddp", OPTIONS, "hierarchical", wanted, objection)
        if not objection:
            report.note(
                f"{get_model_name(ddp)}: {len(layout.ranks)} hosts reduce gradients within each "
                "host first "
                f"({layout.num_lanes} ranks of each host send over its link)"
            )
        return dataclasses.replace(config, layout=layout, reduces_by_host=not objection)


def _choose_bucket_mb(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Return the default bucket size on CUDA, in MiB: a 16th of the gradients, 25 to 400."""
    # Fewer, larger collectives cost the backward and the host less, and buckets that are reduced in
    # place take no memory. But the first bucket must be small enough to start early.
    nbytes = sum(param.numel() * param.element_size() for param in parameters)
    return min(max(nbytes / 16 / _MIB, 25), 400)


def restore_stock(ddp: Wrapper, reason: str = "") -> None:
    """Restore the stock reducer of a model, on all ranks and not in the middle of a backward.

    Args:
        ddp: A model with our reducer.
        reason: The reason, for the report; "" if the user did it.

    Raises:
        RuntimeError: A backward is running, whose gradients are being reduced.
    """
    from ovpatch.overlap.data_parallel.grad_hooks import all_trained

    _refuse_inside_backward(ddp)
    if ddp.reducer.mesh_grads is not None:
        ddp.reducer.mesh_grads.restore()
    reducer = ddp.reducer.grad_reducer
    reducer.recover()
    reducer.sharder.detach()
    reducer.hooks.remove()
    stock_helper = _get_values(ddp).pop(_STOCK_HELPER)
    # A static graph in which each parameter is used once is not declared again. The stock reducer
    # would learn it in a backward of all ranks, and with join() ranks run different numbers of
    # backwards.
    graph = reducer.static_graph
    plain: list[int] | None = None
    if graph is not None and graph.is_uniform:
        # No parameter is known to be used if hooks drop gradients at once.
        plain = [i for i in range(len(reducer.params)) if i not in graph.unused] or None
    indices = range(len(reducer.params)) if plain is None else plain
    # The module may lack its parameters: with `device_mesh=`, stock PyTorch removes them in the
    # first forward.
    parameters = [reducer.params[i] for i in indices]
    names = {new: reducer.names[old] for new, old in enumerate(indices)}
    searches = ddp.find_unused_parameters
    try:
        # With a static graph the wrapper gives the stock reducer no outputs to search from.
        is_known = ddp.static_graph and (plain or reducer.is_armed)
        ddp.find_unused_parameters = searches and not is_known
        sparse = [reducer.config.sparse[i] for i in indices]
        # Like the reducer of the wrap, it must have the parameters that were frozen since.
        with all_trained(parameters):
            stock_helper(ddp, parameters, sparse, names, ddp.static_graph)
    finally:
        ddp.find_unused_parameters = searches
    if reducer.is_armed:
        # The forward is over; without this call its backward would silently leave the gradients
        # local. This function does not have the outputs, so aliases of all parameters make the
        # stock reducer wait for each parameter. A static graph is not declared then, because its
        # first backward would only count, and not reduce.
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = True
        with torch.enable_grad():
            ddp.reducer.prepare_for_backward([param.view_as(param) for param in parameters])
    elif ddp.static_graph and plain is None:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if reason:
        _report_stock(ddp, reason)


def restore_all() -> None:
    """Restore the stock reducers of all models in this process, or of none.

    Raises:
        RuntimeError: A backward is running, whose gradients are being reduced.
    """
    for ddp in _list_wrappers():
        _refuse_inside_backward(ddp)
    for ddp in _list_wrappers():
        restore_stock(ddp)
    hosts = sys.modules.get("ovpatch.overlap.comm.hosts")
    if hosts is not None:
        hosts.close_host_groups()


def _list_wrappers() -> list[Wrapper]:
    """Return the wrappers with our reducer."""
    from ovpatch.overlap.comm.lifetimes import find_owners

    return [ddp for ddp, _ in find_owners(_STOCK_HELPER)]


def _get_values(ddp: Wrapper) -> dict[Hashable, Any]:
    from ovpatch.overlap.comm.lifetimes import attached_values

    return attached_values(ddp)


def _refuse_inside_backward(ddp: Wrapper) -> None:
    if ddp.reducer.grad_reducer.is_in_backward():
        raise RuntimeError(report.say_inside_backward(get_model_name(ddp)))


def get_model_name(ddp: Wrapper) -> str:
    """Return the model's name for messages: that of its class."""
    # replicate() wraps a list of the model's parameters.
    if isinstance(ddp.module, torch.nn.ParameterList):
        return "a model under replicate()"
    return type(ddp.module).__name__


def _install(
    ddp: Wrapper,
    parameters: Sequence[torch.nn.Parameter],
    config: ReducerConfig,
    calls: WrapperCalls,
) -> None:
    from ovpatch.overlap.data_parallel.grad_reducer import GradReducer
    from ovpatch_plugins.ddp.reducer_stub import LoggerStub, ReducerStub

    by_id = {id(param): name for name, param in ddp.module.named_parameters()}
    names = [by_id[id(param)] for param in parameters]
    reducer = GradReducer(parameters, names, ddp.process_group, config, calls)
    reducer.hooks.watch_modules(ddp)
    ddp.reducer = ReducerStub(reducer, calls)
    # torch marks the local parameters of DTensors. The module is imported only for these.
    if any(hasattr(param, "_st_info") for param in parameters):
        from ovpatch.overlap.data_parallel.mesh_grads import MeshGrads

        ddp.reducer.mesh_grads = MeshGrads()
    ddp.logger = LoggerStub(ddp, reducer, calls)
    ddp.reducer.set_logger(ddp.logger)
    ddp.logger.set_construction_data_and_log(
        type(ddp.module).__name__,
        ddp.device_ids or [],
        -1 if ddp.output_device is None else ddp.output_device,
        ddp.forward_sync_buffers if hasattr(ddp, "forward_sync_buffers") else ddp.broadcast_buffers,
        any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.module.modules()),
        ddp.static_graph,
    )
    ddp._passing_sync_batchnorm_handle(ddp.module)
    COUNTERS.models += 1
    if ddp.device_type != "cuda":
        _let_threads_go_at_exit()


def _note_sharing(ddp: Wrapper, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Notify our reducers of parameters that another reducer, ours or a stock one, works on."""
    from ovpatch.overlap.comm.lifetimes import find_owners

    param_ids = frozenset(map(id, parameters))
    _get_values(ddp)[_PARAMETERS] = param_ids
    found = find_owners(_PARAMETERS)
    sharing = [wrapper for wrapper, known in found if not param_ids.isdisjoint(known)]
    # One of them is `ddp` itself.
    if len(sharing) > 1:
        for wrapper in sharing:
            if _STOCK_HELPER in _get_values(wrapper):
                wrapper.reducer.grad_reducer.hooks.is_shared = True


@functools.cache
def _let_threads_go_at_exit() -> None:
    """Give gloo's threads the interpreter's lock once more before the interpreter exits.

    A thread that has just completed the last collective drops a Python object that torch attached
    to the backward. If the interpreter exits first, the process aborts after all its work
    ("terminate called without an active exception"), as it sometimes does in stock PyTorch.
    """
    atexit.register(time.sleep, 0.05)


def _agree_late(reference: weakref.ref[Wrapper], terms: Mapping[str, Any]) -> None:
    from ovpatch.overlap.comm.consensus import check_consistent
    from ovpatch.overlap.comm.lifetimes import group_timeout_s

    ddp = reference()
    if ddp is not None:
        timeout = group_timeout_s(ddp.process_group, ddp.device)
        check_consistent(ddp.process_group, "ddp", terms, timeout_s=timeout)
        _identify(ddp)


def _identify(ddp: Wrapper) -> None:
    """Name a model.

    Its ranks have just agreed, so models get their numbers in the same order on all ranks.
    """
    from ovpatch.overlap.comm.lifetimes import group_state

    state = group_state(ddp.process_group)
    numbers = state.get_or_create("models", functools.partial(itertools.count, 1))
    name = f"{get_model_name(ddp)}, model {next(numbers)} of its process group"
    ddp.reducer.grad_reducer.set_name(name)


def _make_terms(
    parameters: Sequence[torch.nn.Parameter],
    config: ReducerConfig,
    max_ctas: int | None,
    hierarchical: str,
    static_graph: bool,
) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, so that their collectives match."""
    from ovpatch.overlap.comm.consensus import get_version
    from ovpatch.overlap.data_parallel.grad_sharder import get_registered_terms

    return {
        "version of ovpatch": get_version(),
        "number of parameters": len(parameters),
        "number of gradient elements": sum(param.numel() for param in parameters),
        "dtypes": sorted({str(param.dtype) for param in parameters}),
        "bucket sizes in bytes": list(config.bucket_limits),
        "bucket_granularity": config.granularity,
        "sparse gradients": [i for i, sparse in enumerate(config.sparse) if sparse],
        "find_unused_parameters": config.facts.finds_unused,
        "skip_all_reduce_unused_params": config.skips_unused,
        "overlap_grad_reduce": config.facts.should_overlap,
        "grad_reduce_in_fp32": config.in_fp32,
        "average_in_collective": config.average,
        "max_ctas": max_ctas,
        "hierarchical": hierarchical,
        "static_graph": bool(static_graph),
        **{f"dist_optimizer.{name}": value for name, value in get_registered_terms().items()},
    }


def _report_stock(ddp: Wrapper, reason: str) -> None:
    COUNTERS.stock_models += 1
    report.remark(f"{get_model_name(ddp)} keeps the stock reducer: {reason}")
