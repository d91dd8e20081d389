"""Parameters of fp32 in mixed precision: whole in half precision, and in fp32 by slices, one on each rank.

[Note: mixed by type] A forward under autocast reads a Linear's weight in half precision and nothing else of it. So the
whole in fp32 need not be there: the parameter's class is :class:`MixedParameter`, its memory one NaN expanded to its
shape, and beside it there is a copy in half precision. A function all of whose operands autocast casts gets the copy
(:func:`ovpatch.overlap.autocast.casts_operands`); who asks for metadata is answered; for anybody else the whole is put
together from the ranks' slices (:mod:`ovpatch.overlap.main_shards`), and the parameter is a plain one from then on.
Code in C++ that asks no class meets NaN, so that nothing is silently wrong.

[Note: as autocast casts] What a function gets is what autocast's own cast would have made, with a gradient that is cast
to fp32. Autocast keeps its casts until the outermost context ends: a weight that is used twice in it has its gradients
added up in half precision, and cast once. So what was handed out is kept as long, and forgotten with autocast's own
(:func:`forgetting_casts`). A parameter that is made whole meanwhile keeps its class until then, for its next use under
autocast gets the same cast; anything else is called with it as the plain parameter that it is.

[Note: copies in graphs] A graph keeps the copy for its backward, as it keeps autocast's cast. Who writes new values
looks first whether somebody else holds the copy's memory (:func:`writable_copy`), and takes new memory then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from ovpatch.overlap import grad_shards
from ovpatch.overlap.autocast import casts_operands
from ovpatch.overlap.memory import references_of_one, storage_references
from ovpatch.overlap.metadata import LIKE, METADATA
from ovpatch.overlap.nested import leaves
from ovpatch.overlap.pending import DERIVED, PendingParameter, plainly, reduce_between_processes, settle
from ovpatch.overlap.unwidened import widened

_CAPTURED: Final = (
    "ovpatch: a CUDA graph cannot be captured over parameters that param_dtype of dist_optimizer keeps in half "
    "precision, for their memory may move. Set OVPATCH_DIST_OPTIMIZER_PARAM_DTYPE to nothing."
)


class Source(Protocol):
    """Who has the slices in fp32."""

    lock: threading.RLock

    def make_whole(self, indices: Sequence[int], reader: str) -> None:
        """Make parameters plain ones again, for a reader who is reported."""

    def main(self, index: int) -> Tensor:
        """Return this rank's slice in fp32, padded to the same size on all ranks."""

    def peek(self, index: int) -> Tensor | None:
        """Return the whole in fp32, in new memory; None if the parameter has become a plain one."""


class Mixed:
    """What there is of a parameter in mixed precision.

    Args:
        source: Who has the slices in fp32; kept as long as the parameter is mixed, not by this object.
        index: The parameter's index there.
        copy: The whole, in half precision.
        form: A tensor on the meta device that is laid out as the whole in fp32 would be.

    Attributes:
        stream: The CUDA stream on which the copy was allocated.
    """

    def __init__(self, source: Source, index: int, copy: Parameter, form: Tensor) -> None:
        self.index, self.copy, self.form = index, copy, form
        self.stream: torch.cuda.Stream | None = None
        # Weakly: the source has this object, and both have memory that must not wait for the garbage collector.
        self._source = weakref.ref(source)
        self._casts: list[weakref.ref[Node]] = []

    def cast(self, node: Node) -> None:
        """Note a node of a graph whose gradient is the copy's."""
        self._casts = [*(one for one in self._casts if one() is not None), weakref.ref(node)]

    def is_reached_once(self) -> bool:
        """Tell whether the running backward runs just one of those. Only valid inside a backward."""
        nodes = [node for one in self._casts if (node := one()) is not None]
        return sum(map(torch._C._will_engine_execute_node, nodes)) == 1

    @property
    def source(self) -> Source:
        """Who has the slices in fp32."""
        source = self._source()
        assert source is not None, "it is kept while there is a parameter to read"
        return source


