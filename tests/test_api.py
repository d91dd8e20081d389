"""apply, applied, revert and report over one session of features."""

from __future__ import annotations

import re
import sys

import pytest

import ovpatch
from ovpatch.patching import PatchError, PatchManager
from ovpatch.session.feature_plan import FeatureError
from ovpatch.session.session_report import NEVER_CALLED, NO_WORK, SPAWNED
from tests.support import fake_plugins
from tests.support.fake_plugins import ADD, ADD_N, OPTION, REASON, states

site = fake_plugins.only_site
session = fake_plugins.session
apply = fake_plugins.apply


# --- the plain case ---


def test_apply_patches_and_revert_restores(site, session, apply):
    site.plugin("a", register=ADD.format(10))
    stock = site.victim.f
    report = apply()
    assert states(report) == {"a": "applied"}
    assert site.victim.f(1) == 11
    assert site.log == ["import a", "register a", "activate a"]
    assert states(session.revert(())) == {"a": "disabled"}
    assert site.victim.f is stock
    assert site.log[-1] == "deactivate a"
    assert session.report()["a"].reason == "reverted"


def test_apply_again_does_nothing(site, apply):
    site.plugin("a", register=ADD.format(10))
    apply()
    patched, log = site.victim.f, list(site.log)
    assert states(apply("a")) == {"a": "applied"}
    assert site.victim.f is patched
    assert site.log == log


def test_a_second_apply_adds_the_difference_and_takes_nothing_away(site, apply):
    site.plugin("a", register=ADD.format(10))
    site.plugin("b", register=ADD.format(100))
    assert states(apply("a")) == {"a": "applied", "b": "disabled"}
    assert "fake_b" not in sys.modules
    assert states(apply("b")) == {"a": "applied", "b": "applied"}
    assert site.victim.f(1) == 111
    assert site.log.count("register a") == 1


def test_patches_that_come_late_are_the_features_and_go_with_it(site, session, apply):
    site.plugin("a", register="global KEPT; KEPT = patches, add")
    apply()
    patches, add = sys.modules["fake_a"].KEPT
    patches.register_patch("victim.f", wrap=add(10))
    assert site.victim.f(1) == 1
    patches.apply()
    assert site.victim.f(1) == 11
    session.revert(())
    assert site.victim.f(1) == 1
    with pytest.raises(PatchError, match="'a' has been turned off during the call"):
        patches.apply()
    assert site.victim.f(1) == 1
    apply()
    assert site.victim.f(1) == 1


def test_patches_that_come_while_another_thread_turns_the_feature_off_are_taken_back(
    site, session, apply, monkeypatch
):
    site.plugin("a", register="global KEPT; KEPT = patches, add")
    apply()
    patches, add = sys.modules["fake_a"].KEPT
    patches.register_patch("victim.f", wrap=add(10))
    write = PatchManager.apply

    def write_behind_revert(manager, *names):
        session.revert(())
        write(manager, *names)

    monkeypatch.setattr(PatchManager, "apply", write_behind_revert)
    with pytest.raises(PatchError, match="turned off during the call"):
        patches.apply()
    assert site.victim.f(1) == 1


def test_revert_by_name_and_apply_again(site, session, apply):
    site.plugin("a", register=ADD.format(10))
    site.plugin("b", register=ADD.format(100))
    apply()
    session.revert(["A"])
    assert site.victim.f(1) == 101
    apply("a")
    assert site.victim.f(1) == 111


def test_revert_of_an_unknown_name(site, session, apply):
    site.plugin("abcd")
    apply()
    with pytest.raises(
        ovpatch.SettingsError, match="unknown feature 'abdc' \\(did you mean 'abcd'"
    ):
        session.revert(["abdc"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("a", {"n": 1})], r"options= is .*; write {feature: {option: value}} there"),
        ({"a": None}, r"options\['a'\] is None; write {option: value} there"),
        ({1: {}}, "names are strings; got 1"),
        ({"a": {2: 3}}, "names are strings; got 2"),
        (
            {"a": {"n": 1}, "A": {"n": 2}},
            "options= has 'a' and 'A', which mean the same. Keep one of them",
        ),
        ({"a": {"n": 1, "N": 2}}, r"options\['a'\] has 'n' and 'N', which mean the same"),
    ],
)
def test_options_of_another_shape(site, apply, options, message):
    site.plugin("a", feature=OPTION, register=ADD_N)
    with pytest.raises(ovpatch.SettingsError, match=message):
        apply(options=options)
    assert site.victim.f(1) == 1


