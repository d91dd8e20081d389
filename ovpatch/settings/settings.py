"""Environment variables, and whether the settings turn a feature on.

Off always wins; then the environment overrides the argument, which overrides the default. Options of features are in
:mod:`ovpatch.settings.options`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ovpatch.exit_codes import ExitCode

ON_WORDS: Final = ("1", "on", "true", "yes")
OFF_WORDS: Final = ("0", "off", "false", "no")
NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
PREFIX: Final = "OVPATCH"
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


class SettingsError(ValueError):
    """A setting cannot be parsed. Raised before anything is patched; the text ends with the remedy."""

    exit_code = ExitCode.USAGE


class Selection(NamedTuple):
    """The value of ``OVPATCH``."""

    # ``defaults`` and ``signed`` are combined with the call's choice; the others replace it.
    kind: Literal["defaults", "nothing", "all", "only", "signed"] = "defaults"
    text: str = ""  # as written by the user, for messages
    names: tuple[str, ...] = ()  # features named plainly or with ``+``
    without: tuple[str, ...] = ()  # features named with ``-``


def parse_selection(text: str) -> Selection:
    """Parse ``OVPATCH``; raise SettingsError if plain and signed names are mixed, or ``all`` does not stand alone."""
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
        raise SettingsError(
            f"OVPATCH={text}: {alone[0]!r} stands alone. Write it alone, or only names of features."
        )
    signed = [item for item in items if item[0] in "+-"]
    if signed and len(signed) != len(items):
        raise SettingsError(
            f"OVPATCH={text} mixes plain and signed names. Write only plain names (only these "
            "features) "
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
    near = get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


class Variable(NamedTuple):
    """One environment variable that does not belong to a feature; a row of the table in ``docs/settings.md``."""

    name: str  # the variable
    values: str  # allowed values
    default: str  # value if it is unset or empty
    help: str  # one sentence


VARIABLES: Final = (
    Variable(
        "OVPATCH",
        "`1` `on` `0` `off` `all` `a,b` `-c` `+c`",
        "`1`",
        "Which features are on: the defaults, none, all, only these, or the defaults without or "
        "with these.",
    ),
    Variable(
        "OVPATCH_AUTO",
        "`0` `1`",
        "`0`",
        "Apply at the end of `import torch`, without a line in the script.",
    ),
    Variable(
        "OVPATCH_STRICT", "`0` `1`", "`0`", "Any feature that is on and cannot run is an error."
    ),
    Variable(
        "OVPATCH_LOG",
        "`debug` `info` `warning` `error`",
        "unset",
        "Log to stderr from this level on.",
    ),
    Variable(
        "OVPATCH_CACHE_DIR",
        "a path",
        "the user's cache",
        "Where options that choose by measurement (`auto`) keep what they measured; a directory "
        "that cannot be written "
        "to is left alone.",
    ),
    Variable(
        "OVPATCH_THIRD_PARTY",
        "`0` `1`",
        "`1`",
        "`0` leaves out every plugin that ovpatch does not ship.",
    ),
    Variable(
        "OVPATCH_REPORT_DIR",
        "a path",
        "unset",
        "Internal: `ovpatch run` sets it, workers report there.",
    ),
    Variable(
        "OVPATCH_INSIGHT",
        "JSON",
        "unset",
        "Internal: what `verify`, `bench` and `timeline` want of workers.",
    ),
)
RESERVED: Final = frozenset(variable.name for variable in VARIABLES)


class Environment(NamedTuple):
    """All ``OVPATCH*`` variables of a process."""

    selection: Selection  # ``OVPATCH``
    auto: bool  # ``OVPATCH_AUTO``
    strict: bool | None  # ``OVPATCH_STRICT``, or None if it is unset
    log: str  # ``OVPATCH_LOG``, or an empty string
    third_party: bool  # ``OVPATCH_THIRD_PARTY``
    features: Mapping[str, str]  # the remaining variables as text; each must belong to a feature


class FeatureRequest(NamedTuple):
    """Whether the settings turn a feature on."""

    on: bool | None  # True, False, or None if the feature's own default decides
    by_name: bool = False  # the settings name the feature, so a skip is an error
    enforced: bool = False  # off by the environment, so an active feature is reverted
    reason: str = ""  # the setting that decides, for the report


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Parse the environment; features' variables stay text, empty is unset. Raises SettingsError for a wrong value."""
    source = os.environ if environ is None else environ
    ours = {k: v.strip() for k, v in source.items() if k == PREFIX or k.startswith(PREFIX + "_")}
    ours = {k: v for k, v in ours.items() if v}
    return Environment(
        selection=parse_selection(ours.get(PREFIX, "")),
        auto=_flag(ours, "OVPATCH_AUTO") or False,
        strict=_flag(ours, "OVPATCH_STRICT"),
        log=_level(ours.get("OVPATCH_LOG", "")),
        third_party=_flag(ours, "OVPATCH_THIRD_PARTY") is not False,
        features={k: v for k, v in ours.items() if k not in RESERVED},
    )


