"""Tensors that are read when somebody reads them: of full shape, without memory, filled in at the first look.

[Note: placeholder by class] A placeholder is an ordinary tensor, one zero expanded to the full shape, whose class says
that its content is elsewhere. ``__torch_function__`` lets questions about shape and kind pass; at anything else the
content is put in place (``tensor.data``) and the class goes back, so that the tensor object itself, wherever somebody
holds it, is the whole from then on. What sees neither class nor Python (an extension written in C++ that is handed the
tensor) meets a tensor of stride 0, into which torch refuses to write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ovpatch.overlap.tensors.metadata_ops import METADATA, leaves
from ovpatch.overlap.tensors.ownership import outside_inference


class Source(Protocol):
    """Where the content of placeholders comes from."""

    def fetch(self, placeholders: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        """Return the contents: of the placeholders' shapes, dtypes and devices, in new memory.

        Args:
            placeholders: What to return the contents of.
            noticed: Whether the source is to take it for a sign of what the script needs.
        """


class Form(Protocol):
    """What a placeholder shows; every tensor has one."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the content."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the content's elements."""

    @property
    def device(self) -> torch.device:
        """Where the content will be."""


class LazyTensor(torch.Tensor):
    """A tensor without content; made by :func:`make_lazy_` and :func:`make`.

    Attributes:
        source: Where its content comes from.
        key: What the source knows it by.
    """

    source: Source
    key: Any

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape and kind; fill in the content for anything else."""
        kwargs = kwargs or {}
        if func in _ABOUT_KIND:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = list(dict.fromkeys(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, LazyTensor)))
        if func in _ZEROING:
            for placeholder in found:
                _fill_with_zeros(placeholder)
        else:
            settle(found)
        return func(*args, **kwargs)


_lock = threading.RLock()


def settle(placeholders: Iterable[Tensor | None]) -> None:
    """Put the content of all that are placeholders still in place, fetched together where the source is the same."""
    with _lock, torch.inference_mode(False), torch.no_grad():
        by_source: dict[int, list[LazyTensor]] = {}
        for one in placeholders:
            if isinstance(one, LazyTensor):
                by_source.setdefault(id(one.source), []).append(one)
        for ones in by_source.values():
            for placeholder, content in zip(ones, ones[0].source.fetch(ones, noticed=True), strict=True):
                _fill(placeholder, content)


def peek(tensor: Tensor) -> Tensor:
    """Return a tensor's content and change nothing: for those who watch a script, and must not be taken for it."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    with _lock, torch.inference_mode(False), torch.no_grad():
        return tensor.source.fetch([tensor], noticed=False)[0] if isinstance(tensor, LazyTensor) else tensor


def make(like: Form, source: Source, key: Any, *, own: bool = False) -> LazyTensor:
    """Return a new placeholder of the shape, dtype and device of ``like``.

    Args:
        like: What it shows.
        source: Where its content comes from.
        key: What the source knows it by.
        own: Have a storage of its own, for compilers refuse tensors that share one and are written to.
    """
    with torch._C.DisableTorchFunctionSubclass():
        tensor = _nothing(like.shape, like.dtype, like.device, own=own)
    return _mark(tensor, source, key)


def make_lazy_(tensor: Tensor, source: Source, key: Any, *, own: bool = False) -> LazyTensor:
    """Make a placeholder of a plain tensor, whose memory is given up; the object stays. See :func:`make`."""
    kind = (tensor.shape, tensor.dtype, tensor.device)
    if own:
        tensor.data = _nothing(*kind, own=True)
        return _mark(tensor, source, key)
    if kind not in _nothings:
        _nothings[kind] = _nothing(*kind)
    tensor.data = _nothings[kind]  # the memory alone
    return _mark(tensor, source, key)


def origin(tensor: Tensor | None) -> tuple[Source | None, Any]:
    """Return a placeholder's source and key, without the lock; None where it is none, or is being filled in."""
    if not isinstance(tensor, LazyTensor):
        return None, None
    known = vars(tensor)
    return known.get("source"), known.get("key")


def redirect(placeholder: Tensor | None, source: Source, key: Any) -> TypeGuard[LazyTensor]:
    """Let the content of a placeholder come from elsewhere; return false if somebody has filled it in by now."""
    with _lock:
        unread = isinstance(placeholder, LazyTensor)
        if unread:
            vars(placeholder).update(source=source, key=key)
        return unread


def _mark(tensor: Tensor, source: Source, key: Any) -> LazyTensor:
    vars(tensor).update(source=source, key=key)  # first: another thread looks at the class without the lock
    tensor.__class__ = LazyTensor
    assert isinstance(tensor, LazyTensor)
    return tensor


def _nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, own: bool = False) -> Tensor:
    with outside_inference():
        if own:
            return torch.zeros((), dtype=dtype, device=device).expand(shape).detach()
        kind = (dtype, device)
        if kind not in _zeros:
            _zeros[kind] = torch.zeros((), dtype=dtype, device=device)
        return _zeros[kind].detach().expand(shape)  # of its own: what is done to it as a part of a graph stays there


_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
_nothings: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _fill_with_zeros(placeholder: LazyTensor) -> None:
    with _lock, torch.inference_mode(False), torch.no_grad():
        if isinstance(placeholder, LazyTensor):  # still, now that the lock is ours
            with torch._C.DisableTorchFunctionSubclass():
                content = torch.zeros(placeholder.shape, dtype=placeholder.dtype, device=placeholder.device)
            _fill(placeholder, content)


def _fill(placeholder: LazyTensor, content: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        placeholder.data = content
        del placeholder.source, placeholder.key
        # Last: another thread looks at the class without the lock.
        placeholder.__class__ = torch.Tensor  # type: ignore[assignment]  # which is narrowed to LazyTensor here


_ABOUT_MEMORY = frozenset(
    getattr(torch.Tensor, name)
    for name in ("stride", "storage_offset", "is_contiguous", "dim_order", "_is_view")
    if hasattr(torch.Tensor, name)
)
_ABOUT_KIND = METADATA - _ABOUT_MEMORY  # a placeholder's memory is not that of what it stands for
_ZEROING: frozenset[Any] = frozenset([torch.Tensor.zero_, torch.zero_, torch._foreach_zero_])