def test_names_are_given_one_by_one(apply):
    with pytest.raises(ovpatch.SettingsError, match="Pass each name as an argument"):
        apply(["a"])


def test_what_is_off_by_default_is_on_by_name(site, apply):
    site.plugin("a", feature="default=False", register=ADD.format(10))
    report = apply()
    assert report["a"].state == "disabled"
    assert "OVPATCH=+a" in report["a"].reason
    assert states(apply("a")) == {"a": "applied"}


# --- the environment ---


@pytest.mark.parametrize(
    "variable", [("OVPATCH", "0"), ("OVPATCH", "-a"), ("OVPATCH", "b"), ("OVPATCH_A", "0")]
)
def test_off_by_the_environment_is_never_imported_and_no_error_even_by_name(
    site, apply, monkeypatch, variable
):
    site.plugin("a", register=ADD.format(10))
    site.plugin("b")
    monkeypatch.setenv(*variable)
    report = apply("a", strict=True)
    assert report["a"].state == "disabled"
    assert variable[0] in report["a"].reason
    assert "fake_a" not in sys.modules
    assert site.victim.f(1) == 1


def test_off_by_the_environment_takes_back_what_is_on(site, apply, monkeypatch):
    site.plugin("a", register=ADD.format(10))
    apply()
    monkeypatch.setenv("OVPATCH_A", "0")
    assert states(apply()) == {"a": "disabled"}
    assert site.victim.f(1) == 1


def test_third_party_plugins_can_be_left_out(site, apply, monkeypatch):
    site.plugin("a", dist="ovpatch")
    site.plugin("b")
    monkeypatch.setenv("OVPATCH_THIRD_PARTY", "0")
    report = apply()
    assert states(report) == {"a": "applied", "b": "disabled"}
    assert report["b"].reason == "left out by OVPATCH_THIRD_PARTY=0"
    assert "fake_b" not in sys.modules


def test_the_environment_overrules_strict(site, apply, monkeypatch):
    site.plugin("a", extra=REASON)
    monkeypatch.setenv("OVPATCH_STRICT", "0")
    assert states(apply(strict=True)) == {"a": "skipped"}
    monkeypatch.setenv("OVPATCH_STRICT", "1")
    with pytest.raises(FeatureError, match="OVPATCH_STRICT"):
        apply(strict=False)


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({"OVPATCH_A_M": "1"}, None, "did you mean 'OVPATCH_A_N'"),
        ({"OVPATCH_A_N": "x"}, None, "expected a whole number"),
        ({}, {"a": {"amuont": 1}}, "did you mean 'amount'"),
        ({}, {"b": {"m": 1}}, "unknown feature 'b'"),
        ({}, {"a": 3}, "write {option: value}"),
    ],
)
def test_wrong_settings_raise_before_anything_is_patched(
    site, apply, monkeypatch, environ, options, message
):
    site.plugin("a", feature=OPTION, register=ADD_N)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ovpatch.SettingsError, match=message):
        apply(options=options)
    assert site.victim.f(1) == 1
    assert "register a" not in site.log


def test_options_of_a_feature_that_is_off_are_not_checked_and_cause_no_import(
    site, apply, monkeypatch
):
    site.plugin("a", feature=OPTION)
    monkeypatch.setenv("OVPATCH", "-a")
    monkeypatch.setenv("OVPATCH_A_WHATEVER", "1")
    apply()
    assert "fake_a" not in sys.modules


# --- options ---


def test_options_reach_the_plugin_and_the_report(site, apply, monkeypatch):
    site.plugin("a", feature=OPTION, register=ADD_N)
    report = apply(options={"a": {"amount": 5}})
    assert site.victim.f(1) == 6
    assert report["a"].options["n"] == ovpatch.settings.feature_options.OptionValue(5, "argument")


def test_changed_options_apply_anew_and_unmentioned_ones_stay(site, apply):
    site.plugin("a", feature=OPTION, register=ADD_N)
    apply(options={"a": {"n": 5}})
    apply()
    assert site.victim.f(1) == 6
    apply(options={"a": {"n": 7}})
    assert site.victim.f(1) == 8
    assert site.log == [
        "import a",
        "register a",
        "activate a",
        "deactivate a",
        "register a",
        "activate a",
    ]


