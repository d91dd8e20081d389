"""The models in Megatron's DistributedDataParallel, and when the bucket groups of each are reduced.

Megatron counts the gradients of the first step and starts a group's reduction once a later step has as many. So ranks
whose autograd order differs start reductions in different orders, which mixes buckets of equal size; and a gradient
beyond the count is added to memory that is being reduced. Neither raises an error there. Here groups are reduced in
one order on all ranks, and not too early.
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
from ovpatch_plugins.megatron.megatron_report import COUNTERS, drop_left, note_left

_DDP = "megatron.core.distributed.distributed_data_parallel"


class BucketChain:
    """The bucket groups of one family, dense or expert, in the order in which Megatron finishes them.

    All of them are reduced over one process group, where ranks have to start collectives in the same order. Autograd's
    order may differ from rank to rank; that of the groups does not.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._starts: dict[
            int, Callable[[], None]
        ] = {}  # reductions that are ready, by the group's index
        self._next = 0  # index of the group whose reduction has to start next

    def start_in_order(self, index: int, start: Callable[[], None]) -> None:
        """Start the reduction of a group that is ready as soon as all groups before it have started theirs."""
        COUNTERS.held += index != self._next
        self._starts[index] = start
        while (ready := self._starts.pop(self._next, None)) is not None:
            self._next += 1
            ready()
            COUNTERS.reductions += 1

    def rewind(self) -> None:
        """Begin with the first group again: a new backward comes, or the last one has failed."""
        self._starts.clear()
        self._next = 0

    def find_name(self, param: Any) -> str:
        """Return the name of a parameter in the model."""
        model = self._model()
        named = () if model is None else model.module.named_parameters()
        return next((name for name, one in named if one is param), "of unknown name")


@dataclass
class BucketPlace:
    """Where a bucket group is reduced.

    Attributes:
        chain: The groups of its family.
        index: Its own among them.
        counts: Whether it counts a gradient right now.
    """

    chain: BucketChain
    index: int
    counts: bool = False


_PLACE: Final = "megatron: place"  # of a bucket group


def find_place(group: Any) -> BucketPlace | None:
    """Return the place of a bucket group; None if its model is not known."""
    return attached_values(group).get(_PLACE)


def take_over(model: Any) -> None:
    """Note the bucket groups of a model in Megatron's DistributedDataParallel."""
    for groups in (model.bucket_groups, model.expert_parallel_bucket_groups):
        chain = BucketChain(model)
        for index, group in enumerate(groups):
            attached_values(group)[_PLACE] = BucketPlace(chain, index)
    COUNTERS.models += 1
    for kind in {type(module) for module in model.module.modules()}:
        foreign = kind.__module__.startswith(
            ("megatron.core.extensions.transformer_engine", "transformer_engine")
        )
        if foreign and (
            "Linear" in kind.__name__ or "MLP" in kind.__name__
        ):  # its norms and attention change nothing
            note_left(
                f"{kind.__name__}: it is Transformer Engine's, which has an overlap of its own "
                "(tp_comm_overlap)"
            )


def take_over_all() -> None:
    """Note the models that have been wrapped before ``ovpatch.apply()``."""
    module = sys.modules.get(_DDP)
    kind = getattr(module, "DistributedDataParallel", None)
    if kind is not None:
        # Not isinstance, which asks objects for their __class__ and so runs foreign code.
        for model in [one for one in gc.get_objects() if issubclass(type(one), kind)]:
            take_over(model)


def give_back_all() -> None:
    """Forget all models."""
    for group in list_bucket_groups():
        del attached_values(group)[_PLACE]
    drop_left()


def list_bucket_groups() -> list[Any]:
    """Return the bucket groups of all known models."""
    return [group for group, _ in find_owners(_PLACE)]


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the initialiser of Megatron's DistributedDataParallel: notes the model."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        take_over(self)

    return __init__


# --- reductions ---


def wrap_register(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``register_grad_ready``: refuses a late gradient, and has a complete group wait for its turn."""

    @functools.wraps(original)
    def register_grad_ready(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        place = find_place(self)
        if place is None:
            original(self, param, *args, **kwargs)
            return
        _refuse_late_grad(self, param, place.chain)
        place.counts = True
        try:
            original(self, param, *args, **kwargs)
        finally:
            place.counts = False

    return register_grad_ready


def wrap_start_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_grad_sync``: a group that is complete in backward starts behind those before it."""

    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        place = find_place(self)
        if (
            place is None or not place.counts
        ):  # Megatron starts all groups, which it does in their order
            original(self, *args, **kwargs)
        else:
            place.chain.start_in_order(
                place.index, functools.partial(original, self, *args, **kwargs)
            )

    return start_grad_sync


def wrap_finish_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
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
        place.chain.rewind()


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
            f"ovpatch: parameter {chain.find_name(param)} got a gradient after the reduction of "
            "its bucket may have "
            "started, so that the gradients of this step are wrong on all ranks. Megatron's "
            "DistributedDataParallel "
            "expects as many backwards as in the first step. Run all backwards of a step but the "
            "last one inside "
            "`with model.no_sync():`, and call model.zero_grad_buffer() before the next step"
        )
