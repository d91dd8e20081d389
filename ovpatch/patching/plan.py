"""The plan of one ``apply()``: targets are resolved and checked here, and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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
    explain_torch_mismatch,
)
from ovpatch.patching.references import keeps_original, list_author_packages, match_packages
from ovpatch.patching.slot import read_slot, set_picklable_name
from ovpatch.patching.target import (
    ABSENT,
    MissingTarget,
    PendingTarget,
    Slot,
    format_owner,
    is_module,
    resolve_target,
)
from ovpatch.patching.wrapper_chain import Staged, Wrapper, WrapperChain

_LIVE: Final = (PatchState.APPLIED, PatchState.PENDING)


@dataclass(eq=False)
class PatchRecord:
    """One declaration and its state; changes under the write lock."""

    declared: Patch | Hook  # the patch or hook
    state: PatchState = (
        PatchState.REGISTERED
    )  # state at the last change; get_status() looks at the slot as well
    reason: str = ""  # why it is in this state
    # The patch in its chains. The last one is current; older ones belong to code from before a reload.
    wrappers: list[tuple[WrapperChain, Wrapper]] = field(default_factory=list)
    shadowed_chains: list[WrapperChain] = field(
        default_factory=list
    )  # not restored: another patch lies over them
    handle: Removable | None = None  # handle of the installed hook
    waits_for: tuple[str, ...] = ()  # modules whose import may bring the target
    applied_order: int = 0  # position among all applied records; ``revert()`` goes backwards
    location: str = ""  # file and line of the stock function
    _calls: int = 0
    _traces: int = 0

    @property
    def is_live(self) -> bool:
        """Whether there is something to revert."""
        return self.state in _LIVE or bool(self.wrappers)

    def set_state(
        self, state: PatchState, reason: str = "", waits_for: tuple[str, ...] = ()
    ) -> None:
        """Change the state."""
        self.state, self.reason, self.waits_for = state, reason, waits_for

    def retain_counts(self, wrapper: Wrapper) -> None:
        """Keep the counts of a wrapper that is removed."""
        self._calls += wrapper.calls
        self._traces += wrapper.traces

    def get_status(self) -> PatchStatus:
        """Return the status; a slot that another library has overwritten since makes it ``shadowed``."""
        for chain, _ in self.wrappers:
            chain.collect_counts()
        state, reason = self.state, self.reason
        last = self.wrappers[-1][0] if self.wrappers else None
        if state is PatchState.APPLIED and last is not None and not last.is_reached:
            lost = (
                f"{last.shadowed_by} took its place"
                if last.shadowed_by
                else "its module was executed again"
            )
            state, reason = PatchState.SHADOWED, f"{lost} after apply(): call apply() again"
        return PatchStatus(
            target=self.declared.name,
            feature=self.declared.feature,
            kind=self.declared.kind,
            state=state,
            reason=reason,
            calls=self._calls + sum(wrapper.calls for _, wrapper in self.wrappers),
            location=self.location,
            rebound=tuple(name for chain, _ in self.wrappers for name in chain.rebound),
            why=self.declared.why,
            expires=self.declared.expires,
            traces=self._traces + sum(wrapper.traces for _, wrapper in self.wrappers),
        )


def find_chain(chains: Sequence[WrapperChain], slot: Slot) -> WrapperChain | None:
    """Return the chain of a slot: all module attributes that hold one function share it, each class has its own."""
    for chain in chains:
        of_modules = is_module(slot.owner) and is_module(chain.slot.owner)
        if chain.slot.is_same(slot):
            if chain.is_reached:
                return chain
        elif (
            chain.wrappers
            and of_modules
            and (slot.raw is chain.installed or slot.raw is chain.original)
        ):
            return chain
    return None


def make_conflict_error(one: Patch, other: Patch, slot: Slot) -> PatchConflictError:
    """Return the error for two replacements of one slot."""
    names = " and ".join(dict.fromkeys((one.target, other.target)))
    remedies = " or ".join(dict.fromkeys((_turn_off(one), _turn_off(other))))
    return PatchConflictError(
        f"{one} and {other} both replace {format_owner(slot.owner)}.{slot.name} (as {names}), and "
        "a function can have "
        f"one replacement only. Turn one of them off ({remedies}), or let one of them wrap it: "
        "register_patch(target, wrap=function)",
        other,
        one,
    )


def _turn_off(patch: Patch) -> str:
    variable = f"OVPATCH_{patch.feature.upper().replace('-', '_')}=0"
    return variable if patch.feature else f"leave out the patch of {patch.target}"


@dataclass(eq=False)
class SlotPlan:
    """The patches of one slot that are to be added."""

    chain: WrapperChain  # chain that they join; not installed yet if it is new
    slots: list[Slot] = field(default_factory=list)  # slots that do not hold the chain's entry yet
    records: list[PatchRecord] = field(default_factory=list)  # patches to add
    staged: Staged = field(default_factory=list)  # the wrappers of the chain after this plan

    @property
    def is_current(self) -> bool:
        """Whether the slots still hold what the planning found."""
        return all(
            read_slot(slot.owner, slot.name)
            is (slot.raw if slot.inherited_from is None else ABSENT)
            for slot in self.slots
        )

    def get_wrapper(self, record: PatchRecord) -> Wrapper:
        """Return the staged wrapper of one of the records."""
        return next(wrapper for wrapper, _, _ in self.staged if wrapper.patch is record.declared)

    def check_conflicts(self) -> None:
        """Raise a PatchConflictError that names both, if the slot would have two replacements."""
        replacements = [
            wrapper.patch for wrapper in self.chain.wrappers if wrapper.patch.kind == "replace"
        ]
        for patch in map(_patch, self.records):
            if patch.kind == "replace" and replacements:
                raise make_conflict_error(replacements[0], patch, self.chain.slot)
            replacements += [patch] if patch.kind == "replace" else []

    def set_name(self) -> None:
        """Name the entry of a new chain so that it can be pickled."""
        if self.chain.writes:
            return
        of_author = match_packages(
            list_author_packages(_patch(record).source for record in self.records)
        )
        original = self.chain.original
        set_picklable_name(
            self.chain.entry.function,
            self.chain.slot,
            lambda module: of_author(module.__name__) or keeps_original(module, original),
        )


@dataclass(eq=False)
class PatchPlan:
    """The writes of one ``apply()``."""

    version: int  # version of the manager at planning
    finished: str = ""  # module whose import hook calls ``apply()``, if one does
    slot_plans: list[SlotPlan] = field(default_factory=list)  # patches to add, by slot
    hooks: list[tuple[PatchRecord, Hook]] = field(default_factory=list)  # hooks to install
    handles: list[tuple[PatchRecord, Removable]] = field(
        default_factory=list
    )  # of the hooks that are installed
    # Patches that are not applied, with state, reason and the modules that may bring the target.
    not_applied: list[tuple[PatchRecord, PatchState, str, tuple[str, ...]]] = field(
        default_factory=list
    )
    # Applied patches whose module was removed, with the modules that may bring it back.
    unloaded: list[tuple[PatchRecord, tuple[str, ...]]] = field(default_factory=list)
    # Wrappers that no call reaches any more, because their slot was overwritten.
    unreachable: list[tuple[PatchRecord, WrapperChain, Wrapper]] = field(default_factory=list)

    @property
    def modules(self) -> list[str]:
        """Modules whose import may bring a target."""
        waiting = [modules for _, modules in self.unloaded] + [
            modules for *_, modules in self.not_applied
        ]
        return list(dict.fromkeys(name for modules in waiting for name in modules))

    def add(self, record: PatchRecord, chains: Sequence[WrapperChain]) -> None:
        """Resolve and check one declaration, unless it is in force; raise PatchError if it cannot be applied."""
        if isinstance(record.declared, Hook):
            if record.state is not PatchState.APPLIED:
                self.hooks.append((record, record.declared))
            return
        patch = record.declared
        try:
            found = resolve_target(patch.target, self.finished)
        except IncompatiblePatchError as error:
            self._refuse(record, f"{patch}: {error}")
            return
        if not isinstance(found, Slot):
            self._add_absent(record, patch, found)
            return
        mismatch = explain_torch_mismatch(patch.torch) if patch.torch else None
        if mismatch:
            remedy = (
                f"install a torch that fits, turn {patch} off, or register it with optional=True"
            )
            self._refuse(record, f"{patch} cannot patch {patch.target}: {mismatch}; {remedy}")
            return
        chain = find_chain(chains, found)
        if all(where is not chain for where, _ in record.wrappers):
            self._add_to_slot(record, patch, found, chain)

    def _add_absent(
        self, record: PatchRecord, patch: Patch, found: PendingTarget | MissingTarget
    ) -> None:
        if record.wrappers:  # the patched code is still alive although its module was removed
            self.unloaded.append((record, found.modules))
        elif isinstance(found, PendingTarget):
            self.not_applied.append((record, PatchState.PENDING, found.reason, found.modules))
        elif patch.optional:
            self.not_applied.append((record, PatchState.SKIPPED, found.reason, found.modules))
        else:
            raise TargetNotFoundError(f"{patch}: {found.error}", patch)

    def _add_to_slot(
        self, record: PatchRecord, patch: Patch, slot: Slot, chain: WrapperChain | None
    ) -> None:
        try:
            slot_plan = self._get_slot_plan(slot, chain)
            if patch.wrap is None:
                slot_plan.chain.check_replacement(patch)
        except IncompatiblePatchError as error:
            self._refuse(record, str(error) if error.patches else f"{patch}: {error}")
            return
        slot_plan.records.append(record)
        self.unreachable.extend(
            (record, where, wrapper)
            for where, wrapper in record.wrappers
            if where.slot.is_same(slot) and not where.is_reloaded
        )

    def _get_slot_plan(self, slot: Slot, chain: WrapperChain | None) -> SlotPlan:
        """Return the plan of a slot, and add the slot to it unless it holds the entry already."""
        slot_plan = next(
            (one for one in self.slot_plans if one.chain is chain or _share(one.chain.slot, slot)),
            None,
        )
        if slot_plan is None:
            slot_plan = SlotPlan(chain or WrapperChain(slot))
            self.slot_plans.append(slot_plan)
        holds_entry = chain is not None and (
            slot.raw is chain.installed or chain.slot.is_same(slot)
        )
        if not holds_entry and not any(known.is_same(slot) for known in slot_plan.slots):
            slot_plan.slots.append(slot)
        return slot_plan

    def _refuse(self, record: PatchRecord, text: str) -> None:
        """Raise, unless the patch is optional."""
        patch = _patch(record)
        if not patch.optional:
            raise IncompatiblePatchError(text, patch)
        if not record.wrappers:
            self.not_applied.append((record, PatchState.INCOMPATIBLE, text, ()))

    def build_wrappers(self, undo: ExitStack) -> None:
        """Call the wrap functions and install the hooks, which ``undo`` removes; PatchError if one of them fails."""
        for slot_plan in self.slot_plans:
            self._stage(slot_plan)
        self.slot_plans = [slot_plan for slot_plan in self.slot_plans if slot_plan.staged]
        for record, hook in self.hooks:
            handle = _install(hook)
            undo.callback(handle.remove)
            self.handles.append((record, handle))

    def _stage(self, slot_plan: SlotPlan) -> None:
        while slot_plan.records:
            try:
                slot_plan.staged = slot_plan.chain.stage_patches(
                    [_patch(record) for record in slot_plan.records]
                )
                return
            except IncompatiblePatchError as error:
                # The signature of a wrapper is known only after wrap has returned it.
                record = next(
                    record for record in slot_plan.records if record.declared in error.patches
                )
                self._refuse(record, str(error))
                slot_plan.records.remove(record)


def make_plan(
    records: Sequence[PatchRecord], chains: Sequence[WrapperChain], version: int, finished: str = ""
) -> PatchPlan:
    """Resolve and check the declarations to apply, except those in force; raise PatchError if one cannot be applied.

    ``finished`` is the module whose import hook calls ``apply()``, if one does.
    """
    plan = PatchPlan(version, finished)
    for record in records:
        plan.add(record, chains)
    for slot_plan in plan.slot_plans:
        slot_plan.check_conflicts()
        slot_plan.set_name()
    return plan


def _share(one: Slot, other: Slot) -> bool:
    """Whether two slots share a chain: they are one slot, or two modules hold one function in them."""
    return one.is_same(other) or (
        one.raw is other.raw and is_module(one.owner) and is_module(other.owner)
    )


def _patch(record: PatchRecord) -> Patch:
    assert isinstance(record.declared, Patch)
    return record.declared


def _install(hook: Hook) -> Removable:
    try:
        handle = hook.install()
    except Exception as error:
        raise PatchError(
            f"{hook} could not be installed: {error!r}. Nothing of this call is applied; correct "
            "it, or leave it out",
            hook,
        ) from error
    if not callable(getattr(handle, "remove", None)):
        raise PatchError(
            f"{hook} returned {handle!r} when it was installed: it must return a handle. Return "
            "one with a method "
            "remove()",
            hook,
        )
    return handle
