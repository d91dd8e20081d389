"""The patch manager, as its users see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ovpatch.patching.engine import Engine
from ovpatch.patching.entries import find_stack, holder
from ovpatch.patching.errors import PatchError, TargetNotFoundError
from ovpatch.patching.journal import LOCK
from ovpatch.patching.originals import function_in
from ovpatch.patching.patches import Hook, Patch, PatchStatus, Removable, Wrap
from ovpatch.patching.targets import Place, resolve


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
    def _place(target: str) -> Place:
        found = resolve(target)
        if isinstance(found, Place):
            return holder(found)
        raise TargetNotFoundError(f"{target}: {found.reason}")
