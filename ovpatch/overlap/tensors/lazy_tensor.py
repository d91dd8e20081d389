"""Tensors of full shape without memory, whose content is fetched when they are read.

:data:`METADATA` holds the functions that read a tensor's metadata and none of its elements.
"""

from __future__ import annotations

import abc
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import outside_modes, outside_user_modes, reset_after_fork
from ovpatch.overlap.tensors.shard import compute_contiguous_strides
from ovpatch.overlap.tensors.tensor_memory import is_dense

# Attributes of Tensor that scripts only read.
_READ_ATTRIBUTES: Final = """
    shape ndim dtype device layout names name is_leaf grad_fn output_nr itemsize nbytes retains_grad
    _version _cdata is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested
    is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu
"""

# Attributes that scripts also set or delete.
_WRITTEN_ATTRIBUTES: Final = """
    grad requires_grad grad_dtype _backward_hooks _post_accumulate_grad_hooks
"""

_METHODS: Final = """
    size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous
    dim_order __len__ __hash__ is_floating_point is_complex is_signed is_inference is_conj is_neg
    is_same_size has_names _is_view requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad
"""

_FUNCTIONS: Final = """
    is_floating_point is_complex is_signed is_inference is_conj is_neg numel is_same_size get_device
"""


def _collect_metadata_functions() -> frozenset[Any]:
    written = _get_existing(Tensor, _WRITTEN_ATTRIBUTES)
    read = _get_existing(Tensor, _READ_ATTRIBUTES)
    found = [attribute.__get__ for attribute in (*read, *written)]
    found += [
        getattr(attribute, access) for attribute in written for access in ("__set__", "__delete__")
    ]
    return frozenset([*found, *_get_existing(Tensor, _METHODS), *_get_existing(torch, _FUNCTIONS)])


def _get_existing(owner: Any, names: str) -> list[Any]:
    """Return the attributes that this version of torch has."""
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


#: The functions that may run on a tensor whose content has not arrived.
METADATA: Final = _collect_metadata_functions()


