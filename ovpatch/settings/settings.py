"""Environment variables, and the choice of the features that are on.

Off always wins. Otherwise the environment overrides the argument, and the argument overrides the default. Options of
features are in :mod:`ovpatch.settings.feature_options`.
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
    """A setting that cannot be parsed. It is raised before anything is patched; the message ends with the remedy."""

    exit_code = ExitCode.USAGE


class Selection(NamedTuple):
    """The value of ``OVPATCH``."""

    # ``defaults`` and ``signed`` are combined with the call's choice; the remaining kinds replace it.
    kind: Literal["defaults", "nothing", "all", "only", "signed"] = "defaults"
    # The value that the user wrote, for messages.
    text: str = ""
    # The features that are named plainly or with ``+``.
    names: tuple[str, ...] = ()
    # The features that are named with ``-``.
    without: tuple[str, ...] = ()


def parse_selection(text: str) -> Selection:
    """Parse the value of ``OVPATCH``.

    Raises:
        SettingsError: The value mixes plain and signed names, or has more than ``all`` or a truth value.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    words = {item.lower() for item in items}
    if not items or (len(items) == 1 and words <= set(ON_WORDS)):
        return Selection(text=text)
    if len(items) == 1 and words <= set(OFF_WORDS):
        return Selection("nothing", text)
    if words == {"all"}:
        return Selection("all", text)
    return _parse_names(text, items, words)


