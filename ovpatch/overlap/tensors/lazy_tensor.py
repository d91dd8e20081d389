"""Tensors whose content is elsewhere until they are read: full shape, no memory.

Functions that ask a tensor for its metadata, not for its elements, are in :data:`METADATA`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import outside_modes, renew_in_children
from ovpatch.overlap.tensors.shard import compute_contiguous_strides
from ovpatch.overlap.tensors.tensor_memory import is_dense

_READ: Final = """
    shape ndim dtype device layout names name is_leaf grad_fn output_nr itemsize nbytes retains_grad _version _cdata
    is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_vulkan is_xla is_xpu
"""

_READ_AND_WRITTEN: Final = "grad requires_grad grad_dtype _backward_hooks _post_accumulate_grad_hooks"

_METHODS: Final = """
    size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous dim_order __len__
    __hash__ is_floating_point is_complex is_signed is_inference is_conj is_neg is_same_size has_names _is_view
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad
"""

_FUNCTIONS: Final = "is_floating_point is_complex is_signed is_inference is_conj is_neg numel is_same_size get_device"


def _metadata() -> frozenset[Any]:
    written = _existing(Tensor, _READ_AND_WRITTEN)
    found = [attribute.__get__ for attribute in (*_existing(Tensor, _READ), *written)]
    found += [getattr(attribute, how) for attribute in written for how in ("__set__", "__delete__")]
    return frozenset([*found, *_existing(Tensor, _METHODS), *_existing(torch, _FUNCTIONS)])


def _existing(owner: Any, names: str) -> list[Any]:
    """Return the attributes that this version of torch has."""
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


#: The functions that may be called on a parameter whose values are not there yet.
METADATA: Final = _metadata()


def iterate_leaves(values: Any) -> Iterator[Any]:
    """Yield what is in tuples, lists and the values of mappings, at any depth; ``values`` itself if it is none."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from iterate_leaves(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from iterate_leaves(value)
    else:
        yield values


