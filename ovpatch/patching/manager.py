"""The patch manager, as its users see it."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from ovpatch.patching.import_hooks import watch
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
    Wrap,
    location_of,
)
from ovpatch.patching.plan import Group, PatchRecord, Plan, find_stack, holder, make_plan
from ovpatch.patching.references import author_packages, find, keeps_its_own, within
from ovpatch.patching.slot import LOCK, Journal, Write, function_in
from ovpatch.patching.stack import Wrapper, WrapperChain, learn_about_torch
from ovpatch.patching.target import Slot, is_module, namespace, resolve

# Code that torch.compile made before a patch came or went.


def forget_compiled_code() -> None:
    """Make compiled functions compile again at their next call.

    Dynamo does not guard on methods of library classes: a graph traced before ``apply()`` would go on without the
    patch, and one traced before ``revert()`` with it, in either case silently.
    """
    dynamo = sys.modules.get("torch._dynamo")
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None or convert_frame is None or getattr(dynamo.__spec__, "_initializing", False):
        return
    if not convert_frame.input_codes.seen:
        return
    dynamo.reset_code_caches()


# Writing a plan's stacks into their slots, and taking them out again. All of it runs under the write lock.


def put_on(groups: Sequence[Group], stacks: list[WrapperChain]) -> None:
    """Write everything, or nothing if that fails.

    Args:
        groups: Staged groups of a plan.
        stacks: Stacks of the manager; new ones are added.
    """
    journal = Journal()
    written: list[tuple[list[Write], Write]] = []
    try:
        for group in groups:
            journal.note(group.stack.commit(group.staged))
            for place in group.places:
                done = journal.write(place.owner, place.name, group.stack.installed)
                written.append((group.stack.writes, done))
        written += _rebind(groups, journal)
    except BaseException:  # raised again: also Ctrl-C must not leave half a set written
        journal.roll_back()
        raise
    for known, done in written:
        known.append(done)
    stacks += [group.stack for group in groups if group.stack not in stacks]


def _rebind(groups: Sequence[Group], journal: Journal) -> list[tuple[list[Write], Write]]:
    """Point references elsewhere to the entries, and those in the packages of patch authors to the originals."""
    stacks = [group.stack for group in groups if is_module(group.stack.place.owner)]
    if not stacks:
        return []
    wanted = {id(function): stack for stack in stacks for function in (stack.original, stack.entry.function)}
    theirs = {id(stack): within(author_packages(layer.patch.source for layer in stack.layers)) for stack in stacks}
    slots = {(id(place.owner), place.name) for group in groups for place in (group.stack.place, *group.places)}
    written: list[tuple[list[Write], Write]] = []
    for module, name, found in list(find(wanted)):
        stack = wanted[found]
        of_author = theirs[id(stack)](str(namespace(module).get("__name__", "")))
        if found == id(stack.entry.function):
            if of_author and (id(module), name) not in slots:
                journal.write(module, name, stack.original)
        elif not of_author and not keeps_its_own(module, stack.original):
            written.append((stack.references, journal.write(module, name, stack.entry.function)))
    return written


def take_off(entry: PatchRecord, stack: WrapperChain, layer: Wrapper) -> None:
    """Take one patch out of its stack; from then on no call reaches it.

    Args:
        entry: Whose patch.
        stack: Where it is.
        layer: Its layer there.
    """
    stack.remove(layer)
    entry.keep_counts(layer)
    entry.layers = [one for one in entry.layers if one[1] is not layer]


def release(emptied: Sequence[WrapperChain], stacks: list[WrapperChain]) -> list[WrapperChain]:
    """Restore the slots of stacks that have no patches left.

    Args:
        emptied: Stacks that lost patches; the others among them are left alone.
        stacks: Stacks of the manager; restored ones leave it.

    Returns:
        Those that cannot be restored because somebody else's patch lies over them, or in their place.
    """
    gone = [stack for stack in dict.fromkeys(emptied) if not stack.layers]
    for stack in gone:
        stack.references = [write for write in reversed(stack.references) if not write.undo()]
        stack.writes = [write for write in reversed(stack.writes) if not write.undo()]
    _forget_references(gone)
    covered = [stack for stack in gone if stack.writes and stack.covering]
    stacks[:] = [stack for stack in stacks if stack not in gone or stack in covered]
    return covered


def _forget_references(stacks: Sequence[WrapperChain]) -> None:
    """Point to the originals whoever took a reference to an entry after apply()."""
    entries = {id(stack.entry.function): stack for stack in stacks if is_module(stack.place.owner)}
    slots = {(id(write.owner), write.name) for stack in stacks for write in stack.writes}
    for module, name, found in list(find(entries)) if entries else ():
        if (id(module), name) not in slots:
            namespace(module)[name] = entries[found].original


def restore_uncovered(stacks: list[WrapperChain], entries: Sequence[PatchRecord]) -> bool:
    """Restore slots whose stacks are empty and over which nobody lies any more.

    Args:
        stacks: Stacks of the manager; restored ones leave it.
        entries: Entries of the manager; those that were shadowed by nothing else are reverted then.

    Returns:
        Whether there were any.
    """
    restored = []
    for stack in [stack for stack in stacks if not stack.layers]:
        stack.writes = [write for write in stack.writes if not write.undo()]
        restored += [] if stack.writes else [stack]
    if not restored:
        return False
    stacks[:] = [stack for stack in stacks if stack not in restored]
    for entry in entries:
        entry.over = [stack for stack in entry.over if stack not in restored]
        if entry.state is PatchState.SHADOWED and not entry.over:
            entry.become(PatchState.REVERTED)
    return True


# Carrying out what a manager is asked: the only place with state. How it is done is in the modules beside it.
#
# [Note: callbacks outside the lock]
# Putting on plans, checks, calls wrap functions and installs hooks without holding a lock, then writes under
# [Note: one write lock] if nothing changed meanwhile; else what it built is thrown away and it starts again. Threads
# never wait for each other's callbacks, so an import in one cannot deadlock with an apply() in another. A wrap function
# may thus be called without its result being used.

_logger: Final = logging.getLogger("ovpatch.patching")


class Engine:
    """State of one manager.

    Attributes:
        entries: What was declared, in order of registration.
        stacks: Slots that were patched, those that could not be restored yet included.
    """

    def __init__(self) -> None:
        self.entries: list[PatchRecord] = []
        self.stacks: list[WrapperChain] = []
        self._numbers = itertools.count(1)
        self._version = 0

    def next_number(self) -> int:
        """Return a number larger than all before: of registrations, and of what was applied when."""
        return next(self._numbers)

    def forget(self, entries: Sequence[PatchRecord]) -> None:
        """Drop declarations."""
        self.entries = [entry for entry in self.entries if entry not in entries]

    def add(self, declared: Patch | Hook) -> None:
        """Remember a declaration, unless it is known."""
        with LOCK:
            if not any(declared.repeats(entry.declared) for entry in self.entries):
                self.entries.append(PatchRecord(declared))

    def selected(self, features: Sequence[str], *, to_apply: bool = False) -> list[PatchRecord]:
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

    def put_on(self, entries: list[PatchRecord], finished: str = "") -> None:
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

    def _try(self, entries: list[PatchRecord], finished: str) -> Plan:
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

    def _applied(self, entry: PatchRecord) -> None:
        entry.become(PatchState.APPLIED)
        entry.turn = next(self._numbers)

    def take_back(self, entries: list[PatchRecord]) -> None:
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

    def _take_off(self, entries: list[PatchRecord]) -> list[WrapperChain]:
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

    def _give_up(self, entries: list[PatchRecord], error: Exception, finished: str) -> None:
        """Leave out a feature's patches of one module when one of them failed; those of other modules go on waiting."""
        _logger.warning("patches were left out: %s", error)
        reason = f"left out because a patch of the feature failed: {error}"
        for entry in [entry for entry in entries if entry.waits_for]:
            try:
                found = resolve(entry.declared.name, finished)
            except PatchError as own:
                entry.become(PatchState.FAILED, str(own))
                continue
            if isinstance(found, Slot):
                entry.become(PatchState.FAILED, reason)
            else:
                entry.become(entry.state, found.reason, found.modules)
                self._wait_for(list(found.modules))

    def _blame(self, entries: list[PatchRecord], error: PatchError) -> None:
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


