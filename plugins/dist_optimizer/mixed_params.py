"""Which parameters are kept whole in half precision, with ``param_dtype``, and when that is decided.

[Note: seen first] A parameter is watched from the first step on that updates it by parts. If all its uses until the
next were such that autocast cast it, this rank proposes to keep it in half precision; if it was read otherwise, it is
watched once more, for it may have been a checkpoint that was saved. Who reads it otherwise twice in :data:`_SELDOM`
steps does so by habit: it stays in fp32 from then on. Reads of a parameter that is kept in half precision count alike,
so a script that begins to read one in every step pays for two of them.

[Note: threads that read] To release a parameter's memory while another thread is inside of a function on it is not
safe, and whether one is cannot be seen. A thread of the script's own that reads a parameter once will do so again, so
what was read on another thread than that of the steps stays in fp32 from then on, and its memory where it is.

[Note: captured] A replay of a CUDA graph reads the addresses that its capture saw, and asks nobody. Which those are
cannot be seen from outside, so once a capture has begun nothing more is kept in half precision. (A capture that meets a
parameter that is kept so already is an error.)

[Note: agreed at once] What is gathered has to be the same on all ranks. Their hosts come together before the update
(``ovpatch/overlap/main_shards.py``, [Note: read by edition]), and a rank that proposes something new says so there;
then, and only then, proposals are compared, and what all ranks propose holds for the gathers of this very step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap import grad_shards
from ovpatch.overlap.collectives import AllReduce
from ovpatch.overlap.cuda_graphs import captures
from ovpatch.overlap.gate import Gate
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.main_shards import MainShards
from ovpatch.overlap.pending import settle
from ovpatch.overlap.step_communicator import step_communicator
from ovpatch.overlap.watching import Uses, unwatch, watch
from ovpatch_plugins.dist_optimizer.counters import COUNTERS

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part

#: Dtypes by the names that the option has for them.
DTYPES: Final = {"bf16": torch.bfloat16}

_SELDOM: Final = 100  # steps between reads of a whole that cost less than they save

_CAPTURED: Final = "a CUDA graph was captured, whose replays may read it"  # [Note: captured]

_LONGEST: Final = 32  # steps for which a parameter is watched that nobody uses; gathers are not overlapped meanwhile


class MixedParams:
    """What is decided for the parameters of one model.

    Args:
        shards: The model's gradients; not kept.
        dtype: What wholes are kept in.

    Attributes:
        group: The process group over whose ranks the model is trained.
    """

    def __init__(self, shards: GradShards, dtype: torch.dtype) -> None:
        self.group, self._shards = shards.group, weakref.ref(shards)
        self._dtype, self._names, self._params = dtype, shards.names, shards.params
        self._gate = Gate.of(self.group)
        device = shards.params[0].device
        self._all_reduce = AllReduce(step_communicator(self.group, device), device)
        self._mains = MainShards(shards.params, shards.names, self.group, shards.identity, dtype)
        self._closed = False
        self._step = 0
        self._agreed: frozenset[int] = frozenset()
        self._proposed: frozenset[int] = frozenset()
        self._watched: dict[int, Uses] = {}
        self._waited: dict[int, int] = {}  # for how many steps a parameter has been watched
        self._read: dict[int, int] = {}  # the last step before which a parameter was read otherwise
        self._left: dict[int, str] = {}  # parameters that stay fp32, and why
        self._refused: list[int] = []

    # ---------------------------------------------------------------- around a step, on all ranks

    def begin(self, parts: Sequence[Part]) -> None:
        """Take note of what was read since the last step, and decide with the others; before the update."""
        if self._closed:
            return
        self._step += 1
        ready = [part.index for part in parts if self._end_watch(part.index)]
        self._take_reads()
        proposed = self._proposed.union(ready).difference(self._left)
        if captures.total:  # [Note: captured]; also what waits for the other ranks' proposals
            self._left.update(dict.fromkeys(proposed - self._agreed, _CAPTURED))
            proposed &= self._agreed
        if self._gate.meet(proposed != self._proposed):
            self._agreed = self._compared(proposed)
        self._proposed = proposed
        self._mains.begin()

    @property
    def meets(self) -> bool:
        """Whether hosts meet in :meth:`begin`."""
        return not self._closed

    def lower(self, parts: Sequence[Part]) -> None:
        """Say what is to be gathered in the place of parameters of which this rank has updated its slices."""
        if self._closed:
            return
        low = [part for part in parts if part.index in self._agreed]
        try:
            for part, (copy, reason) in zip(low, self._mains.lower([part.index for part in low]), strict=True):
                part.copy = copy
                if reason:
                    self._refused.append(part.index)
                    self._note(part.index, reason, threading.get_ident())
            for part in parts:
                if part.index not in self._agreed and self._mains.has(part.index):
                    self._mains.raise_(part.index)
            COUNTERS.params_in_param_dtype += len(low)
            self._tell({i: self._dtype for i in range(len(self._names)) if self._mains.has(i)})
        finally:
            self._mains.end()

    def after(self, parts: Sequence[Part]) -> None:
        """Bring those up to date that could not be released, and watch those that may be; after gathers' launch."""
        if self._closed:
            return
        if self._refused:
            self._mains.refresh(self._refused)
            self._refused.clear()
        for part in parts:
            if not (part.index in self._proposed or part.index in self._left):
                self._watch(part)

    def leave(self) -> None:
        """Make all parameters whole, while there are peers to ask; they stay fp32."""
        if self._closed:
            return
        self._closed = True
        for index in list(self._watched):
            self._end_watch(index)
        self._mains.leave()
        self._tell({})

    def _tell(self, lowered: Mapping[int, torch.dtype]) -> None:
        """Tell who reduces the gradients which parameters are kept in half precision."""
        shards = self._shards()
        if shards is not None:
            shards.lowered = lowered

    # ---------------------------------------------------------------- what is known

    def _watch(self, part: Part) -> None:
        settle(part.param)
        if reason := _objection(part.param):
            self._left[part.index] = reason
        else:
            self._watched[part.index] = watch(part.param, self._dtype)

    def _end_watch(self, index: int) -> bool:
        """Tell whether a parameter was watched, and used, always through autocast's cast."""
        uses = self._watched.pop(index, None)
        if uses is None:
            return False
        param = self._params.find(index)
        if param is not None:
            unwatch(param)
        self._waited[index] = self._waited.get(index, 0) + 1
        if uses.reader:
            self._note(index, f"read by {uses.reader}", uses.thread)
        elif not uses.casts and self._waited[index] >= _LONGEST:
            self._left[index] = "no use of it under autocast was seen"
        return bool(uses.casts) and not uses.reader

    def _take_reads(self) -> None:
        reads, self._mains.reads = self._mains.reads, []
        for index, reader, thread in reads:
            self._note(index, f"read by {reader}", thread)

    def _note(self, index: int, reason: str, thread: int) -> None:
        """Note that a whole in fp32 is needed, and conclude from the second time that it is again and again."""
        last = self._read.get(index)
        if thread != threading.get_ident():
            self._left[index] = f"{reason} on another thread"  # [Note: threads that read]
        elif last is not None and last < self._step <= last + _SELDOM:
            self._left[index] = reason
        self._read[index] = self._step

    def _compared(self, proposed: frozenset[int]) -> frozenset[int]:
        """Return what all ranks propose."""
        device = self._params[0].device
        flags = torch.tensor([i in proposed for i in range(len(self._names))], dtype=torch.int32, device=device)
        (work,) = self._all_reduce([flags])
        work.wait()
        return frozenset(i for i, count in enumerate(flags.tolist()) if count == self.group.size())

    def remarks(self) -> Iterable[str]:
        """Yield how many parameters are kept in half precision, and which are not, and why."""
        if not self._closed:
            kept = sum(map(self._mains.has, range(len(self._names))))
            yield f"{kept} parameters are kept and gathered in {_name(self._dtype)}"
        by_reason: dict[str, list[str]] = {}
        for index, reason in sorted(self._left.items()):
            by_reason.setdefault(reason, []).append(self._names[index])
        for reason, names in by_reason.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{names[0]}{more} cannot be kept in {_name(self._dtype)}: {reason}"


