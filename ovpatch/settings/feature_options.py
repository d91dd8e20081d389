"""Options of features: checks of their declarations, and their values with the sources of the values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from ovpatch.hookspecs import Feature, Option, OptionError, Package
from ovpatch.settings.settings import (
    NAME,
    RESERVED,
    SettingsError,
    make_variable_name,
    normalise_name,
    parse_flag,
    suggest_name,
    suggest_variable,
)

# The sources of values, for the report. A value from the environment has ``environment`` and the variable.
DEFAULT: Final = "default"
ARGUMENT: Final = "argument"
# The expected forms, for errors, by the type of the default.
_EXPECTED_FORMS: Final = {
    bool: "1 or 0",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


class OptionValue(NamedTuple):
    """The value of an option and its source."""

    # The value that the plugin gets.
    value: Any
    # ``default``, ``argument``, or ``environment`` followed by the variable.
    source: str


class _Given(NamedTuple):
    """A value that the call or the environment contains, before it is parsed."""

    # The variable, or the argument, for errors.
    place: str
    # The string or Python value.
    raw: Any
    # The source of the value, as in OptionValue.
    source: str


def get_values(options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Return the values by name, without their sources."""
    return {name: option.value for name, option in options.items()}


def check_declaration(feature: Feature) -> None:
    """Raise a ValueError that names the option and the mistake if a declaration is invalid or ambiguous."""
    _check_shape(feature)
    seen: set[str] = set()
    for option in feature.options:
        for name in (option.name, *option.aliases):
            if not NAME.fullmatch(name):
                raise ValueError(f"option name {name!r} is not a lower-case identifier: rename it")
            if name in seen:
                raise ValueError(f"two options are called {name!r}: rename one of them")
            seen.add(name)
        _check_default(option)


def _check_shape(feature: Feature) -> None:
    """Refuse values of the wrong type, such as a string instead of a tuple of strings."""
    _check_all("options", feature.options, Option)
    _check_all("packages", feature.packages, Package)
    _check_all("removed_options", feature.removed_options, tuple)
    for name in ("requires", "conflicts", "work"):
        _check_all(name, getattr(feature, name), str)
    for option in feature.options:
        _check_all("the name of an option", (option.name,), str)
        _check_all(f"the aliases of option {option.name!r}", option.aliases, str)
    kinds = {
        "summary": str,
        "default": bool,
        "torch": str,
        "reorders_products": bool,
        "distributed": bool,
    }
    for name, kind in kinds.items():
        value = getattr(feature, name)
        if not isinstance(value, kind):
            raise ValueError(
                f"{name}= of the feature is {value!r}, not a {kind.__name__}: write one"
            )


def _check_all(label: str, values: Any, kind: type) -> None:
    if not isinstance(values, (tuple, list)) or not all(
        isinstance(value, kind) for value in values
    ):
        raise ValueError(f"{label} must be a tuple of {kind.__name__}, not {values!r}: write one")


def _check_default(option: Option) -> None:
    if (
        option.parse is None
        and option.default is not None
        and type(option.default) not in _EXPECTED_FORMS
    ):
        kind = type(option.default).__name__
        raise ValueError(f"option {option.name!r}: a default of type {kind} needs parse=: add it")
    for default in (option.default, option.default_unless_named, option.verified):
        if option.choices and default is not None and default not in option.choices:
            raise ValueError(
                f"option {option.name!r}: the default {default!r} is not among its choices: add it "
                "to them"
            )


def resolve_options(
    feature: Feature,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    named: bool = True,
) -> dict[str, OptionValue]:
    """Return the value of every option of a feature: environment over argument over default.

    Args:
        feature: The feature.
        arguments: Values from the call, by name or alias.
        environment: The variables of features.
        named: Whether the settings name the feature. Otherwise it is on by default.

    Raises:
        SettingsError: An argument is unknown, a value cannot be parsed, or a name and its alias disagree.
        OptionError: An option was removed.
    """
    _refuse_removed(feature, {normalise_name(name) for name in arguments}, environment)
    known = {name for option in feature.options for name in (option.name, *option.aliases)}
    given = {normalise_name(name): value for name, value in arguments.items()}
    for name in given:
        if name not in known:
            near = suggest_name(name, known)
            raise SettingsError(
                f"Feature {feature.name!r} has no option {name!r}{near}. Choose one of "
                f"{', '.join(sorted(known))}."
            )
    return {
        option.name: _resolve_option(feature.name, option, given, environment, named)
        for option in feature.options
    }


def _refuse_removed(
    feature: Feature, arguments: Collection[str], environment: Mapping[str, str]
) -> None:
    for name, reason in feature.removed_options:
        variable = make_variable_name(feature.name, name)
        if name in arguments or variable in environment:
            raise OptionError(
                f"ovpatch: option {name} of feature {feature.name!r} no longer exists: {reason}\n"
                f"Remove {variable} and the argument of that name."
            )


