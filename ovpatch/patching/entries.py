"""What a manager remembers about each declaration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ovpatch.patching.errors import PatchConflictError
from ovpatch.patching.patches import Hook, Patch, PatchState, PatchStatus, Removable
from ovpatch.patching.stack import Layer, Stack
from ovpatch.patching.targets import Place, is_module, owner_path

_LIVE: Final = (PatchState.APPLIED, PatchState.PENDING)


@dataclass(eq=False)
class Entry:
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
    layers: list[tuple[Stack, Layer]] = field(default_factory=list)
    over: list[Stack] = field(default_factory=list)
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

    def keep_counts(self, layer: Layer) -> None:
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


def find_stack(stacks: list[Stack], place: Place) -> Stack | None:
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


def _is_alias(place: Place, stack: Stack) -> bool:
    """Whether a module's function is the one that a stack patches in another module."""
    both = is_module(place.owner) and is_module(stack.place.owner)
    return both and (place.raw is stack.installed or place.raw is stack.original)


def holder(place: Place) -> Place:
    """Return the slot that an inherited attribute really is."""
    return place if place.heir_of is None else Place(place.heir_of, place.name, place.raw)


def conflict(one: Patch, other: Patch, place: Place) -> PatchConflictError:
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
