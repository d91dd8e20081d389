"""Lazy state dicts of sharded state, and the format in which ranks send a parameter's state.

Messages between ranks are data that cannot run code. So an optimizer's state may contain tensors,
numbers and strings, in lists, tuples and dictionaries. Tensors inside of these are sent in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazySource, LazyTensor, LostSource, TensorMeta
from ovpatch_plugins.dist_optimizer.sharded_state import ShardedState

# --- messages ---


def pack(state: Mapping[Any, Any]) -> tuple[Any, list[Tensor]]:
    """Return a state as JSON values, and the tensors inside of it.

    Args:
        state: The state. Its keys may be numbers, too.

    Raises:
        TypeError: A value cannot be sent.
    """
    tensors: list[Tensor] = []
    return _pack(dict(state), tensors), tensors


def unpack(packed: Any, tensors: Sequence[Tensor], device: torch.device) -> dict[Any, Any]:
    """Return the state that :func:`pack` was given.

    Args:
        packed: The JSON values.
        tensors: The tensors inside, on the CPU.
        device: The device of tensors that were not on the CPU.
    """
    state = _unpack(packed, tensors, device)
    assert isinstance(state, dict)
    return state


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(item, tensors) for item in value]}
    if type(value) is dict:
        # JSON has only strings as keys, but the keys of a state may be numbers.
        items = [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]
        return {"dict": items}
    if type(value) is torch.Size:
        return {"size": list(value)}
    if type(value) is TensorMeta:
        dtype = str(value.dtype).removeprefix("torch.")
        is_on_cpu = value.device.type == "cpu"
        return {"meta": [list(value.shape), list(value.strides), dtype, is_on_cpu]}
    if type(value) is Tensor and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"tensor": [len(tensors) - 1, value.device.type == "cpu"]}
    raise TypeError(_ERROR_NOT_SENDABLE.format(type(value).__name__))


def _unpack(packed: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "dict":
        return {
            _unpack(key, tensors, device): _unpack(item, tensors, device) for key, item in content
        }
    if kind == "size":
        return torch.Size(content)
    if kind == "meta":
        shape, strides, dtype, is_on_cpu = content
        # Indices of GPUs may differ by rank, so only "on the CPU" is sent.
        meta_device = _CPU if is_on_cpu else device
        return TensorMeta(torch.Size(shape), tuple(strides), getattr(torch, dtype), meta_device)
    if kind == "tensor":
        number, is_on_cpu = content
        return tensors[number] if is_on_cpu else tensors[number].to(device)
    items = [_unpack(item, tensors, device) for item in content]
    return tuple(items) if kind == "tuple" else items


# --- state dicts ---

# Limit for the tensors that one read fetches early, in bytes.
_MAX_READ_AHEAD_BYTES: Final = 256 * 2**20

_CPU: Final = torch.device("cpu")

_ERROR_NOT_SENDABLE: Final = (
    "ovpatch: an optimizer has a {} in its state, which cannot be sent to peers. Take its class "
    "out of OVPATCH_DIST_OPTIMIZER_PER_PARAMETER."
)

_ERROR_REMOVED: Final = (
    "ovpatch: '{}' of a state_dict() was read for the first time after the optimizer's state had "
    "lost this tensor. Read or copy it earlier."
)

_ERROR_UNREAD: Final = (
    "ovpatch: the rest of a partly read state_dict() could not be fetched, because training has "
    "continued: {}. Read or copy all of it before the next backward."
)


class StateDictSource(LazySource):
    """The source of the lazy tensors in one state dict.

    [Note: state dicts are lazy] In stock PyTorch, ``state_dict()`` references the live state. A
    full copy on every rank would need the memory that sharding saves, but mostly only rank 0 saves
    it. So a state dict has lazy tensors, which represent the live ones. An unread state dict shows
    the live state, as in stock PyTorch, and costs nothing. Its first read fixes the moment that it
    shows. The rest is fetched before this rank steps, loads state or joins the next backward; no
    peer changes its shards before that backward. A read in the order of ``torch.save`` fetches the
    next tensors early. ``torch.distributed.checkpoint`` saves some tensors on each rank and fetches
    only those.

    Args:
        states: The ``"state"`` of a state dict: an optimizer's dictionaries by parameter number.
        pause_steps: Returns a function whose contexts keep the optimizer from stepping. It returns
            None if the optimizer no longer needs that.

    Attributes:
        shown: The ``"state"`` with lazy tensors.
    """

    def __init__(
        self,
        states: Mapping[Any, dict[Any, Any]],
        pause_steps: Callable[[], Callable[[], AbstractContextManager[None]] | None],
    ) -> None:
        self._pause_steps = pause_steps

        # - The content; the key of a lazy tensor is a position in the first list
        # The live state and the name of each tensor, and the lazy tensor that represents it.
        self._tensors: list[tuple[dict[Any, Any], Any, weakref.ref[LazyTensor]]] = []
        # The live state, the shown one, and its values that are no lazy tensors.
        self._scalars: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = []

        # - Reads
        # Whether the first read has fixed the moment that the state dict shows.
        self._is_read = False
        # The position after the last fetched tensor, and the number of tensors fetched early.
        self._next = 0
        self._num_ahead = 0

        self.shown = {number: self._show(state) for number, state in states.items()}
        self._groups = {
            value.source.group
            for state, name, _ in self._tensors
            if isinstance(value := state[name], LazyTensor)
            and isinstance(value.source, ShardedState)
        }

    def reading(self) -> AbstractContextManager[None]:
        """Return a context that keeps the optimizer from stepping while tensors are fetched."""
        pause = self._pause_steps()
        return nullcontext() if pause is None else pause()

    def fetch(self, wanted: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return full tensors on the CPU; the next ones may be filled as well."""
        if counts_as_read and not self._is_read:
            self._is_read = True
            self._freeze_scalars()
            self.complete_before_backward()
        keys = [lazy.key for lazy in wanted]
        ahead = self._choose_ahead(keys) if counts_as_read else []
        fetched = self._fetch([*keys, *(lazy.key for lazy in ahead)])
        for lazy, full in zip(ahead, fetched[len(keys) :], strict=True):
            lazy_tensor.fill(lazy, full)
        return fetched[: len(keys)]

    def complete_before_backward(self) -> None:
        """Schedule the unread rest to be fetched before this rank joins the next backward."""
        # The group must not keep the state dict alive.
        reference = weakref.WeakMethod(self.complete)
        for group in self._groups:
            retention.call_before_backward(group, lambda: (reference() or _complete_freed)())

    def complete_read(self) -> None:
        """Fetch the unread rest if a tensor was read; readers get the error if that fails."""
        if self._is_read:
            self.complete()

    def complete(self) -> None:
        """Fetch the unread rest; readers get the error if that fails."""
        unread = self._list_unread(range(len(self._tensors)))
        try:
            lazy_tensor.materialize(unread)
        except RuntimeError as error:
            # The rest may never be read, so this must not end the training step.
            lost = LostSource(_ERROR_UNREAD.format(error), error)
            for lazy in unread:
                lazy_tensor.set_source(lazy, lost, lazy.key)
        self._tensors.clear()

    def _show(self, state: dict[Any, Any]) -> dict[Any, Any]:
        shown = dict(state)
        for name, value in state.items():
            # State of a sparse embedding is sparse, and that of a DTensor is a DTensor. They are this
            # rank's own, like a scalar.
            if type(value) in (Tensor, LazyTensor) and value.ndim and value.layout is torch.strided:
                lazy = lazy_tensor.make_lazy(
                    TensorMeta(value.shape, (), value.dtype, _CPU), self, len(self._tensors)
                )
                shown[name] = lazy
                self._tensors.append((state, name, weakref.ref(lazy)))
            elif _is_plain_scalar(value):
                # This object shows the live memory until `_freeze_scalars` gives it its own. A
                # functorch level would make it a wrapper, whose memory cannot be replaced.
                with outside_modes():
                    shown[name] = value.detach()
        scalars = {
            name: value for name, value in shown.items() if not isinstance(value, LazyTensor)
        }
        self._scalars.append((state, shown, scalars))
        return shown

    def _freeze_scalars(self) -> None:
        """Show scalars as they are now, unless the script has replaced them in the state dict."""
        scalars = self._scalars
        self._scalars = []
        for state, shown, given in scalars:
            for name, value in given.items():
                if shown.get(name) is not value:
                    continue
                current = state.get(name, value)
                # The optimizer updates a tensor of one element in place. Other classes of tensors,
                # such as DTensor, cannot compute here, outside of modes; they follow the state.
                kept = current.clone() if type(current) is Tensor else current
                if (
                    _is_plain_scalar(value)
                    and isinstance(kept, Tensor)
                    and (kept.dtype, kept.device) == (value.dtype, value.device)
                ):
                    # A loader that writes into the state dict, such as that of
                    # torch.distributed.checkpoint, may hold this object already.
                    value.data = kept
                else:
                    shown[name] = kept

    def _choose_ahead(self, keys: Sequence[int]) -> list[LazyTensor]:
        """Return unread tensors after these; twice as many each time that reads continue."""
        is_sequential = min(keys) == self._next
        self._num_ahead = 2 * self._num_ahead + 1 if is_sequential else 0
        last = max(keys)
        end = min(last + 1 + self._num_ahead, len(self._tensors))
        ahead = self._list_unread(range(last + 1, end))
        nbytes = 0
        for position, lazy in enumerate(ahead):
            nbytes += lazy.numel() * lazy.dtype.itemsize
            if nbytes > _MAX_READ_AHEAD_BYTES:
                ahead = ahead[:position]
                break
        self._next = max(last, *(lazy.key for lazy in ahead)) + 1 if ahead else last + 1
        return ahead

    def _list_unread(self, positions: Sequence[int]) -> list[LazyTensor]:
        tensors = [self._tensors[position][2]() for position in positions]
        return [
            tensor
            for tensor in tensors
            if tensor is not None and lazy_tensor.get_source(tensor)[0] is self
        ]

    def _fetch(self, keys: Sequence[int]) -> list[Tensor]:
        """Return copies of the live tensors on the CPU, with one call per sharded state."""
        fetched: dict[int, Tensor] = {}
        lazy_by_source: dict[ShardedState, list[tuple[int, LazyTensor]]] = {}
        for key in dict.fromkeys(keys):
            state, name, _ = self._tensors[key]
            value = state.get(name)
            if not isinstance(value, Tensor):
                raise RuntimeError(_ERROR_REMOVED.format(name))
            source, _ = lazy_tensor.get_source(value)
            if isinstance(value, LazyTensor) and isinstance(source, ShardedState):
                lazy_by_source.setdefault(source, []).append((key, value))
            else:
                fetched[key] = lazy_tensor.peek(value).detach().to(_CPU, copy=True)
        for source, keyed in lazy_by_source.items():
            full = source.fetch_to_host([value for _, value in keyed])
            fetched |= {key: tensor for (key, _), tensor in zip(keyed, full, strict=True)}
        return [fetched[key] for key in keys]


def _is_plain_scalar(value: Any) -> TypeGuard[Tensor]:
    return type(value) is Tensor and value.ndim == 0 and value.layout is torch.strided


def _complete_freed() -> None:
    """Do nothing, because the script has freed the state dict."""
