"""Puts our reducer into ``DistributedDataParallel`` objects, and takes it out again.

The reducer is imported when the first model is wrapped: its import takes longer than everything else that ``apply()``
does, and a script may wrap no model.
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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import torch.distributed as dist

from ovpatch.hookspecs import note_failures
from ovpatch_plugins.ddp import report
from ovpatch_plugins.ddp.report import COUNTERS

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ovpatch_plugins.ddp.options import DDPConfig


_RPC: Final = "RPC is in use, whose distributed autograd keeps gradients in contexts of its own"


def find_reason_for_stock(ddp: DistributedDataParallel, params: Sequence[torch.nn.Parameter]) -> str:
    """Return why this model is left to the stock reducer, or ""."""
    from ovpatch.overlap.comm.lifetimes import group_store

    if ddp._use_python_reducer:
        return "torch._dynamo.config.optimize_ddp is 'python_reducer'"
    if ddp.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=...) brings its own hooks"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params has a reduction of its own"
    if any(_is_dtensor(param) for param in params):
        return "parameters are DTensors"
    if group_store(ddp.process_group) is None:
        return "its process group has no store, through which ranks would compare their settings"
    if _has_rpc():
        return _RPC
    return ""


def _has_rpc() -> bool:
    api = sys.modules.get("torch.distributed.rpc.api")
    return api is not None and bool(api._is_current_rpc_agent_set())


def _is_dtensor(param: torch.nn.Parameter) -> bool:
    # By name: importing DTensor for the test would cost every script half a second.
    return any(cls.__name__ == "DTensor" for cls in type(param).__mro__)


# A ``DistributedDataParallel`` object; its own annotations know the C++ reducer only.
Wrapper: TypeAlias = Any

_MIB = 1024 * 1024

InitHelper = Callable[..., None]

# What is kept for a wrapper with our reducer: the function that builds the stock one.
_STOCK_HELPER: Final = "ddp: stock helper"
# What is kept for every wrapper, also with the stock reducer: its parameters' ids. A reducer keeps these alive.
_PARAMETERS: Final = "ddp: parameters"
_ranks_are_together: ContextVar[bool] = ContextVar("ovpatch_ddp_ranks_are_together", default=False)


class DDPAttachment:
    """The feature's patches, made for one set of options.

    [Note: when ranks agree] While ``DistributedDataParallel(...)`` is constructed, stock torch has just compared shapes
    over all ranks, so settings can be compared at once, with a short time-out. A wrapper made by ``copy.deepcopy``,
    ``pickle`` or ``init_sync=False`` may exist on one rank alone: its ranks agree when the first backward that is
    reduced needs the others anyway, with the process group's own time-out.

    Args:
        options: Resolved options of the feature.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``DistributedDataParallel.__init__``: notes whether the ranks construct together."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(self: Wrapper, *args: Any, **kwargs: Any) -> None:
            for other in _alive():
                # A model that is wrapped again after a failed backward must not meet the old one's collectives. The
                # collectives of another thread's model are issued in that thread's order.
                if not other.reducer.is_of_another_thread():
                    other.reducer.recover()
            given = signature.bind(self, *args, **kwargs).arguments
            token = _ranks_are_together.set(bool(given.get("init_sync", True)))
            try:
                with note_failures("ddp", f"wrapping {type(given.get('module')).__name__} in DistributedDataParallel"):
                    original(self, *args, **kwargs)
            finally:
                _ranks_are_together.reset(token)

        return init

    def wrap_init_helper(self, original: InitHelper) -> InitHelper:
        """Wrap ``DistributedDataParallel._ddp_init_helper``: builds our reducer instead of the C++ one."""
        takeover = self

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
                original, ddp, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph
            )
            if ddp.process_group.size() == 1:
                stock()
                _note_sharing(ddp, parameters)
                return
            from ovpatch.overlap.comm.consensus import check_consistent
            from ovpatch.overlap.comm.lifetimes import group_store
            from ovpatch.overlap.data_parallel.grad_sharder import is_chosen

            reason = find_reason_for_stock(ddp, parameters)
            config = takeover._config(ddp, parameters, expect_sparse_gradient)
            terms = _terms(parameters, config, static_graph)
            together = _ranks_are_together.get()
            if together and group_store(ddp.process_group) is not None:
                reason = check_consistent(
                    ddp.process_group,
                    "ddp",
                    terms,
                    objection=reason,
                    timeout_s=takeover._options["agreement_timeout_s"],
                )
            if reason:
                stock()
                _report_stock(ddp, reason)
            else:
                sparse = [i for i, is_sparse in enumerate(config.sparse) if is_sparse]
                sharded = is_chosen(ddp.module, parameters, ddp.process_group, sparse=sparse, together=together)
                _install(ddp, parameters, dataclasses.replace(config, sharded=sharded))
                _kept_values(ddp)[_STOCK_HELPER] = original
                if together:
                    _identify(ddp)
                else:
                    ddp.reducer.on_first_use = functools.partial(_agree_late, weakref.ref(ddp), terms)
            _note_sharing(ddp, parameters)

        return init_helper

    def wrap_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DistributedDataParallel._post_forward``: shows our reducer the outputs as the user gets them."""

        @functools.wraps(original)
        def post_forward(self: Wrapper, output: Any) -> Any:
            reducer = vars(self).get("reducer")
            if reducer is None or isinstance(reducer, dist.Reducer):
                return original(self, output)
            if reducer.learns_graph:
                # Stock queues the callback of the first backward once, also if that backward raises.
                self._static_graph_delay_allreduce_enqueued = False
            output = original(self, output)
            reducer.watch_output(output)
            return output

        return post_forward

    def wrap_autograd_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.distributed.autograd.context.__enter__``: no backward in it gives a gradient to a parameter."""

        @functools.wraps(original)
        def enter(self: Any) -> Any:
            for ddp in _alive():
                if not ddp.reducer.in_backward():  # as that of another thread, which has begun outside
                    restore_stock(ddp, _RPC)
            return original(self)

        return enter

    def wrap_needs_stock(self, original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        """Wrap a method that works on the C++ reducer: brings that one back first."""

        @functools.wraps(original)
        def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
            if _STOCK_HELPER in _kept_values(self):
                restore_stock(self, reason)
            return original(self, *args, **kwargs)

        return method

    def _config(self, ddp: Wrapper, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[bool]) -> DDPConfig:
        from ovpatch_plugins.ddp.nccl_budget import averages, check_budget
        from ovpatch_plugins.ddp.options import DDPConfig

        options = self._options
        own = tuple(getattr(ddp, "bucket_bytes_cap_list", ()))
        limits = own or (ddp.bucket_bytes_cap,)
        if ddp.bucket_bytes_cap_default and not own:
            wanted = options["bucket_cap_mb"]
            if wanted is None and ddp.device_type == "cuda":
                wanted = _bucket_mb(parameters)
            cap = ddp.bucket_bytes_cap if wanted is None else wanted * _MIB
            limits = (dist._DEFAULT_FIRST_BUCKET_BYTES, int(cap))
        in_fp32: bool = options["grad_reduce_in_fp32"]
        summed = set() if in_fp32 else {param.dtype for param in parameters}
        check_budget(ddp.process_group, ddp.device, options["max_ctas"])
        return DDPConfig(
            bucket_limits=limits,
            granularity=options["bucket_granularity"],
            sparse=tuple(sparse),
            find_unused_parameters=ddp.find_unused_parameters,
            skip_unused=ddp.find_unused_parameters and getattr(ddp, "skip_all_reduce_unused_params", False),
            overlap=options["overlap_grad_reduce"],
            in_fp32=in_fp32,
            sums_in_fp32=options["grad_accumulate_in_fp32"],
            average=averages(ddp.process_group, ddp.device, options["average_in_collective"], summed),
            max_ctas=options["max_ctas"],
        )


def _bucket_mb(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Return the default bucket size on CUDA, in MiB: a 16th of the gradients, 25 to 400.

    Fewer, larger collectives cost the backward and the host less, and buckets that are reduced in place take no
    memory; but the first bucket must be small enough to start early.
    """
    gradients = sum(param.numel() * param.element_size() for param in parameters)
    return min(max(gradients / 16 / _MIB, 25), 400)


def restore_stock(ddp: Wrapper, reason: str = "") -> None:
    """Give a model its stock reducer back, on all ranks alike and not in the middle of a backward.

    Args:
        ddp: A model with our reducer.
        reason: Why, for the report; none if the user asked for it.

    Raises:
        RuntimeError: A backward is running, whose gradients are being reduced.
    """
    _refuse_inside_backward(ddp)
    reducer = ddp.reducer
    reducer.recover()
    reducer.sharder.restore_grads()
    reducer._remove_autograd_hooks()
    stock_helper = _kept_values(ddp).pop(_STOCK_HELPER)
    # A static graph that is known to be a plain one is not declared again: to learn it takes a backward of all ranks,
    # which may come unevenly now (join()).
    plain = reducer.get_plain_params() or None  # none are known to be used where hooks drop gradients at once
    indices = range(len(reducer.params)) if plain is None else plain
    # Not asked of the module: with device_mesh=, stock has taken them out of it in the first forward.
    parameters = [reducer.params[i] for i in indices]
    names = {new: reducer.names[old] for new, old in enumerate(indices)}
    searches = ddp.find_unused_parameters
    try:
        # Where the graph is static, the wrapper gives the stock reducer no outputs to search from.
        ddp.find_unused_parameters = searches and not (ddp.static_graph and (plain or reducer.armed))
        with _all_trained(parameters):
            stock_helper(ddp, parameters, [reducer.config.sparse[i] for i in indices], names, ddp.static_graph)
    finally:
        ddp.find_unused_parameters = searches
    if reducer.armed:
        # The forward is over; without this its backward would silently leave the gradients local. Its outputs are no
        # longer at hand: aliases of all parameters make the stock reducer wait for each of them. A static graph is not
        # declared then, because its first backward would only count, and not reduce.
        with torch.enable_grad():
            ddp.reducer.prepare_for_backward([param.view_as(param) for param in parameters])
    elif ddp.static_graph and plain is None:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if reason:
        _report_stock(ddp, reason)


@contextmanager
def _all_trained(params: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Have the stock reducer made as at the wrap: it has parameters that were frozen since, as well."""
    frozen = [param for param in params if not param.requires_grad]
    try:
        for param in frozen:
            param.requires_grad_(True)
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def restore_all() -> None:
    """Give every model in this process its stock reducer back, or none.

    Raises:
        RuntimeError: A backward is running, whose gradients are being reduced.
    """
    for ddp in _alive():
        _refuse_inside_backward(ddp)
    for ddp in _alive():
        restore_stock(ddp)


def _alive() -> list[Wrapper]:
    """Return the models with our reducer."""
    from ovpatch.overlap.comm.lifetimes import find_owners

    return [ddp for ddp, _ in find_owners(_STOCK_HELPER)]


def _kept_values(ddp: Wrapper) -> dict[Hashable, Any]:
    from ovpatch.overlap.comm.lifetimes import attached_values

    return attached_values(ddp)


def _refuse_inside_backward(ddp: Wrapper) -> None:
    if ddp.reducer.in_backward():
        raise RuntimeError(report.say_inside_backward(get_model_name(ddp)))


def get_model_name(ddp: Wrapper) -> str:
    """Return the model's name for messages: that of its class."""
    if isinstance(ddp.module, torch.nn.ParameterList):
        return "a model under replicate()"  # which wraps a list of the model's parameters
    return type(ddp.module).__name__


def _install(ddp: Wrapper, parameters: Sequence[torch.nn.Parameter], config: DDPConfig) -> None:
    from ovpatch_plugins.ddp.grad_reducer import GradReducer
    from ovpatch_plugins.ddp.reducer_stub import LoggerStub

    by_id = {id(param): name for name, param in ddp.module.named_parameters()}
    names = [by_id[id(param)] for param in parameters]
    reducer = GradReducer(ddp.process_group, parameters, names, config)
    reducer.foreign_hooks.watch(ddp)
    ddp.reducer = reducer
    ddp.logger = LoggerStub(ddp, reducer)
    reducer.set_logger(ddp.logger)
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
    """Tell our reducers of parameters that another reducer works on, ours or a stock one."""
    from ovpatch.overlap.comm.lifetimes import find_owners

    mine = _kept_values(ddp)[_PARAMETERS] = frozenset(map(id, parameters))
    sharing = [one for one, others in find_owners(_PARAMETERS) if not mine.isdisjoint(others)]
    if len(sharing) > 1:  # ddp is one of them
        for one in sharing:
            if _STOCK_HELPER in _kept_values(one):
                one.reducer.foreign_hooks.shared = True


@functools.cache
def _let_threads_go_at_exit() -> None:
    """Give gloo's threads the interpreter's lock once more before the interpreter goes down.

    A thread that has just completed the last collective drops a Python object that torch attached to the backward. If
    the interpreter ends first, the process aborts after it has done all its work ("terminate called without an active
    exception"), as now and then under stock DDP.
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
    """Name a model. Its ranks have just agreed, so models get their numbers in one order on all ranks."""
    from ovpatch.overlap.comm.lifetimes import group_state

    number = next(group_state(ddp.process_group).get_or_create("models", functools.partial(itertools.count, 1)))
    ddp.reducer.set_name(f"{get_model_name(ddp)}, model {number} of its process group")


def _terms(parameters: Sequence[torch.nn.Parameter], config: DDPConfig, static_graph: bool) -> dict[str, Any]:
    """Return what must be the same on all ranks, or their collectives would not match."""
    from importlib.metadata import version

    from ovpatch.overlap.data_parallel.grad_sharder import get_registered_terms

    return {
        "version of ovpatch": version("ovpatch"),
        "number of parameters": len(parameters),
        "number of gradient elements": sum(param.numel() for param in parameters),
        "dtypes": sorted({str(param.dtype) for param in parameters}),
        "bucket sizes in bytes": list(config.bucket_limits),
        "bucket_granularity": config.granularity,
        "sparse gradients": [i for i, sparse in enumerate(config.sparse) if sparse],
        "find_unused_parameters": config.find_unused_parameters,
        "skip_all_reduce_unused_params": config.skip_unused,
        "overlap_grad_reduce": config.overlap,
        "grad_reduce_in_fp32": config.in_fp32,
        "average_in_collective": config.average,
        "max_ctas": config.max_ctas,
        "static_graph": bool(static_graph),
        **{f"dist_optimizer.{name}": value for name, value in get_registered_terms().items()},
    }


def _report_stock(ddp: Wrapper, reason: str) -> None:
    COUNTERS.stock_models += 1
    report.remark(f"{get_model_name(ddp)} keeps the stock reducer: {reason}")
