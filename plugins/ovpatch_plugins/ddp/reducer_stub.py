"""The faces of torch's C++ ``Reducer`` and ``Logger`` inside ``DistributedDataParallel``.

The wrapper calls both objects, and torch's logger accepts a C++ reducer only.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch.overlap.data_parallel.backward_plan import PlanFacts
from ovpatch.overlap.data_parallel.grad_hooks import watch_outputs
from ovpatch.overlap.data_parallel.grad_reducer import GradReducer, ReducerOwner, ReducerState
from ovpatch.overlap.data_parallel.grad_sync import GradSync
from ovpatch_plugins.ddp import ddp_report as report
from ovpatch_plugins.ddp.ddp_report import COUNTERS
from ovpatch_plugins.ddp.nccl_budget import get_budgeted_group

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ovpatch.overlap.data_parallel.mesh_grads import MeshGrads


def refuse_method(name: str) -> Callable[..., NoReturn]:
    """Return a method that only the C++ object has, and that raises an error with the remedy.

    ``DistributedDataParallel`` never calls it: its own method restores the stock reducer first.
    """

    def method(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(report.say_needs_stock(name))

    method.__name__ = name
    method.__qualname__ = name
    return method


class CppStub:
    """Base of the stubs, which names attributes that a later version of torch may read."""

    # The type checker must still find misspelled attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(report.say_unknown_to_reducer(name))


class ReducerStub(CppStub):
    """The face of torch's C++ ``Reducer``, which ``DistributedDataParallel`` calls.

    ``torch.compile`` of the wrapper breaks its graph where the wrapper calls the C++ object.
    Methods that are hidden from Dynamo break it in the same places.

    Args:
        reducer: The reducer that does the work.
        calls: The calls by which it involves this wrapper.
    """

    _autograd_hook = refuse_method("_autograd_hook")
    _finalize_backward_manual = refuse_method("_finalize_backward_manual")
    _get_zeros_like_grad_buckets = refuse_method("_get_zeros_like_grad_buckets")
    _push_all_rebuilt_params = refuse_method("_push_all_rebuilt_params")
    _run_allreduce_hook = refuse_method("_run_allreduce_hook")
    _run_comm_hook = refuse_method("_run_comm_hook")
    _set_forward_pass_work_handle = refuse_method("_set_forward_pass_work_handle")
    _set_mixed_precision_param_dtype = refuse_method("_set_mixed_precision_param_dtype")
    _set_optimizer_in_backward = refuse_method("_set_optimizer_in_backward")
    _set_sparse_metadata = refuse_method("_set_sparse_metadata")
    _should_finalize_after_backward = refuse_method("_should_finalize_after_backward")
    get_backward_stats = refuse_method("get_backward_stats")

    def __init__(self, reducer: GradReducer, calls: WrapperCalls) -> None:
        self.grad_reducer = reducer
        self._calls = calls
        # Only with `device_mesh=`.
        self.mesh_grads: MeshGrads | None = None
        # The thread of the last forward. The collectives of the model come in that thread's order.
        self._get_thread: Callable[[], threading.Thread | None] = _get_no_thread

    # ---------------------------------------------------------------- a step

    @torch._disable_dynamo
    def prepare_for_forward(self) -> None:
        """Complete the last backward if it failed; comes before a forward that is synchronized."""
        self.grad_reducer.prepare_for_forward()

    @torch._disable_dynamo
    def _rebuild_buckets(self) -> bool:
        return self.grad_reducer.rebuild_buckets()

    @torch._disable_dynamo
    def prepare_for_backward(self, _outputs: Sequence[Tensor]) -> None:
        """Reduce the next backward. The patched wrapper reports the outputs itself."""
        self.grad_reducer.arm()
        # A checkpoint may recompute the forward on a thread of the engine, which arms nothing.
        if self.grad_reducer.state is ReducerState.ARMED:
            self._get_thread = weakref.ref(threading.current_thread())

    @torch._disable_dynamo
    def watch_output(self, output: Any) -> None:
        """Begin the armed backward when it reaches one of the tensors in ``output``."""
        # An earlier forward may have armed the reducer, and this one ran under `no_sync`.
        if self.grad_reducer.state is not ReducerState.IDLE:
            watch_outputs(output, self.grad_reducer)

    def _delay_all_reduce(self) -> None:
        if not self.grad_reducer.is_armed:
            raise self.grad_reducer.make_error(report.STATIC_GRAPH_UNSYNCHRONISED)
        self.grad_reducer.finish_static_first()

    def is_of_another_thread(self) -> bool:
        """Return whether another thread that lives runs the model's steps."""
        thread = self._get_thread()
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    # ---------------------------------------------------------------- rare calls

    def set_logger(self, logger: LoggerStub) -> None:
        """Report errors to a logger, which holds the reducer and is therefore held weakly."""
        self._calls.get_logger = weakref.ref(logger)

    def _set_static_graph(self) -> None:
        reducer = self.grad_reducer
        if reducer.steps or reducer.is_armed:
            raise reducer.make_error(report.STATIC_GRAPH_TOO_LATE)
        reducer.facts = reducer.facts._replace(is_static=True)

    def _check_reducer_finalized(self) -> None:
        self.grad_reducer.raise_for_missing()

    def _remove_autograd_hooks(self) -> None:
        self.grad_reducer.hooks.remove()

    def _reset_state(self) -> None:
        self.grad_reducer.change_group(self.grad_reducer.group)

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.grad_reducer.change_group(group)

    @torch._disable_dynamo
    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self._calls.futures += futures

    def _set_ddp_runtime_logging_sample_rate(self, _rate: int) -> None:
        """Accept the rate; the logger takes no samples."""

    def _set_manual_finalization_required(self, _required: bool) -> None:
        """Accept the value.

        Backwards that the script finalizes never come here, because the wrapper restores the stock
        reducer before them.
        """

    def _get_local_used_map(self) -> Tensor:
        """Return by how many ranks each parameter was used in the last step that shared usage."""
        assert self.grad_reducer.usage is not None
        return self.grad_reducer.usage.last

    def _ddp_graph_static(self) -> bool:
        """Return whether all backwards so far left the same parameters out."""
        assert self.grad_reducer.usage is not None
        return not self.grad_reducer.usage.has_changed