def _remove(entry: PatchRecord, handle: Removable) -> list[PatchError]:
    try:
        handle.remove()
    except Exception as error:  # noqa: BLE001 - the other hooks and patches must come off all the same
        problem = PatchError(f"{entry.declared} could not be removed: {error!r}; correct its remove()", entry.declared)
        problem.__cause__ = error
        return [problem]
    return []


class PatchManager:
    """Declares, applies and reverts patches of functions and methods; usable without any plugin.

    Example:
        >>> import textwrap
        >>> def shout(original):
        ...     return lambda *args, **kwargs: original(*args, **kwargs).upper()
        >>> pm = PatchManager()
        >>> pm.register_patch("textwrap.dedent", wrap=shout)
        >>> with pm.applied():
        ...     textwrap.dedent("  quiet")
        'QUIET'
        >>> textwrap.dedent("  quiet")
        'quiet'
    """

    def __init__(self) -> None:
        self._engine = Engine()

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
        number = self._engine.next_number()
        self._engine.add(Patch(target, replacement, wrap, feature, optional, order, torch, why, expires, number))

    def register_hook(self, name: str, install: Callable[[], Removable], *, feature: str = "", why: str = "") -> None:
        """Declare an official hook, which is preferred to a patch wherever there is one.

        Args:
            name: How the report calls it.
            install: Registers the hook and returns its handle, which has ``remove()``. Called at apply, without a
                lock, and perhaps more than once.
            feature: Name under which it is applied and reverted.
            why: What it is for.
        """
        self._engine.add(Hook(name, install, feature, why, self._engine.next_number()))

    def unregister(self, *features: str) -> None:
        """Forget the declarations of features; without names, of all.

        Raises:
            PatchError: Some are still applied or pending.
        """
        with LOCK:
            going = self._engine.selected(features)
            live = [entry for entry in going if entry.is_live]
            if live:
                raise PatchError(
                    f"{live[0].declared} is still {live[0].state.value}: call revert() before unregister()"
                )
            self._engine.forget(going)

    def apply(self, *features: str) -> None:
        """Apply everything that is registered for some features, or for all: all of it or nothing.

        What is in force stays; what was lost, for example by a reload, is put on again. Targets that are not imported
        yet become pending and are patched when they are.

        Args:
            *features: Names; all without any.

        Raises:
            PatchError: Something cannot be applied, or nothing is registered for a feature; nothing of this call is.
        """
        self._engine.put_on(self._engine.selected(features, to_apply=True))

    def revert(self, *features: str) -> None:
        """Take back what was applied for some features, or for all, the last first.

        Where somebody else patched on top of ours, theirs stays, ours lets every call through, and the state is
        ``shadowed``.

        Args:
            *features: Names; all without any.

        Raises:
            PatchError: The handle of a hook could not be removed; everything else was taken back.
        """
        self._engine.take_back(self._engine.selected(features))

    @contextlib.contextmanager
    def applied(self, *features: str) -> Iterator[None]:
        """Apply in a ``with`` block; at its end, what was not applied before is reverted.

        Args:
            *features: Names; all without any.
        """
        chosen = self._engine.selected(features)
        before = {entry for entry in chosen if entry.is_live}
        self.apply(*features)
        try:
            yield
        finally:
            self._engine.take_back([entry for entry in chosen if entry not in before])

    def statuses(self) -> tuple[PatchStatus, ...]:
        """Return how every patch and hook stands, in order of registration."""
        with LOCK:
            return tuple(entry.status() for entry in self._engine.entries)

    def get_original(self, target: str) -> Any:
        """Return the stock function of a target, patched or not.

        Args:
            target: Dotted path.

        Raises:
            TargetNotFoundError: It does not exist or is not imported yet.
        """
        place = self._place(target)
        with LOCK:
            stack = find_stack(self._engine.stacks, place)
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
            stack = find_stack(self._engine.stacks, place)
            return stack is not None and bool(stack.layers)

    @staticmethod
    def _place(target: str) -> Slot:
        found = resolve(target)
        if isinstance(found, Slot):
            return holder(found)
        raise TargetNotFoundError(f"{target}: {found.reason}")
