"""Entry points found without import, and plugins loaded one by one, each failure with a name."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from ovpatch.patching.patch import NamedFunction, describe_callable, unwrap_callable
from ovpatch.session import plugins
from ovpatch.session.plugins import PluginError, Plugins
from ovpatch.session.session import Session
from tests.support import fake_plugins
from tests.support.fake_plugins import Site

site = fake_plugins.site
only_site = fake_plugins.only_site
session = fake_plugins.session


@pytest.fixture
def find(site):
    return lambda *more: plugins.find_plugins([str(site.folder), *map(str, more)])


@pytest.fixture
def load(find):
    return lambda name: Plugins().load_feature(find()[name])


# --- finding ---


def test_names_are_known_without_import(site, find):
    site.plugin("a", dist="My.Dist", version="3.1")
    found = find()["a"]
    assert (found.name, found.target, found.version) == ("a", "fake_a", "3.1")
    assert found.distribution == "my-dist"
    assert str(site.folder) in found.path
    assert not found.first_party
    assert "fake_a" not in sys.modules


def test_what_ovpatch_ships_comes_first(site, find):
    site.plugin("b", dist="ovpatch")
    site.plugin("a")
    assert list(find()) == ["b", "a"]
    assert find()["b"].first_party


def test_other_groups_do_not_matter(site, find):
    info = site.folder / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nx = y:z\n")
    assert find() == {}


def test_a_distribution_listed_twice_is_no_duplicate(site, find, tmp_path_factory):
    site.plugin("a", dist="dist-a")
    site.announce("a", "fake_a", dist="dist-a", version="1.0", suffix="egg-info")
    elsewhere = Site(tmp_path_factory.mktemp("elsewhere"))
    elsewhere.announce("a", "older", dist="dist_a", version="0.9")
    found = find(elsewhere.folder)["a"]
    assert (found.problem, found.remark, found.target) == ("", "", "fake_a")


def test_two_distributions_with_one_name_are_both_named_and_neither_loaded(site, find, load):
    site.plugin("a", dist="one")
    site.announce("a", "fake_other", dist="two", version="2.0")
    problem = find()["a"].problem
    assert "one 1.0 (fake_a)" in problem
    assert "two 2.0 (fake_other)" in problem
    with pytest.raises(PluginError) as error:
        load("a")
    assert error.value.state == "conflict"
    assert "fake_a" not in sys.modules


def test_ovpatch_keeps_its_own_name_and_says_what_was_left_out(site, find, load):
    site.plugin("a", dist="ovpatch")
    site.announce("a", "fake_other", dist="two", version="2.0")
    found = find()["a"]
    assert found.first_party
    assert "two 2.0 (fake_other) was left out" in found.remark
    assert load("a").name == "a"


def test_the_same_line_twice_in_one_distribution_is_no_duplicate(site, find):
    site.plugin("a", dist="one")
    site.announce("a", "fake_a", dist="one")
    assert not find()["a"].problem


@pytest.mark.parametrize("name", ["9lives", "a.b", "all", "on"])
def test_names_that_settings_could_not_write(site, find, name):
    site.announce(name, "fake_x", dist="odd")
    assert find()[plugins.normalise_name(name)].problem


# --- loading ---


def test_a_sound_plugin(site, load):
    site.plugin("a", feature="options=(Option('x', 1, ''),), default=False")
    feature = load("a")
    assert (feature.name, feature.default, [option.name for option in feature.options]) == (
        "a",
        False,
        ["x"],
    )


def test_a_plugin_may_have_an_object_that_answers_nothing(site, load):
    site.plugin(
        "a",
        extra="class Lazy:\n    def __getattr__(self, name):\n        raise RuntimeError\nlazy = Lazy()",
    )
    assert load("a").name == "a"


def test_a_plugin_is_imported_and_described_once(site, find):
    site.plugin("a")
    plugins, found = Plugins(), find()["a"]
    assert plugins.load_feature(found) is plugins.load_feature(found)
    assert site.log == ["import a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"extra": "raise RuntimeError('boom')"},
            "importing fake_a of dist-a raised RuntimeError: boom",
        ),
        (
            {"extra": "import no_such_module"},
            "raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ({"extra": "raise SystemExit(3)"}, "raised SystemExit: 3"),
        (
            {"extra": "@hookimpl\ndef ovpatch_actvate():\n    pass"},
            r"unknown hook 'ovpatch_actvate' \(did you mean 'ovpatch_activate'\?\)",
        ),
        ({"extra": "@hookimpl\ndef counters():\n    pass"}, "unknown hook 'counters'"),
        (
            {"extra": "def ovpatch_counters():\n    return {}"},
            "'ovpatch_counters' looks like a hook but is not marked with @hookimpl",
        ),
        (
            {"extra": "@hookimpl\ndef ovpatch_counters(colour):\n    return {}"},
            "does not fit the specification",
        ),
        ({"extra": "del ovpatch_register"}, "does not implement ovpatch_register"),
        (
            {"extra": "del ovpatch_register, ovpatch_feature"},
            "implement ovpatch_feature and ovpatch_register",
        ),
        (
            {"extra": "@hookimpl\ndef ovpatch_feature():\n    return 'a'"},
            "ovpatch_feature returned str, not a Feature",
        ),
        (
            {"extra": "@hookimpl\ndef ovpatch_feature():\n    return Feature('b', '')"},
            "its feature is called 'b', its entry point 'a'",
        ),
        (
            {"extra": "@hookimpl\ndef ovpatch_feature():\n    return 1 / 0"},
            "ovpatch_feature raised ZeroDivisionError",
        ),
        (
            {"feature": "options=(Option('X', 1, ''),)"},
            "option name 'X' is not a lower-case identifier",
        ),
        ({"feature": "torch='about 2'"}, "about 2"),
        ({"feature": "torch=2.11"}, "torch= of the feature is 2.11, not a str"),
        ({"feature": "default='no'"}, "default= of the feature is 'no', not a bool"),
        ({"feature": "requires='b'"}, "requires must be a tuple of str, not 'b'"),
        ({"feature": "conflicts=None"}, "conflicts must be a tuple of str, not None"),
        ({"feature": "options=None"}, "options must be a tuple of Option, not None"),
        ({"feature": "options=('n',)"}, "options must be a tuple of Option, not"),
        ({"feature": "options=(Option(1, 1, ''),)"}, "the name of an option must be"),
        (
            {"feature": "options=(Option('n', 1, '', aliases='ab'),)"},
            "the aliases of option 'n' must be a tuple",
        ),
    ],
)
def test_a_broken_plugin_says_what_is_wrong_and_leaves_the_others_alone(
    site, find, change, message
):
    site.plugin("a", **change)
    site.plugin("b")
    plugins = Plugins()
    # A second attempt fails the same, because the first left nothing registered.
    for _ in range(2):
        with pytest.raises(PluginError, match=message) as error:
            plugins.load_feature(find()["a"])
    assert error.value.state == "failed"
    assert "\n" not in str(error.value)
    assert plugins.load_feature(find()["b"]).name == "b"


def test_a_broken_plugin_may_be_tried_again(site, find):
    site.plugin("a", extra="raise RuntimeError('boom')")
    plugins = Plugins()
    with pytest.raises(PluginError):
        plugins.load_feature(find()["a"])
    site.forget()
    site.plugin("a", extra="# repaired, and of another length than before")
    assert plugins.load_feature(find()["a"]).name == "a"


# --- calling ---


def test_a_hook_is_called_for_one_plugin_only(site, find):
    for name in ("a", "b"):
        site.plugin(name, extra=f"@hookimpl\ndef ovpatch_counters():\n    return {{{name!r}: 1}}")
    plugins = Plugins()
    for found in find().values():
        plugins.load_feature(found)
    assert plugins.call_hook("a", "ovpatch_counters") == {"a": 1}
    assert plugins.call_hook("b", "ovpatch_counters") == {"b": 1}
    assert plugins.call_hook("a", "ovpatch_remarks") is None


def test_an_error_in_a_hook_is_attributed_and_chained(site, find):
    site.plugin("a", extra="@hookimpl\ndef ovpatch_remarks():\n    raise KeyError('lost')")
    plugins = Plugins()
    plugins.load_feature(find()["a"])
    with pytest.raises(PluginError, match="ovpatch_remarks raised KeyError: 'lost'") as error:
        plugins.call_hook("a", "ovpatch_remarks")
    assert isinstance(error.value.__cause__, KeyError)


# --- plugins that make_feature_hooks makes ---

MADE = """
import victim
from ovpatch import Feature, FeatureCounters, Level, Option, Peak, make_feature_hooks

