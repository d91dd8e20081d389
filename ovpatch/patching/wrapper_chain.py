"""The chain of patches of one slot, behind one installed function."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Final

from ovpatch.patching.patch import (
    IncompatiblePatchError,
    Patch,
    PatchError,
    describe_callable,
    unwrap_callable,
)
from ovpatch.patching.references import is_fresh_copy, leads_to
from ovpatch.patching.slot import (
    SlotKind,
    SlotWrite,
    get_slot_kind,
    make_base,
    make_descriptor,
    read_slot,
    unwrap_descriptor,
    unwrap_replacement,
)
from ovpatch.patching.target import ABSENT, Slot, call_after_import, format_owner

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def compare_signatures(original: Callable[..., Any], new: Callable[..., Any]) -> str | None:
    """Return the difference between two signatures, or None if ``new`` can replace ``original``.

    Names, kinds, order and defaults of all parameters must agree, those of ``self`` and ``cls`` as well: torch itself
    calls ``Optimizer.state_dict(self=optimizer)``. ``*args`` and ``**kwargs`` of ``new`` match the remaining
    parameters. Functions without a signature (most of C) are not compared. ``original`` is compared by the signature
    that it shows, ``new`` by its own code, since ``functools.wraps`` may show another signature.
    """
    if _takes_anything(new):
        return None
    old_parameters, new_parameters = (
        _parameters(original),
        _parameters(_undisguised(new), follow=False),
    )
    if old_parameters is None or new_parameters is None:
        return None
    return _compare(old_parameters, new_parameters)


def _takes_anything(function: Callable[..., Any]) -> bool:
    """Return whether a function takes nothing but ``*args`` and ``**kwargs``; without the cost of its signature."""
    code = getattr(function, "__code__", None)
    both = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return (
        code is not None
        and code.co_flags & both == both
        and not (code.co_argcount or code.co_kwonlyargcount)
    )


def _undisguised(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the attributes from ``functools.wraps``, such as ``__signature__``."""
    if not isinstance(function, types.FunctionType):
        return function
    bare = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


def _parameters(function: Callable[..., Any], *, follow: bool = True) -> list[Parameter] | None:
    try:
        return list(inspect.signature(function, follow_wrapped=follow).parameters.values())
    except (ValueError, TypeError):
        return None


def _show_signature(function: Callable[..., Any]) -> str:
    """Return a function's parameters without annotations, which may be long."""
    found = inspect.signature(function)
    bare = [
        parameter.replace(annotation=Parameter.empty) for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=Parameter.empty))


def _compare(old: list[Parameter], new: list[Parameter]) -> str | None:
    kinds = {parameter.kind for parameter in new}
    left = {parameter.name: parameter for parameter in old}
    names, old_names = _ordered_names(new), _ordered_names(old)
    for name, old_name in zip(names, old_names, strict=False):
        if name != old_name and old_name not in names:
            return f"parameter {old_name!r} is called {name!r}"
    for mine in new:
        if mine.kind in _VARIABLE:
            left = {name: theirs for name, theirs in left.items() if theirs.kind is not mine.kind}
            continue
        if mine.name not in left:
            return f"parameter {mine.name!r} is not in the original"
        problem = _compare_one(left.pop(mine.name), mine)
        if problem:
            return problem
    missing = [name for name, theirs in left.items() if not _absorbed(theirs, kinds)]
    if missing:
        return f"parameter {missing[0]!r} of the original is missing"
    now, before = ", ".join(names), ", ".join(old_names[: len(names)])
    return None if now == before else f"parameters come as ({now}) instead of ({before})"


def _ordered_names(parameters: list[Parameter]) -> list[str]:
    return [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]