def test_a_revert_forgets_the_options(site, session, apply):
    site.plugin("a", feature=OPTION, register=ADD_N)
    apply(options={"a": {"n": 5}})
    session.revert(())
    apply()
    assert site.victim.f(1) == 2


def test_changed_options_that_cannot_be_taken_keep_the_old_ones(site, session, apply):
    extra = "@hookimpl\ndef ovpatch_deactivate():\n    raise RuntimeError('in the middle of a backward')"
    site.plugin("a", feature=OPTION, register=ADD_N, extra=extra)
    apply()
    with pytest.raises(FeatureError, match=r"stays on: .*in the middle of a backward"):
        apply(options={"a": {"n": 5}})
    assert site.victim.f(1) == 2
    assert session.report()["a"].options["n"].value == 1
    assert states(apply()) == {"a": "applied"}
    with pytest.raises(FeatureError, match="'a' cannot be turned off now"):
        session.revert(())
    assert site.victim.f(1) == 2


def test_features_that_require_a_changed_one_follow_it(site, apply):
    site.plugin("a", feature=OPTION, register=ADD_N)
    site.plugin("b", feature="requires=('a',)")
    apply()
    site.log.clear()
    apply(options={"a": {"n": 5}})
    assert site.log == [
        "deactivate b",
        "deactivate a",
        "register a",
        "register b",
        "activate a",
        "activate b",
    ]


# --- the report ---


@pytest.mark.parametrize("spawned", [False, True])
def test_counters_remarks_and_never_called(site, session, apply, monkeypatch, spawned):
    # Not what this process did: the pool of ranks in the same pytest run starts children.
    for way in ("popen_spawn_posix", "popen_forkserver"):
        monkeypatch.delitem(sys.modules, f"multiprocessing.{way}", raising=False)
    if spawned:
        monkeypatch.setitem(sys.modules, "multiprocessing.popen_spawn_posix", sys)
    extra = """
    @hookimpl
    def ovpatch_counters():
        return COUNT
    @hookimpl
    def ovpatch_remarks():
        return ["one model stays stock"]
    @hookimpl
    def ovpatch_activate():
        return "built too early"
    """
    site.plugin("a", register=ADD.format(10), extra=extra)
    hint = (SPAWNED,) if spawned else ()
    assert apply()["a"].remarks == ("built too early", "one model stays stock", NEVER_CALLED, *hint)
    site.victim.f(1)
    found = session.report()["a"]
    assert found.counters == {"calls": 1}
    assert found.remarks == ("built too early", "one model stays stock")


def test_a_wrapper_that_was_called_and_raised_was_called(site, session, apply):
    extra = """
    @hookimpl
    def ovpatch_counters():
        return COUNT
    def fail(original):
        @functools.wraps(original)
        def f(x):
            raise ValueError(x)
        return f
    """
    site.plugin("a", register="patches.register_patch('victim.f', wrap=fail)", extra=extra)
    assert NEVER_CALLED in apply()["a"].remarks
    with pytest.raises(ValueError, match="3"):
        site.victim.f(3)
    assert NO_WORK in session.report()["a"].remarks
    assert NEVER_CALLED not in session.report()["a"].remarks


def test_without_counters_the_calls_of_the_patches_count(site, session, apply):
    site.plugin("a", register=ADD.format(10))
    assert NEVER_CALLED in apply()["a"].remarks
    site.victim.f(1)
    assert session.report()["a"].remarks == ()
    assert session.report().patches[0].calls == 1


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("counters", "its counters cannot be read: cannot convert float infinity to integer"),
        ("remarks", "ovpatch_remarks returned float, not a list of strings. Return a list"),
    ],
)
def test_a_hook_that_returns_nonsense_does_not_break_the_report(site, apply, hook, said):
    value = "{'n': INF}" if hook == "counters" else "INF"
    site.plugin(
        "a", extra=f"INF = float('inf')\n@hookimpl\ndef ovpatch_{hook}():\n    return {value}"
    )
    found = apply()["a"]
    assert found.state == "applied"
    assert said in found.remarks


def test_counters_that_raise_do_not_break_the_report(site, apply):
    site.plugin("a", extra="@hookimpl\ndef ovpatch_counters():\n    return 1 / 0")
    assert "ZeroDivisionError" in apply()["a"].remarks[0]


