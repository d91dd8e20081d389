"""What lies in nested containers, such as the arguments of a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(values: Any) -> Iterator[Any]:
    """Yield what is in tuples, lists and the values of mappings, at any depth; ``values`` itself if it is none."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from leaves(value)
    else:
        yield values
