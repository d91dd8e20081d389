"""The gains of a feature in words and units, from its counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class _Amount(int):
    """A counter that formats itself: ``{:bucket}`` is "64 buckets", ``{:bytes}`` is "7.4 GiB"."""

    def __format__(self, spec: str) -> str:
        if spec == "bytes":
            # This method would format the amount again.
            return format_bytes(int(self))
        plural = "" if self == 1 or not spec else "s"
        return f"{int(self):,} {spec}{plural}".rstrip()


class _Amounts:
    """The counters by name; ``a-b`` is the difference of two counters."""

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._counters = counters

    def __getitem__(self, name: str) -> _Amount:
        first, _, second = name.partition("-")
        return _Amount(self._counters.get(first, 0) - self._counters.get(second, 0))


def format_bytes(size: float) -> str:
    """Return a size with its unit, such as ``7.4 GiB``."""
    place = 0
    while abs(size) >= 1024 and place < len(_UNITS) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.1f} {_UNITS[place]}" if place else f"{size:.0f} bytes"


def describe_gains(gains: Sequence[str], counters: Mapping[str, int]) -> str:
    """Return the clauses of :attr:`ovpatch.Feature.gains` whose counters are not all zero.

    Without clauses, return the names of the counters with their values.
    """
    if gains:
        return ", ".join(_list_clauses(gains, counters))
    named = counters.items()
    return ", ".join(f"{key} {count}" for key, count in named if count and key[:6] != "stock_")


def _list_clauses(gains: Sequence[str], counters: Mapping[str, int]) -> Iterator[str]:
    amounts = _Amounts(counters)
    for clause in gains:
        fields = [name for _, name, _, _ in Formatter().parse(clause) if name]
        if any(amounts[name] for name in fields):
            yield clause.format_map(amounts)
