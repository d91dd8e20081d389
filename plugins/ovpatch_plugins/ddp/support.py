"""Where our reducer can run, and what is left to the stock reducer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def reasons_against() -> list[str]:
    """Return why the feature cannot run in this process at all."""
    if not torch.distributed.is_available():
        return ["this build of torch has no torch.distributed"]
    if importlib.util.find_spec("torch.nn.parallel.distributed") is None:
        return ["this build of torch has no DistributedDataParallel"]
    return []


def objection(ddp: DistributedDataParallel, params: Sequence[torch.nn.Parameter]) -> str:
    """Return why this model is left to the stock reducer, or ""."""
    from ovpatch.overlap.cards import store_of  # only when a model is wrapped

    if ddp._use_python_reducer:
        return "torch._dynamo.config.optimize_ddp is 'python_reducer'"
    if ddp.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=...) brings its own hooks"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params has a reduction of its own"
    if any(_is_dtensor(param) for param in params):
        return "parameters are DTensors"
    if store_of(ddp.process_group) is None:
        return "its process group has no store, through which ranks would compare their settings"
    if _has_rpc():
        return "RPC is in use, whose distributed autograd keeps gradients in contexts of its own"
    return ""


DISTRIBUTED_AUTOGRAD = "RPC is in use, whose distributed autograd keeps gradients in contexts of its own"


def _has_rpc() -> bool:
    api = sys.modules.get("torch.distributed.rpc.api")
    return api is not None and bool(api._is_current_rpc_agent_set())


def _is_dtensor(param: torch.nn.Parameter) -> bool:
    # By name: importing DTensor for the test would cost every script half a second.
    return any(cls.__name__ == "DTensor" for cls in type(param).__mro__)
