"""What one call of apply() is going to do: everything is resolved and checked here, and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ovpatch.patching.patch import (
    Hook,
    IncompatiblePatchError,
    Patch,
    PatchConflictError,
    PatchError,
    PatchState,
    PatchStatus,
    Removable,
    TargetNotFoundError,
    torch_mismatch,
)
from ovpatch.patching.references import author_packages, keeps_its_own, within
from ovpatch.patching.slot import current, settle_name
from ovpatch.patching.stack import Staged, Wrapper, WrapperChain
from ovpatch.patching.target import ABSENT, Missing, Slot, Waiting, is_module, owner_path, resolve

# What a manager remembers about each declaration.

_LIVE: Final = (PatchState.APPLIED, PatchState.PENDING)


@dataclass(eq=False)
class PatchRecord:
    """One declaration and where it stands; changes under the write lock.

    Attributes:
        declared: The patch or hook.
        state: Its state; what it looks like from outside is :meth:`status`.
        reason: Why.
        layers: Where the patch is installed; the last is the current one, older ones live on in reloaded code.
        over: Slots that could not be restored because somebody else lies over them.
        handle: What installing the hook returned.
        waits_for: Modules whose import may bring the target.
        turn: When it was applied, compared with the other entries.
        location: File and line of what was patched.
    """

    declared: Patch | Hook
    state: PatchState = PatchState.REGISTERED
    reason: str = ""
    layers: list[tuple[WrapperChain, Wrapper]] = field(default_factory=list)
    over: list[WrapperChain] = field(default_factory=list)
    handle: Removable | None = None
    waits_for: tuple[str, ...] = ()
    turn: int = 0
    location: str = ""
    _calls: int = 0
    _traces: int = 0

    @property
    def is_live(self) -> bool:
        """Whether there is something to revert."""
        return self.state in _LIVE or bool(self.layers)

    def become(self, state: PatchState, reason: str = "", waits_for: tuple[str, ...] = ()) -> None:
        """Change the state."""
        self.state, self.reason, self.waits_for = state, reason, waits_for

    def keep_counts(self, layer: Wrapper) -> None:
        """Remember what a layer that goes away has counted."""
        self._calls += layer.calls
        self._traces += layer.traces

    def status(self) -> PatchStatus:
        """Return what is told about it; looks at the slot as it is now."""
        for stack, _ in self.layers:
            stack.settle()
        state, reason = self._live_state()
        return PatchStatus(
            target=self.declared.name,
            feature=self.declared.feature,
            kind=self.declared.kind,
            state=state,
            reason=reason,
            calls=self._calls + sum(layer.calls for _, layer in self.layers),
            location=self.location,
            rebound=tuple(name for stack, _ in self.layers for name in stack.rebound),
            why=self.declared.why,
            expires=self.declared.expires,
            traces=self._traces + sum(layer.traces for _, layer in self.layers),
        )

    def _live_state(self) -> tuple[PatchState, str]:
        if self.state is not PatchState.APPLIED or not self.layers:
            return self.state, self.reason
        stack = self.layers[-1][0]
        if stack.is_reached:
            return self.state, self.reason
        lost = f"{stack.covering} took its place" if stack.covering else "its module was executed again"
        return PatchState.SHADOWED, f"{lost} after apply(): call apply() again"


def find_stack(stacks: list[WrapperChain], place: Slot) -> WrapperChain | None:
    """Return the stack that a slot belongs to, seen through every alias.

    A function of a module is one slot however many modules hold it. An attribute of a class is a slot by itself.

    Args:
        stacks: Stacks of the manager, those without active patches included.
        place: The slot.
    """
    for stack in stacks:
        if stack.place.owner is place.owner and stack.place.name == place.name:
            if stack.is_reached:
                return stack
        elif stack.layers and _is_alias(place, stack):
            return stack
    return None


def _is_alias(place: Slot, stack: WrapperChain) -> bool:
    """Whether a module's function is the one that a stack patches in another module."""
    both = is_module(place.owner) and is_module(stack.place.owner)
    return both and (place.raw is stack.installed or place.raw is stack.original)


def holder(place: Slot) -> Slot:
    """Return the slot that an inherited attribute really is."""
    return place if place.heir_of is None else Slot(place.heir_of, place.name, place.raw)