def find_near_misses(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings about variables that look like misspelt ones, as ``OVPATH=0``; they may be other software's."""
    source = os.environ if environ is None else environ
    found = [(name, _corrected(name)) for name in source]
    return [
        f"{name}={source[name]} does nothing here: no variable of ovpatch has this name (did you "
        f"mean {better!r}?)"
        for name, better in sorted(found)
        if better
    ]


def _corrected(name: str) -> str:
    """Return the probable correct name of a variable; "" if it is ours or not similar."""
    if name == PREFIX or name.startswith(PREFIX + "_"):
        return ""
    upper = name.upper()
    head, _, rest = upper.partition("_")
    one_edit = (
        SequenceMatcher(None, head, PREFIX).ratio() > 0.85
    )  # a letter missing, added, replaced or swapped
    if head != PREFIX and not one_edit:
        if not upper.replace("_", "").startswith(PREFIX):  # an underscore too many or too few
            return ""
        rest = upper[len(PREFIX) + upper[: len(PREFIX) + 1].count("_") :].lstrip("_")
    return f"{PREFIX}_{rest}" if rest else PREFIX


def make_variable_name(feature: str, option: str = "") -> str:
    """Return the name of the variable of a feature, or of one of its options."""
    return "_".join(part for part in (PREFIX, feature, option) if part).upper()


def _flag(values: Mapping[str, str], name: str) -> bool | None:
    if name not in values:
        return None
    truth = parse_flag(values[name])
    if truth is None:
        raise SettingsError(f"{name}={values[name]} is neither on nor off. Write 1 or 0.")
    return truth


def _level(text: str) -> str:
    if text and text.lower() not in LOG_LEVELS:
        near = suggest_name(text.lower(), LOG_LEVELS)
        raise SettingsError(
            f"OVPATCH_LOG={text} is no level{near}. Write one of {', '.join(LOG_LEVELS)}."
        )
    return text.lower()


def read_switch(environment: Environment, name: str, known: Collection[str] = ()) -> bool | None:
    """Return the value of ``OVPATCH_<FEATURE>``, or None if it is unset.

    If the variable may be an option of another of the known features, a text that is no truth value is read as that.
    """
    own = make_variable_name(name)
    shared = any(name.startswith(other + "_") for other in known if other != name)
    if shared and parse_flag(environment.features.get(own, "1")) is None:
        return None
    return _flag(environment.features, own)


def get_request(
    name: str, environment: Environment, asked: Collection[str], known: Collection[str] = ()
) -> FeatureRequest:
    """Return whether the settings turn a feature on; ``asked`` are those named in the call, none for the defaults."""
    selection, own, said = (
        environment.selection,
        make_variable_name(name),
        read_switch(environment, name, known),
    )
    if selection.kind == "nothing":
        return FeatureRequest(False, enforced=True, reason=f"off by OVPATCH={selection.text}")
    if said is False:
        return FeatureRequest(False, enforced=True, reason=f"off by {own}=0")
    if name in selection.without:
        return FeatureRequest(False, enforced=True, reason=f"off by OVPATCH={selection.text}")
    if said or name in selection.names:
        return FeatureRequest(
            True, by_name=True, reason=f"{own}=1" if said else f"OVPATCH={selection.text}"
        )
    if selection.kind == "only":
        return FeatureRequest(False, enforced=True, reason=f"not named in OVPATCH={selection.text}")
    if name in asked:
        return FeatureRequest(True, by_name=True, reason="named in the call")
    if selection.kind == "all":
        return FeatureRequest(True, reason="OVPATCH=all")
    return (
        FeatureRequest(False, reason="not named in the call")
        if asked
        else FeatureRequest(None, reason="on by default")
    )


def check_names(
    environment: Environment, asked: Iterable[str], options: Iterable[str], known: Collection[str]
) -> None:
    """Raise a SettingsError for a feature that is not installed; it names the place and the nearest known name."""
    selection = environment.selection
    places = [
        (f"OVPATCH={selection.text}", name) for name in (*selection.names, *selection.without)
    ]
    places += [("the call", name) for name in asked]
    places += [("options=", name) for name in options]
    for place, name in places:
        if name not in known:
            raise SettingsError(describe_unknown_feature(place, name, known))
    own = {make_variable_name(name) for name in known}
    for name in environment.features:
        if name not in own and not any(name.startswith(one + "_") for one in own):
            near = suggest_variable(name, own)
            raise SettingsError(
                f"Unknown environment variable {name}{near}. Unset it, or correct it: {_all(known)}"
            )


def describe_unknown_feature(place: str, name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown feature."""
    return f"{place} names an unknown feature {name!r}{suggest_name(name, known)}. Correct the name: {_all(known)}"


def suggest_variable(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'OVPATCH_X'?)"``, by similarity without the common prefix."""
    shorts = [one.removeprefix(PREFIX + "_") for one in (*known, *RESERVED)]
    near = suggest_name(name.upper().removeprefix(PREFIX + "_"), shorts)
    return near.replace("'", f"'{PREFIX}_", 1)


def _all(known: Collection[str]) -> str:
    return f"installed features are {', '.join(sorted(known)) or 'none'}."


def cache_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory of measurements: ``OVPATCH_CACHE_DIR``, or ``ovpatch`` in the user's cache.

    The user's cache is ``XDG_CACHE_HOME`` if that is an absolute path, else ``~/.cache``. The directory need not exist.
    None for a user without a home, as in many containers.
    """
    source = os.environ if environ is None else environ
    named, base = source.get("OVPATCH_CACHE_DIR", "").strip(), source.get("XDG_CACHE_HOME", "")
    users = Path(base if os.path.isabs(base) else "~/.cache") / "ovpatch"
    try:
        return (Path(named) if named else users).expanduser()
    except RuntimeError:  # raised by pathlib for a user without a home
        return None