class LazySource(Protocol):
    """Where the content of lazy tensors comes from."""

    def fetch(self, tensors: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return the contents: of the lazy tensors' shapes, dtypes and devices, in new memory.

        Args:
            tensors: The lazy tensors.
            counts_as_read: Whether the source is to take this for a read by the script.
        """


@runtime_checkable
class GuardedLazySource(LazySource, Protocol):
    """A source that needs other locks while it fetches, which are taken before that of lazy tensors."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context to fetch in."""


class LostSource:
    """The source of lazy tensors whose content is gone: every read is an error."""

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        self._message, self._cause = message, cause

    def fetch(self, tensors: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Raise the error."""
        del tensors, counts_as_read
        raise RuntimeError(self._message) from self._cause


@dataclass(frozen=True)
class TensorMeta:
    """A dense tensor without its content."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Return a tensor's metadata; of one that is not dense, that of a contiguous copy."""
        strides = tensor.stride() if is_dense(tensor) else compute_contiguous_strides(tensor.shape)
        return cls(tensor.shape, strides, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return such a tensor on the CPU, in new memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class LazyTensor(torch.Tensor):
    """A tensor without content; made by :func:`make_lazy_` and :func:`make_lazy`.

    [Note: a tensor's life] A parameter and its gradient begin as the *original* tensors of the script. A reduce-scatter
    leaves each rank its shard of the gradient (memory.py): it is *sharded*, ``p.grad`` is a *lazy gradient*, of this
    class. ``optimizer.step`` works on the shards of parameter, gradient and state. The parameter's shard is then the
    *all-gather input*, its own memory the *all-gather output*, and it is pending until the first read
    (pending_param.py). After that it is *unsharded*: the original again. The tensors of the optimizer's state are lazy
    between steps. A read of a lazy tensor materializes it from the shards of all ranks.

    [Note: lazy by class] A lazy tensor is one zero, expanded to the full shape, whose class says that the content is
    elsewhere. Functions that ask for shape or kind pass ``__torch_function__``; all others first put the content in
    place (``tensor.data``) and the class back. The object stays the same wherever the script holds it. C++ code that
    does not ask the class meets a tensor of stride 0, into which torch refuses to write.
    """

    source: LazySource  # where its content comes from
    key: Any  # what the source knows it by

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Materialize the lazy tensors among the arguments, unless ``func`` asks for shape or kind; then call it."""
        kwargs = kwargs or {}
        if func in _ABOUT_KIND:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = dict.fromkeys(leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, LazyTensor))
        if func in _ZEROING:
            for tensor in found:
                _fill_with_zeros(tensor)
        else:
            materialize(found)
        return func(*args, **kwargs)


_lock = threading.RLock()
renew_in_children(sys.modules[__name__], "_lock", threading.RLock)


def materialize(tensors: Iterable[Tensor | None]) -> None:
    """Put the content of all lazy tensors among these in place, fetched together where the source is the same."""
    lazy_ones = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
    with ExitStack() as guards:
        for source in {id(source): source for source, _ in map(get_source, lazy_ones)}.values():
            if isinstance(source, GuardedLazySource):
                guards.enter_context(source.reading())
        _materialize(lazy_ones)


def _materialize(tensors: Sequence[Tensor]) -> None:
    with _lock, torch.inference_mode(False), torch.no_grad():
        by_source: dict[int, list[LazyTensor]] = {}
        for tensor in tensors:
            if isinstance(tensor, LazyTensor):  # still, now that the lock is held
                if "source" not in vars(tensor):  # this process was forked while another thread filled it
                    tensor.__class__ = torch.Tensor  # type: ignore[assignment]
                    continue
                by_source.setdefault(id(tensor.source), []).append(tensor)
        for lazy in by_source.values():
            for tensor, content in zip(lazy, lazy[0].source.fetch(lazy, counts_as_read=True), strict=True):
                fill(tensor, content)


def peek(tensor: Tensor) -> Tensor:
    """Return a tensor's content and change nothing: for observers, whose reads are not the script's."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    with _lock, torch.inference_mode(False), torch.no_grad():
        return tensor.source.fetch([tensor], counts_as_read=False)[0] if isinstance(tensor, LazyTensor) else tensor


def make_lazy(like: Tensor | TensorMeta, source: LazySource, key: Any, *, own: bool = False) -> LazyTensor:
    """Return a new lazy tensor of the shape, dtype and device of ``like``.

    Args:
        like: What it shows.
        source: Where its content comes from.
        key: The source's key of it.
        own: Give it a storage of its own: compilers refuse tensors that share one and are written to.
    """
    with torch._C.DisableTorchFunctionSubclass():
        tensor = _expanded_zero(like.shape, like.dtype, like.device, own=own)
    return _mark_lazy(tensor, source, key)


def make_lazy_(tensor: Tensor, source: LazySource, key: Any) -> LazyTensor:
    """Make a plain tensor lazy, with a storage of its own, and free its memory; the object stays the same."""
    tensor.data = _expanded_zero(tensor.shape, tensor.dtype, tensor.device, own=True)
    return _mark_lazy(tensor, source, key)


def make_lazy_from(tensor: Tensor, zero: Tensor, source: LazySource, key: Any) -> None:
    """Make a plain tensor lazy and free its memory, with one of :func:`expand_zeros` in its place."""
    tensor.data = zero  # its memory alone
    attributes = tensor.__dict__
    attributes["source"], attributes["key"] = source, key
    tensor.__class__ = LazyTensor


def expand_zeros(likes: Iterable[Tensor]) -> list[Tensor]:
    """Return a zero expanded to the shape of each of some tensors; one of the same kind is the same object."""
    kinds = [(like.shape, like.dtype, like.device) for like in likes]
    made = {kind: _expanded_zero(*kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def get_source(tensor: Tensor | None) -> tuple[LazySource | None, Any]:
    """Return a lazy tensor's source and key, without the lock; None for other tensors."""
    if not isinstance(tensor, LazyTensor):
        return None, None
    known = vars(tensor)  # empty if another thread fills it in at this moment
    return known.get("source"), known.get("key")


def set_source(tensor: Tensor | None, source: LazySource, key: Any) -> TypeGuard[LazyTensor]:
    """Let the content of a lazy tensor come from elsewhere; return false if it has been materialized by now."""
    with _lock:
        unread = isinstance(tensor, LazyTensor)
        if unread:
            vars(tensor).update(source=source, key=key)
        return unread


def _mark_lazy(tensor: Tensor, source: LazySource, key: Any) -> LazyTensor:
    vars(tensor).update(source=source, key=key)  # first: another thread looks at the class without the lock
    tensor.__class__ = LazyTensor
    assert isinstance(tensor, LazyTensor)
    return tensor


def _expanded_zero(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, own: bool = False) -> Tensor:
    # With gradients on: autograd refuses writes to views that were made without, if another input has a graph.
    with outside_modes(), torch.enable_grad():
        if own:
            return torch.zeros((), dtype=dtype, device=device).expand(shape).detach()
        kind = (dtype, device)
        if kind not in _zeros:
            _zeros[kind] = torch.zeros((), dtype=dtype, device=device)
        return _zeros[kind].detach().expand(shape)  # a tensor of its own: what a graph does to it stays there


_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _fill_with_zeros(tensor: LazyTensor) -> None:
    with _lock, torch.inference_mode(False), torch.no_grad():
        if isinstance(tensor, LazyTensor):  # still, now that the lock is held
            with outside_modes():
                content = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            fill(tensor, content)


def fill(tensor: LazyTensor, content: Tensor) -> None:
    """Put a lazy tensor's content in place; sources may call this for others while they fetch."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = content
        del tensor.source, tensor.key
        # Last: another thread looks at the class without the lock.
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]  # which is narrowed to LazyTensor here


_ABOUT_MEMORY = frozenset(
    getattr(torch.Tensor, name)
    for name in ("stride", "storage_offset", "is_contiguous", "dim_order", "_is_view")
    if hasattr(torch.Tensor, name)
)
_ABOUT_KIND = METADATA - _ABOUT_MEMORY  # a lazy tensor's memory is not that of its content
_ZEROING: frozenset[Any] = frozenset([torch.Tensor.zero_, torch.zero_, torch._foreach_zero_])
