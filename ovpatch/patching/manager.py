"""The patch manager, which registers, applies and reverts patches."""

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
    """Patches of functions and methods, which the manager registers, applies and reverts. It needs no plugin.

    [Note: callbacks outside the lock]
    ``apply()`` plans, checks signatures, calls wrap functions and installs hooks without a lock. Then it takes the
    write lock and writes the slots. If another thread has changed something in between, it discards the plan and
    starts again. No thread waits for a callback of another thread, so an import on one thread cannot deadlock with
    ``apply()`` on another. A wrap function may therefore be called without its result being used.

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
        # All declarations, in order of registration.
        self._records: list[PatchRecord] = []
        # The chains of all patched slots, including empty chains whose slots could not be restored yet.
        self._chains: list[WrapperChain] = []
        # The numbers that order registrations and applied patches.
        self._numbers = itertools.count(1)
        # Changes with every write. A plan that was made for another version is outdated.
        self._version = 0

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
            replacement: Function to call instead. A function may have one replacement, which is the innermost patch.
            wrap: Function that takes the original and returns the function to call instead. A function may have any
                number of wrappers. :meth:`apply` calls ``wrap`` without a lock, and perhaps more than once.
            feature: Name under which the patch is applied and reverted.
            optional: Whether :meth:`apply` skips a missing or incompatible target instead of raising.
            order: Position among wrappers; lower is closer to the original. Equal numbers keep the order of
                registration.
            torch: Versions of torch that the patch was written for, such as ``">=2.11,<2.16"``; None for all.
            why: The binding that callers use, and the reason why no official hook is enough.
            expires: Condition under which the patch can be deleted, and the issue.

        Raises:
            DeclarationError: The declaration itself is wrong.
        """
        number = next(self._numbers)
        self._add(
            Patch(target, replacement, wrap, feature, optional, order, torch, why, expires, number)
        )

    def register_hook(
        self, name: str, install: Callable[[], Removable], *, feature: str = "", why: str = ""
    ) -> None:
        """Declare an official hook. Prefer it to a patch wherever torch has one.

        Args:
            name: Name in the report.
            install: Function that registers the hook and returns its handle, which has ``remove()``. :meth:`apply`
                calls it without a lock, and perhaps more than once.
            feature: Name under which the hook is installed and removed.
            why: Purpose of the hook.

        Raises:
            DeclarationError: ``install`` is not callable.
        """
        self._add(Hook(name, install, feature, why, next(self._numbers)))

    def _add(self, declared: Patch | Hook) -> None:
        with WRITE_LOCK:
            if not any(declared.is_same_as(record.declared) for record in self._records):
                self._records.append(PatchRecord(declared))

    def unregister(self, *features: str) -> None:
        """Delete the declarations of some features, by default of all.

        Raises:
            PatchError: Some of these patches are still applied or pending.
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
        """Apply all patches and hooks of some features, by default of all features, or none of them.

        Patches in force stay. Patches that were lost, for example by a reload, are installed again. A patch of a
        target that is not imported yet is pending; it is applied after the import.

        Raises:
            PatchError: A patch cannot be applied, or a feature has no patches. Nothing is applied then.
        """
        known = {record.declared.feature for record in self._select(())}
        for name in features:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise PatchError(
                    f"nothing is registered for feature {name!r}.{hint} Correct the name, or "
                    "register its patches before they are applied"
                )
        self._apply(self._select(features))

    def revert(self, *features: str) -> None:
        """Revert the patches of some features, by default of all, starting with the last applied.

        If another library has patched a function afterwards, its patch stays. The function that it covers then calls
        the original, and the state is ``shadowed``.

        Raises:
            PatchError: The handle of a hook could not be removed. Everything else was reverted.
        """
        self._revert(self._select(features))

    @contextlib.contextmanager
    def applied(self, *features: str) -> Iterator[None]:
        """Apply for a ``with`` block. Its end reverts everything that was not applied before."""
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
        """Apply all declarations or none. ``finished`` is the module whose import hook calls this, or empty."""
        try:
            plan = self._plan_and_write(records, finished)
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
        # No compiled code can contain functions of a module whose import has just ended.
        if plan.slot_plans and not finished:
            reset_compiled_code()

    def _plan_and_write(self, records: list[PatchRecord], finished: str) -> PatchPlan:
        """Plan, build and write until no other thread interferes; see [Note: callbacks outside the lock]."""
        while True:
            with WRITE_LOCK:
                # Another thread may have unregistered or, in an import hook, already applied some of these.
                records = [
                    record
                    for record in records
                    if record in self._records and (record.waits_for or not finished)
                ]
                self._restore_unshadowed()
                version, chains = self._version, list(self._chains)
            plan = make_plan(records, chains, version, finished)
            if plan.slot_plans:
                watch_for_torch()
            # No hook stays installed if nothing is written.
            with contextlib.ExitStack() as undo:
                plan.build_wrappers(undo)
                if self._commit(plan):
                    undo.pop_all()
                    return plan

    def _commit(self, plan: PatchPlan) -> bool:
        with WRITE_LOCK:
            # Another manager, or another library, changes slots without changing this manager's version.
            are_slots_current = all(slot_plan.is_current for slot_plan in plan.slot_plans)
            if plan.version != self._version or not are_slots_current:
                return False
            self._write_slots(plan.slot_plans)
            self._version += 1
            self._record_plan(plan)
        return True

    def _write_slots(self, slot_plans: Sequence[SlotPlan]) -> None:
        """Write all slots and references, or nothing if that fails."""
        # Each write with the list of its chain that will record it.
        written: list[tuple[list[SlotWrite], SlotWrite]] = []
        with contextlib.ExitStack() as undo:
            for slot_plan in slot_plans:
                chain = slot_plan.chain
                undo.callback(chain.activate(slot_plan.staged))
                for slot in slot_plan.slots:
                    written.append(
                        (
                            chain.writes,
                            write_reversibly(slot.owner, slot.name, chain.installed, undo),
                        )
                    )
            written += _rebind_references(slot_plans, undo)
            # All writes have succeeded, so leaving the block must undo none of them.
            undo.pop_all()
        for writes, write in written:
            writes.append(write)
        self._chains += [
            slot_plan.chain for slot_plan in slot_plans if slot_plan.chain not in self._chains
        ]

    def _record_plan(self, plan: PatchPlan) -> None:
        for record, chain, wrapper in plan.unreachable:
            _remove_wrapper(record, chain, wrapper)
            self._restore_slots([chain])
        for slot_plan in plan.slot_plans:
            for record in slot_plan.records:
                record.wrappers.append((slot_plan.chain, slot_plan.get_wrapper(record)))
                record.shadowed_chains = [
                    chain for chain in record.shadowed_chains if chain is not slot_plan.chain
                ]
                record.location = find_location(slot_plan.chain.original)
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
            # Another thread may have imported the module after the plan was made and before the listener existed.
            if name in sys.modules:
                self._apply_pending(name)

    def _apply_pending(self, module: str) -> None:
        """Apply the patches that waited for a module, by feature: the failure of one feature stops no other."""
        with WRITE_LOCK:
            ready = [record for record in self._records if module in record.waits_for]
        for feature in dict.fromkeys(record.declared.feature for record in ready):
            records = [record for record in ready if record.declared.feature == feature]
            try:
                self._apply(records, module)
            except Exception as error:  # noqa: BLE001 - the report has it, and the user's import must succeed
                self._fail_feature(records, error, module)

    def _fail_feature(self, records: list[PatchRecord], error: Exception, finished: str) -> None:
        """Mark a feature's patches of one module as failed; patches of other modules stay pending."""
        _logger.warning("patches were left out: %s", error)
        reason = f"left out because a patch of the feature failed: {error}"
        for record in [record for record in records if record.waits_for]:
            try:
                found = resolve_target(record.declared.name, finished)
            except PatchError as own_error:
                record.set_state(PatchState.FAILED, str(own_error))
                continue
            if isinstance(found, Slot):
                record.set_state(PatchState.FAILED, reason)
            else:
                record.set_state(record.state, found.reason, found.modules)
                self._wait_for_imports(found.modules)

    # --- how revert() works ---

    def _revert(self, records: list[PatchRecord]) -> None:
        """Revert declarations, starting with the last applied. They no longer wait for imports either."""
        with WRITE_LOCK:
            self._version += 1
            live = sorted(
                [record for record in records if record.is_live],
                key=lambda record: record.applied_order,
                reverse=True,
            )
            for record in records:
                record.waits_for = ()
            chains = self._remove_patches(live)
            handles = [(record, record.handle) for record in live if record.handle is not None]
            for record in live:
                record.handle = None
        # remove() is a callback, so it runs without the lock.
        failures: list[PatchError] = []
        for record, handle in handles:
            try:
                handle.remove()
            except Exception as error:  # noqa: BLE001 - the remaining hooks and patches must be removed nevertheless
                text = f"{record.declared} could not be removed: {error!r}; correct its remove()"
                failures.append(PatchError(text, record.declared))
                failures[-1].__cause__ = error
        if chains:
            reset_compiled_code()
        if failures:
            raise failures[0]

    def _remove_patches(self, records: list[PatchRecord]) -> list[WrapperChain]:
        """Remove patches from their chains and restore the slots. Return the chains."""
        record_chains = {record: [chain for chain, _ in record.wrappers] for record in records}
        for record in records:
            for chain, wrapper in reversed(list(record.wrappers)):
                _remove_wrapper(record, chain, wrapper)
            record.set_state(PatchState.REVERTED)
        chains = [chain for left in record_chains.values() for chain in left]
        shadowed = self._restore_slots(chains)
        for record, left in record_chains.items():
            record.shadowed_chains += [chain for chain in left if chain in shadowed]
            if record.shadowed_chains:
                above = record.shadowed_chains[-1].shadowed_by
                reason = f"{above} covers it and was left alone; calls go to the original"
                record.set_state(PatchState.SHADOWED, reason)
        self._restore_unshadowed()
        return chains

    def _restore_slots(self, chains: Sequence[WrapperChain]) -> list[WrapperChain]:
        """Restore the slots of chains without wrappers; return those that another library's patch covers."""
        empty = [chain for chain in dict.fromkeys(chains) if not chain.wrappers]
        # undo() writes nothing if the slot was overwritten since. Such a write stays in the list for a later attempt.
        for chain in empty:
            chain.references = [write for write in reversed(chain.references) if not write.undo()]
            chain.writes = [write for write in reversed(chain.writes) if not write.undo()]
        _restore_late_references(empty)
        shadowed = [chain for chain in empty if chain.writes and chain.shadowed_by]
        self._chains = [chain for chain in self._chains if chain not in empty or chain in shadowed]
        return shadowed

    def _restore_unshadowed(self) -> None:
        """Restore the slots of empty chains that no other patch covers any longer."""
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
    record.wrappers = [
        (joined, remaining) for joined, remaining in record.wrappers if remaining is not wrapper
    ]


