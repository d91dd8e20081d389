"""The models in Megatron's DistributedDataParallel, and the bucket groups of each."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from ovpatch_plugins.megatron.report import COUNTERS

_DDP = "megatron.core.distributed.distributed_data_parallel"


class BucketChain:
    """The bucket groups of one family, dense or expert, in the order in which Megatron finishes them.

    All of them are reduced over one process group, where ranks have to start collectives in the same order. Autograd's
    order may differ from rank to rank; that of the groups does not.
    """

    def __init__(self, model: Any, groups: Sequence[Any]) -> None:
        self._model = weakref.ref(model)
        self._groups = [weakref.ref(group) for group in groups]
        self._starts: dict[int, Callable[[], None]] = {}  # reductions that are ready, by the group's index
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


_PLACES: Final[weakref.WeakKeyDictionary[Any, tuple[BucketChain, int]]] = weakref.WeakKeyDictionary()
_LEFT: Final[dict[str, None]] = {}  # why parts of models are left to Megatron


def find_place(group: Any) -> tuple[BucketChain, int] | None:
    """Return the chain of a bucket group and its index there; None if its model is not known."""
    return _PLACES.get(group)


def take_over(model: Any) -> None:
    """Note the bucket groups of a model in Megatron's DistributedDataParallel."""
    for groups in (model.bucket_groups, model.expert_parallel_bucket_groups):
        chain = BucketChain(model, groups)
        for index, group in enumerate(groups):
            _PLACES[group] = chain, index
    COUNTERS.models += 1
    for kind in {type(module) for module in model.module.modules()}:
        foreign = kind.__module__.startswith(("megatron.core.extensions.transformer_engine", "transformer_engine"))
        if foreign and ("Linear" in kind.__name__ or "MLP" in kind.__name__):  # its norms and attention change nothing
            note_left(f"{kind.__name__}: it is Transformer Engine's, which has an overlap of its own (tp_comm_overlap)")


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
    _PLACES.clear()
    _LEFT.clear()


def list_bucket_groups() -> list[Any]:
    """Return the bucket groups of all known models."""
    return list(_PLACES)


def note_left(text: str) -> None:
    """Note for the report what is left to Megatron, and why."""
    _LEFT[text] = None


def list_left() -> list[str]:
    """Return what is left to Megatron, and why."""
    return list(_LEFT)


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the initialiser of Megatron's DistributedDataParallel: notes the model."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        take_over(self)

    return __init__
