"""Ways in which patch managers of this kind go wrong; none of them exists here."""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from ovpatch.patching import (
    IncompatiblePatchError,
    PatchConflictError,
    PatchError,
    PatchManager,
)

from .conftest import MakeModule, WritePackage
from .tools import patch, same, snapshot, states, tag


def test_equal_constants_elsewhere_are_never_touched(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'\nversion = 1\noptional_fn = None\nclass C:\n    version = 1")
    other = make("version = 1\noptional_fn = None\nflag = True")
    before = snapshot(other)
    stock = m.f
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    for call in (pm.apply, pm.apply, pm.revert, pm.revert):
        call()
        assert same(before, snapshot(other))
    assert m.f is stock
    for path in ("version", "optional_fn", "C.version"):
        manager = PatchManager()
        manager.register_patch(f"{m.__name__}.{path}", lambda: None)
        with pytest.raises(IncompatiblePatchError):
            manager.apply()


WARNS = """
import functools, warnings

def f(fails=False):
    warnings.warn("deprecated", FutureWarning, stacklevel=2)
    if fails:
        raise ValueError("no")
    return "f"

def decorate(function):
    @functools.wraps(function)
    def decorated():
        return function()
    return decorated

@decorate
def g():
    warnings.warn("deprecated", FutureWarning, stacklevel=3)
    return "g"

class C:
    def __init__(self):
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        self.seen = "C"
"""


def test_a_warning_names_the_line_of_the_caller_through_every_wrapper(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make(WARNS)
    stock = _lines_that_warn(m)
    for name in ("inner", "outer"):
        pm.register_patch(f"{m.__name__}.f", wrap=tag(name))
        pm.register_patch(f"{m.__name__}.g", wrap=tag(name))
        pm.register_patch(f"{m.__name__}.C.__init__", wrap=_passing)
    pm.apply()
    assert _lines_that_warn(m) == stock
    assert {file for file, _ in stock} == {__file__}
    assert len(stock) == 6, "once a line, by the registry of the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (m.f(), m.g(), m.C().seen) == ("outer(inner(f))", "outer(inner(g))", "C")


def _passing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)

    return init


def _lines_that_warn(m: Any) -> list[tuple[str, int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            m.f()
            m.f()
            m.g()
            m.g()
            m.C()
            m.C()
    return [(one.filename, one.lineno) for one in caught]


@pytest.mark.filterwarnings("ignore:deprecated")
def test_a_traceback_through_hidden_frames_shows_their_lines(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make(WARNS)
    patch(pm, m, "f", wrap=tag("w"))
    with pytest.raises(ValueError, match="no") as caught:
        m.f(True)
    text = "".join(traceback.format_exception(caught.value))
    assert "return _ovpatch_target(*args, **kwargs)" in text
    assert 'return f"{name}({original(*args, **kwargs)})"' in text


def test_module_with_a_missing_dependency_is_not_taken_for_missing(
    pm: PatchManager, package: WritePackage
) -> None:
    package(
        {
            "needy/__init__.py": "",
            "needy/inner.py": "import a_dependency_that_is_missing\ndef f(): return 'f'",
        }
    )
    pm.register_patch("needy.inner.f", wrap=tag("w"))
    pm.apply()
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("needy.inner")
    assert caught.value.name == "a_dependency_that_is_missing"
    assert states(pm) == ["pending"]
    assert "needy.inner" not in sys.modules
    package({"a_dependency_that_is_missing.py": ""})
    assert importlib.import_module("needy.inner").f() == "w(f)"
    assert states(pm) == ["applied"]


def test_a_replacement_that_is_false_counts(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")

    class Falsy:
        def __bool__(self) -> bool:
            return False

        def __call__(self) -> str:
            return "falsy"

    pm.register_patch(f"{m.__name__}.f", Falsy(), feature="one")
    pm.register_patch(f"{m.__name__}.f", lambda: "two", feature="two")
    with pytest.raises(PatchConflictError):
        pm.apply()


def test_author_keeps_the_original(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    make(name="author_package", __path__=[])
    source = f"from {home.__name__} import f\ndef new_f(): return 'new ' + f()"
    author = make(source, "author_package.patches")
    helper = make(f"from {home.__name__} import f as stock", "author_package.helper")
    patch(pm, home, "f", author.new_f)
    assert home.f() == "new f"
    assert helper.stock() == "f"
    late = make(f"from {home.__name__} import f", "author_package.late")
    pm.revert()
    assert late.f is home.f


def test_author_who_joins_later_gets_the_original_back(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    author = make(
        f"from {home.__name__} import f\ndef new_f(): return 'new ' + f()", "single_author"
    )
    patch(pm, home, "f", wrap=tag("w"), feature="first")
    assert author.f() == "w(f)"
    patch(pm, home, "f", author.new_f, feature="second")
    assert home.f() == "w(new f)"


def test_failure_in_the_middle_leaves_nothing_and_can_be_retried(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'\ndef g(): return 'g'\nclass C:\n    def h(self): return 'h'")
    user = make(also=m.f)
    owners = (m, m.C, user)
    before = [snapshot(owner) for owner in owners]
    broken = True

    def wrap(original: Any) -> Any:
        if broken:
            raise ValueError("not today")
        return tag("w")(original)

    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.register_patch(f"{m.__name__}.C.h", wrap=tag("w"))
    pm.register_patch(f"{m.__name__}.g", wrap=wrap)
    with pytest.raises(PatchError, match="not today"):
        pm.apply()
    assert all(same(old, snapshot(owner)) for old, owner in zip(before, owners, strict=True))
    assert states(pm) == ["registered", "registered", "failed"]
    broken = False
    pm.apply()
    assert (m.f(), m.C().h(), m.g(), user.also()) == ("w(f)", "w(h)", "w(g)", "w(f)")


def test_conflict_names_both_authors_paths_and_remedies(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    facade = make(f=home.f)

    def mine() -> str:
        return "mine"

    def yours() -> str:
        return "yours"

    pm.register_patch(f"{home.__name__}.f", mine, feature="alpha")
    pm.register_patch(f"{facade.__name__}.f", yours, feature="beta")
    with pytest.raises(PatchConflictError) as caught:
        pm.apply()
    text = str(caught.value)
    for part in (
        "feature 'alpha'",
        "feature 'beta'",
        f"{home.__name__}.f",
        f"{facade.__name__}.f",
        "OVPATCH_ALPHA=0",
        "OVPATCH_BETA=0",
        "wrap",
        "mine",
        "yours",
        "test_defects.py",
    ):
        assert part in text
    assert states(pm) == ["conflict", "conflict"]
    assert home.f() == "f"


def test_wrapper_shared_by_two_features_goes_with_each_alone(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    shared = tag("w")
    for name in ("a", "b"):
        pm.register_patch(f"{m.__name__}.f", wrap=shared, feature=name)
    pm.apply()
    assert m.f() == "w(w(f))"
    pm.revert("a")
    assert m.f() == "w(f)"
    assert states(pm) == ["reverted", "applied"]


def test_report_says_what_is_active_where_and_why_not(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    user = make(alias=m.f)
    pm.register_patch(
        f"{m.__name__}.f",
        wrap=tag("w"),
        feature="a",
        why="callers look it up here",
        expires="never",
    )
    pm.register_patch(f"{m.__name__}.gone", wrap=tag("w"), feature="b", optional=True)
    pm.apply()
    applied, skipped = pm.statuses()
    assert applied.rebound == (f"{user.__name__}.alias",)
    assert (applied.calls, applied.never_called) == (0, True)
    m.f()
    applied = pm.statuses()[0]
    assert (applied.calls, applied.never_called) == (1, False)
    assert applied.to_json() == {
        "target": f"{m.__name__}.f",
        "feature": "a",
        "kind": "wrap",
        "state": "applied",
        "reason": "",
        "calls": 1,
        "location": "<string>:1",
        "rebound": [f"{user.__name__}.alias"],
        "why": "callers look it up here",
        "expires": "never",
        "traces": 0,
    }
    assert (skipped.state.value, "no 'gone'" in skipped.reason) == ("skipped", True)
