"""What ``optimizer.state_dict()`` shows of sharded state, and the format in which ranks send a parameter's state.

It shows lazy tensors on the CPU, which are fetched when they are read. Messages between ranks are data that cannot run
code, so what an optimizer keeps besides tensors has to be numbers, texts and the like, in lists, tuples and dicts.
Tensors inside of those travel along whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazySource, LazyTensor, LostSource, TensorMeta
from ovpatch_plugins.dist_optimizer.sharded_state import ShardedState


def pack(state: Mapping[Any, Any]) -> tuple[Any, list[Tensor]]:
    """Return a state as JSON values, and the tensors inside of it. Its keys may be numbers, too.

    Raises:
        TypeError: Something in it cannot be sent.
    """
    tensors: list[Tensor] = []
    return _packed(dict(state), tensors), tensors


def unpack(packed: Any, tensors: Sequence[Tensor], device: torch.device) -> dict[Any, Any]:
    """Return what :func:`pack` was given.

    Args:
        packed: JSON values.
        tensors: The tensors inside, on the CPU.
        device: The device of tensors that were not on the CPU.
    """
    state = _unpacked(packed, tensors, device)
    assert isinstance(state, dict)
    return state


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(one, tensors) for one in value]}
    if type(value) is dict:
        return {"dict": [[_packed(key, tensors), _packed(one, tensors)] for key, one in value.items()]}
    if type(value) is torch.Size:
        return {"size": list(value)}
    if type(value) is TensorMeta:
        return {"meta": [list(value.shape), list(value.strides), _name(value.dtype), value.device.type == "cpu"]}
    if type(value) is Tensor and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"tensor": [len(tensors) - 1, value.device.type == "cpu"]}
    raise TypeError(
        f"ovpatch: an optimizer keeps a {type(value).__name__} in its state, which cannot be sent to other ranks; "
        "take its class out of OVPATCH_DIST_OPTIMIZER_PER_PARAMETER"
    )


def _unpacked(packed: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "dict":
        return {_unpacked(key, tensors, device): _unpacked(one, tensors, device) for key, one in content}
    if kind == "size":
        return torch.Size(content)
    if kind == "meta":
        shape, strides, dtype, on_cpu = content
        where = torch.device("cpu") if on_cpu else device
        return TensorMeta(torch.Size(shape), tuple(strides), getattr(torch, dtype), where)
    if kind == "tensor":
        number, on_cpu = content
        return tensors[number] if on_cpu else tensors[number].to(device)
    items = [_unpacked(one, tensors, device) for one in content]
    return tuple(items) if kind == "tuple" else items


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_READ_AHEAD_BYTES = 256 * 2**20

_CPU = torch.device("cpu")

_GONE = (
    "ovpatch: '{}' of an optimizer's state_dict() was read for the first time when the optimizer's state had no such "
    "tensor any more. Read or copy it earlier."
)

_UNREAD = (
    "ovpatch: an optimizer's state_dict() was read in part, then training went on, and the rest could not be fetched "
    "any more: {}. Read or copy all of it before the next backward."
)


class StateDictSource(LazySource):
    """The source of the lazy tensors in one state dict.

    [Note: state dicts are lazy] Stock's ``state_dict()`` refers to the live state. A whole copy on every rank would
    need the memory that sharding saves, while mostly rank 0 alone saves it. So a state dict has lazy tensors, which
    stand for the live ones. An unread state dict shows the live state, as stock's does, and costs nothing. Its first
    read fixes the moment that it shows. The rest is fetched before this rank steps, loads state or joins a further
    backward; no peer changes its shards before that backward. Tensors that are read in their order, as ``torch.save``
    does it, are fetched ahead. ``torch.distributed.checkpoint`` saves some tensors on each rank and fetches those.

    Args:
        states: The ``"state"`` of a state dict: an optimizer's own dicts, by number of the parameter.
        undivided: Returns what makes a context that keeps the optimizer from stepping; None once that is not needed.

    Attributes:
        shown: What the state dict shows instead.
    """

    def __init__(
        self,
        states: Mapping[Any, dict[Any, Any]],
        undivided: Callable[[], Callable[[], AbstractContextManager[None]] | None],
    ) -> None:
        self._undivided = undivided
        self._entries: list[tuple[dict[Any, Any], Any, weakref.ref[LazyTensor]]] = []
        self._scalars: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = []
        self._next = self._ahead = 0
        self._is_read = False
        self.shown = {number: self._show(state) for number, state in states.items()}
        self._groups = {
            value.source.group
            for state, name, _ in self._entries
            if isinstance(value := state[name], LazyTensor) and isinstance(value.source, ShardedState)
        }

    def reading(self) -> AbstractContextManager[None]:
        """Return a context that keeps the optimizer from stepping while tensors are fetched."""
        undivided = self._undivided()
        return nullcontext() if undivided is None else undivided()

    def fetch(self, wanted: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return whole tensors on the CPU; those that come next may be filled as well."""
        if counts_as_read and not self._is_read:
            self._is_read = True
            self._freeze_scalars()
            self.complete_before_backward()
        keys = [lazy.key for lazy in wanted]
        ahead = self._choose_ahead(keys) if counts_as_read else []
        found = self._fetch([*keys, *(lazy.key for lazy in ahead)])
        for lazy, whole in zip(ahead, found[len(keys) :], strict=True):
            lazy_tensor.fill(lazy, whole)
        return found[: len(keys)]

    def complete_before_backward(self) -> None:
        """Fetch what is unread before this rank joins a further backward."""
        reference = weakref.WeakMethod(self.complete)
        for group in self._groups:
            retention.call_before_backward(group, lambda: (reference() or _nothing)())

    def complete_read(self) -> None:
        """Fetch what is unread if something was read; an error is raised by its readers."""
        if self._is_read:
            self.complete()

    def complete(self) -> None:
        """Fetch what is unread; an error is raised by its readers."""
        unread = self._unread(range(len(self._entries)))
        try:
            lazy_tensor.materialize(unread)
        except RuntimeError as error:
            failed = LostSource(_UNREAD.format(error), error)
            for lazy in unread:
                lazy_tensor.set_source(lazy, failed, lazy.key)
        self._entries.clear()

    # ---------------------------------------------------------------- inside

    def _show(self, state: dict[Any, Any]) -> dict[Any, Any]:
        shown = dict(state)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                meta = TensorMeta(value.shape, (), value.dtype, _CPU)
                shown[name] = lazy_tensor.make_lazy(meta, self, len(self._entries))
                self._entries.append((state, name, weakref.ref(shown[name])))
        self._scalars.append((state, shown, {n: v for n, v in shown.items() if v is state[n]}))
        return shown

    def _freeze_scalars(self) -> None:
        """Show numbers as they are now, where the script has not put others."""
        scalars, self._scalars = self._scalars, []
        for state, shown, given in scalars:
            for name, value in given.items():
                if shown.get(name) is value:
                    now = state.get(name, value)
                    shown[name] = now.clone() if isinstance(now, Tensor) else now

    def _choose_ahead(self, keys: Sequence[int]) -> list[LazyTensor]:
        """Return unread tensors behind these, twice as many each time that reads go on where the last one ended."""
        self._ahead = 2 * self._ahead + 1 if min(keys) == self._next else 0
        last = max(keys)
        found = self._unread(range(last + 1, min(last + 1 + self._ahead, len(self._entries))))
        size = 0
        for position, lazy in enumerate(found):
            size += lazy.numel() * lazy.dtype.itemsize
            if size > _READ_AHEAD_BYTES:
                found = found[:position]
                break
        self._next = max(last, *(lazy.key for lazy in found)) + 1 if found else last + 1
        return found

    def _unread(self, positions: Sequence[int]) -> list[LazyTensor]:
        lazy = [self._entries[position][2]() for position in positions]
        return [one for one in lazy if one is not None and lazy_tensor.get_source(one)[0] is self]

    def _fetch(self, keys: Sequence[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        by_source: dict[ShardedState, list[tuple[int, LazyTensor]]] = {}
        for key in dict.fromkeys(keys):
            state, name, _ = self._entries[key]
            value = state.get(name)
            if not isinstance(value, Tensor):
                raise RuntimeError(_GONE.format(name))
            source, _ = lazy_tensor.get_source(value)
            if isinstance(value, LazyTensor) and isinstance(source, ShardedState):
                by_source.setdefault(source, []).append((key, value))
            else:
                found[key] = lazy_tensor.peek(value).detach().to(_CPU, copy=True)
        for source, entries in by_source.items():
            wholes = source.fetch_to_host([value for _, value in entries])
            found |= {key: whole for (key, _), whole in zip(entries, wholes, strict=True)}
        return [found[key] for key in keys]


def _nothing() -> None:
    """Complete a state dict that does not exist any more."""
