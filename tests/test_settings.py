"""Environment variables, the grammar of OVPATCH, precedence, and options with their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovpatch.hookspecs import Feature, Option, make_count_parser, make_seconds_parser
from ovpatch.settings import feature_options, settings
from ovpatch.settings.feature_options import OptionValue
from ovpatch.settings.settings import SettingsError
from tools import docs_table

KNOWN = ("ddp", "tp_linear", "pipe")
DOCS = Path(__file__).resolve().parent.parent / "docs"


DDP = Feature(
    "ddp",
    "Reducer.",
    options=(
        Option("overlap", True, "Overlap."),
        Option("depth", 2, "Depth."),
        Option("size", 25.0, "Size.", aliases=("bucket_size",)),
        Option("mode", "auto", "Mode.", choices=("auto", "ring", "tree")),
        Option("streams", 1, "Streams.", parse=make_count_parser("a number above 0", least=1)),
        Option("patience_s", 20.0, "Patience.", parse=make_seconds_parser()),
        Option("path", None, "A path."),
    ),
)


def wish(name, asked=(), **environ):
    return settings.get_request(name, settings.read_environment(environ), asked, KNOWN)


def resolve(arguments=None, **environ):
    return feature_options.resolve_options(DDP, arguments or {}, environ)


# --- the grammar of OVPATCH ---


@pytest.mark.parametrize(
    ("text", "kind", "names", "without"),
    [
        ("", "defaults", (), ()),
        ("1", "defaults", (), ()),
        (" ON ", "defaults", (), ()),
        ("0", "nothing", (), ()),
        ("Off", "nothing", (), ()),
        ("all", "all", (), ()),
        ("ddp", "only", ("ddp",), ()),
        ("ddp, TP-linear ,", "only", ("ddp", "tp_linear"), ()),
        ("-ddp", "signed", (), ("ddp",)),
        ("+pipe,-ddp", "signed", ("pipe",), ("ddp",)),
    ],
)
def test_grammar(text, kind, names, without):
    selection = settings.parse_selection(text)
    assert (selection.kind, selection.names, selection.without) == (kind, names, without)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ddp,-pipe", "+ddp,pipe"], "mixes plain and signed"),
        (["1,ddp", "all,-ddp", "0,1", "on,all"], "combines"),
        (["+", "-ddp,-", "+ddp, + "], "has a sign without a name"),
    ],
)
def test_what_the_grammar_does_not_have(texts, message):
    for text in texts:
        with pytest.raises(SettingsError, match=message):
            settings.parse_selection(text)


# --- precedence ---


@pytest.mark.parametrize(
    ("name", "asked", "environ", "on", "by_name"),
    [
        ("ddp", (), {}, None, False),
        ("ddp", ("ddp",), {}, True, True),
        ("pipe", ("ddp",), {}, False, False),
        # the environment over the argument
        ("pipe", ("ddp",), {"OVPATCH": "pipe"}, True, True),
        ("ddp", ("ddp",), {"OVPATCH": "pipe"}, False, False),
        ("pipe", ("ddp",), {"OVPATCH": "all"}, True, False),
        ("ddp", ("ddp",), {"OVPATCH": "all"}, True, True),
        ("pipe", ("ddp",), {"OVPATCH": "+pipe"}, True, True),
        ("pipe", (), {"OVPATCH_PIPE": "1"}, True, True),
        ("pipe", (), {"OVPATCH": "ddp", "OVPATCH_PIPE": "yes"}, True, True),
        # what leaves the choice to the call
        ("ddp", ("ddp",), {"OVPATCH": "1"}, True, True),
        ("ddp", (), {"OVPATCH": "1"}, None, False),
        ("ddp", (), {"OVPATCH": "-pipe"}, None, False),
        # off always wins
        ("ddp", ("ddp",), {"OVPATCH": "0"}, False, False),
        ("ddp", (), {"OVPATCH": "off", "OVPATCH_DDP": "1"}, False, False),
        ("ddp", (), {"OVPATCH": "ddp", "OVPATCH_DDP": "0"}, False, False),
        ("ddp", (), {"OVPATCH": "all", "OVPATCH_DDP": "no"}, False, False),
        ("ddp", ("ddp",), {"OVPATCH": "-ddp"}, False, False),
        ("ddp", (), {"OVPATCH": "+ddp,-ddp"}, False, False),
        ("ddp", (), {"OVPATCH": "-ddp", "OVPATCH_DDP": "1"}, False, False),
        # empty is unset
        ("ddp", (), {"OVPATCH": " ", "OVPATCH_DDP": ""}, None, False),
    ],
)
def test_precedence(name, asked, environ, on, by_name):
    found = wish(name, asked, **environ)
    assert (found.on, found.by_name) == (on, by_name)


@pytest.mark.parametrize(
    ("asked", "environ", "enforced"),
    [
        (("pipe",), {}, False),
        ((), {"OVPATCH": "0"}, True),
        ((), {"OVPATCH_DDP": "0"}, True),
        ((), {"OVPATCH": "-ddp"}, True),
        ((), {"OVPATCH": "pipe"}, True),
    ],
)
def test_only_the_environment_takes_back_what_is_on(asked, environ, enforced):
    found = wish("ddp", asked, **environ)
    assert found.on is False
    assert found.enforced is enforced
    assert found.reason


# --- mistakes ---


@pytest.mark.parametrize("name", ["OVPATCH_AUTO", "OVPATCH_STRICT", "OVPATCH_THIRD_PARTY"])
def test_flags_are_parsed_or_refused(name):
    field = name.removeprefix("OVPATCH_").lower()
    assert getattr(settings.read_environment({name: "Yes"}), field) is True
    assert getattr(settings.read_environment({name: "off"}), field) is False
    with pytest.raises(SettingsError, match=f"{name}=2 is neither on nor off"):
        settings.read_environment({name: "2"})


def test_a_switch_that_is_no_truth_value():
    with pytest.raises(SettingsError, match="OVPATCH_DDP=maybe is neither on nor off"):
        wish("ddp", OVPATCH_DDP="maybe")


def test_log_level():
    assert settings.read_environment({"OVPATCH_LOG": "DEBUG"}).log == "debug"
    with pytest.raises(SettingsError, match="did you mean 'debug'"):
        settings.read_environment({"OVPATCH_LOG": "debgu"})


def test_strict_unset_is_told_from_off():
    assert settings.read_environment({}).strict is None
    assert settings.read_environment({"OVPATCH_STRICT": "0"}).strict is False


def test_cache_dir(tmp_path):
    assert settings.cache_dir({"OVPATCH_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert settings.cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "ovpatch"
    assert settings.cache_dir({"XDG_CACHE_HOME": "cache"}) == Path.home() / ".cache" / "ovpatch"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert settings.cache_dir({}) is None


@pytest.mark.parametrize(
    ("environ", "asked", "arguments", "text"),
    [
        (
            {"OVPATCH": "dpp"},
            (),
            (),
            r"OVPATCH=dpp names an unknown feature 'dpp' \(did you mean 'ddp'\?\)",
        ),
        ({"OVPATCH": "-tp_liner"}, (), (), "did you mean 'tp_linear'"),
        ({}, ("ppie",), (), r"the call names an unknown feature 'ppie' \(did you mean 'pipe'\?\)"),
        ({}, (), ("dpd",), "options= names an unknown feature 'dpd'"),
        ({"OVPATCH_DPP": "1"}, (), (), r"OVPATCH_DPP \(did you mean 'OVPATCH_DDP'\?\)"),
        ({"OVPATCH_STRIKT": "1"}, (), (), "did you mean 'OVPATCH_STRICT'"),
        ({"OVPATCH_ddp": "1"}, (), (), "did you mean 'OVPATCH_DDP'"),
        (
            {"OVPATCH_QQQQQQQQ": "1"},
            (),
            (),
            "Unknown environment variable OVPATCH_QQQQQQQQ. Unset it",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_known_one(environ, asked, arguments, text):
    with pytest.raises(SettingsError, match=text):
        settings.check_names(settings.read_environment(environ), asked, arguments, KNOWN)


def test_known_names_pass():
    environ = {
        "OVPATCH": "+ddp",
        "OVPATCH_PIPE": "1",
        "OVPATCH_TP_LINEAR_SIZE": "3",
        "OVPATCH_REPORT_DIR": "x",
        "OVP": "1",
    }
    settings.check_names(settings.read_environment(environ), ["ddp"], ["pipe"], KNOWN)


# --- options ---


def test_every_option_says_where_its_value_comes_from():
    found = resolve({"depth": 3, "mode": "ring"}, OVPATCH_DDP_MODE="tree", OVPATCH_DDP_SIZE="4")
    assert found["overlap"] == OptionValue(True, "default")
    assert found["depth"] == OptionValue(3, "argument")
    assert found["mode"] == OptionValue("tree", "environment OVPATCH_DDP_MODE")
    assert found["size"] == OptionValue(4.0, "environment OVPATCH_DDP_SIZE")


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("overlap", "off", False),
        ("depth", "7", 7),
        ("size", "1e2", 100.0),
        ("path", "/a b", "/a b"),
        ("streams", "2", 2),
        ("patience_s", "2.5", 2.5),
        ("patience_s", "3", 3.0),
    ],
)
def test_text_is_parsed_by_the_type_of_the_default(option, text, value):
    from_environment = resolve(**{settings.make_variable_name("ddp", option): text})[option].value
    from_argument = resolve({option: text})[option].value
    assert from_environment == from_argument == value
    assert type(from_environment) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("OVPATCH_DDP_OVERLAP", "maybe", "OVPATCH_DDP_OVERLAP=maybe: expected 1 or 0"),
        ("OVPATCH_DDP_DEPTH", "2.5", "expected a whole number"),
        ("OVPATCH_DDP_SIZE", "big", "expected a number"),
        (
            "OVPATCH_DDP_MODE",
            "rnig",
            r"not a choice \(did you mean 'ring'\?\). Choose one of auto, ring, tree",
        ),
        ("OVPATCH_DDP_STREAMS", "0", "expected a number above 0"),
        ("OVPATCH_DDP_STREAMS", "2.5", "expected a number above 0"),
    ],
)
def test_unparsable_values(name, text, message):
    with pytest.raises(SettingsError, match=message):
        resolve(**{name: text})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"overlap": 1}, "expected 1 or 0, not int"),
        ({"depth": True}, "expected a whole number, not bool"),
        ({"depth": 2.0}, "not float"),
        ({"mode": "rnig"}, "did you mean 'ring'"),
        ({"streams": 0}, "expected a number above 0"),
        *[
            ({"patience_s": value}, "expected a time in seconds")
            for value in (0, -1.0, "inf", "nan", "soon", True)
        ],
        ({"dpeth": 1}, r"Feature 'ddp' has no option 'dpeth' \(did you mean 'depth'\?\)"),
    ],
)
def test_arguments_of_the_wrong_kind(argument, message):
    with pytest.raises(SettingsError, match=message):
        resolve(argument)


def test_a_whole_number_does_for_a_number():
    assert resolve({"size": 3})["size"].value == 3.0


def test_an_argument_that_the_environment_overrules_is_still_checked():
    with pytest.raises(SettingsError, match="expected a whole number"):
        resolve({"depth": "x"}, OVPATCH_DDP_DEPTH="3")


def test_aliases_set_the_option():
    assert resolve({"bucket-size": 3})["size"] == OptionValue(3.0, "argument")
    found = resolve({"size": 9}, OVPATCH_DDP_BUCKET_SIZE="4")["size"]
    assert found == OptionValue(4.0, "environment OVPATCH_DDP_BUCKET_SIZE")


def test_name_and_alias_may_agree_but_not_differ():
    assert resolve(OVPATCH_DDP_BUCKET_SIZE="4", OVPATCH_DDP_SIZE="4.0")["size"].value == 4.0
    with pytest.raises(SettingsError, match="same option with different values"):
        resolve(OVPATCH_DDP_BUCKET_SIZE="4", OVPATCH_DDP_SIZE="5")
    with pytest.raises(SettingsError, match="same option with different values"):
        resolve({"bucket_size": 4, "size": 5})


def test_variables_must_belong_to_an_option_unless_the_plugin_is_not_imported():
    feature_options.check_variables(
        {"OVPATCH_DDP_DEPTH": "1", "OVPATCH_DDP": "1", "OVPATCH_PIPE_X": "1"}, [DDP], ["pipe"]
    )
    with pytest.raises(
        SettingsError, match=r"OVPATCH_DDP_DPETH \(did you mean 'OVPATCH_DDP_DEPTH'\?\)"
    ):
        feature_options.check_variables({"OVPATCH_DDP_DPETH": "1"}, [DDP], ["pipe"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((Option("Upper", 1, ""),), "not a lower-case identifier"),
        ((Option("a", 1, ""), Option("b", 1, "", aliases=("a",))), "two options are called 'a'"),
        ((Option("a", (1, 2), ""),), "a default of type tuple needs parse="),
        ((Option("a", "x", "", choices=("y",)),), "the default 'x' is not among its choices"),
    ],
)
def test_unsound_declarations(bad, message):
    with pytest.raises(ValueError, match=message):
        feature_options.check_declaration(Feature("f", "", options=bad))


# --- variables that could be read in two ways ---

A = Feature("a", "", options=(Option("b_c", 1, ""),))
A_B = Feature("a_b", "", options=(Option("c", 1, ""),))
A_B_C = Feature("a_b_c", "")
CACHE = Feature("cache", "", options=(Option("dir", "", ""),))


def test_two_options_with_one_variable_lose_both():
    lost = feature_options.find_clashes({"a": A, "a_b": A_B}, (), ("a", "a_b"))
    assert set(lost) == {"a", "a_b"}
    assert (
        "OVPATCH_A_B_C would be option 'b_c' of feature 'a' and option 'c' of feature 'a_b'"
        in lost["a"]
    )


def test_ovpatch_keeps_its_own_variable():
    assert set(feature_options.find_clashes({"a": A, "a_b": A_B}, ("a",), ("a", "a_b"))) == {"a_b"}


def test_the_switch_of_a_feature_that_is_not_imported_clashes_too():
    assert set(feature_options.find_clashes({"a": A}, (), ("a", "a_b_c"))) == {"a", "a_b_c"}
    assert set(feature_options.find_clashes({"a": A, "a_b_c": A_B_C}, ("a",), ("a", "a_b_c"))) == {
        "a_b_c"
    }


def test_variables_of_ovpatch_are_reserved():
    assert (
        "OVPATCH_CACHE_DIR"
        in feature_options.find_clashes({"cache": CACHE}, ("cache",), ("cache",))["cache"]
    )


def test_no_clash():
    assert feature_options.find_clashes({"a": A, "ddp": DDP}, (), ("a", "ddp", "pipe")) == {}


def test_a_value_that_is_no_truth_value_is_left_to_the_option_of_the_shorter_feature():
    known = ("ddp", "ddp_size")
    assert (
        settings.read_switch(
            settings.read_environment({"OVPATCH_DDP_SIZE": "25"}), "ddp_size", known
        )
        is None
    )
    with pytest.raises(SettingsError, match="neither on nor off"):
        settings.read_switch(
            settings.read_environment({"OVPATCH_DDP_SIZE": "25"}), "ddp_size", ("ddp_size",)
        )


# --- the documentation ---


def test_the_table_has_every_variable_and_alias():
    table = docs_table.make_variables_table([DDP]) + docs_table.make_options_table(DDP)
    for name in (*settings.RESERVED, *feature_options.list_variables(DDP)):
        assert f"`{name}`" in table
    assert "| `OVPATCH_DDP_MODE` | `auto` `ring` `tree` | `auto` | Mode. |" in table
    assert "| `OVPATCH_DDP_OVERLAP` | `0` `1` | `1` | Overlap. |" in table
