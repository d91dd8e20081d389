"""Features among each other: in which order, and who stands down for whom. Pure functions over descriptions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ovpatch.hookspecs import Feature


def in_order(features: Mapping[str, Feature]) -> list[str]:
    """Return the names so that each comes after what it requires; otherwise the given order is kept.

    Features that require each other stay in the given order.
    """
    ordered: list[str] = []
    visiting: set[str] = set()

    def visit(name: str) -> None:
        if name in visiting or name not in features:
            return
        visiting.add(name)
        for other in features[name].requires:
            visit(other)
        ordered.append(name)

    for name in features:
        visit(name)
    return ordered


def dependents(name: str, features: Mapping[str, Feature]) -> list[str]:
    """Return the features that require ``name``, directly or through others."""
    found: list[str] = []
    wave = [name]
    while wave:
        wave = [
            other
            for other, feature in features.items()
            if other != name and other not in found and set(wave) & set(feature.requires)
        ]
        found += wave
    return found


def conflicts(features: Mapping[str, Feature], ranking: Sequence[Collection[str]]) -> dict[str, str]:
    """Find features that cannot run together.

    Args:
        features: What is about to be on.
        ranking: Groups of names, the strongest first; of two in conflict the one in the stronger group stays. Two of
            the same group stand down both.

    Returns:
        The features that stand down, each with the reason.
    """
    lost: dict[str, str] = {}
    names = list(features)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if _exclude(features[a], features[b])]
    for a, b in sorted(pairs, key=lambda pair: min(_rank(pair[0], ranking), _rank(pair[1], ranking))):
        if a in lost or b in lost:
            continue
        for loser, winner in ((a, b), (b, a)):
            if _rank(loser, ranking) >= _rank(winner, ranking):
                lost[loser] = f"conflicts with {winner!r}; switch one of them off, for example by OVPATCH=-{winner}"
    return lost


def _exclude(one: Feature, other: Feature) -> bool:
    return other.name in one.conflicts or one.name in other.conflicts


def _rank(name: str, ranking: Sequence[Collection[str]]) -> int:
    return next((index for index, group in enumerate(ranking) if name in group), len(ranking))


def unmet(features: Mapping[str, Feature], reasons: Mapping[str, str]) -> dict[str, str]:
    """Find features that lack what they require, and then those that lack these, until nothing changes.

    Args:
        features: What is about to be on.
        reasons: Why other features are not on, by name; a name that is missing here is not installed.

    Returns:
        The features that stand down, each with the reason.
    """
    lost: dict[str, str] = {}
    changed = True
    while changed:
        changed = False
        for name, feature in features.items():
            missing = [one for one in feature.requires if one not in features or one in lost]
            if missing and name not in lost:
                lost[name] = "; ".join(_why_missing(one, reasons, lost) for one in missing)
                changed = True
    return lost


def _why_missing(name: str, reasons: Mapping[str, str], lost: Mapping[str, str]) -> str:
    why = lost.get(name) or reasons.get(name)
    if why is None:
        return f"requires {name!r}, which is not installed"
    return f"requires {name!r}, which is not on ({why}); name both, or OVPATCH=+{name}"
