"""All patches of one slot, closest to the original first, behind one installed function.

[Note: one entry per slot]
The installed function, the entry, stays the same while patches come and go; what it calls is switched. So whoever
holds it, a module, an instance, somebody else's wrapper, always runs the patches of the moment, and after the last
one is gone, the original. It serves the outermost patch at the same time, which spares a call: a single wrapper costs
one function call. Inner patches have dispatchers of their own, so that each is counted and can be taken out without
building the others again.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Final, Protocol

from ovpatch.patching.patch import IncompatiblePatchError, Patch, PatchError, describe_callable
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

# Whether one function can be called in every way another one can, by its signature alone.

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def compare_signatures(original: Callable[..., Any], new: Callable[..., Any], *, bound: bool) -> str | None:
    """Return what differs between two signatures, or None if ``new`` can stand for ``original``.

    Names, kinds, order and the presence of defaults must agree; ``*args`` and ``**kwargs`` of ``new`` stand for
    whatever is left. Functions without a signature (most of C) are not compared. The original counts as it shows
    itself, ``new`` as it can be called: ``functools.wraps`` shows a signature that the function itself may not have.

    Args:
        original: What callers know.
        new: What shall stand in its slot.
        bound: Whether the first parameter is ``self`` or ``cls``, whose name is free.
    """
    old_parameters, new_parameters = _parameters(original, bound), _parameters(_undisguised(new), bound, follow=False)
    if old_parameters is None or new_parameters is None or _accepts_anything(old_parameters):
        return None
    return _compare(old_parameters, new_parameters)


def _undisguised(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without what ``functools.wraps`` has copied to it, such as ``__signature__``."""
    if not isinstance(function, types.FunctionType):
        return function
    bare = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


def _parameters(function: Callable[..., Any], bound: bool, *, follow: bool = True) -> list[Parameter] | None:
    try:
        found = list(inspect.signature(function, follow_wrapped=follow).parameters.values())
    except (ValueError, TypeError):
        return None
    return found[1:] if bound and found and found[0].kind in _POSITIONAL else found


def _accepts_anything(parameters: list[Parameter]) -> bool:
    return {parameter.kind for parameter in parameters} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def _compare(old: list[Parameter], new: list[Parameter]) -> str | None:
    kinds = {parameter.kind for parameter in new}
    left = {parameter.name: parameter for parameter in old}
    for mine, theirs in zip(_ordered(new), _ordered(old), strict=False):
        if mine.name != theirs.name and theirs.name not in {parameter.name for parameter in _ordered(new)}:
            return f"parameter {theirs.name!r} is called {mine.name!r}"
    for mine in new:
        if mine.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
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
    return _order(old, new)


