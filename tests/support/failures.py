"""The fate of every rank of a case, and the error that reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Printed by gloo at every connection.
_NOISE = ("[Gloo] Rank ",)


@dataclass
class Fate:
    """The fate of one rank: still running, ok, failed, skipped or died."""

    rank: int
    kind: str = "running"
    value: bytes = b""
    error: str = ""
    details: str = ""
    output: str = ""
    when: float = 0.0

    @property
    def running(self) -> bool:
        return self.kind == "running"

    @property
    def bad(self) -> bool:
        return self.kind in ("failed", "died")

    def take(self, kind: str, value: bytes, error: str, details: str, when: float) -> None:
        self.kind = kind
        self.value = value
        self.error = error
        self.details = details
        self.when = when


class RankFailure(AssertionError):
    """A failed case. The message starts with the ranks that failed on their own, and then lists the remaining ranks."""

    def __init__(self, name: str, fates: Sequence[Fate], complaint: str) -> None:
        self.fates = tuple(fates)
        super().__init__(_render(name, self.fates, complaint))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that raised or died; if there are none, the ranks that hung."""
        bad = tuple(fate.rank for fate in self.fates if fate.bad)
        return bad or tuple(fate.rank for fate in self.fates if fate.running)


def _render(name: str, fates: Sequence[Fate], complaint: str) -> str:
    # The first failure is often the cause.
    bad = sorted((fate for fate in fates if fate.bad), key=lambda fate: fate.when)
    hung = [fate for fate in fates if fate.running]
    if bad:
        heading = "; ".join(f"rank {fate.rank} of {len(fates)}: {fate.error}" for fate in bad)
    else:
        heading = f"rank {', '.join(str(fate.rank) for fate in hung)} of {len(fates)} {complaint}"
    blocks = [heading, f"in {name}"]
    remaining = [fate for fate in fates if not fate.bad]
    for fate in bad + remaining:
        blocks.append(_block(fate, complaint if not bad else "was still running"))
    return "\n\n".join(blocks)


def _block(fate: Fate, complaint: str) -> str:
    finished = "finished; its stacks:" if fate.details else "finished"
    titles = {
        "running": f"{complaint}; its stacks:",
        "ok": finished,
        "skipped": f"skipped: {fate.error}",
    }
    lines = [f"-------- rank {fate.rank}: {titles.get(fate.kind, fate.error)}"]
    lines += [text for text in (fate.details,) if text]
    if fate.output:
        lines += [f"-------- output of rank {fate.rank}:", fate.output]
    return "\n".join(lines)


def tail(path: Path, *, characters: int = 8000) -> str:
    """Return the end of a worker's output, without gloo's announcements."""
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace")[-characters:].splitlines()
    return "\n".join(line for line in lines if not line.startswith(_NOISE)).strip()
