"""Puts our reducer into ``DistributedDataParallel`` objects, and takes it out again.

[Note: when ranks agree] While ``DistributedDataParallel(...)`` is constructed, stock torch has just compared shapes
over all ranks, so all of them are there and settings can be compared at once, with a short time-out. A wrapper that
comes out of ``copy.deepcopy`` or ``pickle``, or is built with ``init_sync=False``, may exist on one rank alone: its
ranks agree when the first synchronised forward needs the others anyway, with the process group's own time-out.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ovpatch.overlap.agreement import agree
from ovpatch_plugins.ddp import messages
from ovpatch_plugins.ddp.config import ReducerConfig
from ovpatch_plugins.ddp.counters import COUNTERS
from ovpatch_plugins.ddp.logger import ReducerLogger
from ovpatch_plugins.ddp.reducer import GradReducer
from ovpatch_plugins.ddp.support import objection

# A ``DistributedDataParallel`` object; its own annotations know the C++ reducer only.
Wrapper: TypeAlias = Any

_log = logging.getLogger("ovpatch.ddp")

_MIB = 1024 * 1024

# Fewer, larger collectives: on 2 and 4 H200s as fast as 25 MiB at 3.8B parameters, faster at 1B, and less work for a
# host that is busy (benchmarks/results/ddp_step.jsonl). Larger buckets take no more memory.
_CUDA_BUCKET_MB = 100

InitHelper = Callable[..., None]

# Models with our reducer, each with the function that builds the stock one.
_live: weakref.WeakKeyDictionary[Wrapper, InitHelper] = weakref.WeakKeyDictionary()
_remarks: list[str] = []
_ranks_are_together: ContextVar[bool] = ContextVar("ovpatch_ddp_ranks_are_together", default=False)


class Takeover:
    """The feature's patches, made for one set of options.

    Args:
        options: Resolved options of the feature.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``DistributedDataParallel.__init__``: notes whether the ranks construct together."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(ddp: Wrapper, *args: Any, **kwargs: Any) -> None:
            for other in list(_live):
                # A model that is wrapped anew after a failed backward must not meet the old one's collectives.
                other.reducer.recover()
            together = bool(signature.bind(ddp, *args, **kwargs).arguments.get("init_sync", True))
            token = _ranks_are_together.set(together)
            try:
                original(ddp, *args, **kwargs)
            finally:
                _ranks_are_together.reset(token)

        return init

    def wrap_init_helper(self, original: InitHelper) -> InitHelper:
        """Wrap ``DistributedDataParallel._ddp_init_helper``: builds our reducer instead of the C++ one."""

        @functools.wraps(original)
        def init_helper(
            ddp: Wrapper,
            parameters: Sequence[torch.nn.Parameter],
            expect_sparse_gradient: Sequence[bool],
            param_to_name_mapping: Mapping[int, str],
            static_graph: bool,
        ) -> None:
            stock = functools.partial(
                original, ddp, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph
            )
            if ddp.process_group.size() == 1:
                stock()
                return
            reason = objection(ddp, parameters, expect_sparse_gradient)
            config = self._config(ddp)
            terms = _terms(parameters, config, static_graph)
            if _ranks_are_together.get():
                reason = agree(
                    ddp.process_group,
                    "ddp",
                    terms,
                    objection=reason,
                    timeout_s=self._options["agreement_timeout_s"],
                )
            if reason:
                stock()
                _report_stock(ddp, reason)
            else:
                _install(ddp, parameters, config)
                _live[ddp] = original
                if not _ranks_are_together.get():
                    ddp.reducer.on_first_use = functools.partial(_agree_late, weakref.ref(ddp), terms)

        return init_helper

    def wrap_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DistributedDataParallel._post_forward``: shows our reducer the outputs as the user gets them."""

        @functools.wraps(original)
        def post_forward(ddp: Wrapper, output: Any) -> Any:
            reducer = ddp.reducer
            if not isinstance(reducer, GradReducer):
                return original(ddp, output)
            if reducer.learns_static_graph():
                # Stock asks for the first backward's end once, and never hears of it if that backward raises.
                ddp._static_graph_delay_allreduce_enqueued = False
            output = original(ddp, output)
            reducer.watch(output)
            return output

        return post_forward

    def wrap_needs_stock(self, original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        """Wrap a method that works on the C++ reducer: brings that one back first."""

        @functools.wraps(original)
        def method(ddp: Wrapper, *args: Any, **kwargs: Any) -> Any:
            if ddp in _live:
                restore_stock(ddp, reason)
            return original(ddp, *args, **kwargs)

        return method

    def _config(self, ddp: Wrapper) -> ReducerConfig:
        own = tuple(getattr(ddp, "bucket_bytes_cap_list", ()))
        limits = own or (ddp.bucket_bytes_cap,)
        if ddp.bucket_bytes_cap_default and not own:
            wanted = self._options["bucket_cap_mb"]
            if wanted is None and ddp.device_type == "cuda":
                wanted = _CUDA_BUCKET_MB
            cap = ddp.bucket_bytes_cap if wanted is None else wanted * _MIB
            limits = (dist._DEFAULT_FIRST_BUCKET_BYTES, int(cap))
        return ReducerConfig(
            bucket_limits=limits,
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            overlap=self._options["overlap_grad_reduce"],
        )


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
    reducer._remove_autograd_hooks()
    stock_helper = _live.pop(ddp)
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    stock_helper(ddp, parameters, expect_sparse, names, ddp.static_graph)
    if reducer.armed:
        # The forward is over; without this its backward would leave the gradients local, and nobody would know. Its
        # outputs are no longer at hand: aliases of all parameters have the stock reducer wait for each of them. A
        # static graph is not declared then, for its first backward would only count, and not reduce.
        with torch.enable_grad():
            ddp.reducer.prepare_for_backward([param.view_as(param) for param in parameters])
    elif ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if reason:
        _report_stock(ddp, reason)


def restore_all() -> None:
    """Give every model in this process its stock reducer back, or none.

    Raises:
        RuntimeError: A backward is running, whose gradients are being reduced.
    """
    for ddp in list(_live):
        _refuse_inside_backward(ddp)
    for ddp in list(_live):
        restore_stock(ddp)


def _refuse_inside_backward(ddp: Wrapper) -> None:
    if ddp.reducer.in_backward():
        raise RuntimeError(messages.inside_backward(type(ddp.module).__name__))


def remarks() -> list[str]:
    """Return which models were left to the stock reducer, and why."""
    return list(_remarks)


def _install(ddp: Wrapper, parameters: Sequence[torch.nn.Parameter], config: ReducerConfig) -> None:
    by_id = {id(param): name for name, param in ddp.module.named_parameters()}
    names = [by_id[id(param)] for param in parameters]
    reducer = GradReducer(ddp.process_group, parameters, names, config)
    mine = {id(param) for param in parameters}
    for other in list(_live):
        if other is not ddp and any(id(param) in mine for param in other.reducer.params):
            reducer.shares_parameters = other.reducer.shares_parameters = True
    ddp.reducer = reducer
    ddp.logger = ReducerLogger(ddp, reducer)
    ddp._passing_sync_batchnorm_handle(ddp.module)
    COUNTERS.models += 1
    if ddp.device_type != "cuda":
        _let_threads_go_at_exit()


@functools.cache
def _let_threads_go_at_exit() -> None:
    """Give gloo's threads the interpreter's lock once more before the interpreter goes down.

    A thread that has just completed the last collective lets go of a Python object that torch attached to the backward.
    If the interpreter ends first, that aborts a process that has done all its work ("terminate called without an active
    exception"); stock DDP does so, too, now and then.
    """
    atexit.register(time.sleep, 0.05)


def _agree_late(reference: weakref.ref[Wrapper], terms: Mapping[str, Any]) -> None:
    ddp = reference()
    if ddp is not None:
        timeout = ddp.process_group._get_backend(ddp.device).options._timeout.total_seconds()
        agree(ddp.process_group, "ddp", terms, timeout_s=timeout)


def _terms(parameters: Sequence[torch.nn.Parameter], config: ReducerConfig, static_graph: bool) -> dict[str, Any]:
    """Return what must be the same on all ranks, or their collectives would not match."""
    return {
        "version of ovpatch": importlib.metadata.version("ovpatch"),
        "number of parameters": len(parameters),
        "number of gradient elements": sum(param.numel() for param in parameters),
        "dtypes": sorted({str(param.dtype) for param in parameters}),
        "bucket sizes in bytes": list(config.bucket_limits),
        "find_unused_parameters": config.find_unused_parameters,
        "overlap_grad_reduce": config.overlap,
        "static_graph": bool(static_graph),
    }


def _report_stock(ddp: Wrapper, reason: str) -> None:
    COUNTERS.stock_models += 1
    text = f"{type(ddp.module).__name__} keeps the stock reducer: {reason}"
    if text not in _remarks:
        _remarks.append(text)
        _log.warning("%s", text)
