"""``GradScaler`` over gradients of which each rank has parts.

[Note: look, agree, then scale] An infinity is seen only by the rank that has its part, and all must skip the step.
Ranks agree first and change their parts afterwards: then no peer has changed a part that this rank may still be
reading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.changing import changing
from ovpatch.overlap.step_communicator import step_communicator
from ovpatch_plugins.dist_optimizer import optimizers
from ovpatch_plugins.dist_optimizer.parts import Part, standing_in

Unscale = Callable[..., dict[torch.device, Tensor]]


def wrap_unscale(original: Unscale) -> Unscale:
    """Wrap ``GradScaler._unscale_grads_``: works on parts, and finds infinities for all ranks."""

    @functools.wraps(original)
    def unscale_grads(
        scaler: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        sharded = optimizers.sharded(optimizer)
        all_parts = sharded.parts(optimizer) if sharded is not None else []
        for shards in dict.fromkeys(part.shards for part in all_parts if part.shards.last_delivered(part.index)):
            shards.tell_if_local()
        parts = [part for part in all_parts if part.delivered]
        if not parts:
            return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        with _pending_as_parts(optimizer, parts):
            looked = original(scaler, optimizer, torch.ones_like(inv_scale), found_inf.clone(), allow_fp16)
        for group in dict.fromkeys(part.shards.group for part in parts):
            for seen in looked.values():
                dist.all_reduce(seen, dist.ReduceOp.MAX, group=step_communicator(group, seen.device))
        with changing([(part.shards, part.index) for part in parts]), _pending_as_parts(optimizer, parts):
            found = original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        for device, seen in looked.items():
            found[device].copy_(seen)
        return found

    return unscale_grads


@contextmanager
def _pending_as_parts(optimizer: Optimizer, parts: Sequence[Part]) -> Iterator[None]:
    """Show the parts of gradients that nobody has put together; what was put together is scaled whole."""
    pending = [part for part in parts if part.shards.is_pending(part.index)]
    with standing_in(optimizer, pending) as stand_ins:
        yield
        for part in pending:
            reduced, shown = part.shards.part_of(part.index), stand_ins[id(part.param)].grad
            if shown is not None and shown.dtype != reduced.dtype:  # then it was a copy
                reduced.copy_(shown)
