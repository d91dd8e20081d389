"""When Megatron's DistributedDataParallel reduces a bucket group: in one order on all ranks, and not too early.

Megatron counts the gradients of the first step and starts a group's reduction once a later step has as many. So ranks
whose autograd order differs start reductions in different orders, which mixes buckets of equal size; and a gradient
beyond the count is added to memory that is being reduced. Neither raises an error there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ovpatch_plugins.megatron.takeover import BucketChain, find_place

_counting: set[int] = set()  # ids of the bucket groups that count a gradient right now


def wrap_register(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``register_grad_ready``: refuses a late gradient, and has a complete group wait for its turn."""

    @functools.wraps(original)
    def register_grad_ready(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        place = find_place(self)
        if place is None:
            original(self, param, *args, **kwargs)
            return
        _refuse_late_grad(self, param, place[0])
        _counting.add(id(self))
        try:
            original(self, param, *args, **kwargs)
        finally:
            _counting.discard(id(self))

    return register_grad_ready


def wrap_start(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_grad_sync``: a group that is complete in backward starts behind those before it."""

    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        place = find_place(self) if id(self) in _counting else None
        if place is None:  # Megatron starts all groups, which it does in their order
            original(self, *args, **kwargs)
        else:
            chain, index = place
            chain.start_in_order(index, functools.partial(original, self, *args, **kwargs))

    return start_grad_sync


def wrap_finish(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_grad_sync``: the next backward begins with the first group."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _rewind(self)

    return finish_grad_sync


def wrap_reset(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset``, which Megatron calls before each step: what a failed backward has left is dropped."""

    @functools.wraps(original)
    def reset(self: Any) -> None:
        original(self)
        _rewind(self)

    return reset


def _rewind(group: Any) -> None:
    place = find_place(group)
    if place is not None:
        place[0].rewind()


def _refuse_late_grad(group: Any, param: Any, chain: BucketChain) -> None:
    expected = getattr(group, "golden_per_param_grad_ready_counts", {}).get(param)
    complete = (
        expected is not None
        and not group.is_first_batch
        and group.is_last_microbatch
        and group.per_param_grad_ready_counts.get(param, 0) >= expected
    )
    if complete or group.grad_reduce_handle is not None:
        raise RuntimeError(
            f"ovpatch: parameter {chain.find_name(param)} got a gradient after the reduction of its bucket may have "
            "started, so that the gradients of this step are wrong on all ranks. Megatron's DistributedDataParallel "
            "expects as many backwards as in the first step. Run all backwards of a step but the last one inside "
            "`with model.no_sync():`, and call model.zero_grad_buffer() before the next step"
        )
