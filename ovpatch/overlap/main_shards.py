"""The slices in fp32 of one model's parameters in mixed precision, and how a whole is put together from them.

[Note: read by edition] Whoever reads a whole parameter asks the others' threads for their slices, without their taking
part. They must be those of the step after which it reads. So ranks come together before a step begins to change them
(:meth:`MainShards.begin` is called after that), and until then a slice stays as the last step has left it, also where
this rank has made the parameter whole since, and has perhaps written to it: what it has written becomes the slice in
the next step, and no peer sees it twice. Only another thread can be so late that its edition is gone: it reads the
next.

[Note: followed] Where a parameter is whole when a step begins, what stands there counts.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap import mixed as mixing
from ovpatch.overlap import pending
from ovpatch.overlap.editions import Editions, TornReadError
from ovpatch.overlap.farewell import Farewell, keep
from ovpatch.overlap.memory import handles
from ovpatch.overlap.mixed import Mixed
from ovpatch.overlap.peers import Peers
from ovpatch.overlap.slices import Slice, cut, elements_of
from ovpatch.overlap.staging import to_host
from ovpatch.overlap.weakly import Weakly, weakly

_PATIENCE_S: Final = 600.0  # for a rank whose step comes later; the asker's own time-out comes first
_PAUSE_S: Final = 0.001

_INSIDE = (
    "ovpatch: parameter '{}' is kept in half precision and was read whole while the optimizer that updates it was "
    "inside of its step. Read it before or after the step, or set OVPATCH_DIST_OPTIMIZER_PARAM_DTYPE to nothing."
)


class MainShards:
    """This rank's slices of the parameters of one model.

    Args:
        params: All parameters of the model, in registration order.
        names: Their names.
        group: The process group over whose ranks they are cut.
        identity: Name of the model, the same on all ranks and no other's in the process group.
        dtype: What the wholes are kept in.

    Attributes:
        lock: Held while a parameter becomes whole or mixed.
        editions: The editions of the slices.
        reads: Parameters that were made whole for a reader, with its name and thread; who looks takes them away.
    """

    def __init__(
        self, params: Weakly, names: Sequence[str], group: dist.ProcessGroup, identity: str, dtype: torch.dtype
    ) -> None:
        self.lock = threading.RLock()
        self.reads: list[tuple[int, str, int]] = []
        self._params, self._names, self._group, self._dtype = params, names, group, dtype
        self._rank, self._world = group.rank(), group.size()
        self._slices = [[cut(param.numel(), self._world, rank) for rank in range(self._world)] for param in params]
        self._mains: dict[int, Tensor] = {}
        self._mixed: dict[int, Mixed] = {}
        # As for gathers, [Note: owners of a parameter]; who takes gradients keeps the nodes.
        self._owners = min(map(handles, params))
        self._changing: int | None = None  # the thread that is inside of a step
        self.editions = Editions(params[0].device)
        self._farewell = Farewell(group)
        self._topic = f"parameters of {identity}"
        weakref.finalize(self, Peers.of(group).serve(self._topic, weakly(self._answer)))
        # As long as this rank has the model, and then until slower peers have come on.
        self._with_model = weakref.finalize(params[0], keep, group, self)
        self._with_model.atexit = False

    # ---------------------------------------------------------------- around a step

    def begin(self) -> None:
        """Say that a step begins to change the slices; every rank's host has come to it."""
        mixing.end_lingering()
        with self.lock:
            self._changing = threading.get_ident()
            self.editions.begin()

    def end(self) -> None:
        """Say that the step has changed them all."""
        with self.lock:
            self.editions.end()
            self._changing = None

    def has(self, index: int) -> bool:
        """Tell whether there is a slice in fp32 of a parameter."""
        return index in self._mains

    def main(self, index: int) -> Tensor:
        """Return this rank's slice in fp32, ``[slice.size]``."""
        return self._mains[index]

    def lower(self, indices: Sequence[int]) -> list[tuple[Parameter, str]]:
        """Make parameters mixed: round this rank's slices into the copies, and release the wholes.

        Returns:
            For each parameter, the copy, which is to be gathered; and why the whole could not be released, if it could
            not. Then it has to be brought up to date (:meth:`refresh`), once this step has ended on this rank.
        """
        lowered: list[tuple[Parameter, str]] = []
        slices: list[Tensor] = []
        mains: list[Tensor] = []
        with self.lock, pending.plainly():
            for index in indices:
                param, own, mixed = self._params[index], self._slice(index), self._mixed_of(index)
                main, reason = self._mains[index][: own.numel], ""
                rounded = mixing.writable_copy(mixed)[own.begin : own.end]
                if mixing.find(param) is not None:
                    slices.append(rounded)
                    mains.append(main)
                else:  # [Note: followed]; one by one, or there would be wholes and copies of all at the same time
                    main.copy_(elements_of(param.data, own))
                    rounded.copy_(main)
                    reason = self._release(param, mixed)
                lowered.append((mixed.copy, reason))
            if slices:
                torch._foreach_copy_(slices, mains)
        return lowered

    def _release(self, param: Parameter, mixed: Mixed) -> str:
        self._owners = min(self._owners, handles(param))
        reason = pending.refusal(param, owners=self._owners)
        if not reason:
            mixing.lower(param, mixed)
        return reason

    def raise_(self, index: int) -> None:
        """Make a parameter one of fp32 alone, with this rank's slice in its place; the others are to be gathered."""
        param, own = self._params[index], self._slice(index)
        with self.lock, pending.plainly():
            mixed, main = self._mixed.pop(index), self._mains.pop(index)
            if mixing.find(param) is not None:
                whole = torch.empty_like(mixed.form, device=param.device)
                elements_of(whole, own).copy_(main[: own.numel])
                mixing.give_back(param, whole)

    def refresh(self, indices: Sequence[int]) -> None:
        """Bring whole parameters up to date, in the memory that they have."""
        with pending.plainly():
            contents = self._pull(self.editions.number, indices)
            assert contents is not None, "no rank goes on without this one"
            for index, whole in zip(indices, contents, strict=True):
                self._params[index].copy_(whole)

    # ---------------------------------------------------------------- reading

    def make_whole(self, indices: Sequence[int], reader: str) -> None:
        """Make parameters plain ones again, for a reader who is reported."""
        for number, wanted, contents in self._attempts(indices):
            if self._put(number, wanted, contents):
                self.reads += [(index, reader, threading.get_ident()) for index in wanted]
                reads.total += len(wanted)
                return

    def peek(self, index: int) -> Tensor | None:
        """Return a whole parameter, in new memory; None if it has become a plain one. It stays what it is."""
        return next((contents[0] for _, _, contents in self._attempts([index])), None)

    def _attempts(self, indices: Sequence[int]) -> Iterator[tuple[int, list[int], list[Tensor]]]:
        """Yield an edition, those of the parameters that are not whole, and their contents, until all are whole."""
        deadline = time.monotonic() + _PATIENCE_S
        while wanted := self._mixed_among(indices):
            number = self.editions.number
            if self._changing is None:
                with pending.plainly():
                    contents = self._pull(number, wanted)
                if contents is not None:
                    yield number, wanted, contents
            if time.monotonic() > deadline:
                raise RuntimeError(f"ovpatch: the values of '{self._names[wanted[0]]}' changed faster than they came")
            time.sleep(_PAUSE_S)

    def leave(self) -> None:
        """Make all parameters whole, while there are peers to ask."""
        if self._mains and not Peers.destroyed(self._group):
            self._farewell.say(self)
            self.make_whole(list(self._mixed), "")
        self._with_model.detach()

    def _mixed_among(self, indices: Sequence[int]) -> list[int]:
        wanted = [index for index in indices if mixing.find(self._params.find(index)) is not None]
        if wanted and self._changing == threading.get_ident():
            raise RuntimeError(_INSIDE.format(self._names[wanted[0]]))
        return wanted

    def _put(self, number: int, indices: Sequence[int], contents: Sequence[Tensor]) -> bool:
        """Give parameters their values, unless a step has changed them since."""
        with self.lock:
            if self._changing is not None or self.editions.number != number:
                return False
            for index, whole in zip(indices, contents, strict=True):
                if mixing.find(self._params[index]) is not None:  # no other thread was faster
                    mixing.give_back(self._params[index], whole)
                    mixing.drop_copy(self._mixed[index])
        return True

    def _pull(self, number: int, indices: Sequence[int]) -> list[Tensor] | None:
        """Return whole parameters of an edition; None if it is gone."""
        question = self._farewell.mark({"edition": number, "indices": list(indices)})
        answers = Peers.of(self._group).ask(self._topic, question)
        own = self._read(number, indices)
        if own is None or any(header["gone"] for header, _ in answers.values()):
            return None
        reads.nbytes += sum(part.nbytes for _, parts in answers.values() for part in parts)
        wholes = []
        for position, index in enumerate(indices):
            parts = {rank: tensors[position] for rank, (_, tensors) in answers.items()}
            wholes.append(self._assembled(index, parts | {self._rank: own[position]}))
        if wholes[0].is_cuda:  # whoever comes next may be on another stream
            torch.cuda.current_stream(wholes[0].device).synchronize()
        return wholes

    def _assembled(self, index: int, parts: Mapping[int, Tensor]) -> Tensor:
        whole = torch.empty_like(self._mixed[index].form, device=self._params[index].device)
        for rank, part in parts.items():
            own = self._slices[index][rank]
            elements_of(whole, own).copy_(part[: own.numel])
        return whole

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        parts = self._read(question["edition"], question["indices"])
        self._farewell.hear(question)
        return {"gone": parts is None}, parts or []

    def _read(self, number: int, indices: Sequence[int]) -> list[Tensor] | None:
        """Return copies of this rank's slices of an edition, on the CPU; None if it is gone."""

        def copy() -> list[Tensor] | None:
            mains = [self._mains[index] for index in indices if index in self._mains]
            return [to_host(main) for main in mains] if len(mains) == len(indices) else None

        try:
            with pending.plainly():
                found = self.editions.read(number, copy, _PATIENCE_S)
        except TornReadError:
            if self.editions.number < number:  # it did not come
                raise
            return None
        return found

    def _slice(self, index: int) -> Slice:
        return self._slices[index][self._rank]

    def _mixed_of(self, index: int) -> Mixed:
        if index not in self._mixed:
            param = self._params[index]
            copy = Parameter(torch.empty(0, dtype=self._dtype, device=param.device), requires_grad=False)
            self._mixed[index] = Mixed(self, index, copy, torch.empty_like(param.data, device="meta"))
            self._mains[index] = torch.zeros(self._slice(index).size, device=param.device)
        return self._mixed[index]


class Reads:
    """How often parameters were made whole in this process because somebody read them.

    Attributes:
        total: How many, each time.
        nbytes: What peers sent for that, in bytes.
    """

    total: int = 0
    nbytes: int = 0


reads = Reads()
