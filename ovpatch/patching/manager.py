"""The patch manager: registers, applies and reverts patches."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ovpatch.patching.patch import (
    Hook,
    Patch,
    PatchError,
    PatchState,
    PatchStatus,
    Removable,
    TargetNotFoundError,
    Wrap,
    find_location,
)
from ovpatch.patching.plan import PatchPlan, PatchRecord, SlotPlan, make_plan
from ovpatch.patching.references import (
    find_references,
    keeps_original,
    list_author_packages,
    match_packages,
)
from ovpatch.patching.slot import WRITE_LOCK, SlotWrite, write_reversibly
from ovpatch.patching.target import (
    Slot,
    call_after_import,
    get_namespace,
    is_module,
    resolve_target,
)
from ovpatch.patching.wrapper_chain import Wrapper, WrapperChain, watch_for_torch

_logger: Final = logging.getLogger("ovpatch.patching")


class PatchManager:
    """Registers, applies and reverts patches of functions and methods; usable without any plugin.

    [Note: callbacks outside the lock]
    ``apply()`` plans, checks signatures, calls wrap functions and installs hooks without a lock. Then it takes the
    write lock and writes the slots, unless another thread has changed something meanwhile: in that case it discards
    the result and starts again. No thread waits for a callback of another thread, so an import in one cannot deadlock
    with ``apply()`` in another. A wrap function may therefore be called without its result being used.

    Examples:
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
        self._records: list[PatchRecord] = []  # in order of registration
        self._chains: list[
            WrapperChain
        ] = []  # of patched slots, including those that could not be restored yet
        self._numbers = itertools.count(1)
        self._version = (
            0  # changes with every write, so that a plan can tell whether it is outdated
        )

    # --- declarations ---

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
        """Declare a patch. Nothing is written before :meth:`apply`; a repeated declaration counts once.

        Args:
            target: Dotted path of a function, method, class or static method, or property (its getter is patched).
            replacement: Function to call instead. At most one per function; it is the innermost patch.
            wrap: Takes the original and returns the function to call instead; any number per function. It is called
                by :meth:`apply`, without a lock, and perhaps more than once.
            feature: Name under which the patch is applied and reverted.
            optional: Whether a missing or incompatible target is skipped instead of raising.
            order: Among wrappers, lower is closer to the original; equal ones keep the order of registration.
            torch: Versions it was written for, such as ``">=2.11,<2.16"``.
            why: Which binding callers use, and why no official hook serves.
            expires: When the patch can be deleted: condition and issue.

        Raises:
            PatchError: The declaration itself is wrong.
        """
        number = next(self._numbers)
        self._add(
            Patch(target, replacement, wrap, feature, optional, order, torch, why, expires, number)
        )

    def register_hook(
        self, name: str, install: Callable[[], Removable], *, feature: str = "", why: str = ""
    ) -> None:
        """Declare an official hook, which is preferred to a patch wherever one exists.

        Args:
            name: Name in the report.
            install: Registers the hook and returns its handle, which has ``remove()``. It is called by
                :meth:`apply`, without a lock, and perhaps more than once.
            feature: Name under which the hook is installed and removed.
            why: Purpose of the hook.
        """
        self._add(Hook(name, install, feature, why, next(self._numbers)))

    def _add(self, declared: Patch | Hook) -> None:
        with WRITE_LOCK:
            if not any(declared.is_same_as(record.declared) for record in self._records):
                self._records.append(PatchRecord(declared))

    def unregister(self, *features: str) -> None:
        """Delete the declarations of some features; without names, of all.

        Raises:
            PatchError: Some are still applied or pending.
        """
        with WRITE_LOCK:
            selected = self._select(features)
            live = [record for record in selected if record.is_live]
            if live:
                raise PatchError(
                    f"{live[0].declared} is still {live[0].state.value}: call revert() before "
                    "unregister()"
                )
            self._records = [record for record in self._records if record not in selected]

    def _select(self, features: Sequence[str]) -> list[PatchRecord]:
        with WRITE_LOCK:
            return [
                record
                for record in self._records
                if not features or record.declared.feature in features
            ]

    # --- apply and revert ---

    def apply(self, *features: str) -> None:
        """Apply everything that is registered for some features, by default for all: all of it or nothing.

        Patches in force stay; patches that were lost, for example by a reload, are installed again. A target that is
        not imported yet is pending and is patched after its import.

        Raises:
            PatchError: Something cannot be applied, or nothing is registered for a feature. Nothing is applied then.
        """
        known = {record.declared.feature for record in self._select(())}
        for name in features:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise PatchError(
                    f"nothing is registered for feature {name!r}.{hint} Correct the name, or "
                    "register its patches "
                    "before they are applied"
                )
        self._apply(self._select(features))

    def revert(self, *features: str) -> None:
        """Revert the patches of some features, by default of all, the last first.

        Where another library patched on top, its function stays, ours calls the original, and the state is
        ``shadowed``.

        Raises:
            PatchError: The handle of a hook could not be removed; everything else was reverted.
        """
        self._revert(self._select(features))

    @contextlib.contextmanager
    def applied(self, *features: str) -> Iterator[None]:
        """Apply in a ``with`` block; at its end, everything that was not applied before is reverted."""
        selected = self._select(features)
        before = {record for record in selected if record.is_live}
        self.apply(*features)
        try:
            yield
        finally:
            self._revert([record for record in selected if record not in before])

    # --- queries ---

    def statuses(self) -> tuple[PatchStatus, ...]:
        """Return the status of every patch and hook, in order of registration."""
        with WRITE_LOCK:
            return tuple(record.get_status() for record in self._records)

    # --- how apply() works ---

    def _apply(self, records: list[PatchRecord], finished: str = "") -> None:
        """Apply declarations: all or none. ``finished`` is the module whose import hook calls this, if one does."""
        try:
            plan = self._carry_out(records, finished)
        except PatchError as error:
            state = (
                PatchState.FAILED
                if isinstance(error, TargetNotFoundError)
                else PatchState(error.state)
            )
            with WRITE_LOCK:
                for record in records:
                    if record.declared in error.patches and not record.wrappers:
                        record.set_state(state, str(error))
            raise
        self._wait_for_imports(plan.modules)
        if plan.slot_plans and not finished:
            reset_compiled_code()

    def _carry_out(self, records: list[PatchRecord], finished: str) -> PatchPlan:
        """Plan, build and write, again until no other thread interferes; see [Note: callbacks outside the lock]."""
        while True:
            with WRITE_LOCK:
                records = [
                    one
                    for one in records
                    if one in self._records and (one.waits_for or not finished)
                ]
                self._restore_unshadowed()
                version, chains = self._version, list(self._chains)
            plan = make_plan(records, chains, version, finished)
            if plan.slot_plans:
                watch_for_torch()
            with contextlib.ExitStack() as undo:  # no hook stays installed where nothing is written
                plan.build_wrappers(undo)
                if self._commit(plan):
                    undo.pop_all()
                    return plan

    def _commit(self, plan: PatchPlan) -> bool:
        with WRITE_LOCK:
            if plan.version != self._version or not all(one.is_current for one in plan.slot_plans):
                return False
            self._write(plan.slot_plans)
            self._version += 1
            self._record(plan)
        return True

    def _write(self, slot_plans: Sequence[SlotPlan]) -> None:
        """Write all slots and references, or nothing if that fails."""
        written: list[tuple[list[SlotWrite], SlotWrite]] = []
        with contextlib.ExitStack() as undo:
            for one in slot_plans:
                chain = one.chain
                undo.callback(chain.activate(one.staged))
                for slot in one.slots:
                    written.append(
                        (
                            chain.writes,
                            write_reversibly(slot.owner, slot.name, chain.installed, undo),
                        )
                    )
            written += _rebind_references(slot_plans, undo)
            undo.pop_all()  # all is written
        for writes, write in written:
            writes.append(write)
        self._chains += [one.chain for one in slot_plans if one.chain not in self._chains]

    def _record(self, plan: PatchPlan) -> None:
        for record, chain, wrapper in plan.unreachable:
            _remove_wrapper(record, chain, wrapper)
            self._restore_slots([chain])
        for one in plan.slot_plans:
            for record in one.records:
                record.wrappers.append((one.chain, one.get_wrapper(record)))
                record.shadowed_chains = [
                    chain for chain in record.shadowed_chains if chain is not one.chain
                ]
                record.location = find_location(one.chain.original)
                self._set_applied(record)
        for record, handle in plan.handles:
            record.handle = handle
            self._set_applied(record)
        for record, state, reason, modules in plan.not_applied:
            record.set_state(state, reason, modules)
        for record, modules in plan.unloaded:
            record.waits_for = modules

    def _set_applied(self, record: PatchRecord) -> None:
        record.set_state(PatchState.APPLIED)
        record.applied_order = next(self._numbers)

    # --- targets that are imported later ---

    def _wait_for_imports(self, modules: Sequence[str]) -> None:
        for name in modules:
            call_after_import(name, self._apply_pending)
        for name in modules:
            if name in sys.modules:  # imported by another thread after the plan was made
                self._apply_pending(name)

    def _apply_pending(self, module: str) -> None:
        """Apply the patches that waited for a module, one feature after the other: one's failure stops no other."""
        with WRITE_LOCK:
            ready = [record for record in self._records if module in record.waits_for]
        for feature in dict.fromkeys(record.declared.feature for record in ready):
            own = [record for record in ready if record.declared.feature == feature]
            try:
                self._apply(own, module)
            except Exception as error:  # noqa: BLE001 - it is in the report, and must not break the user's import
                self._give_up(own, error, module)

    def _give_up(self, records: list[PatchRecord], error: Exception, finished: str) -> None:
        """Fail a feature's patches of one module when one of them failed; patches of other modules stay pending."""
        _logger.warning("patches were left out: %s", error)
        reason = f"left out because a patch of the feature failed: {error}"
        for record in [record for record in records if record.waits_for]:
            try:
                found = resolve_target(record.declared.name, finished)
            except PatchError as own:
                record.set_state(PatchState.FAILED, str(own))
                continue
            if isinstance(found, Slot):
                record.set_state(PatchState.FAILED, reason)
            else:
                record.set_state(record.state, found.reason, found.modules)
                self._wait_for_imports(found.modules)

    # --- how revert() works ---

    def _revert(self, records: list[PatchRecord]) -> None:
        """Revert declarations, the last first; those that wait for an import stop waiting."""
        with WRITE_LOCK:
            self._version += 1
            live = sorted(
                [one for one in records if one.is_live],
                key=lambda one: one.applied_order,
                reverse=True,
            )
            for record in records:
                record.waits_for = ()
            chains = self._remove_patches(live)
            handles = [(record, record.handle) for record in live if record.handle is not None]
            for record in live:
                record.handle = None
        problems: list[PatchError] = []
        for record, handle in handles:
            try:
                handle.remove()
            except Exception as error:  # noqa: BLE001 - the other hooks and patches must be removed all the same
                text = f"{record.declared} could not be removed: {error!r}; correct its remove()"
                problems.append(PatchError(text, record.declared))
                problems[-1].__cause__ = error
        if chains:
            reset_compiled_code()
        if problems:
            raise problems[0]

    def _remove_patches(self, records: list[PatchRecord]) -> list[WrapperChain]:
        """Take patches out of their chains and restore the slots; returns the chains."""
        chains_of = {record: [chain for chain, _ in record.wrappers] for record in records}
        for record in records:
            for chain, wrapper in reversed(list(record.wrappers)):
                _remove_wrapper(record, chain, wrapper)
            record.set_state(PatchState.REVERTED)
        chains = [chain for own in chains_of.values() for chain in own]
        shadowed = self._restore_slots(chains)
        for record, own in chains_of.items():
            record.shadowed_chains += [chain for chain in own if chain in shadowed]
            if record.shadowed_chains:
                above = record.shadowed_chains[-1].shadowed_by
                reason = f"{above} lies over it and was left alone; calls go to the original"
                record.set_state(PatchState.SHADOWED, reason)
        self._restore_unshadowed()
        return chains

    def _restore_slots(self, chains: Sequence[WrapperChain]) -> list[WrapperChain]:
        """Restore the slots of chains without wrappers; return those that another library's patch covers."""
        empty = [chain for chain in dict.fromkeys(chains) if not chain.wrappers]
        for chain in empty:
            chain.references = [write for write in reversed(chain.references) if not write.undo()]
            chain.writes = [write for write in reversed(chain.writes) if not write.undo()]
        _restore_late_references(empty)
        shadowed = [chain for chain in empty if chain.writes and chain.shadowed_by]
        self._chains = [chain for chain in self._chains if chain not in empty or chain in shadowed]
        return shadowed

    def _restore_unshadowed(self) -> None:
        """Restore slots with an empty chain over which no other patch lies any more."""
        restored = []
        for chain in [chain for chain in self._chains if not chain.wrappers]:
            chain.writes = [write for write in chain.writes if not write.undo()]
            restored += [] if chain.writes else [chain]
        if not restored:
            return
        self._version += 1
        self._chains = [chain for chain in self._chains if chain not in restored]
        for record in self._records:
            record.shadowed_chains = [
                chain for chain in record.shadowed_chains if chain not in restored
            ]
            if record.state is PatchState.SHADOWED and not record.shadowed_chains:
                record.set_state(PatchState.REVERTED)


