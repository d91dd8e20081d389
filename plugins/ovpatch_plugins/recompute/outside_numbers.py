"""Numbers outside of a block's modules that its forward changes, such as counters of calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType
from typing import Any, Final, NamedTuple

# Types of numbers. A flag is none: if it says that something is prepared, a second forward must not prepare it again.
_NUMBERS: Final = (int, float)
# Types that a value may have before it becomes another number.
_PLAIN: Final = (*_NUMBERS, type(None))


class _Missing:
    """The value of a key that does not exist."""


class _Other:
    """The value of a key whose value is not to be restored, and may hold a graph."""


class NumberPlace(NamedTuple):
    """A place that may hold numbers.

    Attributes:
        owner: A dictionary, a list, a class, or the cell of a closure's variable.
        names: The keys or attributes that are read; None for all of them.
    """

    owner: Any
    names: Collection[str] | None = None

    def read(self) -> dict[Any, Any]:
        """Return the values by key."""
        owner = self.owner
        if type(owner) is CellType:
            return _read_cell(owner)
        if type(owner) is list:
            return dict(enumerate(owner))
        # Another thread may add an item while this one looks for numbers, so it looks in a copy.
        items = dict(vars(owner) if isinstance(owner, type) else owner)
        keys = items if self.names is None else items.keys() & self.names
        return {key: items[key] for key in keys}

    def is_changed(self, before: Any, now: float) -> bool:
        """Return whether a number is another one than before the forward, and can be restored."""
        if type(before) in _PLAIN:
            return bool(before != now)
        # From anything but a dictionary, a number that the forward has added cannot be removed.
        return before is _Missing and type(self.owner) is dict

    def write(self, key: Any, value: Any) -> None:
        """Write a value, or remove it from a dictionary if it is missing."""
        owner = self.owner
        if isinstance(owner, type):
            setattr(owner, key, value)
        elif type(owner) is CellType:
            owner.cell_contents = value
        elif type(owner) is dict and value is _Missing:
            owner.pop(key, None)
        elif type(owner) is dict or key < len(owner):
            owner[key] = value


def _read_cell(cell: CellType) -> dict[Any, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:
        # The variable has no value yet.
        return {}


class OutsideNumbers:
    """The numbers outside of a block's modules that its forward changes, as they are before it.

    The recomputation starts from these numbers and then restores the current values, so each number changes
    once, as in stock PyTorch.

    Args:
        places: The places that the forward may write to.
    """

    def __init__(self, places: Sequence[NumberPlace]) -> None:
        # The values of each place before the forward: all of them during it, and after it the numbers that it changed.
        self._before: list[tuple[NumberPlace, dict[Any, Any]]] = []
        for place in places:
            values = place.read().items()
            before = {key: value if type(value) in _PLAIN else _Other for key, value in values}
            self._before.append((place, before))

    def end_forward(self) -> bool:
        """Keep the numbers that the forward has changed, and return whether there are any."""
        all_before, self._before = self._before, []
        for place, before in all_before:
            changed = {
                key: before.get(key, _Missing)
                for key, value in place.read().items()
                if type(value) in _NUMBERS and place.is_changed(before.get(key, _Missing), value)
            }
            if changed:
                self._before.append((place, changed))
        return bool(self._before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the numbers of before the forward in this context; afterwards, restore the current values."""
        current = []
        for place, before in self._before:
            items = place.read()
            current.append({key: items.get(key, _Missing) for key in before})
        try:
            self._write([before for _, before in self._before])
            yield
        finally:
            self._write(current)

    def _write(self, values_by_place: Sequence[Mapping[Any, Any]]) -> None:
        for (place, _), values in zip(self._before, values_by_place, strict=True):
            for key, value in values.items():
                place.write(key, value)