class Counters(FeatureCounters):
    calls: int = 3
    kept: Level = 2
    most: Peak = 1

COUNTERS = Counters()

def register(patches, options):
    patches.register_patch("victim.f", wrap="fake_work:wrap_f")
    patches.register_patch("victim.g", wrap="fake_work:wrap_g")

hooks = make_feature_hooks(
    Feature("a", "The feature a.", options=(Option("amount", 10, "What is added."),)),
    register,
    counters="fake_a:COUNTERS",
    reasons_against=lambda options: victim.reasons,
    activate="fake_live:attach",
    deactivate="fake_live:detach_all",
    remarks="fake_remarks:list_remarks",
)
"""
WORK = """
import functools

def wrap_f(original, options):
    @functools.wraps(original)
    def f(x):
        return original(x) + options["amount"]
    return f

def wrap_g(original):
    @functools.wraps(original)
    def g(x):
        return original(x) * 2
    return g
"""
LIVE = """
import victim

def attach(options):
    victim.LOG.append(f"attach {options['amount']}")

def detach_all():
    victim.LOG.append("detach")
"""


@pytest.fixture
def made(only_site):
    """A plugin of make_feature_hooks, with three modules of work."""
    site = only_site
    site.write("fake_a", MADE)
    site.write("fake_work", WORK)
    site.write("fake_live", LIVE)
    site.write("fake_remarks", "def list_remarks():\n    return ['there are remarks']\n")
    site.announce("a", "fake_a:hooks", dist="dist-a")
    site.victim.reasons = []
    return site


def test_a_made_plugin_imports_its_modules_when_they_are_needed(made, session):
    made.victim.reasons = ["no such machine"]
    assert session.apply((), None, None)["a"].reason == "no such machine"
    assert not {"fake_work", "fake_live", "fake_remarks"} & set(sys.modules)

    made.victim.reasons = []
    assert session.apply((), {"a": {"amount": 5}}, None)["a"].state == "applied"
    assert (made.victim.f(1), made.victim.g(3), made.log) == (6, 6, ["attach 5"])
    assert session.report()["a"].counters == {"calls": 3, "kept": 2, "most": 1}
    assert session.report()["a"].levels == {"kept": "level", "most": "peak"}
    assert "there are remarks" not in session.report()["a"].remarks, (
        "nothing has imported that module"
    )
    importlib.import_module("fake_remarks")
    assert "there are remarks" in session.report()["a"].remarks

    session.revert(())
    assert (made.victim.f(1), made.log) == (1, ["attach 5", "detach"])


def test_a_made_plugin_does_not_detach_what_nothing_has_imported(made, session):
    made.write("fake_live", LIVE.replace("import victim", "import nowhere"))
    found = session.apply((), None, None)["a"]
    assert (found.state, found.reason.partition(":")[0]) == (
        "failed",
        "ovpatch_activate raised ModuleNotFoundError",
    )
    assert made.victim.f(1) == 1


@pytest.mark.parametrize(
    "name", ["fake_work", "fake_work:", ":wrap_f", "fake work:f", "fake_work:no.method"]
)
def test_a_wrap_that_names_no_function(made, name):
    made.write("fake_a", MADE.replace("fake_work:wrap_f", name))
    found = Session().apply((), None, None)["a"]
    assert found.state == "failed"
    assert f"wrap={name!r} names no function: write it as 'package.module:function'" in found.reason


def test_a_named_wrap_that_does_not_exist_names_patch_and_target(made):
    made.write("fake_a", MADE.replace("fake_work:wrap_f", "fake_work:wrap_h"))
    found = Session().apply((), None, None)["a"]
    assert found.state == "failed"
    assert "(fake_work.wrap_h) failed for victim.f: AttributeError" in found.reason


def test_a_named_wrap_is_declared_once_and_found_inside():
    first, again = (
        NamedFunction("textwrap:dedent", {"a": 1}),
        NamedFunction("textwrap:dedent", {"a": 1}),
    )
    assert first == again
    assert hash(first) == hash(again)
    assert first != NamedFunction("textwrap:dedent", {"a": 2})
    assert unwrap_callable(first) is textwrap.dedent, "Dynamo skips frames of its file"
    unknown = NamedFunction("fake_nowhere:f", {})
    assert unwrap_callable(unknown) is unknown
    assert describe_callable(unknown) == "fake_nowhere.f"