def _compare_one(old: Parameter, new: Parameter) -> str | None:
    if old.kind is not new.kind:
        return f"parameter {old.name!r} is {new.kind.description} and was {old.kind.description}"
    if (old.default is Parameter.empty) is not (new.default is Parameter.empty):
        return f"parameter {old.name!r} has {'no ' if new.default is Parameter.empty else 'a new '}default"
    # Arrays are equal by element, which is no answer: a default that is one must be the same object.
    if new.default is not old.default and (new.default == old.default) is not True:
        return f"parameter {old.name!r} has the default {new.default!r} and had {old.default!r}"
    return None


def _absorbed(parameter: Parameter, kinds: set[Any]) -> bool:
    """Whether ``*args`` and ``**kwargs`` take a parameter however it is passed."""
    by_position = parameter.kind in _POSITIONAL
    by_name = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return (
        parameter.kind not in _VARIABLE
        and (not by_position or Parameter.VAR_POSITIONAL in kinds)
        and (not by_name or Parameter.VAR_KEYWORD in kinds)
    )


Function = Callable[..., Any]

# Attributes that functools.wraps must not copy: they tell Dynamo whether to trace the function that carries them.
_DYNAMO_KEYS: Final = ("_torchdynamo", "get_compiler_config")
_CACHE_METHODS: Final = ("cache_info", "cache_clear", "cache_parameters")


def _never() -> bool:
    return False