def _resolve_option(
    feature: str,
    option: Option,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    named: bool,
) -> OptionValue:
    names = (option.name, *option.aliases)
    variables = [make_variable_name(feature, name) for name in names]
    from_environment = [
        _Given(name, environment[name], f"environment {name}")
        for name in variables
        if name in environment
    ]
    from_call = [
        _Given(f"option {feature}.{name}", arguments[name], ARGUMENT)
        for name in names
        if name in arguments
    ]
    # The call's value is parsed even if the environment overrides it, so that a typing error in it shows immediately.
    parsed_call = [(given, _convert(option, given)) for given in from_call]
    parsed = [(given, _convert(option, given)) for given in from_environment] or parsed_call
    if not parsed:
        unnamed = None if named else option.default_unless_named
        return OptionValue(option.default if unnamed is None else unnamed, DEFAULT)
    first, value = parsed[0]
    for second, second_value in parsed[1:]:
        if second_value != value:
            raise SettingsError(
                f"{first.place}={first.raw} and {second.place}={second.raw} are the same option "
                "with different values. Keep one of them."
            )
    return OptionValue(value, first.source)


def _convert(option: Option, given: _Given) -> Any:
    try:
        value = (
            _parse(option, given.raw)
            if isinstance(given.raw, str)
            else _check_value(option, given.raw)
        )
    except ValueError as error:
        cause = str(error).rstrip(".")
        raise SettingsError(
            f"{given.place}={given.raw}: {cause}. Correct it or leave it out."
        ) from error
    if option.choices and value not in option.choices:
        near = suggest_name(str(value), map(str, option.choices))
        choices = ", ".join(map(str, option.choices))
        raise SettingsError(
            f"{given.place}={given.raw} is not a choice{near}. Choose one of {choices}."
        )
    return value


def _parse(option: Option, text: str) -> Any:
    """Parse a string by ``parse``, otherwise by the type of the default."""
    if option.parse is not None:
        return option.parse(text)
    kind = type(option.default)
    if kind is bool:
        truth = parse_flag(text)
        if truth is None:
            raise ValueError(f"expected {_EXPECTED_FORMS[bool]}")
        return truth
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {_EXPECTED_FORMS[kind]}") from None


def _check_value(option: Option, value: Any) -> Any:
    """Accept a Python value of the default's type; ``parse`` gets numbers and bools as strings."""
    kind = type(option.default)
    if option.parse is not None:
        if type(value) in (int, float, bool):
            return option.parse(str(value))
        if type(value) is not kind:
            raise ValueError(
                f"expected a value like {option.default!r}, or a string as in its variable, not "
                f"{value!r}"
            )
        return value
    # None has no type that values could have.
    if option.default is None:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"expected {_EXPECTED_FORMS[kind]}, not {type(value).__name__}")
    return value


def list_variables(feature: Feature) -> dict[str, str]:
    """Return every variable of a feature with its meaning."""
    names = {make_variable_name(feature.name): f"the switch of feature {feature.name!r}"}
    for option in feature.options:
        for name in (option.name, *option.aliases):
            names.setdefault(
                make_variable_name(feature.name, name),
                f"option {name!r} of feature {feature.name!r}",
            )
    return names


def list_verified_variables(feature: Feature, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of options that ``ovpatch verify`` sets, except of those that the environment sets."""
    return {
        make_variable_name(feature.name, option.name): str(option.verified)
        for option in feature.options
        if option.verified is not None
        and not any(
            make_variable_name(feature.name, name) in environment
            for name in (option.name, *option.aliases)
        )
    }


def check_variables(
    environment: Mapping[str, str], features: Collection[Feature], unread: Collection[str] = ()
) -> None:
    """Raise a SettingsError for an unknown variable.

    Args:
        environment: The variables of features.
        features: The features whose plugins are imported.
        unread: The features whose plugins are not imported. Their options are unknown, so they are not checked.
    """
    known = {name for feature in features for name in list_variables(feature)}
    # `resolve_options` refuses removed options with the reason of their removal.
    known |= {
        make_variable_name(feature.name, name)
        for feature in features
        for name, _ in feature.removed_options
    }
    known |= {make_variable_name(name) for name in unread}
    unread_prefixes = tuple(make_variable_name(name) + "_" for name in unread)
    for name in environment:
        if name not in known and not name.startswith(unread_prefixes):
            near = suggest_variable(name, known)
            raise SettingsError(
                f"Unknown environment variable {name}{near}. Unset it, or correct it."
            )


def find_clashes(
    features: Mapping[str, Feature], first_party: Collection[str], known: Collection[str]
) -> dict[str, str]:
    """Return the features that lose a variable to another feature, each with the reason.

    ``OVPATCH_A_B_C`` is option ``b_c`` of feature ``a`` and option ``c`` of feature ``a_b``. A feature that ovpatch
    ships keeps the variable.

    Args:
        features: The features whose plugins are imported, by name.
        first_party: The features that ovpatch ships.
        known: All features. A feature whose plugin is not imported has at least a switch.
    """
    owners: dict[str, list[tuple[str, str]]] = {
        name: [("", "a variable of ovpatch")] for name in RESERVED
    }
    for name, feature in features.items():
        for variable, meaning in list_variables(feature).items():
            owners.setdefault(variable, []).append((name, meaning))
    for name in set(known) - set(features):
        owners.setdefault(make_variable_name(name), []).append(
            (name, f"the switch of feature {name!r}")
        )
    lost: dict[str, str] = {}
    for variable, claims in owners.items():
        meanings = " and ".join(meaning for _, meaning in claims)
        is_reserved = any(name == "" for name, _ in claims)
        winners = [""] if is_reserved else [name for name, _ in claims if name in first_party]
        for name, _ in claims:
            # A feature keeps the variable only as the sole winner: two features that ovpatch ships both lose it.
            if len(claims) > 1 and [name] != winners:
                lost.setdefault(
                    name, f"{variable} would be {meanings}; one of them must be renamed"
                )
    return lost