def _ordered(parameters: list[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.kind in _POSITIONAL]


def _compare_one(old: Parameter, new: Parameter) -> str | None:
    if old.kind is not new.kind:
        return f"parameter {old.name!r} is {new.kind.description} and was {old.kind.description}"
    if (old.default is Parameter.empty) is not (new.default is Parameter.empty):
        return f"parameter {old.name!r} has {'no ' if new.default is Parameter.empty else 'a new '}default"
    return None


def _absorbed(parameter: Parameter, kinds: set[Any]) -> bool:
    """Whether ``*args`` and ``**kwargs`` take everything a caller may pass for a parameter."""
    by_position = parameter.kind in _POSITIONAL
    by_name = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return (
        parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and (not by_position or Parameter.VAR_POSITIONAL in kinds)
        and (not by_name or Parameter.VAR_KEYWORD in kinds)
    )


def _order(old: list[Parameter], new: list[Parameter]) -> str | None:
    mine = [parameter.name for parameter in _ordered(new)]
    theirs = [parameter.name for parameter in _ordered(old)][: len(mine)]
    return None if mine == theirs else f"parameters come as ({', '.join(mine)}) instead of ({', '.join(theirs)})"


# The function that is installed: a plain Python function that counts, can be switched, and survives torch.compile.
#
# [Note: plain functions]
# Dynamo, the LR schedulers (``step.__func__``), pickle and ``inspect`` treat functions specially and see through
# proxies to the original, silently. So what is installed is a function, and everything that changes lives in its
# closure: Dynamo guards on the identity of ``target``, hence a switch recompiles and nothing else does. The counter
# must not be touched in traced code, where a changing int would be guarded on and recompile at each call; there, a
# function that Dynamo evaluates once while tracing notes that the patch is part of the graph.
#
# [Note: skipped frames] Where Dynamo does not trace a caller, as ``Module._call_impl``, it looks at every Python
# function that is called below it. Stock has a builtin there, or one function; a frame of ours would be compiled by
# itself, looked up at each call, and all installed functions would share one code object's cache. So that frame is
# skipped, and what it calls is not.
#
# [Note: the original's globals]
# TorchScript compiles the source of the original, which it finds by ``__wrapped__``, with the names that the installed
# function sees: its globals, and over them what its closure holds. So it is given the original's globals, and all that
# it needs is in its closure, under names that no script has.

Function = Callable[..., Any]

# What functools.wraps copies and must not be: they tell Dynamo to trace, or not to trace, the function they belong to.
_DYNAMO_KEYS: Final = ("_torchdynamo", "get_compiler_config")
_CACHE_METHODS: Final = ("cache_info", "cache_clear", "cache_parameters")


class Mark(Protocol):
    """What ``__ovpatch__`` of an installed function tells."""

    @property
    def target(self) -> str:
        """Where the function was installed."""

    @property
    def patches(self) -> tuple[Any, ...]:
        """Patches that a call runs through, closest to the original first."""


def _never() -> bool:
    return False


class _Tracing:
    """Whether a call is being traced. Asks torch once that is imported: patches may be installed before it is."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Callable[[], bool] = _never


_tracing: Final = _Tracing()


def _torch_is_here(_module: str) -> None:
    _tracing.now = getattr(sys.modules["torch.compiler"], "is_dynamo_compiling", _never)


def _dynamo_is_here(module: str) -> None:
    skip = getattr(sys.modules[module], "skip_code", None)
    if skip is not None:  # [Note: skipped frames]
        skip(_build(_never, _never)[0].__code__)  # all installed functions have the same


def watch_for_torch() -> None:
    """Make sure that calls in traced code are recognised, now or as soon as torch is imported."""
    if _tracing.now is not _never:
        return
    for module, is_here in (("torch.compiler", _torch_is_here), ("torch._dynamo.eval_frame", _dynamo_is_here)):
        if module in sys.modules:
            is_here(module)
        else:
            call_after_import(module, is_here)


class Dispatcher:
    """One installed function and the hold on it.

    Attributes:
        function: What is installed.
        switch: Makes calls go to another function from now on.
    """

    __slots__ = ("_credited", "_read", "function", "switch")

    def __init__(self, target: Function, like: Function) -> None:
        self.function, self.switch, self._read = _build(target, like)
        self._credited = (0, 0)
        _disguise(self.function, like)

    def take_counts(self) -> tuple[int, int]:
        """Return the calls and the traces since this was asked last."""
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

    # See [Note: the original's globals]; what is not written in Python has none.
    names = getattr(like, "__globals__", dispatch.__globals__)
    installed = types.FunctionType(dispatch.__code__, names, dispatch.__name__, None, dispatch.__closure__)
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


@dataclass(eq=False)
class Wrapper:
    """One patch in a chain.

    Attributes:
        patch: What was declared.
        function: The replacement, or what wrap returned.
        inner: Its dispatcher while another patch lies above it.
        calls: Eager calls counted so far.
        traces: Traces counted so far.
    """

    patch: Patch
    function: Function
    inner: Dispatcher | None = None
    calls: int = 0
    traces: int = 0

    def add_counts(self, dispatcher: Dispatcher) -> None:
        """Add what a dispatcher counted for this patch."""
        calls, traces = dispatcher.take_counts()
        self.calls += calls
        self.traces += traces


# A wrapper with the function and the dispatcher that it will have.
Staged = list[tuple[Wrapper, Function, Dispatcher | None]]


@dataclass(eq=False)
class WrapperChain:
    """The patches of one slot; not thread-safe: changes happen under the write lock.

    Attributes:
        slot: The slot, as it was before.
        kind: How the slot is read.
        original: The stock function.
        base: What the innermost wrapper gets: the stock function, or a look-up of the inherited one.
        entry: The installed function.
        installed: The entry in the slot's descriptor.
        wrappers: Active patches, closest to the original first.
        writes: Slots that were pointed to the entry.
        references: References elsewhere that were pointed to it.
    """

    slot: Slot
    kind: SlotKind = field(init=False)
    original: Function = field(init=False)
    base: Function = field(init=False)
    entry: Dispatcher = field(init=False)
    installed: Any = field(init=False)
    wrappers: list[Wrapper] = field(default_factory=list, init=False)
    writes: list[SlotWrite] = field(default_factory=list, init=False)
    references: list[SlotWrite] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.kind = get_slot_kind(self.slot)
        self.original = unwrap_descriptor(self.slot.raw)
        self.base = make_base(self.slot, self.kind)
        self.entry = Dispatcher(self.base, self.original)
        self.entry.function.__ovpatch__ = ChainMark(self)  # type: ignore[attr-defined]  # a function takes any attribute
        self.installed = make_descriptor(self.slot, self.kind, self.entry.function)

    def stage_patches(self, patches: Sequence[Patch]) -> Staged:
        """Build the chain with some patches more, without changing anything. Calls wrap functions.

        Layers above the first new one are built again over it.

        Args:
            patches: Patches to add.

        Raises:
            PatchError: A wrap function failed, or returned something that is no stand-in for the original.
        """
        known = {wrapper.patch: wrapper for wrapper in self.wrappers}
        wanted = sorted([*known, *patches], key=lambda patch: patch.rank)
        staged: Staged = []
        below, fresh = self.base, False
        for patch in wanted:
            wrapper = known.get(patch)
            fresh = fresh or wrapper is None
            function = self._build(patch, below) if wrapper is None or fresh else wrapper.function
            inner = Dispatcher(function, self.original) if fresh or not wrapper or not wrapper.inner else wrapper.inner
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
                f"wrap of {patch} failed for {patch.target}: {error!r}. Nothing of this call is applied; correct it, "
                "or leave this patch out",
                patch,
            ) from error
        if not callable(function):
            raise PatchError(
                f"wrap of {patch} returned {function!r} for {patch.target}: it must return the wrapper, a function",
                patch,
            )
        self._check_signature(patch, function)
        return function

    def check_replacement(self, patch: Patch) -> Function:
        """Return the function of a replacement.

        Raises:
            IncompatiblePatchError: It cannot stand for the original.
        """
        function = unwrap_replacement(patch.replacement, self.slot, self.kind)
        self._check_signature(patch, function)
        return function

    def _check_signature(self, patch: Patch, function: Function) -> None:
        bound = self.kind in (SlotKind.METHOD, SlotKind.CLASSMETHOD, SlotKind.GETTER)
        problem = compare_signatures(self.original, function, bound=bound)
        if problem:
            raise IncompatiblePatchError(
                f"{patch} does not fit {patch.target}: {problem} (the original is "
                f"{describe_callable(self.original)}). Give {describe_callable(function)} the original's signature, or "
                "(*args, **kwargs) with functools.wraps",
                patch,
            )

    def activate(self, staged: Staged) -> Callable[[], None]:
        """Make a staged chain the active one; returns what takes that back."""
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
        """Take one patch out. Calls nothing of anybody: what lies above goes through to what lies below."""
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
        """Credit all calls so far to the wrappers that they went through."""
        for wrapper in self.wrappers:
            if wrapper.inner:
                wrapper.add_counts(wrapper.inner)
        if self.wrappers:
            self.wrappers[-1].add_counts(self.entry)
        else:
            self.entry.take_counts()

    @property
    def rebound(self) -> tuple[str, ...]:
        """References elsewhere that hold the entry now, as ``module.name``."""
        held = [write for write in self.references if read_slot(write.owner, write.name) is write.new]
        return tuple(f"{format_owner(write.owner)}.{write.name}" for write in held)

    @property
    def is_reached(self) -> bool:
        """Whether reading the slot still leads to the entry, directly or through somebody else's wrapper."""
        now = read_slot(self.slot.owner, self.slot.name)
        if now is self.installed:
            return True
        return now is not ABSENT and leads_to(now, self.entry.function, self.original)

    @property
    def is_reloaded(self) -> bool:
        """Whether the slot holds the stock function again, executed anew."""
        now = read_slot(self.slot.owner, self.slot.name)
        return now is not ABSENT and is_fresh_copy(now, self.original)

    @property
    def shadowed_by(self) -> str:
        """Who lies over or in slot of the entry; empty if nobody does."""
        now = read_slot(self.slot.owner, self.slot.name)
        if now is self.installed or now is ABSENT or is_fresh_copy(now, self.original):
            return ""
        function = unwrap_descriptor(now)
        return describe_callable(function) if callable(function) else repr(now)


class ChainMark:
    """``__ovpatch__`` of an installed function: names its target and the patches that a call runs through."""

    def __init__(self, chain: WrapperChain) -> None:
        self._stack = chain

    @property
    def target(self) -> str:
        """Where the function was installed."""
        return self._stack.slot.path

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Active patches, closest to the original first."""
        return tuple(wrapper.patch for wrapper in self._stack.wrappers)

    def __repr__(self) -> str:
        return f"<ovpatch {self.target}: {', '.join(map(str, self.patches)) or 'off'}>"
