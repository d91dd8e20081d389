"""Names, truth values, and the grammar of the variable ``OVPATCH``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from ovpatch.exit_codes import ExitCode

ON_WORDS: Final = ("1", "on", "true", "yes")
OFF_WORDS: Final = ("0", "off", "false", "no")
NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


class SettingsError(ValueError):
    """A setting cannot be parsed. Raised before anything is patched; the text ends with the remedy."""

    exit_code = ExitCode.USAGE


class Selection(NamedTuple):
    """The value of ``OVPATCH``.

    Attributes:
        kind: ``defaults`` and ``signed`` are combined with the call's choice; the others replace it.
        text: As written by the user, for messages.
        names: Features named plainly or with ``+``.
        without: Features named with ``-``.
    """

    kind: Literal["defaults", "nothing", "all", "only", "signed"] = "defaults"
    text: str = ""
    names: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def parse_selection(text: str) -> Selection:
    """Parse the value of ``OVPATCH``.

    Raises:
        SettingsError: Plain and signed names are mixed, or a word such as ``all`` does not stand alone.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    words = {item.lower() for item in items}
    if not items or (len(items) == 1 and words <= set(ON_WORDS)):
        return Selection(text=text)
    if len(items) == 1 and words <= set(OFF_WORDS):
        return Selection("nothing", text)
    if words == {"all"}:
        return Selection("all", text)
    return _named_selection(text, items, words)


def _named_selection(text: str, items: list[str], words: set[str]) -> Selection:
    alone = sorted(words & {*ON_WORDS, *OFF_WORDS, "all"})
    if alone:
        raise SettingsError(f"OVPATCH={text}: {alone[0]!r} stands alone. Write it alone, or only names of features.")
    signed = [item for item in items if item[0] in "+-"]
    if signed and len(signed) != len(items):
        raise SettingsError(
            f"OVPATCH={text} mixes plain and signed names. Write only plain names (only these features) "
            f"or only signed ones (the defaults with +name, without -name)."
        )
    if any(not item.strip("+-").strip() for item in signed):
        raise SettingsError(f"OVPATCH={text} has a sign without a name. Write +name or -name.")
    if not signed:
        return Selection("only", text, names=tuple(normalise_name(item) for item in items))
    plus = tuple(normalise_name(item[1:]) for item in items if item[0] == "+")
    minus = tuple(normalise_name(item[1:]) for item in items if item[0] == "-")
    return Selection("signed", text, names=plus, without=minus)


def normalise_name(name: str) -> str:
    """Return the name of a feature or option in lower case, with underscores."""
    return name.strip().lower().replace("-", "_")


def parse_flag(text: str) -> bool | None:
    """Return the truth value of a text, or None if it is not one."""
    word = text.strip().lower()
    if word in ON_WORDS:
        return True
    return False if word in OFF_WORDS else None


def suggest_name(word: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest candidate, or nothing."""
    from difflib import get_close_matches  # only on the way to an error

    near = get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
