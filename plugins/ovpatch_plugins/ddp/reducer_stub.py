"""The faces of torch's C++ ``Reducer`` and ``Logger`` inside ``DistributedDataParallel``.

The wrapper calls both objects, and torch's logger accepts a C++ reducer only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from ovpatch_plugins.ddp import report

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ovpatch_plugins.ddp.grad_reducer import GradReducer


def refuse_method(name: str) -> Callable[..., NoReturn]:
    """Return a method that only the C++ object has, and that raises an error with the remedy.

    ``DistributedDataParallel`` never calls it: its own method restores the stock reducer first.
    """

    def method(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(report.say_needs_stock(name))

    method.__name__ = method.__qualname__ = name
    return method


class CppStub:
    """Base of the stubs, which names attributes that a later version of torch may read."""

    # The type checker must still find misspelled attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(report.say_unknown_to_reducer(name))


class CppReducerMethods(CppStub):
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
        """Accept the value.

        Backwards that the script finalizes never come here, because the wrapper restores the
        stock reducer before them.
        """


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
    sample them costs each step some calls, and nobody but torch's own tests reads them.

    Args:
        ddp: The model's wrapper.
        reducer: Its reducer.
    """

    def __init__(self, ddp: DistributedDataParallel, reducer: GradReducer) -> None:
        group = ddp.process_group
        params = reducer.params
        backend = str(group.name()) if hasattr(group, "name") else ""
        self._reducer = reducer
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

    def _set_static_graph(self) -> None:
        self._numbers["static_graph"] = int(self._reducer.static_graph)

    def _set_comm_hook_name(self, name: str) -> None:
        self._strings["comm_hook"] = name

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        reducer = self._reducer
        strings = dict(self._strings)
        numbers = {**self._numbers, "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets)}
        if not reducer.static_graph:
            numbers["can_set_static_graph"] = int(reducer._ddp_graph_static())
        if reducer.has_rebuilt_buckets:
            strings["rebuilt_bucket_sizes"] = self._list_bucket_sizes()
            indices = (" ".join(map(str, bucket.indices)) for bucket in reducer.buckets)
            strings["rebuilt_per_bucket_param_indices"] = ", ".join(indices)
        return SimpleNamespace(strs_map=strings, ints_map=numbers)

    def _list_bucket_sizes(self) -> str:
        params = self._reducer.params
        nbytes = [param.numel() * param.element_size() for param in params]
        return ", ".join(str(sum(nbytes[i] for i in b.indices)) for b in self._reducer.buckets)

    _set_uneven_input_join = refuse_method("_set_uneven_input_join")


def _get_dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _get_index(device: int | torch.device) -> int:
    if isinstance(device, torch.device):
        return device.index if device.index is not None else -1
    return device