class MixedParameter(PendingParameter):
    """The class of a parameter in mixed precision; see [Note: mixed by type]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give ``func`` the copy in half precision, or metadata, or else the whole."""
        if func in _ABOUT_FORM:  # first of all, for a step asks for much of it
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        first = next((value for value in (*args, *kwargs.values()) if type(value) is MixedParameter), None)
        mixed, cast = find(first), _casts.get(id(first))
        low = cast if mixed is None else mixed.copy
        if low is not None:
            if casts_operands(func, kwargs, low.device.type, low.dtype) and not _transformed():
                return func(*map(_lowered, args), **{name: _lowered(value) for name, value in kwargs.items()})
            if mixed is not None and (func in _ABOUT_MEMORY or func in LIKE):
                return _answered(mixed, func, args, kwargs)
        make_whole((args, kwargs), reader=name_of(func))
        if _lingering:
            return _called_plainly(func, args, kwargs)
        return func(*args, **kwargs)

    def _bring(self) -> None:
        make_whole([self], reader="code that does not ask for its class")
        _make_plain(id(self))


def find(param: Any) -> Mixed | None:
    """Return what there is of a parameter, if it is in mixed precision."""
    entry = _mixed.get(id(param)) if type(param) is MixedParameter else None
    return None if entry is None else entry[1]


def make_whole(values: Any, *, reader: str) -> None:
    """Make parameters among nested values plain ones again; all there are, if there is none, as ``settle_within``."""
    found = [value for value in leaves(values) if isinstance(value, PendingParameter)]
    for one in found:
        if type(one) is not MixedParameter:
            settle(one)
    by_source: dict[Source, list[int]] = {}
    ones = [find(one) for one in found] if found else [mixed for _, mixed, _ in list(_mixed.values())]
    for mixed in ones:
        if mixed is not None:
            by_source.setdefault(mixed.source, []).append(mixed.index)
    for source, indices in by_source.items():
        source.make_whole(indices, reader)


def peek(param: Tensor) -> Tensor:
    """Return a parameter's values and change nothing: for those who watch a script, and must not be taken for it."""
    mixed = find(param)
    whole = None if mixed is None else mixed.source.peek(mixed.index)
    return param if whole is None else whole


def lower(param: Parameter, mixed: Mixed) -> None:
    """Release a parameter's memory in fp32. Nobody else may hold it; see :func:`ovpatch.overlap.pending.refusal`."""
    key = id(param)
    # The class after it, as in pending.py, [Note: order of class and entry].
    _mixed[key] = (weakref.ref(param, functools.partial(_forget, key)), mixed, mixed.source)
    DERIVED.add(key)
    param.__class__ = MixedParameter
    with plainly():
        param.data = _nothing(param.device).expand(param.shape)


def give_back(param: Parameter, whole: Tensor) -> None:
    """Make a parameter a plain one again, of these values, whose memory becomes its own."""
    key = id(param)
    with plainly():
        param.data = whole
    if key in _casts:  # [Note: as autocast casts]
        _lingering[key] = weakref.ref(param)
    else:
        param.__class__ = Parameter
    _forget(key)


def writable_copy(mixed: Mixed) -> Tensor:
    """Return the copy's elements, to write to; in new memory if there is none, or somebody holds it.

    Call it :func:`ovpatch.overlap.pending.plainly`.
    """
    copy = mixed.copy
    if not copy.numel() or storage_references(copy) != references_of_one():
        copy.data = torch.empty_like(mixed.form, dtype=copy.dtype, device=copy.device)
        mixed.stream = torch.cuda.current_stream(copy.device) if copy.is_cuda else None
    return copy.data.view(-1)


def drop_copy(mixed: Mixed) -> None:
    """Release the copy's memory, when those that hold it have let go."""
    with plainly():
        mixed.copy.data = mixed.copy.new_empty(0)


def lowered(param: Parameter) -> Tensor:
    """Return what autocast's cast of a parameter is; the parameter itself if it is whole by now and was not cast yet.

    Raises:
        RuntimeError: A CUDA graph is being captured, or the values did not arrive.
    """
    mixed = find(param)
    if mixed is None:
        return _casts.get(id(param), param)
    with mixed.source.lock:
        if find(param) is not mixed:
            return _casts.get(id(param), param)
        if mixed.stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED)
        settle(mixed.copy)
        _use_on_this_stream(mixed)
        with torch._C.DisableTorchFunctionSubclass():
            differentiable = param.requires_grad and torch.is_grad_enabled()
        if not differentiable:
            return mixed.copy.detach()  # which is seen by who looks for others that hold the memory
        found = _casts.get(id(param))
        if found is None:
            found = _cast(param, (mixed.copy,))
            mixed.cast(found.grad_fn)
            if torch.is_autocast_cache_enabled():
                _casts[id(param)] = found
        return found


