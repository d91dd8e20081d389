"""The models in Megatron's DistributedDataParallel, and the order in which their bucket groups are reduced.

Megatron counts the gradients of the first step, and starts a group's reduction once a later step has the same number.
So ranks with different autograd orders start reductions in different orders, which mixes buckets of equal size. A
gradient beyond the count is added to memory that is being reduced. Neither raises an error in Megatron. Here, groups
are reduced in one order on all ranks, and not too early.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch_plugins.megatron.megatron_report import COUNTERS, clear_fallbacks, note_fallback

_DDP = "megatron.core.distributed.distributed_data_parallel"


class BucketChain:
    """The bucket groups of one family, dense or expert, in the order in which Megatron finishes them.

    All groups are reduced over one process group, in which ranks must start collectives in the same order. Autograd's
    order may differ between ranks; the order of the groups does not.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        # The reductions that are ready, by the index of the group.
        self._starts: dict[int, Callable[[], None]] = {}
        # The index of the group whose reduction must start next.
        self._next = 0

    def start_in_order(self, index: int, start: Callable[[], None]) -> None:
        """Start the reduction of a ready group, once the reductions of all groups before it have started."""
        COUNTERS.held += index != self._next
        # One start may be followed by the starts of groups that were ready earlier.
        self._starts[index] = start
        while (start_ready := self._starts.pop(self._next, None)) is not None:
            self._next += 1
            start_ready()
            COUNTERS.reductions += 1

    def rewind(self) -> None:
        """Start over with the first group, for a new backward or after a failed one."""
        self._starts.clear()
        self._next = 0

    def find_name(self, param: Any) -> str:
        """Return the name of a parameter in the model."""
        model = self._model()
        named = () if model is None else model.module.named_parameters()
        return next(
            (name for name, named_param in named if named_param is param), "of unknown name"
        )


@dataclass
class BucketPlace:
    """The place of a bucket group in the order of reductions.

    Attributes:
        chain: The groups of its family.
        index: The index of this group in the chain.
        is_counting: Whether the group is counting a gradient, so that a reduction that starts now is the group's own.
    """

    chain: BucketChain
    index: int
    is_counting: bool = False


# The value of a bucket group: its place.
_PLACE: Final = "megatron: place"


def find_place(group: Any) -> BucketPlace | None:
    """Return the place of a bucket group; None if the feature is not attached to its model."""
    return attached_values(group).get(_PLACE)


def attach_to_model(model: Any) -> None:
    """Give the bucket groups of a model in Megatron's DistributedDataParallel their places."""
    for groups in (model.bucket_groups, model.expert_parallel_bucket_groups):
        # Dense and expert groups are reduced over different process groups, so each family has its own order.
        chain = BucketChain(model)
        for index, group in enumerate(groups):
            attached_values(group)[_PLACE] = BucketPlace(chain, index)
    COUNTERS.models += 1
    for module_class in {type(module) for module in model.module.modules()}:
        is_transformer_engine = module_class.__module__.startswith(
            ("megatron.core.extensions.transformer_engine", "transformer_engine")
        )
        # The norms and the attention of Transformer Engine do not matter, because their linears may be Megatron's.
        if is_transformer_engine and (
            "Linear" in module_class.__name__ or "MLP" in module_class.__name__
        ):
            note_fallback(
                f"{module_class.__name__}: it is Transformer Engine's, which has its own overlap (tp_comm_overlap)"
            )


def attach_to_all() -> None:
    """Attach to the models that were wrapped before ``ovpatch.apply()``."""
    module = sys.modules.get(_DDP)
    model_class = getattr(module, "DistributedDataParallel", None)
    if model_class is not None:
        # isinstance() would read the __class__ of objects, and so run foreign code.
        models = [found for found in gc.get_objects() if issubclass(type(found), model_class)]
        for model in models:
            attach_to_model(model)


def detach_all() -> None:
    """Detach from all models."""
    for group in list_bucket_groups():
        del attached_values(group)[_PLACE]
    clear_fallbacks()


def list_bucket_groups() -> list[Any]:
    """Return the bucket groups of all models to which the feature is attached."""
    return [group for group, _ in find_owners(_PLACE)]


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DistributedDataParallel.__init__`` of Megatron, to attach to the model."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        attach_to_model(self)

    return __init__


# --- reductions ---


def wrap_register(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``register_grad_ready``, to refuse a late gradient, and to make a complete group wait for its turn."""

    @functools.wraps(original)
    def register_grad_ready(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        place = find_place(self)
        if place is None:
            original(self, param, *args, **kwargs)
            return
        _refuse_late_grad(self, param, place.chain)
        place.is_counting = True
        try:
            original(self, param, *args, **kwargs)
        finally:
            place.is_counting = False

    return register_grad_ready


def wrap_start_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_grad_sync``, so that a group that is complete in backward starts after all groups before it."""

    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        place = find_place(self)
        # Outside of a count, Megatron starts all groups itself, in their order.
        if place is None or not place.is_counting:
            original(self, *args, **kwargs)
        else:
            place.chain.start_in_order(
                place.index, functools.partial(original, self, *args, **kwargs)
            )

    return start_grad_sync


def wrap_finish_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_grad_sync``, so that the next backward begins with the first group."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _rewind(self)

    return finish_grad_sync


def wrap_reset(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset``, which Megatron calls before each step, to drop the reductions that a failed backward left."""

    @functools.wraps(original)
    def reset(self: Any) -> None:
        original(self)
        _rewind(self)

    return reset


def _rewind(group: Any) -> None:
    place = find_place(group)
    if place is not None:
        place.chain.rewind()


def _refuse_late_grad(group: Any, param: Any, chain: BucketChain) -> None:
    expected = getattr(group, "golden_per_param_grad_ready_counts", {}).get(param)
    has_all_grads = (
        expected is not None
        and not group.is_first_batch
        and group.is_last_microbatch
        and group.per_param_grad_ready_counts.get(param, 0) >= expected
    )
    if has_all_grads or group.grad_reduce_handle is not None:
        raise RuntimeError(
            f"ovpatch: parameter {chain.find_name(param)} got a gradient after the reduction of its bucket may have "
            "started, so the gradients of this step are wrong on all ranks: Megatron's DistributedDataParallel expects "
            "the number of backwards of the first step. Run all backwards of a step but the last one inside "
            "`with model.no_sync():`, and call model.zero_grad_buffer() before the next step"
        )
