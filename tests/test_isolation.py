"""Features that fail or depend on each other: isolated by default, raising by name, and nothing left behind."""

from __future__ import annotations

import re

import pytest

from ovpatch.session.feature_plan import FeatureError
from tests.support import fake_plugins
from tests.support.fake_plugins import ADD, ADD_N, OPTION, REASON, states

site = fake_plugins.only_site
session = fake_plugins.session
apply = fake_plugins.apply


# --- failures are isolated by default, raise by name, and leave nothing behind ---

FAILURES = [
    ({"extra": "raise RuntimeError('boom')"}, "failed", "boom"),
    ({"extra": REASON}, "skipped", "no such machine"),
    (
        {"register": "raise RuntimeError('boom')"},
        "failed",
        "ovpatch_register raised RuntimeError: boom",
    ),
    (
        {"register": "patches.register_patch('victim.nowhere', wrap=add(1))"},
        "unavailable",
        "nowhere",
    ),
    (
        {
            "register": ADD.format(7),
            "extra": "@hookimpl\ndef ovpatch_activate():\n    raise RuntimeError('boom')",
        },
        "failed",
        "ovpatch_activate raised RuntimeError: boom",
    ),
    ({"register": "patches.register_hook('h', lambda: 1 / 0)"}, "failed", "division by zero"),
    ({"register": "patches.register_hook('h', lambda: None)"}, "failed", "remove"),
    ({"feature": "requires=('nobody',)"}, "skipped", "requires 'nobody', which is not installed"),
    ({"feature": "requires=('idle',)"}, "skipped", "requires 'idle', which is not on"),
    (
        {"extra": "@hookimpl\ndef ovpatch_reasons_against():\n    raise OSError('x')"},
        "failed",
        "OSError: x",
    ),
    (
        {"extra": "@hookimpl\ndef ovpatch_reasons_against():\n    return 5"},
        "failed",
        "returned int, not a list",
    ),
    (
        {"extra": "@hookimpl\ndef ovpatch_reasons_against():\n    raise SystemExit(3)"},
        "failed",
        "SystemExit: 3",
    ),
    ({"register": "raise SystemExit(3)"}, "failed", "ovpatch_register raised SystemExit: 3"),
    ({"register": "patches.register_hook('h', lambda: exit(3))"}, "failed", r"SystemExit\(3\)"),
    (
        {"register": ADD.format(7), "extra": "@hookimpl\ndef ovpatch_activate():\n    return 5"},
        "failed",
        "ovpatch_activate returned int, not a list of strings",
    ),
    (
        {"feature": "options=(Option('p', 0, '', parse=lambda text: 1 / 0),)"},
        "failed",
        "parsing its options raised ZeroDivisionError",
    ),
]


@pytest.fixture
def broken(site, request, monkeypatch):
    change, state, reason = request.param
    if "Option('p'" in change.get("feature", ""):
        monkeypatch.setenv("OVPATCH_A_P", "1")
    site.plugin("a", **change)
    site.plugin("b", register=ADD.format(100))
    site.plugin("idle", feature="default=False")
    return state, reason


@pytest.mark.parametrize("broken", FAILURES, indirect=True)
def test_a_failing_default_feature_leaves_the_others_alone(site, session, apply, broken):
    state, reason = broken
    report = apply()
    assert states(report) == {"a": state, "b": "applied", "idle": "disabled"}
    assert re.search(reason, report["a"].reason)
    assert site.victim.f(1) == 101
    session.revert(())
    assert site.victim.f(1) == 1


@pytest.mark.parametrize("how", ["named", "variable", "switch", "strict"])
@pytest.mark.parametrize("broken", FAILURES, indirect=True)
def test_asked_for_by_name_or_strict_it_raises_and_nothing_stays(
    site, session, apply, broken, how, monkeypatch
):
    stock = site.victim.f
    if how == "variable":
        monkeypatch.setenv("OVPATCH", "+a")
    if how == "switch":
        monkeypatch.setenv("OVPATCH_A", "1")
    with pytest.raises(FeatureError, match=broken[1]) as error:
        apply(*(["a", "b"] if how == "named" else []), strict=how == "strict")
    assert str(error.value).endswith(" or continue without: OVPATCH_A=0.")
    assert site.victim.f is stock
    assert states(session.report())["b"] == "skipped"
    assert session.report()["a"].state == broken[0]
    # The remedy helps however the feature was requested.
    monkeypatch.setenv("OVPATCH_A", "0")
    found = apply(*(["a", "b"] if how == "named" else []), strict=how == "strict")
    assert states(found) == {"a": "disabled", "b": "applied", "idle": "disabled"}


def test_a_failed_call_brings_back_what_was_on(site, session, apply):
    site.plugin("a", feature=OPTION, register=ADD_N)
    site.plugin("b", feature="default=False", register="raise RuntimeError('boom')")
    apply(options={"a": {"n": 5}})
    with pytest.raises(FeatureError, match="boom"):
        apply("b", options={"a": {"n": 7}})
    assert site.victim.f(1) == 6
    assert session.report()["a"].state == "applied"
    assert session.report()["a"].options["n"].value == 5
    apply()
    assert site.victim.f(1) == 6


def test_two_features_replacing_one_function_conflict(site, apply):
    replace = "patches.register_patch('victim.g', lambda x: {})"
    site.plugin("a", register=replace.format(1))
    site.plugin("b", register=replace.format(2))
    site.plugin("c", register=ADD.format(10))
    report = apply()
    assert sorted(states(report).values()) == ["applied", "applied", "conflict"]
    assert site.victim.f(1) == 11