class _Tracing:
    """Whether a call is traced by Dynamo. ``now`` is replaced when torch is imported, perhaps after the patches."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Callable[[], bool] = _never


_tracing: Final = _Tracing()


def _torch_is_here(_module: str) -> None:
    _tracing.now = getattr(sys.modules["torch.compiler"], "is_dynamo_compiling", _never)


#: The code of installed functions and of wrappers, which Dynamo skips as soon as it is imported.
_skipped: Final[set[types.CodeType]] = set()


def _skip_frames(code: types.CodeType) -> None:
    """Have Dynamo leave frames of a code object alone, see [Note: skipped frames]."""
    _skipped.add(code)
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        skip(code)


def _dynamo_is_here(_module: str) -> None:
    # All installed functions share this code object, or its hidden form.
    dispatcher = _build(_never, _never)[0].__code__
    for code in {*_skipped, dispatcher, _hide_from_warnings(dispatcher, globals())}:
        _skip_frames(code)


# Part of the file name of a hidden frame. warnings.warn(), in Python 3.10 to 3.14, does not count frames whose file has
# both "importlib" and "_bootstrap" in its name, so that a warning never names the import system.
_HIDDEN: Final = " (importlib._bootstrap)"


@functools.cache
def _rename_file(code: types.CodeType) -> types.CodeType:
    """Return the one hidden form of a code, since Dynamo knows the code to skip by its identity."""
    return code.replace(co_filename=code.co_filename + _HIDDEN)


def _hide_from_warnings(code: types.CodeType, module: dict[str, Any]) -> types.CodeType:
    """Return the code with a file name by which ``warnings.warn`` does not count its frames.

    ``warnings.warn(..., stacklevel=2)`` names the file and line of the caller, and filters and the once-per-line rule
    go by them. Frames of dispatchers and wrappers are between the caller and the original, so each warning would name a
    file of ovpatch. They are hidden where an original passes ``stacklevel``, and only there, since a traceback through
    them has the longer file name. ``module`` is the namespace of the code's module, in which a traceback finds the
    source lines.
    """
    hidden = _rename_file(code)
    linecache.lazycache(hidden.co_filename, module)
    return hidden


def _warns_of_its_caller(function: Function) -> bool:
    """Return whether a function, or a function that it wraps, passes ``stacklevel`` to a call."""
    seen: list[Any] = []
    while function is not None and function not in seen:
        constants = getattr(getattr(function, "__code__", None), "co_consts", ())
        if any("stacklevel" in names for names in constants if isinstance(names, tuple)):
            return True
        seen.append(function)
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]  # None ends the loop
    return False


def watch_for_torch() -> None:
    """Detect calls in traced code, now or as soon as torch is imported."""
    if _tracing.now is not _never:
        return
    for module, is_here in (
        ("torch.compiler", _torch_is_here),
        ("torch._dynamo.eval_frame", _dynamo_is_here),
    ):
        if module in sys.modules:
            is_here(module)
        else:
            call_after_import(module, is_here)


class Dispatcher:
    """A plain function that counts its calls; ``switch`` sets the target of all later calls.

    Dynamo, LR schedulers (``step.__func__``), pickle and ``inspect`` see through proxies to the
    original, so the installed object is a function and its state is in its closure. Dynamo guards on the identity of
    the target: only a switch recompiles. The call counter stays out of traced code, where a changing int would
    recompile at each call; a function that Dynamo evaluates once while tracing counts the trace instead.

    [Note: skipped frames] Where Dynamo does not trace a caller, such as ``Module._call_impl``, it examines every Python
    function called below it. It would compile each dispatcher by itself, all in the cache of one code object, and
    each wrapper with a graph break of its own. So their frames are skipped; those of the original are not.
    """

    __slots__ = ("_credited", "_read", "function", "switch")

    def __init__(self, target: Function, like: Function) -> None:
        self.function, self.switch, self._read = _build(target, like)
        self._credited = (0, 0)
        _disguise(self.function, like)

    def take_counts(self) -> tuple[int, int]:
        """Return the calls and traces since the last call of this method."""
        now, last = self._read(), self._credited
        self._credited = now
        return now[0] - last[0], now[1] - last[1]


def _build(
    target: Function, like: Function
) -> tuple[Function, Callable[[Function], None], Callable[[], tuple[int, int]]]:
    _ovpatch_target, _ovpatch_tracing = target, _tracing
    _ovpatch_calls = traces = 0

    def _ovpatch_note_trace() -> bool:
        nonlocal traces
        traces += 1
        return True

    # As torch.compiler.assume_constant_result marks it.
    _ovpatch_note_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        nonlocal _ovpatch_calls
        if _ovpatch_tracing.now():
            _ovpatch_note_trace()
        else:
            _ovpatch_calls += 1
        return _ovpatch_target(*args, **kwargs)

    def switch(new: Function) -> None:
        nonlocal _ovpatch_target
        _ovpatch_target = new

    # TorchScript compiles the source of the original with the globals and the closure of the installed function. So it
    # gets the original's globals (a function written in C has none), and the names in its closure are unusual.
    names = getattr(like, "__globals__", dispatch.__globals__)
    code = dispatch.__code__
    if _warns_of_its_caller(like):
        code = _hide_from_warnings(code, globals())
    installed = types.FunctionType(code, names, dispatch.__name__, None, dispatch.__closure__)
    return installed, switch, lambda: (_ovpatch_calls, traces)


def _disguise(function: Function, like: Function) -> None:
    """Give an installed function the name, signature and attributes of the original."""
    functools.update_wrapper(function, like)
    attributes = vars(function)
    for key in [key for key in attributes if key.startswith(_DYNAMO_KEYS) or key == "__ovpatch__"]:
        del attributes[key]
    for name in _CACHE_METHODS:
        if hasattr(like, name) and name not in attributes:
            attributes[name] = getattr(like, name)


def _skip_wrapper(wrap: Function, wrapper: Function) -> None:
    """Have Dynamo skip a wrapper's frames, unless its code is not of the file of ``wrap``.

    What a decorator of another package returned shares its code with all other functions that this decorates.
    """
    code, made_by = (
        getattr(unwrap_callable(function), "__code__", None) for function in (wrapper, wrap)
    )
    if (
        code is not None
        and made_by is not None
        and code.co_filename.removesuffix(_HIDDEN) == made_by.co_filename
    ):
        _skip_frames(code)


@dataclass(eq=False)
class Wrapper:
    """One patch in a chain."""

    patch: Patch  # the declaration
    function: Function  # the replacement, or the function that wrap returned
    inner: Dispatcher | None = None  # its dispatcher while another patch lies above it
    calls: int = 0  # eager calls so far
    traces: int = 0  # traces so far

    def add_counts(self, dispatcher: Dispatcher) -> None:
        """Add the new counts of a dispatcher."""
        calls, traces = dispatcher.take_counts()
        self.calls += calls
        self.traces += traces


# Wrappers with the function and the dispatcher that they get when the chain is activated.
Staged = list[tuple[Wrapper, Function, Dispatcher | None]]


@dataclass(eq=False)
class WrapperChain:
    """The patches of one slot, innermost first. It changes only under the write lock.

    The installed function, the entry, stays the same while patches come and go; its target is switched. So every
    reference to it (in a module, an instance, another library's wrapper) runs the current patches, and the original
    after the last one is removed. The entry is also the dispatcher of the outermost patch, so that a single wrapper
    costs one function call. Each inner patch has its own dispatcher: it is counted, and removed without rebuilding
    the others.
    """

    slot: Slot  # the slot before the patch
    kind: SlotKind = field(init=False)  # how Python reads the slot
    original: Function = field(init=False)  # the stock function
    base: Function = field(
        init=False
    )  # what the innermost wrapper gets: the stock function, or a look-up of it
    entry: Dispatcher = field(init=False)  # dispatcher of the installed function
    installed: Any = field(init=False)  # the installed function in the slot's descriptor
    wrappers: list[Wrapper] = field(
        default_factory=list, init=False
    )  # active patches, innermost first
    writes: list[SlotWrite] = field(
        default_factory=list, init=False
    )  # slots that hold the installed function
    references: list[SlotWrite] = field(
        default_factory=list, init=False
    )  # references in other modules that hold it

    def __post_init__(self) -> None:
        self.kind = get_slot_kind(self.slot)
        self.original = unwrap_descriptor(self.slot.raw)
        self.base = make_base(self.slot, self.kind)
        self.entry = Dispatcher(self.base, self.original)
        self.entry.function.__ovpatch__ = ChainMark(self)  # type: ignore[attr-defined]  # a function takes any attribute
        self.installed = make_descriptor(self.slot, self.kind, self.entry.function)

    def stage_patches(self, patches: Sequence[Patch]) -> Staged:
        """Build the chain with additional patches, without a change of the present one; wrappers above are built again.

        Raises PatchError if a wrap function fails, or its result cannot replace the original.
        """
        known = {wrapper.patch: wrapper for wrapper in self.wrappers}
        wanted = sorted([*known, *patches], key=lambda patch: patch.sort_key)
        staged: Staged = []
        below, fresh = self.base, False
        for patch in wanted:
            wrapper = known.get(patch)
            fresh = fresh or wrapper is None
            function = self._build(patch, below) if wrapper is None or fresh else wrapper.function
            inner = (
                Dispatcher(function, self.original)
                if fresh or not wrapper or not wrapper.inner
                else wrapper.inner
            )
            staged.append((wrapper or Wrapper(patch, function), function, inner))
            below = inner.function
        outermost, function, _ = staged[-1]
        return [*staged[:-1], (outermost, function, None)]

    def _build(self, patch: Patch, below: Function) -> Function:
        if patch.wrap is None:
            return self.check_replacement(patch)
        try:
            function = patch.wrap(below)
        except Exception as error:
            raise PatchError(
                f"wrap of {patch} failed for {patch.target}: {error!r}. Nothing of this call is "
                "applied; correct it, "
                "or leave this patch out",
                patch,
            ) from error
        if not callable(function):
            raise PatchError(
                f"wrap of {patch} returned {function!r} for {patch.target}: it must return the "
                "wrapper, a function",
                patch,
            )
        self._check_signature(patch, function)
        if isinstance(function, types.FunctionType) and _warns_of_its_caller(self.original):
            function.__code__ = _hide_from_warnings(function.__code__, function.__globals__)
        _skip_wrapper(patch.wrap, function)
        return function

    def check_replacement(self, patch: Patch) -> Function:
        """Return the function of a replacement; raise IncompatiblePatchError if it cannot replace the original."""
        function = unwrap_replacement(patch.replacement, self.slot, self.kind)
        self._check_signature(patch, function)
        return function

    def _check_signature(self, patch: Patch, function: Function) -> None:
        problem = compare_signatures(self.original, function)
        if problem:
            raise IncompatiblePatchError(
                f"{patch} does not fit {patch.target}: {problem} (the original is "
                f"{describe_callable(self.original)} with {_show_signature(self.original)}, the "
                "new function "
                f"{describe_callable(function)} with {_show_signature(_undisguised(function))}). "
                "Give the new function "
                "the original's signature, names and defaults included, or (*args, **kwargs) with "
                "functools.wraps",
                patch,
            )

    def activate(self, staged: Staged) -> Callable[[], None]:
        """Make staged wrappers the active ones; returns a function that undoes this."""
        self.collect_counts()
        before = [(wrapper, wrapper.function, wrapper.inner) for wrapper in self.wrappers]
        self._activate(staged)
        return lambda: self._activate(before)

    def _activate(self, staged: Staged) -> None:
        for wrapper, function, inner in staged:
            wrapper.function, wrapper.inner = function, inner
        self.wrappers = [wrapper for wrapper, _, _ in staged]
        self.entry.switch(self.wrappers[-1].function if self.wrappers else self.base)

    def remove_wrapper(self, wrapper: Wrapper) -> None:
        """Remove one patch: the wrapper above it then calls the one below. No callback runs."""
        self.collect_counts()
        index = self.wrappers.index(wrapper)
        below = self.wrappers[index - 1] if index else None
        if index == len(self.wrappers) - 1:
            self.entry.switch(below.function if below else self.base)
            if below:
                below.inner = None
        elif wrapper.inner:
            wrapper.inner.switch(below.inner.function if below and below.inner else self.base)
        self.wrappers = [one for one in self.wrappers if one is not wrapper]

    def collect_counts(self) -> None:
        """Add the new counts of all dispatchers to their wrappers."""
        for wrapper in self.wrappers:
            if wrapper.inner:
                wrapper.add_counts(wrapper.inner)
        if self.wrappers:
            self.wrappers[-1].add_counts(self.entry)
        else:
            self.entry.take_counts()

    @property
    def rebound(self) -> tuple[str, ...]:
        """References in other modules that hold the entry now, as ``module.name``."""
        held = [
            write for write in self.references if read_slot(write.owner, write.name) is write.new
        ]
        return tuple(f"{format_owner(write.owner)}.{write.name}" for write in held)

    @property
    def is_reached(self) -> bool:
        """Whether the slot still leads to the entry, directly or through another library's wrapper."""
        now = read_slot(self.slot.owner, self.slot.name)
        if now is self.installed:
            return True
        return now is not ABSENT and leads_to(now, self.entry.function, self.original)

    @property
    def is_reloaded(self) -> bool:
        """Whether the slot holds a new copy of the stock function, as after a reload."""
        now = read_slot(self.slot.owner, self.slot.name)
        return now is not ABSENT and is_fresh_copy(now, self.original)

    @property
    def shadowed_by(self) -> str:
        """Description of the foreign function that lies over the entry or in its place; empty if there is none."""
        now = read_slot(self.slot.owner, self.slot.name)
        if now is self.installed or now is ABSENT or is_fresh_copy(now, self.original):
            return ""
        function = unwrap_descriptor(now)
        return describe_callable(function) if callable(function) else repr(now)


class ChainMark:
    """The attribute ``__ovpatch__`` of an installed function: its target and active patches."""

    def __init__(self, chain: WrapperChain) -> None:
        self._chain = chain

    @property
    def target(self) -> str:
        """Dotted path of the slot."""
        return self._chain.slot.path

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Active patches, innermost first."""
        return tuple(wrapper.patch for wrapper in self._chain.wrappers)

    def __repr__(self) -> str:
        return f"<ovpatch {self.target}: {', '.join(map(str, self.patches)) or 'off'}>"