def _parse_names(text: str, items: list[str], words: set[str]) -> Selection:
    alone = sorted(words & {*ON_WORDS, *OFF_WORDS, "all"})
    if alone:
        raise SettingsError(
            f"OVPATCH={text} combines {alone[0]!r} with other names. Write it alone, or only names "
            "of features."
        )
    signed = [item for item in items if item[0] in "+-"]
    if signed and len(signed) != len(items):
        raise SettingsError(
            f"OVPATCH={text} mixes plain and signed names. Write only plain names (only these "
            "features) or only signed ones (the defaults with +name, without -name)."
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
    """Return the truth value of a string, or None if it has none."""
    word = text.strip().lower()
    if word in ON_WORDS:
        return True
    return False if word in OFF_WORDS else None


def suggest_name(word: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest candidate, or an empty string."""
    near = get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


class Variable(NamedTuple):
    """One environment variable that does not belong to a feature; a row of the table in ``docs/settings.md``."""

    # The name of the variable.
    name: str
    # The allowed values.
    values: str
    # The value if the variable is unset or empty.
    default: str
    # The meaning, in one sentence.
    help: str


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
        "that cannot be written to is left alone.",
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

    # The value of ``OVPATCH``.
    selection: Selection
    # The value of ``OVPATCH_AUTO``: whether ``import torch`` applies ovpatch.
    auto: bool
    # The value of ``OVPATCH_STRICT``; None if it is unset, because the call may set it as well.
    strict: bool | None
    # The value of ``OVPATCH_LOG``; empty if it is unset.
    log: str
    # The value of ``OVPATCH_THIRD_PARTY``.
    third_party: bool
    # The remaining variables as strings. Each must belong to a feature.
    features: Mapping[str, str]


class FeatureRequest(NamedTuple):
    """The decision of the settings on one feature."""

    # Whether the feature is on; None if its own default decides.
    on: bool | None
    # Whether the settings name the feature. It is then an error if the feature is skipped.
    by_name: bool = False
    # Whether the environment turns the feature off. An active feature is then reverted.
    enforced: bool = False
    # The setting that decides, for the report.
    reason: str = ""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Parse the environment, in which an empty variable counts as unset.

    Args:
        environ: The environment. Default: that of this process.

    Raises:
        SettingsError: A variable has a wrong value.
    """
    source = os.environ if environ is None else environ
    ours = {
        name: value.strip()
        for name, value in source.items()
        if name == PREFIX or name.startswith(PREFIX + "_")
    }
    ours = {name: value for name, value in ours.items() if value}
    return Environment(
        selection=parse_selection(ours.get(PREFIX, "")),
        auto=_read_flag(ours, "OVPATCH_AUTO") or False,
        strict=_read_flag(ours, "OVPATCH_STRICT"),
        log=_check_log_level(ours.get("OVPATCH_LOG", "")),
        third_party=_read_flag(ours, "OVPATCH_THIRD_PARTY") is not False,
        # Only the plugin of a feature, which may be imported later, can parse the feature's variables.
        features={name: value for name, value in ours.items() if name not in RESERVED},
    )


def find_near_misses(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings about variables that look like misspelt ones, such as ``OVPATH=0``.

    These are no errors, because such a variable may belong to other software.
    """
    source = os.environ if environ is None else environ
    found = [(name, _correct_name(name)) for name in source]
    return [
        f"{name}={source[name]} does nothing here: no variable of ovpatch has this name (did you "
        f"mean {better!r}?)"
        for name, better in sorted(found)
        if better
    ]


def _correct_name(name: str) -> str:
    """Return the probable name that the user meant; "" if the variable is ours or not similar."""
    if name == PREFIX or name.startswith(PREFIX + "_"):
        return ""
    upper = name.upper()
    head, _, rest = upper.partition("_")
    # The ratio of two words of this length is above 0.85 if a letter is missing, added, replaced or swapped.
    is_one_edit_away = SequenceMatcher(None, head, PREFIX).ratio() > 0.85
    if head != PREFIX and not is_one_edit_away:
        # The name may also have an underscore too many or too few.
        if not upper.replace("_", "").startswith(PREFIX):
            return ""
        rest = upper[len(PREFIX) + upper[: len(PREFIX) + 1].count("_") :].lstrip("_")
    return f"{PREFIX}_{rest}" if rest else PREFIX


def make_variable_name(feature: str, option: str = "") -> str:
    """Return the name of the variable of a feature, or of one of its options."""
    return "_".join(part for part in (PREFIX, feature, option) if part).upper()


def _read_flag(values: Mapping[str, str], name: str) -> bool | None:
    if name not in values:
        return None
    truth = parse_flag(values[name])
    if truth is None:
        raise SettingsError(f"{name}={values[name]} is neither on nor off. Write 1 or 0.")
    return truth


def _check_log_level(text: str) -> str:
    if text and text.lower() not in LOG_LEVELS:
        near = suggest_name(text.lower(), LOG_LEVELS)
        raise SettingsError(
            f"OVPATCH_LOG={text} is no level{near}. Write one of {', '.join(LOG_LEVELS)}."
        )
    return text.lower()


def read_switch(environment: Environment, name: str, known: Collection[str] = ()) -> bool | None:
    """Return the value of ``OVPATCH_<FEATURE>``, or None if it is unset.

    The variable may also be an option of another known feature: ``OVPATCH_A_B`` is feature ``a_b`` and option ``b`` of
    feature ``a``. In this case, a value that is no truth value belongs to the option.
    """
    variable = make_variable_name(name)
    may_be_option = any(name.startswith(feature + "_") for feature in known if feature != name)
    if may_be_option and parse_flag(environment.features.get(variable, "1")) is None:
        return None
    return _read_flag(environment.features, variable)


def get_request(
    name: str, environment: Environment, requested: Collection[str], known: Collection[str] = ()
) -> FeatureRequest:
    """Return the decision of the settings on a feature.

    Args:
        name: The feature.
        environment: The environment variables.
        requested: The features that the call names. Empty: the defaults.
        known: All features.
    """
    selection = environment.selection
    variable = make_variable_name(name)
    switch = read_switch(environment, name, known)
    if selection.kind == "nothing":
        return FeatureRequest(False, enforced=True, reason=f"off by OVPATCH={selection.text}")
    if switch is False:
        return FeatureRequest(False, enforced=True, reason=f"off by {variable}=0")
    if name in selection.without:
        return FeatureRequest(False, enforced=True, reason=f"off by OVPATCH={selection.text}")
    if switch or name in selection.names:
        return FeatureRequest(
            True, by_name=True, reason=f"{variable}=1" if switch else f"OVPATCH={selection.text}"
        )
    if selection.kind == "only":
        return FeatureRequest(False, enforced=True, reason=f"not named in OVPATCH={selection.text}")
    if name in requested:
        return FeatureRequest(True, by_name=True, reason="named in the call")
    if selection.kind == "all":
        return FeatureRequest(True, reason="OVPATCH=all")
    return (
        FeatureRequest(False, reason="not named in the call")
        if requested
        else FeatureRequest(None, reason="on by default")
    )


def check_names(
    environment: Environment,
    requested: Iterable[str],
    options: Iterable[str],
    known: Collection[str],
) -> None:
    """Raise a SettingsError that names the place and the nearest known name if a feature is not installed.

    Args:
        environment: The environment variables.
        requested: The features that the call names.
        options: The features whose options the call sets.
        known: All features.
    """
    selection = environment.selection
    places = [
        (f"OVPATCH={selection.text}", name) for name in (*selection.names, *selection.without)
    ]
    places += [("the call", name) for name in requested]
    places += [("options=", name) for name in options]
    for place, name in places:
        if name not in known:
            raise SettingsError(describe_unknown_feature(place, name, known))
    switches = {make_variable_name(name) for name in known}
    for name in environment.features:
        # A longer name may be an option, which only the plugin of the feature can check.
        if name not in switches and not any(name.startswith(switch + "_") for switch in switches):
            near = suggest_variable(name, switches)
            raise SettingsError(
                f"Unknown environment variable {name}{near}. Unset it, or correct it: {_list_features(known)}"
            )


def describe_unknown_feature(place: str, name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown feature."""
    near = suggest_name(name, known)
    return f"{place} names an unknown feature {name!r}{near}. Correct the name: {_list_features(known)}"


def suggest_variable(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'OVPATCH_X'?)"``, or an empty string if no known name is similar."""
    # The common prefix would make all names similar.
    suffixes = [variable.removeprefix(PREFIX + "_") for variable in (*known, *RESERVED)]
    near = suggest_name(name.upper().removeprefix(PREFIX + "_"), suffixes)
    return near.replace("'", f"'{PREFIX}_", 1)


def _list_features(known: Collection[str]) -> str:
    return f"installed features are {', '.join(sorted(known)) or 'none'}."


def cache_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory of measurements: ``OVPATCH_CACHE_DIR``, or ``ovpatch`` in the user's cache.

    The user's cache is ``XDG_CACHE_HOME`` if that is an absolute path, otherwise ``~/.cache``. The directory may not
    exist yet. The function returns None for a user without a home, as in many containers.
    """
    source = os.environ if environ is None else environ
    configured = source.get("OVPATCH_CACHE_DIR", "").strip()
    base = source.get("XDG_CACHE_HOME", "")
    users = Path(base if os.path.isabs(base) else "~/.cache") / "ovpatch"
    try:
        return (Path(configured) if configured else users).expanduser()
    # pathlib raises this error for a user without a home.
    except RuntimeError:
        return None