def conflict(one: Patch, other: Patch, place: Slot) -> PatchConflictError:
    """Return the error for two replacements of one slot.

    Args:
        one: A replacement.
        other: Another one.
        place: What both replace.
    """
    names = " and ".join(dict.fromkeys((one.target, other.target)))
    remedies = " or ".join(dict.fromkeys((_turn_off(one), _turn_off(other))))
    return PatchConflictError(
        f"{one} and {other} both replace {owner_path(place.owner)}.{place.name} (as {names}), and a function can have "
        f"one replacement only. Turn one of them off ({remedies}), or let one of them wrap it: "
        "register_patch(target, wrap=function)",
        other,
        one,
    )


def _turn_off(patch: Patch) -> str:
    return (
        f"OVPATCH_{patch.feature.upper().replace('-', '_')}=0"
        if patch.feature
        else f"leave out the patch of {patch.target}"
    )


@dataclass(eq=False)
class Group:
    """The patches of one slot that are to be added.

    Attributes:
        stack: Where to; not installed yet if it is new.
        places: Slots that still have to be pointed to the stack's entry.
        entries: What to add.
        staged: The stack as it will be.
    """

    stack: WrapperChain
    places: list[Slot] = field(default_factory=list)
    entries: list[PatchRecord] = field(default_factory=list)
    staged: Staged = field(default_factory=list)

    @property
    def is_current(self) -> bool:
        """Whether the slots still hold what was found while planning."""
        return all(
            current(place.owner, place.name) is (place.raw if place.heir_of is None else ABSENT)
            for place in self.places
        )

    def layer_of(self, entry: PatchRecord) -> Wrapper:
        """Return the staged layer of one of the entries."""
        return next(layer for layer, _, _ in self.staged if layer.patch is entry.declared)


@dataclass(eq=False)
class Plan:
    """Everything that one call is going to do.

    Attributes:
        version: State of the manager that it was made for.
        finished: Module whose import hook it is made in, if it is.
        groups: Patches to add, by slot.
        hooks: Hooks to install, with their handles once that is done.
        idle: Entries that end up without being applied, with state, reason and the modules they wait for.
        gone: Entries that stay applied although their module was removed, with the modules that may bring it back.
        lost: Layers that lie where no call comes by any more, because something else was put into their slot.
    """

    version: int
    finished: str = ""
    groups: list[Group] = field(default_factory=list)
    hooks: list[tuple[PatchRecord, Hook]] = field(default_factory=list)
    handles: list[tuple[PatchRecord, Removable]] = field(default_factory=list)
    idle: list[tuple[PatchRecord, PatchState, str, tuple[str, ...]]] = field(default_factory=list)
    gone: list[tuple[PatchRecord, tuple[str, ...]]] = field(default_factory=list)
    lost: list[tuple[PatchRecord, WrapperChain, Wrapper]] = field(default_factory=list)

    @property
    def modules(self) -> list[str]:
        """All modules to wait for."""
        waiting = [modules for _, modules in self.gone] + [modules for *_, modules in self.idle]
        return list(dict.fromkeys(name for modules in waiting for name in modules))

    def build(self) -> None:
        """Call the wrap functions and install the hooks; what was installed is removed again if one fails.

        Raises:
            PatchError: One of them failed.
        """
        try:
            for group in self.groups:
                self._stage(group)
            self.groups = [group for group in self.groups if group.staged]
            for entry, hook in self.hooks:
                self.handles.append((entry, _install(hook)))
        except BaseException:  # raised again: also Ctrl-C must not leave hooks installed
            self.discard()
            raise

    def _stage(self, group: Group) -> None:
        while group.entries:
            try:
                group.staged = group.stack.stage([_patch(entry) for entry in group.entries])
                return
            except IncompatiblePatchError as error:
                # What wrap returned does not fit; whether it would is known only now.
                entry = next(entry for entry in group.entries if entry.declared in error.patches)
                _refuse(self, entry, error)
                group.entries.remove(entry)

    def discard(self) -> None:
        """Remove the hooks again, the last first."""
        while self.handles:
            self.handles.pop()[1].remove()


def make_plan(entries: Sequence[PatchRecord], stacks: Sequence[WrapperChain], version: int, finished: str = "") -> Plan:
    """Resolve and check some declarations.

    Args:
        entries: What to apply. What is in force already stays as it is.
        stacks: Stacks of the manager.
        version: Goes into the plan.
        finished: Module whose import hook this is.

    Raises:
        PatchError: Not everything can be applied.
    """
    plan = Plan(version, finished)
    for entry in entries:
        declared = entry.declared
        if isinstance(declared, Patch):
            _plan_patch(plan, entry, declared, list(stacks))
        elif entry.state is not PatchState.APPLIED:
            plan.hooks.append((entry, declared))
    for group in plan.groups:
        _check_conflicts(group)
        _settle_name(group)
    return plan