def _remove_wrapper(record: PatchRecord, chain: WrapperChain, wrapper: Wrapper) -> None:
    chain.remove_wrapper(wrapper)
    record.retain_counts(wrapper)
    record.wrappers = [one for one in record.wrappers if one[1] is not wrapper]


def _rebind_references(
    slot_plans: Sequence[SlotPlan], undo: contextlib.ExitStack
) -> list[tuple[list[SlotWrite], SlotWrite]]:
    """Point references in other modules to the entries, and those in the packages of patch authors to the originals."""
    chains = [one.chain for one in slot_plans if is_module(one.chain.slot.owner)]
    if not chains:
        return []
    wanted = {
        id(function): chain
        for chain in chains
        for function in (chain.original, chain.entry.function)
    }
    is_author = {
        id(chain): match_packages(list_author_packages(one.patch.source for one in chain.wrappers))
        for chain in chains
    }
    slots = {
        (id(slot.owner), slot.name) for one in slot_plans for slot in (one.chain.slot, *one.slots)
    }
    written: list[tuple[list[SlotWrite], SlotWrite]] = []
    for module, name, found in list(find_references(wanted)):
        chain = wanted[found]
        of_author = is_author[id(chain)](str(get_namespace(module).get("__name__", "")))
        if found == id(chain.entry.function):
            if of_author and (id(module), name) not in slots:
                write_reversibly(module, name, chain.original, undo)
        elif not of_author and not keeps_original(module, chain.original):
            written.append(
                (chain.references, write_reversibly(module, name, chain.entry.function, undo))
            )
    return written


def _restore_late_references(chains: Sequence[WrapperChain]) -> None:
    """Point references that modules took to an entry after ``apply()`` to the originals."""
    entries = {id(chain.entry.function): chain for chain in chains if is_module(chain.slot.owner)}
    slots = {(id(write.owner), write.name) for chain in chains for write in chain.writes}
    for module, name, found in list(find_references(entries)) if entries else ():
        if (id(module), name) not in slots:
            get_namespace(module)[name] = entries[found].original


def reset_compiled_code() -> None:
    """Make compiled functions compile again at their next call.

    Dynamo does not guard on methods of library classes. Without a reset, a graph traced before ``apply()`` would run
    without the patch, and one traced before ``revert()`` with it.
    """
    dynamo = sys.modules.get("torch._dynamo")
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None or convert_frame is None or getattr(dynamo.__spec__, "_initializing", False):
        return
    if convert_frame.input_codes.seen:
        dynamo.reset_code_caches()
