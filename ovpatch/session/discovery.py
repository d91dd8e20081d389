"""Which plugins are there: the entry points of the group ``ovpatch``, looked at without importing any of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Final

from ovpatch.settings.selection import NAME, OFF_WORDS, ON_WORDS, normalise

GROUP: Final = "ovpatch"
FIRST_PARTY: Final = "ovpatch"
_WORDS: Final = frozenset((*ON_WORDS, *OFF_WORDS, "all"))


@dataclass(frozen=True)
class Found:
    """A feature that an entry point announces.

    Attributes:
        name: The feature.
        target: Module, or ``module:attribute``, of the plugin.
        distribution: Who installed it.
        version: Version of the distribution.
        path: Where the distribution's metadata lies.
        problem: Why it must not be loaded, or an empty string.
        duplicate: Whether the problem is that several distributions announce it.
        remark: What the report should say about it although it is fine.
        entry_point: The entry point itself.
    """

    name: str
    target: str
    distribution: str
    version: str
    path: str
    problem: str = ""
    duplicate: bool = False
    remark: str = ""
    entry_point: EntryPoint | None = field(default=None, repr=False, compare=False)

    @property
    def first_party(self) -> bool:
        """Whether ovpatch ships it."""
        return self.distribution == FIRST_PARTY

    @property
    def origin(self) -> str:
        """Distribution, version and target, for messages."""
        return f"{self.distribution} {self.version} ({self.target})"


def find(path: list[str] | None = None) -> dict[str, Found]:
    """Return all announced features by name, first-party ones first.

    A distribution that is listed twice, as an editable install beside its egg-info is, counts once: the first on the
    path, as everywhere in Python. A name announced by two distributions is kept for ovpatch if it is one of the two,
    and is otherwise loaded from neither, since a guess would run somebody else's code.

    Args:
        path: Directories to search; ``sys.path`` by default.
    """
    by_name: dict[str, list[Found]] = {}
    for found in _announced(distributions() if path is None else distributions(path=path)):
        by_name.setdefault(found.name, []).append(found)
    chosen = [_choose(candidates) for candidates in by_name.values()]
    return {found.name: found for found in sorted(chosen, key=lambda one: (not one.first_party, one.name))}


def _announced(installed: Iterable[Distribution]) -> Iterable[Found]:
    seen: set[str] = set()
    for distribution in installed:
        text = distribution.read_text("entry_points.txt") or ""
        if f"[{GROUP}]" not in text.replace(" ", ""):  # a scan of all metadata files: parse only those that matter
            continue
        name = _canonical(distribution)
        if name in seen:
            continue
        seen.add(name)
        for entry_point in dict.fromkeys(distribution.entry_points):
            if entry_point.group == GROUP:
                yield _describe(distribution, name, entry_point)


def _canonical(distribution: Distribution) -> str:
    name: str | None = distribution.metadata["Name"]
    return normalise(name or "unknown").replace("_", "-").replace(".", "-")


def _describe(distribution: Distribution, owner: str, entry_point: EntryPoint) -> Found:
    name = normalise(entry_point.name)
    return Found(
        name=name,
        target=entry_point.value,
        distribution=owner,
        version=distribution.version or "unknown",
        path=str(getattr(distribution, "_path", "") or distribution.locate_file("")),
        problem=_name_problem(name),
        entry_point=entry_point,
    )


def _name_problem(name: str) -> str:
    if not NAME.fullmatch(name):
        return f"the entry point's name {name!r} is not a lower-case identifier"
    return f"the entry point's name {name!r} is a word of the variable OVPATCH" if name in _WORDS else ""


def _choose(candidates: list[Found]) -> Found:
    if len(candidates) == 1:
        return candidates[0]
    both = " and ".join(found.origin for found in candidates)
    own = [found for found in candidates if found.first_party]
    if len(own) == 1:
        others = ", ".join(found.origin for found in candidates if not found.first_party)
        return replace(own[0], remark=f"the plugin of the same name from {others} was left out; uninstall or rename it")
    problem = f"announced by {both}; none is loaded. Uninstall or rename one of them"
    return replace(candidates[0], problem=problem, duplicate=True)
