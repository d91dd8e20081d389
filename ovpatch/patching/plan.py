"""The plan of one ``apply()``, which resolves and checks targets and writes nothing."""

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

_LIVE_STATES: Final = (PatchState.APPLIED, PatchState.PENDING)


@dataclass(eq=False)
class PatchRecord:
    """One declaration and its state. It changes under the write lock."""

    # The declaration: a patch or a hook.
    declared: Patch | Hook
    # The state after the last change. get_status() also reads the slot, which other libraries may overwrite.
    state: PatchState = PatchState.REGISTERED
    # The reason for the state.
    reason: str = ""
    # The chains that contain the patch, each with its wrapper there. The last chain is current; older chains belong to
    # code from before a reload.
    wrappers: list[tuple[WrapperChain, Wrapper]] = field(default_factory=list)
    # The chains whose slots could not be restored, because another patch covers them.
    shadowed_chains: list[WrapperChain] = field(default_factory=list)
    # The handle of the installed hook; None for a patch.
    handle: Removable | None = None
    # The modules whose import may define the target.
    waits_for: tuple[str, ...] = ()
    # The position among all applied records. ``revert()`` starts with the highest.
    applied_order: int = 0
    # File and line of the stock function.
    location: str = ""
    # The counts of wrappers that were removed.
    _calls: int = 0
    _traces: int = 0

    @property
    def is_live(self) -> bool:
        """True if there is something to revert."""
        return self.state in _LIVE_STATES or bool(self.wrappers)

    def set_state(
        self, state: PatchState, reason: str = "", waits_for: tuple[str, ...] = ()
    ) -> None:
        """Change the state."""
        self.state = state
        self.reason = reason
        self.waits_for = waits_for

    def retain_counts(self, wrapper: Wrapper) -> None:
        """Keep the counts of a wrapper that is removed."""
        self._calls += wrapper.calls
        self._traces += wrapper.traces

    def get_status(self) -> PatchStatus:
        """Return the status, which is ``shadowed`` if another library has overwritten the slot since."""
        for chain, _ in self.wrappers:
            chain.collect_counts()
        state, reason = self.state, self.reason
        last = self.wrappers[-1][0] if self.wrappers else None
        if state is PatchState.APPLIED and last is not None and not last.is_reached:
            cause = (
                f"{last.shadowed_by} took its place"
                if last.shadowed_by
                else "its module was executed again"
            )
            state, reason = PatchState.SHADOWED, f"{cause} after apply(): call apply() again"
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
    """Return the chain of a slot, if it has one.

    All module attributes that hold one function share a chain. Each class has its own chain, because a subclass may
    be patched without its base.
    """
    for chain in chains:
        are_in_modules = is_module(slot.owner) and is_module(chain.slot.owner)
        if chain.slot.is_same(slot):
            # A chain that was lost, for example by a reload, stays lost: the new function needs a new chain.
            if chain.is_reached:
                return chain
        elif (
            chain.wrappers
            and are_in_modules
            and (slot.raw is chain.installed or slot.raw is chain.original)
        ):
            return chain
    return None


def make_conflict_error(first: Patch, second: Patch, slot: Slot) -> PatchConflictError:
    """Return the error for two replacements of one slot."""
    names = " and ".join(dict.fromkeys((first.target, second.target)))
    remedies = " or ".join(dict.fromkeys((_say_how_to_omit(first), _say_how_to_omit(second))))
    return PatchConflictError(
        f"{first} and {second} both replace {format_owner(slot.owner)}.{slot.name} (as {names}), "
        f"and a function can have one replacement only. Turn one of them off ({remedies}), or let "
        "one of them wrap it: register_patch(target, wrap=function)",
        second,
        first,
    )


def _say_how_to_omit(patch: Patch) -> str:
    variable = f"OVPATCH_{patch.feature.upper().replace('-', '_')}=0"
    return variable if patch.feature else f"leave out the patch of {patch.target}"


