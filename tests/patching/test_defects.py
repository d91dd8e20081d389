"""Ways in which an earlier patch manager of this kind went wrong; none of them exists here.

That manager's 32 recorded defects are the list. Those with a test here have its number; the others are proven by a
test of what they are about:

1. A missing attribute was created: ``test_targets.py``, ``test_missing_target_is_an_error_and_creates_nothing``.
3. A nested class was taken for its outer class: ``test_properties.py``, ``test_missing_target...``.
4. Class and static methods became plain ones, 5. and stayed after their removal: ``test_attribute_of_a_class``.
6. A target without a replacement was accepted: ``test_declarations_that_can_never_work``.
8. What another patch had put on was lost at the next apply, 9. and removal under it said nothing: ``test_revert.py``.
13. Names of functions meant something: ``replacement`` and ``wrap`` are arguments of their own.
15. Lazy modules were woken: ``test_resolution_runs_no_lazy_attributes``.
17. Managers and threads shared state: ``test_threads.py``.
18. Hooks were removed in the order of their installation: ``test_handle_that_cannot_be_removed...``.
19. Nothing reverted alone: ``test_two_features_on_one_target_revert_in_any_order``, ``test_applied_leaves_...``.
22. Signatures and versions were not checked: ``test_checks.py``.
23. Class objects were replaced: ``test_what_cannot_be_patched...``, ``test_models_with_patched_methods...``.
24. Compiled code kept what was reverted: ``test_compiled_code_that_was_only_traced_counts_as_called``.
26. A reload went unnoticed: ``test_late_patch_survives_reload_and_reimport``.

The last six are not about the manager and are avoided by design:

27. Unknown arguments parsed beforehand, so that ``--feature False`` was true: settings are parsed by type, and an
    unknown name or unparsable value is an error (``ovpatch.settings``).
28. ``torch.Tensor`` methods reassigned outside the manager, again at each call: every patch is declared here, and
    declaring or applying it twice means once.
29. ``math.ceil`` replaced for the whole process during a call: a feature computes its own padding; nothing that
    belongs to other libraries is patched to steer one call.
30. Collectives swapped at run time in a context manager, across threads: patches go on and off at apply and revert
    only, and what varies from call to call is state of the feature's objects.
31. A process-wide, non-reentrant switch: an installed function keeps its state in its own closure.
32. A lock made anew in each process and a shared directory deleted: the manager writes no files at all.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from ovpatch.patching import (
    DeclarationError,
    IncompatiblePatchError,
    PatchConflictError,
    PatchError,
    PatchManager,
)

from .conftest import MakeModule, WritePackage
from .tools import patch, same, snapshot, states, tag


def test_02_10_equal_constants_elsewhere_are_never_touched(pm: PatchManager, make: MakeModule) -> None:
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


def test_07_module_with_a_missing_dependency_is_not_taken_for_missing(pm: PatchManager, package: WritePackage) -> None:
    package({"needy/__init__.py": "", "needy/inner.py": "import a_dependency_that_is_missing\ndef f(): return 'f'"})
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


def test_11_two_paths_to_one_function_are_one_target(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    facade = make(f=home.f)
    for module in (home, facade):
        pm.register_patch(f"{module.__name__}.f", wrap=tag(module.__name__), feature=module.__name__)
    pm.apply()
    assert home.f() == facade.f() == f"{facade.__name__}({home.__name__}(f))"


def test_12_falsy_replacements_get_no_special_treatment(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    for value in (0, False, ""):
        with pytest.raises(DeclarationError, match="not callable"):
            pm.register_patch(f"{m.__name__}.f", value)

    class Falsy:
        def __bool__(self) -> bool:
            return False

        def __call__(self) -> str:
            return "falsy"

    pm.register_patch(f"{m.__name__}.f", Falsy(), feature="one")
    pm.register_patch(f"{m.__name__}.f", lambda: "two", feature="two")
    with pytest.raises(PatchConflictError):
        pm.apply()


def test_14_author_keeps_the_original(pm: PatchManager, make: MakeModule) -> None:
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


def test_14b_author_who_joins_later_gets_the_original_back(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    author = make(f"from {home.__name__} import f\ndef new_f(): return 'new ' + f()", "single_author")
    patch(pm, home, "f", wrap=tag("w"), feature="first")
    assert author.f() == "w(f)"
    patch(pm, home, "f", author.new_f, feature="second")
    assert home.f() == "w(new f)"


def test_16_failure_in_the_middle_leaves_nothing_and_can_be_retried(pm: PatchManager, make: MakeModule) -> None:
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


def test_20_conflict_names_both_authors_paths_and_remedies(pm: PatchManager, make: MakeModule) -> None:
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


def test_21_wrapper_shared_by_two_features_goes_with_each_alone(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    shared = tag("w")
    for name in ("a", "b"):
        pm.register_patch(f"{m.__name__}.f", wrap=shared, feature=name)
    pm.apply()
    assert m.f() == "w(w(f))"
    pm.revert("a")
    assert m.f() == "w(f)"
    assert states(pm) == ["reverted", "applied"]


def test_25_report_says_what_is_active_where_and_why_not(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    user = make(alias=m.f)
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"), feature="a", why="callers look it up here", expires="never")
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