def iterate_leaves(values: Any) -> Iterator[Any]:
    """Yield the values in nested tuples, lists and mappings, or ``values`` if it is none."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from iterate_leaves(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from iterate_leaves(value)
    else:
        yield values


class LazySource(abc.ABC):
    """The origin of the content of lazy tensors."""

    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which :meth:`fetch` runs; none by default.

        A source that needs a lock while it fetches returns it here, because it must be acquired
        before the lock of all lazy tensors.
        """
        return nullcontext()

    @abc.abstractmethod
    def fetch(self, tensors: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return the contents, in new memory, with the shapes, dtypes and devices of ``tensors``.

        Args:
            tensors: The lazy tensors.
            counts_as_read: Whether the script reads the tensors. If false, an observer does, and
                the source must not change its behavior because of it.
        """


class LostSource(LazySource):
    """The source of lazy tensors whose content no longer exists: each read is an error."""

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        self._message = message
        self._cause = cause

    def fetch(self, tensors: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Raise the error."""
        del tensors, counts_as_read
        raise RuntimeError(self._message) from self._cause


@dataclass(frozen=True)
class TensorMeta:
    """The metadata of a dense tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Return the metadata of a tensor, or of its contiguous copy if it is not dense."""
        strides = tensor.stride() if is_dense(tensor) else compute_contiguous_strides(tensor.shape)
        return cls(tensor.shape, strides, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return an uninitialized tensor like this on the CPU."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class LazyTensor(torch.Tensor):
    """A tensor without content, created by :func:`make_lazy_` or :func:`make_lazy`.

    [Note: a tensor's life] A parameter and its gradient begin as the *original* tensors of the
    script. A reduce-scatter leaves each rank its *shard* of the gradient, and ``p.grad`` becomes a
    *lazy gradient* of this class. ``optimizer.step`` runs on the shards of parameter, gradient and
    state. The parameter's shard is then the *all-gather input* and the memory of the parameter the
    *all-gather output*. The parameter is *pending* (pending_param.py) until its first read, and is
    then *unsharded*: the original again. Tensors of optimizer state are lazy between steps.

    [Note: lazy by class] The data of a lazy tensor is one *blank* element, expanded to the full
    shape, and its class shows that the content is elsewhere. Functions that read the shape or kind
    pass ``__torch_function__``. Before any other function runs, the content is assigned to
    ``tensor.data``, and the class becomes ``Tensor`` again. The object stays the same wherever the
    script holds it. Some C++ functions ignore the class. ``ARGUMENT_HOOKS`` materializes the
    arguments of those that Python code calls. C++ code without such a hook must not compute with
    other values unnoticed, so the blank element is NaN.

    Attributes:
        source: Fetches the content.
        key: Identifies the tensor to its source.
    """

    source: LazySource
    key: Any

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``. Materialize the lazy arguments first, unless it only reads their kind."""
        kwargs = kwargs or {}
        if func in _KIND_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = dict.fromkeys(
            leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)
        )
        # A dispatch mode decides whether its call writes: that of fake tensors does not.
        if func in _ZEROING_FUNCTIONS and not torch._C._len_torch_dispatch_stack():
            # No content has to be fetched for it.
            for tensor in found:
                _fill_with_zeros(tensor)
        else:
            materialize(found)
        return func(*args, **kwargs)


# Held while any tensor changes between lazy and plain, so that no two threads fetch one content.
_lock = threading.RLock()
reset_after_fork(sys.modules[__name__], "_lock", threading.RLock)


def materialize(tensors: Iterable[Tensor | None]) -> None:
    """Fetch the content of the lazy tensors among ``tensors``, by one call per source."""
    # A script may pass a tensor several times.
    by_id = {id(tensor): tensor for tensor in tensors if isinstance(tensor, LazyTensor)}
    if not by_id:
        # Another thread may hold the lock while it waits for peers.
        return
    lazy_tensors = list(by_id.values())
    with ExitStack() as guards:
        # Locks of sources come before the lock of lazy tensors on every path, so that two readers
        # cannot wait for each other.
        for source in {id(source): source for source, _ in map(get_source, lazy_tensors)}.values():
            if source is not None:
                guards.enter_context(source.reading())
        _materialize(lazy_tensors)


def _materialize(tensors: Sequence[Tensor]) -> None:
    with _lock, outside_user_modes():
        tensors_by_source: dict[int, list[LazyTensor]] = {}
        for tensor in tensors:
            # Another thread may have filled the tensor before this one acquired the lock.
            if isinstance(tensor, LazyTensor):
                if "source" not in vars(tensor):
                    # This process was forked while another thread filled the tensor. The content is
                    # in place, and only the class has not changed yet.
                    tensor.__class__ = torch.Tensor  # type: ignore[assignment]
                    continue
                tensors_by_source.setdefault(id(tensor.source), []).append(tensor)
        for lazy in tensors_by_source.values():
            contents = lazy[0].source.fetch(lazy, counts_as_read=True)
            for tensor, content in zip(lazy, contents, strict=True):
                fill(tensor, content)


def peek(tensor: Tensor) -> Tensor:
    """Return a tensor's content and change nothing.

    This is for observers, since their reads must not count as the script's.
    """
    if not isinstance(tensor, LazyTensor):
        return tensor
    with _lock, outside_user_modes():
        # Another thread may have filled the tensor before this one acquired the lock.
        is_unread = isinstance(tensor, LazyTensor)
        return tensor.source.fetch([tensor], counts_as_read=False)[0] if is_unread else tensor


def make_lazy(
    like: Tensor | TensorMeta, source: LazySource, key: Any, *, own: bool = False
) -> LazyTensor:
    """Return a new lazy tensor of the shape, dtype and device of ``like``.

    Args:
        like: A tensor, or its metadata.
        source: Fetches the content.
        key: Identifies the tensor to its source.
        own: If true, the tensor gets its own storage. Compilers refuse tensors that share a storage
            and are written to. Default: False.
    """
    with torch._C.DisableTorchFunctionSubclass():
        tensor = _make_blank(like.shape, like.dtype, like.device, own=own)
    return _mark_lazy(tensor, source, key)


def make_lazy_(tensor: Tensor, source: LazySource, key: Any) -> LazyTensor:
    """Make a plain tensor lazy in place, with its own storage, and free its memory."""
    tensor.data = _make_blank(tensor.shape, tensor.dtype, tensor.device, own=True)
    return _mark_lazy(tensor, source, key)


def make_lazy_from(tensor: Tensor, blank: Tensor, source: LazySource, key: Any) -> None:
    """Make a plain tensor lazy in place, and free its memory.

    Args:
        tensor: The tensor. It keeps its attributes and its autograd state.
        blank: A tensor of the same shape from :func:`expand_blanks`, whose memory it takes.
        source: Fetches the content.
        key: Identifies the tensor to its source.
    """
    tensor.data = blank
    # The attributes come before the class, see `_mark_lazy`. Each gradient of a step passes here,
    # so this function makes no further calls.
    attributes = tensor.__dict__
    attributes["source"] = source
    attributes["key"] = key
    tensor.__class__ = LazyTensor


def expand_blanks(likes: Iterable[Tensor]) -> list[Tensor]:
    """Return a blank element expanded to the shape of each tensor; equal kinds share one object."""
    kinds = [(like.shape, like.dtype, like.device) for like in likes]
    blanks_by_kind = {kind: _make_blank(*kind) for kind in dict.fromkeys(kinds)}
    return [blanks_by_kind[kind] for kind in kinds]


def get_source(tensor: Tensor | None) -> tuple[LazySource | None, Any]:
    """Return the source and key of a lazy tensor, without the lock. Both are None for others."""
    if not isinstance(tensor, LazyTensor):
        return None, None
    # The dictionary is empty if another thread fills the tensor at this moment.
    attributes = vars(tensor)
    return attributes.get("source"), attributes.get("key")


def set_source(tensor: Tensor | None, source: LazySource, key: Any) -> TypeGuard[LazyTensor]:
    """Replace the source of a lazy tensor; return false if it has been materialized already."""
    with _lock:
        is_unread = isinstance(tensor, LazyTensor)
        if is_unread:
            vars(tensor).update(source=source, key=key)
        return is_unread


def _mark_lazy(tensor: Tensor, source: LazySource, key: Any) -> LazyTensor:
    # The attributes come first, since another thread reads the class without the lock.
    vars(tensor).update(source=source, key=key)
    tensor.__class__ = LazyTensor
    assert isinstance(tensor, LazyTensor)
    return tensor


def _make_blank(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, own: bool = False
) -> Tensor:
    # Gradients are enabled because autograd refuses writes to views that were created without, if
    # another input of the write has a graph.
    with outside_modes(), torch.enable_grad():
        if own:
            return _make_blank_element(dtype, device).expand(shape).detach()
        kind = (dtype, device)
        if kind not in _blanks:
            _blanks[kind] = _make_blank_element(dtype, device)
        # Each caller gets its own tensor object. A graph that one of them joins affects no other.
        return _blanks[kind].detach().expand(shape)


# One element per dtype and device, which the lazy tensors without own storage share.
_blanks: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _make_blank_element(dtype: torch.dtype, device: torch.device) -> Tensor:
    has_nan = dtype.is_floating_point or dtype.is_complex
    return torch.full((), math.nan if has_nan else 0, dtype=dtype, device=device)


def _fill_with_zeros(tensor: LazyTensor) -> None:
    with _lock, outside_modes():
        # Another thread may have filled the tensor before this one acquired the lock.
        if isinstance(tensor, LazyTensor):
            content = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            fill(tensor, content)


def fill(tensor: LazyTensor, content: Tensor) -> None:
    """Give a lazy tensor its content. A source may call this for additional tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = content
        del tensor.source, tensor.key
        # The class changes last, since another thread reads it without the lock. mypy has narrowed
        # the type to LazyTensor here.
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]


_MEMORY_FUNCTIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("stride", "storage_offset", "is_contiguous", "dim_order", "_is_view")
    if hasattr(torch.Tensor, name)
)
# The functions that may run on a lazy tensor. The layout of its memory is not that of its content,
# so functions about memory must wait for the content.
_KIND_FUNCTIONS = METADATA - _MEMORY_FUNCTIONS
_ZEROING_FUNCTIONS: frozenset[Any] = frozenset(
    [torch.Tensor.zero_, torch.zero_, torch._foreach_zero_]
)
