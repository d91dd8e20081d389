"""The patch manager: the only place with state. It decides when; how is in the modules beside it.

[Note: callbacks outside the lock]
apply() plans, checks, calls wrap functions and installs hooks without holding a lock, then writes under
[Note: one write lock] if nothing changed meanwhile; else what it built is thrown away and it starts again. Threads
never wait for each other's callbacks, so an import in one cannot deadlock with an apply() in another. A wrap function
may thus be called without its result being used.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ovpatch.patching.compiled import forget_compiled_code
from ovpatch.patching.dispatch import learn_about_torch
from ovpatch.patching.entries import Entry, find_stack, holder
from ovpatch.patching.errors import (
    IncompatiblePatchError,
    PatchConflictError,
    PatchError,
    TargetNotFoundError,
)
from ovpatch.patching.installing import put_on, release, restore_uncovered, take_off
from ovpatch.patching.journal import LOCK
from ovpatch.patching.late import watch
from ovpatch.patching.originals import function_in
from ovpatch.patching.patches import Hook, Patch, PatchState, PatchStatus, Removable, Wrap
from ovpatch.patching.plan import Plan, make_plan
from ovpatch.patching.stack import Stack
from ovpatch.patching.targets import Place, resolve

_logger: Final = logging.getLogger("ovpatch.patching")


class PatchManager:
    """Declares, applies and reverts patches of functions and methods; usable without any plugin.

    Example:
        >>> pm = PatchManager()
        >>> pm.register_patch("package.module.function", wrap=lambda original: ...)
        >>> with pm.applied():
        ...     ...
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._stacks: list[Stack] = []
        self._numbers = itertools.count(1)
        self._version = 0

    def register_patch(
        self,
        target: str,
        replacement: Any = None,
        *,
        wrap: Wrap | None = None,
        feature: str = "",
        optional: bool = False,
        order: int = 0,
        torch: str | None = None,
        why: str = "",
        expires: str = "",
    ) -> None:
        """Declare a patch. Nothing happens before :meth:`apply`; declaring the same twice means it once.

        Args:
            target: Dotted path of a function, method, class or static method, or property (its getter is patched).
            replacement: What to call instead. At most one per function; always closest to the original.
            wrap: Takes the original and returns the function to call instead; any number per function. Called at
                apply, without a lock, and perhaps more than once.
            feature: Name under which it is applied and reverted.
            optional: Whether a missing or incompatible target is skipped instead of raising.
            order: Among wrappers, lower is closer to the original; equal ones in order of registration.
            torch: Versions it was written for, such as ``">=2.11,<2.16"``.
            why: Which binding callers use, and why no official hook serves.
            expires: When it can go: condition and issue.

        Raises:
            PatchError: The declaration itself is wrong.
        """
        number = next(self._numbers)
        self._add(Patch(target, replacement, wrap, feature, optional, order, torch, why, expires, number))

    def register_hook(self, name: str, install: Callable[[], Removable], *, feature: str = "", why: str = "") -> None:
        """Declare an official hook, which is preferred to a patch wherever there is one.

        Args:
            name: How the report calls it.
            install: Registers the hook and returns its handle, which has ``remove()``. Called at apply, without a
                lock, and perhaps more than once.
            feature: Name under which it is applied and reverted.
            why: What it is for.
        """
        self._add(Hook(name, install, feature, why, next(self._numbers)))

    def _add(self, declared: Patch | Hook) -> None:
        with LOCK:
            if not any(declared.repeats(entry.declared) for entry in self._entries):
                self._entries.append(Entry(declared))

    def unregister(self, *features: str) -> None:
        """Forget the declarations of features; without names, of all.

        Raises:
            PatchError: Some are still applied or pending.
        """
        with LOCK:
            going = self._selected(features)
            live = [entry for entry in going if entry.is_live]
            if live:
                raise PatchError(
                    f"{live[0].declared} is still {live[0].state.value}: call revert() before unregister()"
                )
            self._entries = [entry for entry in self._entries if entry not in going]

    def apply(self, *features: str) -> None:
        """Apply everything that is registered for some features, or for all: all of it or nothing.

        What is in force stays; what was lost, for example by a reload, is put on again. Targets that are not imported
        yet become pending and are patched when they are.

        Args:
            *features: Names; all without any.

        Raises:
            PatchError: Something cannot be applied; nothing of this call is.
        """
        self._carry_out(self._selected(features))

    def revert(self, *features: str) -> None:
        """Take back what was applied for some features, or for all, the last first.

        Where somebody else patched on top of ours, theirs stays, ours lets every call through, and the state is
        ``shadowed``.

        Args:
            *features: Names; all without any.

        Raises:
            PatchError: The handle of a hook could not be removed; everything else was taken back.
        """
        self._take_back([entry for entry in self._selected(features) if entry.is_live])

    @contextlib.contextmanager
    def applied(self, *features: str) -> Iterator[None]:
        """Apply in a ``with`` block; at its end, what was not applied before is reverted.

        Args:
            *features: Names; all without any.
        """
        chosen = self._selected(features)
        before = {entry for entry in chosen if entry.is_live}
        self.apply(*features)
        try:
            yield
        finally:
            self._take_back([entry for entry in chosen if entry.is_live and entry not in before])

    def statuses(self) -> tuple[PatchStatus, ...]:
        """Return how every patch and hook stands, in order of registration."""
        with LOCK:
            return tuple(entry.status() for entry in self._entries)

    def get_original(self, target: str) -> Any:
        """Return the stock function of a target, patched or not.

        Args:
            target: Dotted path.

        Raises:
            TargetNotFoundError: It does not exist or is not imported yet.
        """
        place = self._place(target)
        with LOCK:
            stack = find_stack(self._stacks, place)
        return stack.original if stack else function_in(place.raw)

    def is_patched(self, target: str) -> bool:
        """Return whether calls of a target go through a patch of this manager.

        Args:
            target: Dotted path; False if it does not exist or is not imported yet.
        """
        try:
            place = self._place(target)
        except TargetNotFoundError:
            return False
        with LOCK:
            stack = find_stack(self._stacks, place)
            return stack is not None and bool(stack.layers)

    @staticmethod
    def _place(target: str) -> Place:
        found = resolve(target)
        if isinstance(found, Place):
            return holder(found)
        raise TargetNotFoundError(f"{target}: {found.reason}")

    def _selected(self, features: Sequence[str]) -> list[Entry]:
        with LOCK:
            known = {entry.declared.feature for entry in self._entries}
            for name in features:
                if name not in known:
                    _logger.debug("nothing is registered for feature %r", name)
            return [entry for entry in self._entries if not features or entry.declared.feature in features]

    def _carry_out(self, entries: list[Entry], finished: str = "") -> None:
        try:
            plan = self._try(entries, finished)
        except PatchError as error:
            self._blame(entries, error)
            raise
        self._wait_for(plan.modules)
        if plan.groups and not finished:
            forget_compiled_code()

    def _try(self, entries: list[Entry], finished: str) -> Plan:
        """Plan, build and write until nobody comes in between; see [Note: callbacks outside the lock]."""
        while True:
            with LOCK:
                restore_uncovered(self._stacks, self._entries)
                version, stacks = self._version, list(self._stacks)
            plan = make_plan(entries, stacks, version, finished)
            if plan.groups:
                learn_about_torch()
            plan.build()
            try:
                done = self._commit(plan)
            except BaseException:
                plan.discard()
                raise
            if done:
                return plan
            plan.discard()

    def _commit(self, plan: Plan) -> bool:
        with LOCK:
            if plan.version != self._version or not all(group.is_current for group in plan.groups):
                return False
            put_on(plan.groups, self._stacks)
            self._version += 1
            self._record(plan)
        return True

    def _record(self, plan: Plan) -> None:
        for entry, stack, layer in plan.lost:
            take_off(entry, stack, layer)
            release([stack], self._stacks)
        for group in plan.groups:
            for entry in group.entries:
                entry.layers.append((group.stack, group.layer_of(entry)))
                entry.over = [stack for stack in entry.over if stack is not group.stack]
                self._applied(entry)
        for entry, handle in plan.handles:
            entry.handle = handle
            self._applied(entry)
        for entry, state, reason, modules in plan.idle:
            entry.become(state, reason, modules)
        for entry, modules in plan.gone:
            entry.waits_for = modules

    def _applied(self, entry: Entry) -> None:
        entry.become(PatchState.APPLIED)
        entry.turn = next(self._numbers)

    def _take_back(self, entries: list[Entry]) -> None:
        going = sorted(entries, key=lambda entry: entry.turn, reverse=True)
        with LOCK:
            self._version += 1
            touched = self._take_off(going)
            handles = [(entry, entry.handle) for entry in going if entry.handle is not None]
            for entry in going:
                entry.handle = None
        problems = [problem for entry, handle in handles for problem in _remove(entry, handle)]
        if touched:
            forget_compiled_code()
        if problems:
            raise problems[0]

    def _take_off(self, entries: list[Entry]) -> list[Stack]:
        """Take patches off and restore what lay there; returns the stacks they came from."""
        homes = {entry: [stack for stack, _ in entry.layers] for entry in entries}
        for entry in entries:
            for stack, layer in reversed(list(entry.layers)):
                take_off(entry, stack, layer)
            entry.become(PatchState.REVERTED)
        touched = [stack for stacks in homes.values() for stack in stacks]
        covered = release(touched, self._stacks)
        for entry, stacks in homes.items():
            entry.over += [stack for stack in stacks if stack in covered]
            if entry.over:
                cover = entry.over[-1].covering
                entry.become(PatchState.SHADOWED, f"{cover} lies over it and was left alone; calls go to the original")
        restore_uncovered(self._stacks, self._entries)
        return touched

    def _wait_for(self, modules: list[str]) -> None:
        for name in modules:
            watch(name, self._module_imported)
        for name in modules:
            if name in sys.modules:  # imported by another thread after the plan was made
                self._module_imported(name)

    def _module_imported(self, name: str) -> None:
        """Apply what waited for a module, feature by feature, so that one's failure does not stop another's."""
        with LOCK:
            ready = [entry for entry in self._entries if name in entry.waits_for]
        for feature in dict.fromkeys(entry.declared.feature for entry in ready):
            own = [entry for entry in ready if entry.declared.feature == feature]
            try:
                self._carry_out(own, name)
            except Exception as error:  # noqa: BLE001 - told in the report; it must not break the user's import
                self._give_up(own, error, name)

    def _give_up(self, entries: list[Entry], error: Exception, finished: str) -> None:
        """Leave out a feature's patches of one module when one of them failed; those of other modules go on waiting."""
        _logger.warning("patches were left out: %s", error)
        for entry in [entry for entry in entries if entry.waits_for]:
            found = resolve(entry.declared.name, finished)
            if isinstance(found, Place):
                entry.become(PatchState.FAILED, f"left out because a patch of the feature failed: {error}")
            else:
                entry.become(entry.state, found.reason, found.modules)
                self._wait_for(list(found.modules))

    def _blame(self, entries: list[Entry], error: PatchError) -> None:
        states: list[tuple[type[PatchError], PatchState]] = [
            (PatchConflictError, PatchState.CONFLICT),
            (IncompatiblePatchError, PatchState.INCOMPATIBLE),
        ]
        state = next((state for kind, state in states if isinstance(error, kind)), PatchState.FAILED)
        with LOCK:
            for entry in entries:
                if entry.declared in error.patches and not entry.layers:
                    entry.become(state, str(error))


def _remove(entry: Entry, handle: Removable) -> list[PatchError]:
    try:
        handle.remove()
    except Exception as error:  # noqa: BLE001 - the other hooks and patches must come off all the same
        problem = PatchError(f"{entry.declared} could not be removed: {error!r}; correct its remove()", entry.declared)
        problem.__cause__ = error
        return [problem]
    return []