@dataclass(eq=False)
class SlotPlan:
    """The patches that ``apply()`` will add to one slot."""

    # The chain that the patches join. A new chain is not installed yet.
    chain: WrapperChain
    # The slots that do not hold the installed function of the chain yet.
    slots: list[Slot] = field(default_factory=list)
    # The records of the patches to add.
    records: list[PatchRecord] = field(default_factory=list)
    # All wrappers of the chain after this plan.
    staged: Staged = field(default_factory=list)

    @property
    def is_current(self) -> bool:
        """True if the slots still hold the values that the plan was made for."""
        return all(
            read_slot(slot.owner, slot.name)
            is (slot.raw if slot.inherited_from is None else ABSENT)
            for slot in self.slots
        )

    def get_wrapper(self, record: PatchRecord) -> Wrapper:
        """Return the staged wrapper of one of the records."""
        return next(wrapper for wrapper, _, _ in self.staged if wrapper.patch is record.declared)

    def check_conflicts(self) -> None:
        """Raise a PatchConflictError that names both patches if the slot would have two replacements."""
        replacements = [
            wrapper.patch for wrapper in self.chain.wrappers if wrapper.patch.kind == "replace"
        ]
        for patch in map(_get_patch, self.records):
            if patch.kind == "replace" and replacements:
                raise make_conflict_error(replacements[0], patch, self.chain.slot)
            replacements += [patch] if patch.kind == "replace" else []

    def set_name(self) -> None:
        """Name the installed function of a new chain so that it can be pickled."""
        if self.chain.writes:
            return
        is_author = match_packages(
            list_author_packages(_get_patch(record).source for record in self.records)
        )
        original = self.chain.original
        set_picklable_name(
            self.chain.dispatcher.function,
            self.chain.slot,
            lambda module: is_author(module.__name__) or keeps_original(module, original),
        )