def by_model(parts: Sequence[Part], dtype: torch.dtype | None) -> dict[MixedParams, list[Part]]:
    """Return the parameters of each model that is trained on several ranks; none without a dtype to keep them in."""
    by_shards: dict[GradShards, list[Part]] = {}
    for part in parts if dtype is not None else ():
        by_shards.setdefault(part.shards, []).append(part)
    found: dict[MixedParams, list[Part]] = {}
    for shards, ones in by_shards.items():
        if dtype is not None and shards.group.size() > 1:
            if shards not in _models:
                _models[shards] = MixedParams(shards, dtype)
            found[_models[shards]] = ones
    return found


def leave_models(optimizer: Optimizer) -> None:
    """Make parameters whole of every model of which an optimizer has some."""
    entries = [grad_shards.find(param) for group in optimizer.param_groups for param in group["params"]]
    for model in {entry[0]: _models.get(entry[0]) for entry in entries if entry is not None}.values():
        if model is not None:
            model.leave()


def leave(group: dist.ProcessGroup | None = None) -> None:
    """Make parameters whole that are trained over a process group, by default over any."""
    for one in list(_models.values()):
        if group is None or one.group is group:
            one.leave()


def remarks() -> list[str]:
    """Return what the report says of the models there are."""
    return [remark for one in list(_models.values()) for remark in one.remarks()]


_models: weakref.WeakKeyDictionary[GradShards, MixedParams] = weakref.WeakKeyDictionary()


def _objection(param: Parameter) -> str:
    """Return why a parameter stays in fp32, whoever reads it."""
    if captures.total:
        return _CAPTURED
    if type(param) is not Parameter:
        return f"it is a {type(param).__name__}"
    if param.dtype != torch.float32:
        return f"it is {_name(param.dtype)}"
    return "" if param.is_contiguous() else "its elements lie in another order"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
