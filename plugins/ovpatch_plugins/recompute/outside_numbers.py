"""Numbers outside of a block's modules that its forward changes, such as counters of calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType
from typing import Any, Final, NamedTuple

# Types of numbers. A flag is none: if it says that something is prepared, a second forward must not prepare it again.
_NUMBERS: Final = (int, float)


class _Missing:
    """The value of a key that does not exist."""


class NumberPlace(NamedTuple):
    """A place that may hold numbers.

    Attributes:
        owner: A dictionary, a list, a class, or the cell of a closure's variable.
        names: The keys of the dictionary that are read; None for all keys.
    """

    owner: Any
    names: Collection[str] | None = None

    def read(self) -> dict[Any, float]:
        """Return the numbers by key."""
        items = _list_items(self.owner)
        keys = items if self.names is None else items.keys() & self.names
        return {key: items[key] for key in keys if type(items[key]) in _NUMBERS}


def _list_items(owner: Any) -> Mapping[Any, Any]:
    if isinstance(owner, type):
        return vars(owner)
    if type(owner) is list:
        return dict(enumerate(owner))
    if type(owner) is not CellType:
        return owner  # type: ignore[no-any-return]  # a dictionary
    try:
        return {"": owner.cell_contents}
    except ValueError:
        # The variable has no value yet.
        return {}


def _write_item(owner: Any, key: Any, value: Any) -> None:
    if type(owner) is CellType:
        owner.cell_contents = value
    elif isinstance(owner, type):
        setattr(owner, key, value)
    elif value is _Missing:
        owner.pop(key, None)
    else:
        owner[key] = value


class OutsideNumbers:
    """The numbers outside of a block's modules that its forward changes, as they are before it.

    The recomputation starts from these numbers and then restores the current values, so each number changes
    once, as in stock PyTorch.

    Args:
        places: The places that the forward may write to.
    """

    def __init__(self, places: Sequence[NumberPlace]) -> None:
        # The numbers of each place before the forward: all of them during it, and after it those that it changed.
        self._before = [(place, place.read()) for place in places]

    def end_forward(self) -> bool:
        """Keep the numbers that the forward has changed, and return whether there are any.

        Only dictionaries may have gained numbers, or lost some. An item that was added to a list is not removed.
        """
        all_before, self._before = self._before, []
        for place, before in all_before:
            now = place.read()
            if now != before and (type(place.owner) is dict or now.keys() == before.keys()):
                changed = {
                    key: before.get(key, _Missing)
                    for key in now.keys() | before.keys()
                    if now.get(key) != before.get(key)
                }
                self._before.append((place, changed))
        return bool(self._before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the numbers of before the forward in this context; afterwards, restore the current values."""
        current = []
        for place, before in self._before:
            items = _list_items(place.owner)
            current.append({key: items.get(key, _Missing) for key in before})
        try:
            self._write([before for _, before in self._before])
            yield
        finally:
            self._write(current)

    def _write(self, values_by_place: Sequence[Mapping[Any, Any]]) -> None:
        for (place, _), values in zip(self._before, values_by_place, strict=True):
            for key, value in values.items():
                _write_item(place.owner, key, value)