def forgetting_casts(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``torch.clear_autocast_cache``; see [Note: as autocast casts]."""

    @functools.wraps(original)
    def clear_autocast_cache() -> None:
        forget_casts()
        original()

    return clear_autocast_cache


def forget_casts() -> None:
    """Forget what was handed out as autocast's casts: what is whole is plain from now on."""
    _casts.clear()
    end_lingering()


def end_lingering() -> None:
    """Make parameters plain ones that are whole and have kept their class; a step is about to work on them."""
    for key in list(_lingering):
        _make_plain(key)


def name_of(func: Any) -> str:
    """Return a short name of what ``__torch_function__`` is given, for reports."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") and owner is not None:
        return f".{getattr(owner, '__name__', owner)}"
    return str(getattr(func, "__name__", func))


class _Cast(torch.autograd.Function):
    """Autocast's cast of a parameter whose result is there already."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, copy: tuple[Tensor]) -> Tensor:
        """Return the copy in half precision, without copying it."""
        ctx.param = param
        ctx.set_materialize_grads(False)
        return copy[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Cast the gradient to fp32, unless it is taken as it is."""
        (grad,) = grads
        if grad is None or grad_shards.takes(ctx.param, grad):
            return None, None
        return widened([grad])[0], None


# Without the Python around it, through which readers pass that must find the whole (readers.py).
_cast: Final[Any] = super(torch.autograd.Function, _Cast).apply

_mixed: dict[int, tuple[weakref.ref[Parameter], Mixed, Source]] = {}  # by id() of the parameter
_casts: dict[int, Tensor] = {}  # by id() of the parameter, which the graph keeps alive
_lingering: dict[int, weakref.ref[Parameter]] = {}  # whole, and of their class only while there is a cast
_lingering_lock = threading.Lock()

_ABOUT_MEMORY: Final = frozenset(
    getattr(Tensor, name) for name in ("stride", "storage_offset", "is_contiguous", "dim_order")
)
_ABOUT_FORM: Final = METADATA - _ABOUT_MEMORY


def _called_plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with parameters that are whole, and only keep their class, as plain ones."""
    ones: list[Any] = [value for value in leaves((args, kwargs)) if id(value) in _lingering]
    for one in ones:
        one.__class__ = Parameter
    try:
        return func(*args, **kwargs)
    finally:
        with _lingering_lock:
            for one in ones:
                if id(one) in _lingering:
                    one.__class__ = MixedParameter


def _make_plain(key: int) -> None:
    with _lingering_lock:
        reference = _lingering.get(key)
        param: Any = None if reference is None else reference()
        if param is not None:
            param.__class__ = Parameter  # first, as in pending.py, [Note: order of class and entry]
        _lingering.pop(key, None)


def _lowered(value: Any) -> Any:
    return lowered(value) if type(value) is MixedParameter else value


def _answered(mixed: Mixed, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Answer what the form of the parameter says."""
    if func in LIKE and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": mixed.copy.device}
    answered = [mixed.form if type(value) is MixedParameter else value for value in args]
    named = {name: mixed.form if type(value) is MixedParameter else value for name, value in kwargs.items()}
    return func(*answered, **named)


def _transformed() -> bool:
    """Tell whether functions are being transformed or traced, which want the parameter itself."""
    return torch._C._are_functorch_transforms_active() or torch._C._is_tracing()


def _use_on_this_stream(mixed: Mixed) -> None:
    if mixed.stream is None:
        return
    current = torch.cuda.current_stream(mixed.copy.device)
    if current != mixed.stream:
        mixed.copy.record_stream(current)


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=torch.float32, device=device)


def _forget(key: int, _dead: object = None) -> None:
    _mixed.pop(key, None)
    DERIVED.discard(key)


ForkingPickler.register(MixedParameter, reduce_between_processes)