def _plan_patch(plan: Plan, entry: PatchRecord, patch: Patch, stacks: list[WrapperChain]) -> None:
    try:
        found = resolve(patch.target, plan.finished)
    except IncompatiblePatchError as error:
        _refuse(plan, entry, IncompatiblePatchError(f"{patch}: {error}", patch))
        return
    if not isinstance(found, Slot):
        _plan_absent(plan, entry, patch, found)
        return
    mismatch = torch_mismatch(patch.torch) if patch.torch else None
    if mismatch:
        remedy = f"install a torch that fits, turn {patch} off, or register it with optional=True"
        _refuse(
            plan, entry, IncompatiblePatchError(f"{patch} cannot patch {patch.target}: {mismatch}; {remedy}", patch)
        )
        return
    stack = find_stack(stacks, found)
    if any(where is stack for where, _ in entry.layers):
        return
    _plan_place(plan, entry, patch, found, stack)


def _plan_absent(plan: Plan, entry: PatchRecord, patch: Patch, found: Waiting | Missing) -> None:
    if entry.layers:  # the code that was patched lives on although its module was removed
        plan.gone.append((entry, found.modules))
    elif isinstance(found, Waiting):
        plan.idle.append((entry, PatchState.PENDING, found.reason, found.modules))
    elif patch.optional:
        plan.idle.append((entry, PatchState.SKIPPED, found.reason, found.modules))
    else:
        raise TargetNotFoundError(f"{patch}: {found.error}", patch)


def _plan_place(plan: Plan, entry: PatchRecord, patch: Patch, place: Slot, stack: WrapperChain | None) -> None:
    try:
        group = _group(plan, place, stack)
        if patch.wrap is None:
            group.stack.check_replacement(patch)
    except IncompatiblePatchError as error:
        _refuse(plan, entry, IncompatiblePatchError(str(error) if error.patches else f"{patch}: {error}", patch))
        return
    group.entries.append(entry)
    plan.lost.extend(
        (entry, where, layer)
        for where, layer in entry.layers
        if where.place.owner is place.owner and where.place.name == place.name and not where.is_reloaded
    )


def _refuse(plan: Plan, entry: PatchRecord, error: IncompatiblePatchError) -> None:
    """Raise, unless the patch is optional."""
    if not error.patches[0].optional:
        raise error
    if not entry.layers:
        plan.idle.append((entry, PatchState.INCOMPATIBLE, str(error), ()))


def _group(plan: Plan, place: Slot, stack: WrapperChain | None) -> Group:
    """Return the group of a slot, and see to it that the slot will be written if it has to be."""
    group = next((one for one in plan.groups if one.stack is stack or _is_same(one.stack.place, place)), None)
    if group is None:
        group = Group(stack or WrapperChain(place))
        plan.groups.append(group)
    of_stack = stack is not None and (place.raw is stack.installed or _is_slot(stack.place, place))
    if not of_stack and not any(_is_slot(known, place) for known in group.places):
        group.places.append(place)
    return group


def _is_slot(one: Slot, other: Slot) -> bool:
    return one.owner is other.owner and one.name == other.name


def _is_same(one: Slot, other: Slot) -> bool:
    both_functions = is_module(one.owner) and is_module(other.owner)
    return _is_slot(one, other) or (both_functions and one.raw is other.raw)


def _check_conflicts(group: Group) -> None:
    replacements = [layer.patch for layer in group.stack.layers if layer.patch.kind == "replace"]
    for entry in group.entries:
        patch = _patch(entry)
        if patch.kind == "replace" and replacements:
            raise conflict(replacements[0], patch, group.stack.place)
        replacements += [patch] if patch.kind == "replace" else []


def _settle_name(group: Group) -> None:
    if group.stack.writes:
        return
    of_author = within(author_packages(_patch(entry).source for entry in group.entries))
    original = group.stack.original
    settle_name(
        group.stack.entry.function,
        group.stack.place,
        lambda module: of_author(module.__name__) or keeps_its_own(module, original),
    )


def _patch(entry: PatchRecord) -> Patch:
    assert isinstance(entry.declared, Patch)
    return entry.declared


def _install(hook: Hook) -> Removable:
    try:
        handle = hook.install()
    except Exception as error:
        raise PatchError(
            f"{hook} could not be installed: {error!r}. Nothing of this call is applied; correct it, or leave it out",
            hook,
        ) from error
    if not callable(getattr(handle, "remove", None)):
        raise PatchError(
            f"{hook} returned {handle!r} when it was installed: it must return a handle with a method remove()", hook
        )
    return handle