def test_a_torch_outside_the_tested_versions_is_said_not_refused(site, apply):
    import torch

    site.plugin("a", feature="torch='<1.0'")
    report = apply()
    assert report["a"].state == "applied"
    assert report["a"].remarks == (f"untested with torch {torch.__version__} (tested with <1.0)",)


def test_a_late_target_is_pending(site, session, apply):
    site.plugin("a", register="patches.register_patch('fake_later.f', wrap=add(1))")
    site.write("fake_later", "def f(x):\n    return x\n")
    found = apply("a")["a"]
    assert found.state == "pending"
    assert found.reason == "fake_later is not imported yet"
    import fake_later

    assert fake_later.f(1) == 2
    assert session.report()["a"].state == "applied"


def test_why_nothing_is_patched_is_said_once(site, apply):
    patches = (
        f"patches.register_patch('fake_absent.{name}', wrap=add(1), optional=True)" for name in "fg"
    )
    site.plugin("a", register="; ".join(patches))
    found = apply()["a"]
    assert (found.state, found.reason) == ("skipped", "there is no package 'fake_absent'")


def test_shadowed_after_revert_is_said(site, session, apply):
    site.plugin("a", register=ADD.format(10))
    apply()
    ours = site.victim.f
    site.victim.f = lambda x: ours(x) + 1000
    found = session.revert(())["a"]
    assert found.state == "shadowed"
    assert "victim.f" in found.reason
    assert site.victim.f(1) == 1001
    assert states(apply()) == {"a": "applied"}
    assert site.victim.f(1) == 1011


def test_the_report_before_apply_names_what_is_installed_and_imports_nothing(site, session):
    site.plugin("a")
    report = session.report()
    assert states(report) == {"a": "disabled"}
    assert report["a"].reason == "apply() has not been called in this process"
    assert site.log == []


def test_the_report_where_nothing_is_installed(site, session):
    report = session.report()
    assert report.features == ()
    assert "no features" in report.summary()


def test_shadowed_is_said_of_a_feature_that_never_became_active(site, session, apply):
    """Somebody patches on top of it between its patches and its activation, which fails."""
    cover = (
        "ours = victim.f\n    victim.f = lambda x: ours(x) + 1000\n    raise RuntimeError('boom')"
    )
    site.plugin(
        "a", register=ADD.format(10), extra=f"@hookimpl\ndef ovpatch_activate():\n    {cover}"
    )
    report = apply()
    assert report["a"].state == "failed"
    assert "boom" in report["a"].reason
    assert "victim.f is shadowed" in report["a"].reason
    assert [patch.state.value for patch in report.patches] == ["shadowed"]
    assert site.victim.f(1) == 1001


# --- applied() ---


def test_applied_restores_what_was_there(site, session, apply):
    site.plugin("a", feature=OPTION, register=ADD_N)
    site.plugin("b", register=ADD.format(100))
    apply("a")
    with session.applied(["b"], {"a": {"n": 5}}, None) as report:
        assert states(report) == {"a": "applied", "b": "applied"}
        assert site.victim.f(1) == 106
    assert states(session.report()) == {"a": "applied", "b": "disabled"}
    assert site.victim.f(1) == 2
    apply()
    assert site.victim.f(1) == 102


def test_applied_restores_after_an_error(site, session):
    site.plugin("a", register=ADD.format(10))

    def use():
        with session.applied((), None, None):
            raise KeyError("from the block")

    with pytest.raises(KeyError):
        use()
    assert site.victim.f(1) == 1


@pytest.mark.parametrize("error", [KeyError("from the block"), KeyboardInterrupt(), None])
def test_a_block_ends_by_its_own_error(site, session, caplog, error):
    """Features often cannot be turned off for the same cause. If the block raised, the log has that error instead."""
    extra = "@hookimpl\ndef ovpatch_deactivate():\n    raise RuntimeError('a peer has ended')"
    site.plugin("a", register=ADD.format(10), extra=extra)
    said = r"'a' cannot be turned off now and stays on: .*a peer has ended"

    def use():
        with session.applied((), None, None):
            if error is not None:
                raise error

    with pytest.raises(FeatureError if error is None else type(error)) as caught:
        use()
    if error is None:
        caught.match(said)
    else:
        assert caught.value is error
        assert re.search(said, caplog.text)
