"""Stands in for torch's C++ ``Logger``, which accepts a C++ reducer only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from ovpatch.overlap.data_parallel.grad_bucket import Bucket
from ovpatch_plugins.ddp import report

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


_SAMPLED_AT_FIRST = 10  # steps; later one of so many as the sample rate says
_SAMPLE_RATE = 100


class StepTimes:
    """Host clock readings of one step, in nanoseconds; taken in the same steps in which stock takes them.

    Attributes:
        forwards: How many forwards were to be synchronised.
        rate: In which steps times are taken, from the eleventh on.
        sampled: Whether they are taken in this one.
        at: The readings of this step, by stock's names of the fields.
    """

    def __init__(self) -> None:
        self.forwards, self.rate, self.sampled = 0, _SAMPLE_RATE, False
        self.at: dict[str, int] = {}

    def begin_forward(self) -> None:
        """Count a forward."""
        self.forwards += 1
        self.sampled = self.forwards <= _SAMPLED_AT_FIRST or self.forwards % self.rate == 0
        if self.sampled:
            self.at = {"forward_compute_time_start": time.time_ns()}

    def record(self, phase: str) -> None:
        """Record that a phase begins or ends now; called only in steps that are sampled."""
        self.at[phase] = time.time_ns()

    def durations(self) -> dict[str, int]:
        """Return how long the phases took, without those that did not come in this order."""
        spans = {
            "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
            "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
            "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
            "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
        }
        known = {name: self.at[end] - self.at[begin] for name, (begin, end) in spans.items() if self._has(begin, end)}
        return {name: nanoseconds for name, nanoseconds in known.items() if nanoseconds >= 0}

    def _has(self, *phases: str) -> bool:
        return all(phase in self.at for phase in phases)


def refuse_method(name: str) -> Callable[..., NoReturn]:
    """Return a method for which ``DistributedDataParallel`` brings the stock reducer back first; its error says so."""

    def method(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(report.say_needs_stock(name))

    method.__name__ = method.__qualname__ = name
    return method


class StockFace:
    """Base of what stands in for torch's C++ objects: names what a later version of torch asks for."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(report.say_unknown_to_reducer(name))


class StockOnly(StockFace):
    """The methods that only torch's C++ reducer has."""

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

    def _set_manual_finalization_required(self, _required: bool) -> None:
        """Stay with backwards that finalize themselves: before others, the wrapper brings the C++ reducer back."""


# As C++ names what has another name in Python.
_DTYPES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_ENVIRONMENT_OF = {
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

_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


class LoggedReducer(Protocol):
    """What the logger asks of :class:`ovpatch_plugins.ddp.grad_reducer.GradReducer`, which describes the attributes."""

    params: list[torch.nn.Parameter]
    times: StepTimes
    unused: list[int]
    buckets_reduced: int
    static_graph: bool
    has_rebuilt_buckets: bool

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are reduced."""

    @property
    def ready_order(self) -> list[int]:
        """The parameters in the order in which their gradients became ready."""

    def _ddp_graph_static(self) -> bool: ...


class ReducerLogger(StockFace):
    """What ``DistributedDataParallel`` asks of its logger.

    Times are of the host's clock, and taken where gradients are on the CPU: a device is not waited for to know them.

    Args:
        ddp: The model's wrapper.
        reducer: Its reducer.
    """

    def __init__(self, ddp: DistributedDataParallel, reducer: LoggedReducer) -> None:
        group = ddp.process_group
        self._reducer = reducer
        self._samples = 0
        self._strings = {"backend_name": str(group.name()) if hasattr(group, "name") else "", "reducer": "ovpatch"}
        self._numbers = {
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": 0,
            "is_multi_device_module": int(len({param.device for param in reducer.params}) > 1),
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "bucket_cap_bytes": int(ddp.bucket_bytes_cap),
            "num_parameter_tensors": len(reducer.params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in reducer.params),
        }
        self._strings["dtypes"] = ", ".join(sorted({_name_of(param.dtype) for param in reducer.params}))
        self._strings["bucket_sizes"] = self._bucket_sizes()
        names = (*_ENVIRONMENT, *_ENVIRONMENT_OF.get(self._strings["backend_name"], ()))
        self._strings |= {name.replace("TORCH_NCCL", "NCCL").lower(): os.environ.get(name, "N/A") for name in names}
        threads = getattr(getattr(group._get_backend(ddp.device), "options", None), "_threads", None)
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
        """Keep what is known when the wrapper is constructed."""
        self._strings["module_name"] = module_name
        self._strings["device_ids"] = ", ".join(str(_index(device)) for device in device_ids)
        self._numbers["output_device"] = _index(output_device)
        self._numbers["broadcast_buffers"] = int(broadcast_buffers)
        self._numbers["has_sync_bn"] = int(has_sync_bn)
        if static_graph:
            self._numbers["static_graph"] = 1

    @torch._disable_dynamo
    def set_runtime_stats_and_log(self) -> None:
        """Take over the times of the step before, if it was sampled; called at the beginning of each forward."""
        times = self._reducer.times
        if not times.sampled or not times.forwards:
            return
        reducer, numbers = self._reducer, self._numbers
        numbers["iteration"] = times.forwards
        numbers["unused_parameter_size"] = sum(
            reducer.params[i].numel() * reducer.params[i].element_size() for i in reducer.unused
        )
        order = reducer.ready_order
        if order:
            self._strings["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))
        if "forward_compute_time_start" not in times.at or reducer.params[0].device.type != "cpu":
            return
        self._samples += 1
        durations = times.durations()
        for name in _AVERAGED:
            numbers[name] = durations.get(name, 0)
            if name in durations:
                before = numbers.get(f"avg_{name}", 0) * (self._samples - 1)
                numbers[f"avg_{name}"] = (before + durations[name]) // self._samples
        numbers.update(times.at)

    def set_error_and_log(self, error: str) -> None:
        """Keep the text of an error that the wrapper or the reducer is about to raise, and in which step that is."""
        self._strings["error"] = error
        self._numbers |= {"has_error": 1, "iteration": self._reducer.times.forwards}

    def _set_static_graph(self) -> None:
        self._numbers["static_graph"] = int(self._reducer.static_graph)

    def _set_comm_hook_name(self, name: str) -> None:
        self._strings["comm_hook"] = name

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        reducer, strings, numbers = self._reducer, dict(self._strings), dict(self._numbers)
        numbers["has_rebuilt_buckets"] = int(reducer.has_rebuilt_buckets)
        if reducer.times.forwards:
            numbers["num_buckets_reduced"] = reducer.buckets_reduced
        if not reducer.static_graph:
            numbers["can_set_static_graph"] = int(reducer._ddp_graph_static())
        if reducer.has_rebuilt_buckets:
            strings["rebuilt_bucket_sizes"] = self._bucket_sizes()
            indices = (" ".join(map(str, bucket.indices)) for bucket in reducer.buckets)
            strings["rebuilt_per_bucket_param_indices"] = ", ".join(indices)
        return SimpleNamespace(strs_map=strings, ints_map=numbers)

    def _bucket_sizes(self) -> str:
        params = self._reducer.params
        sizes = (sum(params[i].numel() * params[i].element_size() for i in b.indices) for b in self._reducer.buckets)
        return ", ".join(map(str, sizes))

    _set_uneven_input_join = refuse_method("_set_uneven_input_join")


def _name_of(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _index(device: int | torch.device) -> int:
    if isinstance(device, torch.device):
        return device.index if device.index is not None else -1
    return device