def _rebind_references(
    slot_plans: Sequence[SlotPlan], undo: contextlib.ExitStack
) -> list[tuple[list[SlotWrite], SlotWrite]]:
    """Point references in other modules to the installed functions.

    References in the packages of patch authors point to the originals, see :func:`.list_author_packages`. A function
    that an author's package imported while another patch was applied is changed back.
    """
    chains = [slot_plan.chain for slot_plan in slot_plans if is_module(slot_plan.chain.slot.owner)]
    if not chains:
        return []
    wanted = {
        id(function): chain
        for chain in chains
        for function in (chain.original, chain.dispatcher.function)
    }
    # Predicates on the name of a module, by chain.
    author_checks = {
        id(chain): match_packages(
            list_author_packages(wrapper.patch.source for wrapper in chain.wrappers)
        )
        for chain in chains
    }
    # The slots themselves are written already. An author may also patch its own package.
    slots = {
        (id(slot.owner), slot.name)
        for slot_plan in slot_plans
        for slot in (slot_plan.chain.slot, *slot_plan.slots)
    }
    written: list[tuple[list[SlotWrite], SlotWrite]] = []
    for module, name, found in list(find_references(wanted)):
        chain = wanted[found]
        is_author = author_checks[id(chain)](str(get_namespace(module).get("__name__", "")))
        if found == id(chain.dispatcher.function):
            if is_author and (id(module), name) not in slots:
                write_reversibly(module, name, chain.original, undo)
        elif not is_author and not keeps_original(module, chain.original):
            written.append(
                (chain.references, write_reversibly(module, name, chain.dispatcher.function, undo))
            )
    return written


def _restore_late_references(chains: Sequence[WrapperChain]) -> None:
    """Point references to an installed function that modules took after ``apply()`` to the original."""
    installed = {
        id(chain.dispatcher.function): chain
        for chain in chains
        if is_module(chain.slot.owner) and chain.is_shared
    }
    slots = {(id(write.owner), write.name) for chain in chains for write in chain.writes}
    for module, name, found in list(find_references(installed)) if installed else ():
        if (id(module), name) not in slots:
            get_namespace(module)[name] = installed[found].original


def reset_compiled_code() -> None:
    """Make compiled functions compile again at their next call.

    Dynamo guards on functions that code reads from a module, but not on methods of library classes. Without a reset, a
    graph from before ``apply()`` would run without a patch of a method, and a graph from before ``revert()`` with it.
    """
    dynamo = sys.modules.get("torch._dynamo")
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    # Dynamo that is not imported, or is half imported, has compiled nothing.
    if dynamo is None or convert_frame is None or getattr(dynamo.__spec__, "_initializing", False):
        return
    if convert_frame.input_codes.seen:
        dynamo.reset_code_caches()
