"""All patches of one slot, closest to the original first, behind one installed function.

[Note: one entry per slot]
The installed function, the entry, stays the same while patches come and go; what it calls is switched. So whoever
holds it, a module, an instance, somebody else's wrapper, always runs the patches of the moment, and after the last
one is gone, the original. It serves the outermost patch at the same time, which spares a call: a single wrapper costs
one function call. Inner patches have dispatchers of their own, so that each is counted and can be taken out without
building the others again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ovpatch.patching.dispatch import Dispatcher, Function
from ovpatch.patching.errors import IncompatiblePatchError, PatchError
from ovpatch.patching.journal import Write, current
from ovpatch.patching.originals import Kind, base_of, descriptor, function_in, kind_of, replacement_function
from ovpatch.patching.patches import Patch, describe_callable
from ovpatch.patching.reach import is_fresh_copy, reaches
from ovpatch.patching.signatures import difference
from ovpatch.patching.targets import ABSENT, Place, owner_path


@dataclass(eq=False)
class Layer:
    """One patch in a stack.

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

    def credit(self, dispatcher: Dispatcher) -> None:
        """Add what a dispatcher counted for this patch."""
        calls, traces = dispatcher.take()
        self.calls += calls
        self.traces += traces


# A layer with the function and the dispatcher that it will have.
Staged = list[tuple[Layer, Function, Dispatcher | None]]


@dataclass(eq=False)
class Stack:
    """The patches of one slot; not thread-safe: changes happen under the write lock.

    Attributes:
        place: The slot, as it was before.
        kind: How the slot is read.
        original: The stock function.
        base: What the innermost wrapper gets: the stock function, or a look-up of the inherited one.
        entry: The installed function.
        installed: The entry in the slot's descriptor.
        layers: Active patches, closest to the original first.
        writes: Slots that were pointed to the entry.
        references: References elsewhere that were pointed to it.
    """

    place: Place
    kind: Kind = field(init=False)
    original: Function = field(init=False)
    base: Function = field(init=False)
    entry: Dispatcher = field(init=False)
    installed: Any = field(init=False)
    layers: list[Layer] = field(default_factory=list, init=False)
    writes: list[Write] = field(default_factory=list, init=False)
    references: list[Write] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.kind = kind_of(self.place)
        self.original = function_in(self.place.raw)
        self.base = base_of(self.place, self.kind)
        self.entry = Dispatcher(self.base, self.original)
        self.entry.function.__ovpatch__ = StackMark(self)  # type: ignore[attr-defined]  # a function takes any attribute
        self.installed = descriptor(self.place, self.kind, self.entry.function)

    def stage(self, patches: Sequence[Patch]) -> Staged:
        """Build the stack with some patches more, without changing anything. Calls wrap functions.

        Layers above the first new one are built again over it.

        Args:
            patches: Patches to add.

        Raises:
            PatchError: A wrap function failed, or returned something that is no stand-in for the original.
        """
        known = {layer.patch: layer for layer in self.layers}
        wanted = sorted([*known, *patches], key=lambda patch: patch.rank)
        staged: Staged = []
        below, fresh = self.base, False
        for patch in wanted:
            layer = known.get(patch)
            fresh = fresh or layer is None
            function = self._build(patch, below) if layer is None or fresh else layer.function
            inner = Dispatcher(function, self.original) if fresh or not layer or not layer.inner else layer.inner
            staged.append((layer or Layer(patch, function), function, inner))
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
        function = replacement_function(patch.replacement, self.place, self.kind)
        self._check_signature(patch, function)
        return function

    def _check_signature(self, patch: Patch, function: Function) -> None:
        bound = self.kind in (Kind.METHOD, Kind.CLASSMETHOD, Kind.GETTER)
        problem = difference(self.original, function, bound=bound)
        if problem:
            raise IncompatiblePatchError(
                f"{patch} does not fit {patch.target}: {problem} (the original is "
                f"{describe_callable(self.original)}). Give {describe_callable(function)} the original's signature, or "
                "(*args, **kwargs) with functools.wraps",
                patch,
            )

    def commit(self, staged: Staged) -> Callable[[], None]:
        """Make a staged stack the active one; returns what takes that back."""
        self.settle()
        before = [(layer, layer.function, layer.inner) for layer in self.layers]
        self._activate(staged)
        return lambda: self._activate(before)

    def _activate(self, staged: Staged) -> None:
        for layer, function, inner in staged:
            layer.function, layer.inner = function, inner
        self.layers = [layer for layer, _, _ in staged]
        self.entry.switch(self.layers[-1].function if self.layers else self.base)

    def remove(self, layer: Layer) -> None:
        """Take one patch out. Calls nothing of anybody: what lies above goes through to what lies below."""
        self.settle()
        index = self.layers.index(layer)
        below = self.layers[index - 1] if index else None
        if index == len(self.layers) - 1:
            self.entry.switch(below.function if below else self.base)
            if below:
                below.inner = None
        elif layer.inner:
            layer.inner.switch(below.inner.function if below and below.inner else self.base)
        self.layers = [one for one in self.layers if one is not layer]

    def settle(self) -> None:
        """Credit all calls so far to the layers that they went through."""
        for layer in self.layers:
            if layer.inner:
                layer.credit(layer.inner)
        if self.layers:
            self.layers[-1].credit(self.entry)
        else:
            self.entry.take()

    @property
    def rebound(self) -> tuple[str, ...]:
        """References elsewhere that hold the entry now, as ``module.name``."""
        held = [write for write in self.references if current(write.owner, write.name) is write.new]
        return tuple(f"{owner_path(write.owner)}.{write.name}" for write in held)

    @property
    def is_reached(self) -> bool:
        """Whether reading the slot still leads to the entry, directly or through somebody else's wrapper."""
        now = current(self.place.owner, self.place.name)
        if now is self.installed:
            return True
        return now is not ABSENT and reaches(now, self.entry.function, self.original)

    @property
    def is_reloaded(self) -> bool:
        """Whether the slot holds the stock function again, executed anew."""
        now = current(self.place.owner, self.place.name)
        return now is not ABSENT and is_fresh_copy(now, self.original)

    @property
    def covering(self) -> str:
        """Who lies over or in place of the entry; empty if nobody does."""
        now = current(self.place.owner, self.place.name)
        if now is self.installed or now is ABSENT or is_fresh_copy(now, self.original):
            return ""
        function = function_in(now)
        return describe_callable(function) if callable(function) else repr(now)


class StackMark:
    """``__ovpatch__`` of an installed function: names its target and the patches that a call runs through."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    @property
    def target(self) -> str:
        """Where the function was installed."""
        return self._stack.place.path

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Active patches, closest to the original first."""
        return tuple(layer.patch for layer in self._stack.layers)

    def __repr__(self) -> str:
        return f"<ovpatch {self.target}: {', '.join(map(str, self.patches)) or 'off'}>"
