"""Stands in for torch's C++ ``Logger``, which accepts a C++ reducer only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from ovpatch_plugins.ddp.reducer import GradReducer

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class ReducerLogger:
    """What ``DistributedDataParallel`` asks of its logger.

    Args:
        ddp: The model's wrapper.
        reducer: Its reducer.
    """

    def __init__(self, ddp: DistributedDataParallel, reducer: GradReducer) -> None:
        group = ddp.process_group
        self._reducer = reducer
        self._strings = {
            "module_name": type(ddp.module).__name__,
            "backend_name": str(group.name()) if hasattr(group, "name") else "",
            "reducer": "ovpatch",
        }
        self._numbers = {
            "world_size": group.size(),
            "rank": group.rank(),
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "bucket_cap_bytes": int(ddp.bucket_bytes_cap),
            "num_parameter_tensors": len(reducer.params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in reducer.params),
        }

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is sampled; torch's profiler shows every phase."""

    def set_error_and_log(self, error: str) -> None:
        """Keep the text of an error that the wrapper is about to raise."""
        self._strings["error"] = error

    def _set_static_graph(self) -> None:
        """The reducer knows it itself."""

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        sizes = ", ".join(str(bucket.nbytes) for bucket in self._reducer.buckets)
        numbers = {
            "static_graph": int(self._reducer.static_graph),
            "has_rebuilt_buckets": int(self._reducer.has_rebuilt_buckets),
        }
        return SimpleNamespace(strs_map={**self._strings, "bucket_sizes": sizes}, ints_map=self._numbers | numbers)