def test_what_requires_a_feature_that_fails_late_stands_down_too(site, apply):
    site.plugin("a", extra="@hookimpl\ndef ovpatch_activate():\n    raise RuntimeError('boom')")
    site.plugin("b", feature="requires=('a',)", register=ADD.format(10))
    report = apply()
    assert states(report) == {"a": "failed", "b": "skipped"}
    assert "boom" in report["b"].reason
    assert site.victim.f(1) == 1


def test_a_plugin_that_fails_half_way_may_clean_up(site, apply):
    site.plugin("a", extra="@hookimpl\ndef ovpatch_activate():\n    raise RuntimeError('boom')")
    apply()
    assert site.log == ["import a", "register a", "deactivate a"]


def test_an_iterator_without_reasons_is_no_reason(site, apply):
    site.plugin("a", extra="@hookimpl\ndef ovpatch_reasons_against():\n    return iter(())")
    assert states(apply()) == {"a": "applied"}


def test_an_interrupted_call_leaves_nothing_and_can_be_repeated(site, session, apply):
    interrupt = "if victim.LOG.count('register a') == 1:\n        raise KeyboardInterrupt"
    site.plugin(
        "a", register=ADD.format(10), extra=f"@hookimpl\ndef ovpatch_activate():\n    {interrupt}"
    )
    with pytest.raises(KeyboardInterrupt):
        apply()
    assert site.victim.f(1) == 1
    assert states(apply()) == {"a": "applied"}
    assert site.victim.f(1) == 11


def test_a_hook_that_cannot_be_removed_is_told_and_everything_else_is_off(site, session, apply):
    site.plugin("a", register="patches.register_hook('h', lambda: Stuck())", extra=STUCK)
    site.plugin("b", register=ADD.format(10))
    apply()
    with pytest.raises(FeatureError, match=r"turned off, .* \(hook 'h'\) could not be removed"):
        session.revert(())
    assert states(session.report()) == {"a": "disabled", "b": "disabled"}
    assert site.victim.f(1) == 1


STUCK = """
class Stuck:
    def remove(self):
        raise OSError("stuck")
"""


def test_a_feature_that_fails_with_a_hook_that_cannot_be_removed(site, apply, caplog):
    fail = "@hookimpl\ndef ovpatch_activate():\n    raise RuntimeError('boom')"
    site.plugin("a", register="patches.register_hook('h', lambda: Stuck())", extra=STUCK + fail)
    site.plugin("b", register=ADD.format(10))
    assert states(apply()) == {"a": "failed", "b": "applied"}
    assert "stuck" in caplog.text


# --- features among each other ---


def test_a_feature_comes_after_what_it_requires(site, apply):
    site.plugin("a", feature="requires=('b',)")
    site.plugin("b")
    apply()
    assert site.log[2:] == ["register b", "register a", "activate b", "activate a"]


def test_a_feature_that_is_on_satisfies_a_requirement(site, apply):
    site.plugin("a")
    site.plugin("b", feature="requires=('a',)")
    apply("a")
    assert states(apply("b")) == {"a": "applied", "b": "applied"}


def test_revert_goes_backwards(site, session, apply):
    for name in ("a", "b", "c"):
        site.plugin(name)
    apply()
    session.revert(())
    assert site.log[-3:] == ["deactivate c", "deactivate b", "deactivate a"]


def test_reverting_takes_along_what_requires_it(site, session, apply):
    site.plugin("a")
    site.plugin("b", feature="requires=('a',)")
    apply()
    report = session.revert(["a"])
    assert states(report) == {"a": "disabled", "b": "disabled"}
    assert report["b"].reason == "reverted together with 'a', which it requires"
    assert site.log[-2:] == ["deactivate b", "deactivate a"]


@pytest.mark.parametrize(
    ("first", "asked", "expected"),
    [
        ((), (), {"a": "conflict", "b": "conflict"}),
        (("a",), (), {"a": "applied", "b": "conflict"}),
        ((), ("OVPATCH_B",), {"a": "conflict", "b": "applied"}),
    ],
)
def test_conflicting_features(site, apply, monkeypatch, first, asked, expected):
    site.plugin("a", feature="conflicts=('b',)")
    site.plugin("b")
    if first:
        apply(*first)
    for name in asked:
        monkeypatch.setenv(name, "1")
    assert states(apply()) == expected


def test_what_ovpatch_ships_goes_before_a_third_party_in_conflict(site, apply):
    site.plugin("a", feature="conflicts=('b',)")
    site.plugin("b", dist="ovpatch")
    assert states(apply()) == {"b": "applied", "a": "conflict"}


def test_a_conflict_by_name_raises(site, apply):
    site.plugin("a", feature="conflicts=('b',)")
    site.plugin("b")
    with pytest.raises(FeatureError, match=r"a .* is conflict: conflicts with 'b'"):
        apply("a", "b")
    apply("a")
    with pytest.raises(FeatureError, match=r"b .* is conflict"):
        apply("b")


def test_clashing_variables_are_a_conflict(site, apply):
    site.plugin("x", feature="options=(Option('y_z', 1, ''),)")
    site.plugin("x_y", feature="options=(Option('z', 1, ''),)")
    site.plugin("w")
    report = apply()
    assert states(report) == {"x": "conflict", "x_y": "conflict", "w": "applied"}
    assert "OVPATCH_X_Y_Z would be" in report["x"].reason