class WrapperCalls(ReducerOwner):
    """The calls by which a reducer involves ``DistributedDataParallel`` and the counters.

    Args:
        max_ctas: Limit of the collectives' thread blocks; None for the script's own communicator.
        can_save_memory: Whether gradients in the stock reducer have a second copy, and here no
            fp32 sums.

    Attributes:
        before_first_backward: Called once, in the first backward that is reduced.
        get_logger: Returns the logger, if it still exists.
        futures: Futures for which the next reduced backward waits.
        buckets_reduced: How many buckets the last backward reduced; None before the first one.
    """

    def __init__(self, max_ctas: int | None, *, can_save_memory: bool) -> None:
        self.before_first_backward: Callable[[], None] | None = None
        self.get_logger: Callable[[], LoggerStub | None] = _get_no_logger
        self.futures: list[torch.futures.Future[Any]] = []
        self.buckets_reduced: int | None = None
        self._max_ctas = max_ctas
        # The least memory that a backward has saved so far, because a peak counts.
        self._saved_bytes = math.inf if can_save_memory else 0

    def meet(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Compare settings once, and return the communicator with the limit of thread blocks."""
        if self.before_first_backward is not None:
            self.before_first_backward()
            self.before_first_backward = None
        return get_budgeted_group(group, self._max_ctas)

    def warn_of_create_graph(self) -> None:
        """Log once that gradients of gradients are not reduced."""
        report.warn_of_create_graph()

    def describe_missing(self, missing: Mapping[int, str], facts: PlanFacts, rank: int) -> str:
        """Return stock PyTorch's error, with the names and a remedy."""
        if facts.is_static:
            return report.say_static_graph_lacks(missing, rank, is_first=not facts.has_learned)
        return report.say_unfinished(missing, rank, searched=facts.finds_unused)

    def after_backward(self, sync: GradSync, *, has_failed: bool) -> None:
        """Count the collectives, and wait for the futures that a buffer hook returned."""
        # The logger reads it after the next forward, which may have other buckets.
        self.buckets_reduced = sync.reduced
        COUNTERS.collectives += sync.reduced
        COUNTERS.collectives_in_backward += sync.reduced_early
        COUNTERS.bytes_reduced += sync.nbytes
        if has_failed:
            COUNTERS.recovered += 1
            return
        if sync.saved_nbytes < self._saved_bytes:
            self._count_saved(sync.saved_nbytes)
        if self.futures:
            futures, self.futures = self.futures, []
            torch.futures.wait_all(futures)
        COUNTERS.backwards += 1

    def _count_saved(self, saved_bytes: int) -> None:
        self._saved_bytes = saved_bytes
        # Small gradients that are sharded take more memory for a moment, which is no saving.
        attached_values(self)[_SAVED_BYTES] = max(saved_bytes, 0)
        # Models of earlier trials were freed, and their memory as well.
        COUNTERS.saved_bytes = sum(saved for _, saved in find_owners(_SAVED_BYTES))

    def note_error(self, text: str) -> None:
        """Have the logger keep the text."""
        logger = self.get_logger()
        if logger is not None:
            logger.set_error_and_log(text)


def _get_no_logger() -> None:
    return None


def _get_no_thread() -> None:
    return None


_SAVED_BYTES: Final = "ovpatch.ddp: saved bytes"

# C++ names these dtypes in its own way.
_DTYPE_NAMES: Final = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}

