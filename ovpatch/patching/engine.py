"""Carrying out what a manager is asked: the only place with state. How it is done is in the modules beside it.

[Note: callbacks outside the lock]
Putting on plans, checks, calls wrap functions and installs hooks without holding a lock, then writes under
[Note: one write lock] if nothing changed meanwhile; else what it built is thrown away and it starts again. Threads
never wait for each other's callbacks, so an import in one cannot deadlock with an apply() in another. A wrap function
may thus be called without its result being used.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from ovpatch.patching.compiled import forget_compiled_code
from ovpatch.patching.dispatch import learn_about_torch
from ovpatch.patching.entries import Entry
from ovpatch.patching.errors import IncompatiblePatchError, PatchConflictError, PatchError
from ovpatch.patching.installing import put_on, release, restore_uncovered, take_off
from ovpatch.patching.journal import LOCK
from ovpatch.patching.late import watch
from ovpatch.patching.patches import Hook, Patch, PatchState, Removable, location_of
from ovpatch.patching.plan import Plan, make_plan
from ovpatch.patching.stack import Stack
from ovpatch.patching.targets import Place, resolve

_logger: Final = logging.getLogger("ovpatch.patching")


class Engine:
    """State of one manager.

    Attributes:
        entries: What was declared, in order of registration.
        stacks: Slots that were patched, those that could not be restored yet included.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.stacks: list[Stack] = []
        self._numbers = itertools.count(1)
        self._version = 0

    def next_number(self) -> int:
        """Return a number larger than all before: of registrations, and of what was applied when."""
        return next(self._numbers)

    def forget(self, entries: Sequence[Entry]) -> None:
        """Drop declarations."""
        self.entries = [entry for entry in self.entries if entry not in entries]

    def add(self, declared: Patch | Hook) -> None:
        """Remember a declaration, unless it is known."""
        with LOCK:
            if not any(declared.repeats(entry.declared) for entry in self.entries):
                self.entries.append(Entry(declared))

    def selected(self, features: Sequence[str], *, to_apply: bool = False) -> list[Entry]:
        """Return the entries of some features, or all.

        Args:
            features: Names; all without any.
            to_apply: Whether a name without declarations is a mistake; taken back is what is there, if anything.

        Raises:
            PatchError: Nothing is registered for one of the features.
        """
        with LOCK:
            known = {entry.declared.feature for entry in self.entries}
            unknown = [name for name in features if name not in known]
            if unknown and to_apply:
                raise PatchError(_unknown_text(unknown[0], known))
            return [entry for entry in self.entries if not features or entry.declared.feature in features]

    def put_on(self, entries: list[Entry], finished: str = "") -> None:
        """Apply declarations: all or none.

        Args:
            entries: Which.
            finished: Module whose import hook this is, if it is.

        Raises:
            PatchError: One cannot be applied.
        """
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
                entries = [entry for entry in entries if entry in self.entries and (entry.waits_for or not finished)]
                self._restore_uncovered()
                version, stacks = self._version, list(self.stacks)
            plan = make_plan(entries, stacks, version, finished)
            if plan.groups:
                learn_about_torch()
            plan.build()
            try:
                done = self._commit(plan)
            except BaseException:  # raised again: also Ctrl-C must not leave hooks installed
                plan.discard()
                raise
            if done:
                return plan
            plan.discard()

    def _commit(self, plan: Plan) -> bool:
        with LOCK:
            if plan.version != self._version or not all(group.is_current for group in plan.groups):
                return False
            put_on(plan.groups, self.stacks)
            self._version += 1
            self._record(plan)
        return True

    def _restore_uncovered(self) -> None:
        if restore_uncovered(self.stacks, self.entries):
            self._version += 1

    def _record(self, plan: Plan) -> None:
        for entry, stack, layer in plan.lost:
            take_off(entry, stack, layer)
            release([stack], self.stacks)
        for group in plan.groups:
            for entry in group.entries:
                entry.layers.append((group.stack, group.layer_of(entry)))
                entry.over = [stack for stack in entry.over if stack is not group.stack]
                entry.location = location_of(group.stack.original)
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

    def take_back(self, entries: list[Entry]) -> None:
        """Revert declarations, the last first; those that only wait for an import stop waiting.

        Args:
            entries: Which.

        Raises:
            PatchError: A hook's handle could not be removed.
        """
        with LOCK:
            self._version += 1
            going = sorted([entry for entry in entries if entry.is_live], key=lambda entry: entry.turn, reverse=True)
            for entry in entries:
                entry.waits_for = ()
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
        covered = release(touched, self.stacks)
        for entry, stacks in homes.items():
            entry.over += [stack for stack in stacks if stack in covered]
            if entry.over:
                cover = entry.over[-1].covering
                entry.become(PatchState.SHADOWED, f"{cover} lies over it and was left alone; calls go to the original")
        self._restore_uncovered()
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
            ready = [entry for entry in self.entries if name in entry.waits_for]
        for feature in dict.fromkeys(entry.declared.feature for entry in ready):
            own = [entry for entry in ready if entry.declared.feature == feature]
            try:
                self.put_on(own, name)
            except Exception as error:  # noqa: BLE001 - told in the report; it must not break the user's import
                self._give_up(own, error, name)

    def _give_up(self, entries: list[Entry], error: Exception, finished: str) -> None:
        """Leave out a feature's patches of one module when one of them failed; those of other modules go on waiting."""
        _logger.warning("patches were left out: %s", error)
        reason = f"left out because a patch of the feature failed: {error}"
        for entry in [entry for entry in entries if entry.waits_for]:
            try:
                found = resolve(entry.declared.name, finished)
            except PatchError as own:
                entry.become(PatchState.FAILED, str(own))
                continue
            if isinstance(found, Place):
                entry.become(PatchState.FAILED, reason)
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


def _unknown_text(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"nothing is registered for feature {name!r}.{hint} Correct the name, or register its patches before they are "
        "applied"
    )


def _remove(entry: Entry, handle: Removable) -> list[PatchError]:
    try:
        handle.remove()
    except Exception as error:  # noqa: BLE001 - the other hooks and patches must come off all the same
        problem = PatchError(f"{entry.declared} could not be removed: {error!r}; correct its remove()", entry.declared)
        problem.__cause__ = error
        return [problem]
    return []
