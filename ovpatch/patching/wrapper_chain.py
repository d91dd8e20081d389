"""The chain of patches that the installed function of one slot calls."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import types
import weakref
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

_POSITIONAL_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE_KINDS = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def compare_signatures(original: Callable[..., Any], new: Callable[..., Any]) -> str | None:
    """Return the difference between two signatures, or None if ``new`` can replace ``original``.

    Names, kinds, order and defaults of all parameters must agree. This includes ``self`` and ``cls``, because torch
    itself calls ``Optimizer.state_dict(self=optimizer)``. ``*args`` and ``**kwargs`` of ``new`` match the remaining
    parameters. Functions without a signature, such as most C functions, are not compared. The signature that
    ``original`` shows counts, but the code of ``new``, because ``functools.wraps`` may show another signature.
    """
    if _takes_only_variable_args(new):
        return None
    old_parameters, new_parameters = (
        _read_parameters(original),
        _read_parameters(_strip_wraps(new), follow=False),
    )
    if old_parameters is None or new_parameters is None:
        return None
    return _compare_parameters(old_parameters, new_parameters)


def _takes_only_variable_args(function: Callable[..., Any]) -> bool:
    """Return whether a function takes only ``*args`` and ``**kwargs``, without the cost of its signature."""
    code = getattr(function, "__code__", None)
    both = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return (
        code is not None
        and code.co_flags & both == both
        and not (code.co_argcount or code.co_kwonlyargcount)
    )


def _strip_wraps(function: Callable[..., Any]) -> Callable[..., Any]:
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


def _read_parameters(
    function: Callable[..., Any], *, follow: bool = True
) -> list[Parameter] | None:
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


def _compare_parameters(old: list[Parameter], new: list[Parameter]) -> str | None:
    kinds = {parameter.kind for parameter in new}
    # The parameters of the original that no parameter of the new function matches yet.
    unmatched = {parameter.name: parameter for parameter in old}
    names, old_names = _list_positional_names(new), _list_positional_names(old)
    for name, old_name in zip(names, old_names, strict=False):
        if name != old_name and old_name not in names:
            return f"parameter {old_name!r} is called {name!r}"
    for parameter in new:
        if parameter.kind in _VARIABLE_KINDS:
            unmatched = {
                name: original
                for name, original in unmatched.items()
                if original.kind is not parameter.kind
            }
            continue
        if parameter.name not in unmatched:
            return f"parameter {parameter.name!r} is not in the original"
        difference = _compare_parameter(unmatched.pop(parameter.name), parameter)
        if difference:
            return difference
    missing = [name for name, original in unmatched.items() if not _is_absorbed(original, kinds)]
    if missing:
        return f"parameter {missing[0]!r} of the original is missing"
    now, before = ", ".join(names), ", ".join(old_names[: len(names)])
    return None if now == before else f"parameters come as ({now}) instead of ({before})"


def _list_positional_names(parameters: list[Parameter]) -> list[str]:
    return [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL_KINDS]


def _compare_parameter(old: Parameter, new: Parameter) -> str | None:
    if old.kind is not new.kind:
        return f"parameter {old.name!r} is {new.kind.description} and was {old.kind.description}"
    if (old.default is Parameter.empty) is not (new.default is Parameter.empty):
        return f"parameter {old.name!r} has {'no ' if new.default is Parameter.empty else 'a new '}default"
    # Arrays compare by element and have no truth value. A default that is an array must be the same object.
    if new.default is not old.default and (new.default == old.default) is not True:
        return f"parameter {old.name!r} has the default {new.default!r} and had {old.default!r}"
    return None


def _is_absorbed(parameter: Parameter, kinds: set[Any]) -> bool:
    """Return whether ``*args`` and ``**kwargs`` take a parameter, by position and by name."""
    by_position = parameter.kind in _POSITIONAL_KINDS
    by_name = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return (
        parameter.kind not in _VARIABLE_KINDS
        and (not by_position or Parameter.VAR_POSITIONAL in kinds)
        and (not by_name or Parameter.VAR_KEYWORD in kinds)
    )


Function = Callable[..., Any]

# Attributes that must not be copied from the original: Dynamo reads them to decide whether it traces a function.
_DYNAMO_KEYS: Final = ("_torchdynamo", "get_compiler_config")
# Methods of functools.lru_cache() that scripts call. Its objects are written in C, and update_wrapper() copies none.
_CACHE_METHODS: Final = ("cache_info", "cache_clear", "cache_parameters")


def _return_false() -> bool:
    return False


class _TracingTest:
    """A test for calls in code that Dynamo traces. Patches may exist before torch, whose import replaces the test."""

    __slots__ = ("is_active",)

    def __init__(self) -> None:
        self.is_active: Callable[[], bool] = _return_false


_tracing: Final = _TracingTest()


def _on_torch_imported(_module: str) -> None:
    _tracing.is_active = getattr(
        sys.modules["torch.compiler"], "is_dynamo_compiling", _return_false
    )
    while _unlisted:
        _list_in_torchscript(*_unlisted.popitem())


# The installed functions that were made before TorchScript had its table, each with its original.
_unlisted: Final[weakref.WeakKeyDictionary[Function, Function]] = weakref.WeakKeyDictionary()


def _list_in_torchscript(installed: Function, original: Function) -> None:
    """Have TorchScript compile an installed function as the operator that it takes the original for.

    TorchScript finds operators by the identity of their functions, such as ``torch.nn.functional.gelu``, which is
    written in C. It would search other functions for source, and fail.
    """
    table: dict[int, str] | None = getattr(
        sys.modules.get("torch.jit._builtins"), "_builtin_table", None
    )
    if table is None:
        _unlisted[installed] = original
    elif id(original) in table:
        table[id(installed)] = table[id(original)]
        # Another function may get the same identity later.
        weakref.finalize(installed, table.pop, id(installed), None).atexit = False


#: The code of installed functions and of wrappers, which Dynamo skips as soon as it is imported.
_skipped: Final[set[types.CodeType]] = set()


def _skip_frames(code: types.CodeType) -> None:
    """Make Dynamo skip the frames of a code object, now or after its import; see [Note: skipped frames]."""
    _skipped.add(code)
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        skip(code)


def _on_dynamo_imported(_module: str) -> None:
    # All installed functions share this code object, or its hidden form.
    dispatcher = _build_dispatcher(_return_false, _return_false)[0].__code__
    for code in {*_skipped, dispatcher, _hide_from_warnings(dispatcher, globals())}:
        _skip_frames(code)


# The end of the file name of a hidden frame. In Python 3.10 to 3.14, warnings.warn() does not count frames whose file
# has both "importlib" and "_bootstrap" in its name, because a warning should never name the import system.
_HIDDEN_SUFFIX: Final = " (importlib._bootstrap)"


@functools.cache
def _rename_file(code: types.CodeType) -> types.CodeType:
    """Return the hidden form of a code, always the same object, because Dynamo skips code by its identity."""
    return code.replace(co_filename=code.co_filename + _HIDDEN_SUFFIX)


def _hide_from_warnings(code: types.CodeType, module: dict[str, Any]) -> types.CodeType:
    """Return the code with another file name, so that ``warnings.warn`` does not count its frames.

    ``warnings.warn(..., stacklevel=2)`` names the file and line of the caller. Filters and the once-per-line rule use
    them. Frames of dispatchers and wrappers are between the caller and the original, so each warning would name a
    file of ovpatch. These frames are hidden only if an original passes ``stacklevel``, because a traceback through
    them shows the longer file name.

    Args:
        code: The code of a dispatcher or wrapper.
        module: The namespace of the code's module, in which a traceback finds the source lines.
    """
    hidden = _rename_file(code)
    linecache.lazycache(hidden.co_filename, module)
    return hidden


def _warns_of_its_caller(function: Function) -> bool:
    """Return whether a function, or a function that it wraps, passes ``stacklevel`` to a call."""
    seen: list[Any] = []
    while function is not None and function not in seen:
        # CPython stores the names of keyword arguments as a tuple among the constants.
        constants = getattr(getattr(function, "__code__", None), "co_consts", ())
        if any("stacklevel" in names for names in constants if isinstance(names, tuple)):
            return True
        seen.append(function)
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]  # None ends the loop
    return False


def watch_for_torch() -> None:
    """Start to detect calls in traced code, now or as soon as torch is imported."""
    if _tracing.is_active is not _return_false:
        return
    for module, listener in (
        ("torch.compiler", _on_torch_imported),
        ("torch._dynamo.eval_frame", _on_dynamo_imported),
    ):
        if module in sys.modules:
            listener(module)
        else:
            call_after_import(module, listener)


class Dispatcher:
    """A plain function that counts its calls; ``switch`` sets the target of all later calls.

    Dynamo, LR schedulers (``step.__func__``), pickle and ``inspect`` see through proxies to the original. So the
    installed object is a function, and its state is in its closure. Dynamo guards on the identity of the target, so
    only a switch recompiles. The call counter stays out of traced code, where a changing int would recompile at each
    call. Instead, a function that Dynamo evaluates once while it traces counts the trace.

    [Note: skipped frames] If Dynamo does not trace a caller, such as ``Module._call_impl``, it examines every Python
    function that the caller calls. It would compile each dispatcher by itself, all in the cache of one code object,
    and each wrapper with its own graph break. So Dynamo skips their frames, but not the frames of the original.

    Args:
        target: The function to call.
        like: The original, whose name, signature and attributes the function shows.

    Attributes:
        function: The plain function.
        switch: Sets the target.
    """

    __slots__ = ("_read_counts", "_taken_counts", "function", "switch")

    def __init__(self, target: Function, like: Function) -> None:
        self.function, self.switch, self._read_counts = _build_dispatcher(target, like)
        # The calls and traces that take_counts() has returned so far.
        self._taken_counts = (0, 0)
        _imitate(self.function, like)

    def take_counts(self) -> tuple[int, int]:
        """Return the calls and traces since the last call of this method."""
        now, last = self._read_counts(), self._taken_counts
        self._taken_counts = now
        return now[0] - last[0], now[1] - last[1]


def _build_dispatcher(
    target: Function, like: Function
) -> tuple[Function, Callable[[Function], None], Callable[[], tuple[int, int]]]:
    _ovpatch_target, _ovpatch_tracing = target, _tracing
    _ovpatch_calls = traces = 0

    def _ovpatch_note_trace() -> bool:
        nonlocal traces
        traces += 1
        return True

    # The mark of torch.compiler.assume_constant_result, which would import torch.
    _ovpatch_note_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        nonlocal _ovpatch_calls
        if _ovpatch_tracing.is_active():
            _ovpatch_note_trace()
        else:
            _ovpatch_calls += 1
        return _ovpatch_target(*args, **kwargs)

    def switch(new: Function) -> None:
        nonlocal _ovpatch_target
        _ovpatch_target = new

    # TorchScript compiles the source of the original with the globals and the closure of the installed function. So the
    # function gets the original's globals (a function written in C has none), and unusual names in its closure.
    names = getattr(like, "__globals__", dispatch.__globals__)
    code = dispatch.__code__
    if _warns_of_its_caller(like):
        code = _hide_from_warnings(code, globals())
    installed = types.FunctionType(code, names, dispatch.__name__, None, dispatch.__closure__)
    return installed, switch, lambda: (_ovpatch_calls, traces)


def _imitate(function: Function, like: Function) -> None:
    """Give an installed function the name, signature and attributes of the original."""
    functools.update_wrapper(function, like)
    attributes = vars(function)
    for key in [key for key in attributes if key.startswith(_DYNAMO_KEYS) or key == "__ovpatch__"]:
        del attributes[key]
    for name in _CACHE_METHODS:
        if hasattr(like, name) and name not in attributes:
            attributes[name] = getattr(like, name)


def _skip_wrapper(wrap: Function, wrapper: Function) -> None:
    """Make Dynamo skip a wrapper's frames if its code is in the folder of ``wrap``.

    The code of a wrapper that a decorator of another package returned is shared with all functions that it decorates.
    """
    code, made_by = (
        getattr(unwrap_callable(function), "__code__", None) for function in (wrapper, wrap)
    )
    if (
        code is not None
        and made_by is not None
        and os.path.dirname(code.co_filename) == os.path.dirname(made_by.co_filename)
    ):
        _skip_frames(code)


@dataclass(eq=False)
class Wrapper:
    """One patch in a chain."""

    # The declaration.
    patch: Patch
    # The replacement, or the function that ``wrap`` returned.
    function: Function
    # The dispatcher through which the next outer wrapper calls this one; None for the outermost wrapper.
    inner: Dispatcher | None = None
    # The numbers of eager calls and of traces so far.
    calls: int = 0
    traces: int = 0

    def add_counts(self, dispatcher: Dispatcher) -> None:
        """Add the new counts of a dispatcher."""
        calls, traces = dispatcher.take_counts()
        self.calls += calls
        self.traces += traces


# The wrappers of a chain, each with the function and the dispatcher that activate() will give it.
Staged = list[tuple[Wrapper, Function, Dispatcher | None]]


@dataclass(eq=False)
class WrapperChain:
    """The patches of one slot, innermost first. It changes only under the write lock.

    The installed function stays the same while patches come and go; its target is switched. So every reference to it,
    in a module, an instance or another library's wrapper, runs the current patches, and the original after the last
    patch is removed. The dispatcher of the installed function also serves the outermost patch, so that a single
    wrapper costs one function call. Each inner patch has its own dispatcher, which counts its calls. So a patch can be
    removed without building the remaining wrappers again.
    """

    # The slot before the patch.
    slot: Slot
    # The way in which Python reads the slot.
    kind: SlotKind = field(init=False)
    # The stock function.
    original: Function = field(init=False)
    # The function that the innermost wrapper calls: the stock function, or a look-up if the owner inherits it.
    base: Function = field(init=False)
    # The dispatcher of the installed function.
    dispatcher: Dispatcher = field(init=False)
    # The installed function in the slot's kind of descriptor.
    installed: Any = field(init=False)
    # The active patches, innermost first.
    wrappers: list[Wrapper] = field(default_factory=list, init=False)
    # The writes to slots that hold the installed function.
    writes: list[SlotWrite] = field(default_factory=list, init=False)
    # The writes to references in other modules, as after ``from m import f``.
    references: list[SlotWrite] = field(default_factory=list, init=False)
    # The number of references to the installed function while only this chain has it.
    _own_references: int = field(init=False)

    def __post_init__(self) -> None:
        self.kind = get_slot_kind(self.slot)
        self.original = unwrap_descriptor(self.slot.raw)
        self.base = make_base(self.slot, self.kind)
        self.dispatcher = Dispatcher(self.base, self.original)
        self.dispatcher.function.__ovpatch__ = ChainMark(self)  # type: ignore[attr-defined]  # a function takes any attribute
        self.installed = make_descriptor(self.slot, self.kind, self.dispatcher.function)
        if self.kind is SlotKind.FUNCTION:
            _list_in_torchscript(self.dispatcher.function, self.original)
        self._own_references = self._count_references()

    def stage_patches(self, patches: Sequence[Patch]) -> Staged:
        """Return the wrappers of the chain with additional patches, without changing the active wrappers.

        Wrappers outside of a new patch are built again, because they must call the new patch.

        Raises:
            PatchError: A wrap function fails, or its result cannot replace the original.
        """
        known = {wrapper.patch: wrapper for wrapper in self.wrappers}
        wanted = sorted([*known, *patches], key=lambda patch: patch.sort_key)
        staged: Staged = []
        # The function that the next wrapper calls.
        below = self.base
        # Whether a new patch is below, so that the wrapper must be built again.
        is_rebuilt = False
        for patch in wanted:
            wrapper = known.get(patch)
            is_rebuilt = is_rebuilt or wrapper is None
            function = (
                self._build_wrapper(patch, below)
                if wrapper is None or is_rebuilt
                else wrapper.function
            )
            inner = (
                Dispatcher(function, self.original)
                if is_rebuilt or not wrapper or not wrapper.inner
                else wrapper.inner
            )
            staged.append((wrapper or Wrapper(patch, function), function, inner))
            below = inner.function
        # The dispatcher of the installed function serves the outermost wrapper.
        outermost, function, _ = staged[-1]
        return [*staged[:-1], (outermost, function, None)]

    def _build_wrapper(self, patch: Patch, below: Function) -> Function:
        if patch.wrap is None:
            return self.check_replacement(patch)
        try:
            function = patch.wrap(below)
        except Exception as error:
            raise PatchError(
                f"wrap of {patch} failed for {patch.target}: {error!r}. Nothing of this call is "
                "applied; correct it, or leave this patch out",
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
        """Return the function of a replacement.

        Raises:
            IncompatiblePatchError: The function cannot replace the original.
        """
        function = unwrap_replacement(patch.replacement, self.slot, self.kind)
        self._check_signature(patch, function)
        return function

    def _check_signature(self, patch: Patch, function: Function) -> None:
        difference = compare_signatures(self.original, function)
        if difference:
            raise IncompatiblePatchError(
                f"{patch} does not fit {patch.target}: {difference} (the original is "
                f"{describe_callable(self.original)} with {_show_signature(self.original)}, the "
                f"new function {describe_callable(function)} with "
                f"{_show_signature(_strip_wraps(function))}). Give the new function the original's "
                "signature, names and defaults included, or (*args, **kwargs) with functools.wraps",
                patch,
            )

    def activate(self, staged: Staged) -> Callable[[], None]:
        """Activate staged wrappers. Return a function that activates the present wrappers again."""
        self.collect_counts()
        before = [(wrapper, wrapper.function, wrapper.inner) for wrapper in self.wrappers]
        self._activate(staged)
        return lambda: self._activate(before)

    def _activate(self, staged: Staged) -> None:
        for wrapper, function, inner in staged:
            wrapper.function, wrapper.inner = function, inner
        self.wrappers = [wrapper for wrapper, _, _ in staged]
        self.dispatcher.switch(self.wrappers[-1].function if self.wrappers else self.base)

    def remove_wrapper(self, wrapper: Wrapper) -> None:
        """Remove a patch: the next outer wrapper then calls the next inner wrapper. No callback runs."""
        self.collect_counts()
        index = self.wrappers.index(wrapper)
        below = self.wrappers[index - 1] if index else None
        if index == len(self.wrappers) - 1:
            self.dispatcher.switch(below.function if below else self.base)
            if below:
                below.inner = None
        elif wrapper.inner:
            wrapper.inner.switch(below.inner.function if below and below.inner else self.base)
        self.wrappers = [remaining for remaining in self.wrappers if remaining is not wrapper]

    def collect_counts(self) -> None:
        """Add the new counts of all dispatchers to their wrappers."""
        for wrapper in self.wrappers:
            if wrapper.inner:
                wrapper.add_counts(wrapper.inner)
        if self.wrappers:
            self.wrappers[-1].add_counts(self.dispatcher)
        # Calls of an installed function without patches belong to no patch.
        else:
            self.dispatcher.take_counts()

    @property
    def rebound(self) -> tuple[str, ...]:
        """The references in other modules that hold the installed function now, as ``module.name``."""
        held = [
            write for write in self.references if read_slot(write.owner, write.name) is write.new
        ]
        return tuple(f"{format_owner(write.owner)}.{write.name}" for write in held)

    @property
    def is_shared(self) -> bool:
        """True if anything besides this chain refers to the installed function, such as a slot or a module."""
        return self._count_references() > self._own_references

    def _count_references(self) -> int:
        return sys.getrefcount(self.dispatcher.function)

    @property
    def is_reached(self) -> bool:
        """True if the slot still leads to the installed function, directly or through another library's wrapper."""
        now = read_slot(self.slot.owner, self.slot.name)
        if now is self.installed:
            return True
        return now is not ABSENT and leads_to(now, self.dispatcher.function, self.original)

    @property
    def is_reloaded(self) -> bool:
        """True if the slot holds a new copy of the stock function, as after a reload."""
        now = read_slot(self.slot.owner, self.slot.name)
        return now is not ABSENT and is_fresh_copy(now, self.original)

    @property
    def shadowed_by(self) -> str:
        """The foreign function that covers or replaces the installed function, as text; empty if there is none."""
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
        """The dotted path of the slot."""
        return self._chain.slot.path

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The active patches, innermost first."""
        return tuple(wrapper.patch for wrapper in self._chain.wrappers)

    def __repr__(self) -> str:
        return f"<ovpatch {self.target}: {', '.join(map(str, self.patches)) or 'off'}>"
