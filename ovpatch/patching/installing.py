"""Writing a plan's stacks into their slots, and taking them out again. All of it runs under the write lock."""

from __future__ import annotations

from collections.abc import Sequence

from ovpatch.patching.entries import Entry
from ovpatch.patching.journal import Journal, Write
from ovpatch.patching.patches import PatchState
from ovpatch.patching.plan import Group
from ovpatch.patching.references import author_packages, find, keeps_its_own, within
from ovpatch.patching.stack import Layer, Stack
from ovpatch.patching.targets import is_module, namespace


def put_on(groups: Sequence[Group], stacks: list[Stack]) -> None:
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


def take_off(entry: Entry, stack: Stack, layer: Layer) -> None:
    """Take one patch out of its stack; from then on no call reaches it.

    Args:
        entry: Whose patch.
        stack: Where it is.
        layer: Its layer there.
    """
    stack.remove(layer)
    entry.keep_counts(layer)
    entry.layers = [one for one in entry.layers if one[1] is not layer]


def release(emptied: Sequence[Stack], stacks: list[Stack]) -> list[Stack]:
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


def _forget_references(stacks: Sequence[Stack]) -> None:
    """Point to the originals whoever took a reference to an entry after apply()."""
    entries = {id(stack.entry.function): stack for stack in stacks if is_module(stack.place.owner)}
    slots = {(id(write.owner), write.name) for stack in stacks for write in stack.writes}
    for module, name, found in list(find(entries)) if entries else ():
        if (id(module), name) not in slots:
            namespace(module)[name] = entries[found].original


def restore_uncovered(stacks: list[Stack], entries: Sequence[Entry]) -> bool:
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