_VARIABLES: Final = (
    "MASTER_PORT",
    "MASTER_ADDR",
    "TORCH_DISTRIBUTED_DEBUG",
    "CUDA_VISIBLE_DEVICES",
)
_BACKEND_VARIABLES: Final = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}


class LoggerStub(CppStub):
    """The face of torch's C++ ``Logger``: construction fields, buckets and the last error.

    The fields that stock PyTorch samples in some steps (times, iterations) are absent, because to
    sample them costs each step some calls, and only torch's own tests read them.

    Args:
        ddp: The model's wrapper.
        reducer: Its reducer.
        calls: The calls by which the reducer involves the wrapper.
    """

    def __init__(
        self, ddp: DistributedDataParallel, reducer: GradReducer, calls: WrapperCalls
    ) -> None:
        group = ddp.process_group
        params = reducer.params
        backend = str(group.name()) if hasattr(group, "name") else ""
        self._reducer = reducer
        self._calls = calls
        self._strings = {
            "backend_name": backend,
            "reducer": "ovpatch",
            "dtypes": ", ".join(sorted({_get_dtype_name(param.dtype) for param in params})),
            "bucket_sizes": self._list_bucket_sizes(),
        }
        self._numbers = {
            "world_size": group.size(),
            "rank": group.rank(),
            "is_multi_device_module": int(len({param.device for param in params}) > 1),
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "bucket_cap_bytes": int(ddp.bucket_bytes_cap),
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        }
        for name in (*_VARIABLES, *_BACKEND_VARIABLES.get(backend, ())):
            # torch dropped the prefix in the names of the fields when it renamed the variables.
            field = name.replace("TORCH_NCCL", "NCCL").lower()
            self._strings[field] = os.environ.get(name, "N/A")
        options = getattr(group._get_backend(ddp.device), "options", None)
        threads = getattr(options, "_threads", None)
        if threads is not None:
            self._numbers["gloo_num_threads"] = int(threads)

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int | torch.device],
        output_device: int | torch.device,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Keep the fields that are known when the wrapper is constructed."""
        self._strings["module_name"] = module_name
        self._strings["device_ids"] = ", ".join(str(_get_index(device)) for device in device_ids)
        self._numbers["output_device"] = _get_index(output_device)
        self._numbers["broadcast_buffers"] = int(broadcast_buffers)
        self._numbers["has_sync_bn"] = int(has_sync_bn)
        if static_graph:
            self._numbers["static_graph"] = 1

    # Dynamo must break the graph here, as it does at the method of the C++ object.
    @torch._disable_dynamo
    def set_runtime_stats_and_log(self) -> None:
        """Do nothing; the wrapper calls this at the beginning of each forward."""

    def set_error_and_log(self, error: str) -> None:
        """Keep the text of an error that the wrapper or the reducer is about to raise."""
        self._strings["error"] = error
        self._numbers["has_error"] = 1
        self._numbers["iteration"] = self._reducer.steps

    def _set_static_graph(self) -> None:
        self._numbers["static_graph"] = int(self._reducer.facts.is_static)

    def _set_comm_hook_name(self, name: str) -> None:
        self._strings["comm_hook"] = name

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        reducer = self._reducer
        strings = dict(self._strings)
        has_rebuilt = reducer.facts.has_order
        numbers = {**self._numbers, "has_rebuilt_buckets": int(has_rebuilt)}
        if not reducer.facts.is_static and reducer.usage is not None:
            numbers["can_set_static_graph"] = int(not reducer.usage.has_changed)
        if self._calls.buckets_reduced is not None:
            numbers["num_buckets_reduced"] = self._calls.buckets_reduced
        if has_rebuilt:
            strings["rebuilt_bucket_sizes"] = self._list_bucket_sizes()
            indices = (" ".join(map(str, bucket.indices)) for bucket in reducer.sync.buckets)
            strings["rebuilt_per_bucket_param_indices"] = ", ".join(indices)
        return SimpleNamespace(strs_map=strings, ints_map=numbers)

    def _list_bucket_sizes(self) -> str:
        params = self._reducer.params
        nbytes = [param.numel() * param.element_size() for param in params]
        return ", ".join(str(sum(nbytes[i] for i in b.indices)) for b in self._reducer.sync.buckets)

    _set_uneven_input_join = refuse_method("_set_uneven_input_join")


def _get_dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _get_index(device: int | torch.device) -> int:
    if isinstance(device, torch.device):
        return device.index if device.index is not None else -1
    return device
