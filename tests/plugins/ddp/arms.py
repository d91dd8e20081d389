"""Runs a training loop twice in one worker, stock and patched, and records what a user could see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ovpatch

Record = dict[str, Any]
Loop = Callable[..., list[Record]]


def both(loop: Loop, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Run ``loop`` stock, then patched, from the same seeds.

    Returns:
        ``stock`` and ``patched``: what the loop returned; ``counters``: what the feature did in the patched arm.
    """
    torch.manual_seed(0)
    stock = loop(*args, **kwargs)
    before = _counters()
    with ovpatch.applied("ddp", options={"ddp": options or {}}):
        torch.manual_seed(0)
        patched = loop(*args, **kwargs)
        counters = {name: value - before[name] for name, value in _counters().items()}
    return {"stock": stock, "patched": patched, "counters": counters}


def seen(model: nn.Module, loss: torch.Tensor | None = None, **more: Any) -> Record:
    """Record the loss, every gradient and every parameter as they are now."""
    named = dict(model.named_parameters())
    return {
        "loss": None if loss is None else loss.detach().clone(),
        "grad": {n: None if p.grad is None else p.grad.detach().clone() for n, p in named.items()},
        "param": {n: p.detach().clone() for n, p in named.items()},
        **more,
    }


def device() -> torch.device:
    """Return where this rank trains: its own GPU under NCCL, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def data(step: int, *shape: int, micro: int = 0) -> torch.Tensor:
    """Return random input that differs by step, microbatch and rank and is the same in both arms."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(device())


def _counters() -> dict[str, int]:
    from ovpatch_plugins.ddp.report import COUNTERS

    return COUNTERS.as_dict()