@dataclass(eq=False)
class PatchPlan:
    """The writes of one ``apply()``."""

    # The version of the manager when the plan was made. Another version then makes the plan outdated.
    version: int
    # The module whose import hook calls ``apply()``; empty if the script calls it.
    finished: str = ""
    # The patches to add, by slot.
    slot_plans: list[SlotPlan] = field(default_factory=list)
    # The hooks to install.
    hooks: list[tuple[PatchRecord, Hook]] = field(default_factory=list)
    # The handles of the hooks that this plan has installed.
    handles: list[tuple[PatchRecord, Removable]] = field(default_factory=list)
    # The patches that will not be applied, with state, reason and the modules that may define the target.
    not_applied: list[tuple[PatchRecord, PatchState, str, tuple[str, ...]]] = field(
        default_factory=list
    )
    # The applied patches whose module was removed, with the modules that may define the target again.
    unloaded: list[tuple[PatchRecord, tuple[str, ...]]] = field(default_factory=list)
    # The wrappers that calls no longer reach, because their slot was overwritten.
    unreachable: list[tuple[PatchRecord, WrapperChain, Wrapper]] = field(default_factory=list)

    @property
    def modules(self) -> list[str]:
        """The modules whose import may define a target."""
        waiting = [modules for _, modules in self.unloaded] + [
            modules for *_, modules in self.not_applied
        ]
        return list(dict.fromkeys(name for modules in waiting for name in modules))

    def add(self, record: PatchRecord, chains: Sequence[WrapperChain]) -> None:
        """Resolve and check one declaration, unless it is in force.

        Raises:
            PatchError: The declaration cannot be applied.
        """
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
            self._add_without_slot(record, patch, found)
            return
        mismatch = explain_torch_mismatch(patch.torch) if patch.torch else None
        if mismatch:
            remedy = (
                f"install a torch that fits, turn {patch} off, or register it with optional=True"
            )
            self._refuse(record, f"{patch} cannot patch {patch.target}: {mismatch}; {remedy}")
            return
        chain = find_chain(chains, found)
        if all(joined is not chain for joined, _ in record.wrappers):
            self._add_to_slot(record, patch, found, chain)

    def _add_without_slot(
        self, record: PatchRecord, patch: Patch, found: PendingTarget | MissingTarget
    ) -> None:
        # The patched code is still alive although its module was removed, so the patch stays applied.
        if record.wrappers:
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
        # After a reload, objects from before still run the old chain, so its wrappers stay.
        self.unreachable.extend(
            (record, joined, wrapper)
            for joined, wrapper in record.wrappers
            if joined.slot.is_same(slot) and not joined.is_reloaded
        )

    def _get_slot_plan(self, slot: Slot, chain: WrapperChain | None) -> SlotPlan:
        """Return the plan of a slot, and add the slot to it unless the slot holds the installed function already."""
        slot_plan = next(
            (
                slot_plan
                for slot_plan in self.slot_plans
                if slot_plan.chain is chain or _share_chain(slot_plan.chain.slot, slot)
            ),
            None,
        )
        if slot_plan is None:
            slot_plan = SlotPlan(chain or WrapperChain(slot))
            self.slot_plans.append(slot_plan)
        is_installed = chain is not None and (
            slot.raw is chain.installed or chain.slot.is_same(slot)
        )
        if not is_installed and not any(known.is_same(slot) for known in slot_plan.slots):
            slot_plan.slots.append(slot)
        return slot_plan

    def _refuse(self, record: PatchRecord, text: str) -> None:
        """Raise an IncompatiblePatchError unless the patch is optional."""
        patch = _get_patch(record)
        if not patch.optional:
            raise IncompatiblePatchError(text, patch)
        # A patch that is in force elsewhere, in code from before a reload, keeps its state.
        if not record.wrappers:
            self.not_applied.append((record, PatchState.INCOMPATIBLE, text, ()))

    def build_wrappers(self, undo: ExitStack) -> None:
        """Call the wrap functions and install the hooks, which ``undo`` removes again.

        Raises:
            PatchError: A wrap function or an installation fails.
        """
        for slot_plan in self.slot_plans:
            self._stage(slot_plan)
        self.slot_plans = [slot_plan for slot_plan in self.slot_plans if slot_plan.staged]
        for record, hook in self.hooks:
            handle = _install_hook(hook)
            undo.callback(handle.remove)
            self.handles.append((record, handle))

    def _stage(self, slot_plan: SlotPlan) -> None:
        while slot_plan.records:
            try:
                slot_plan.staged = slot_plan.chain.stage_patches(
                    [_get_patch(record) for record in slot_plan.records]
                )
                return
            except IncompatiblePatchError as error:
                # Only the call of a wrap function shows the signature of its wrapper. An optional patch that does not
                # fit is left out, and the chain is staged without it.
                record = next(
                    record for record in slot_plan.records if record.declared in error.patches
                )
                self._refuse(record, str(error))
                slot_plan.records.remove(record)


def make_plan(
    records: Sequence[PatchRecord], chains: Sequence[WrapperChain], version: int, finished: str = ""
) -> PatchPlan:
    """Return the checked plan of the declarations that are not in force yet.

    Args:
        records: The declarations to apply.
        chains: The chains of the slots that are patched already.
        version: The version of the manager.
        finished: The module whose import hook calls ``apply()``; empty if the script calls it.

    Raises:
        PatchError: A declaration cannot be applied.
    """
    plan = PatchPlan(version, finished)
    for record in records:
        plan.add(record, chains)
    for slot_plan in plan.slot_plans:
        slot_plan.check_conflicts()
        slot_plan.set_name()
    return plan


def _share_chain(first: Slot, second: Slot) -> bool:
    """Return whether two slots share a chain: they are one slot, or two modules hold one function in them."""
    return first.is_same(second) or (
        first.raw is second.raw and is_module(first.owner) and is_module(second.owner)
    )


def _get_patch(record: PatchRecord) -> Patch:
    assert isinstance(record.declared, Patch)
    return record.declared


def _install_hook(hook: Hook) -> Removable:
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
            "an object with a method remove()",
            hook,
        )
    return handle
