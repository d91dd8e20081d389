"""References that other modules hold to a patched function."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ovpatch.patching import PatchManager, manager
from ovpatch.patching.references import Reference, find_references

from .conftest import MakeModule
from .tools import only, patch, same, snapshot, tag


def test_from_import_held_before_apply_under_any_name(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    same_name, renamed = (
        make(f"from {m.__name__} import f"),
        make(f"from {m.__name__} import f as g"),
    )
    before = snapshot(same_name), snapshot(renamed)
    patch(pm, m, "f", wrap=tag("w"))
    assert (same_name.f(), renamed.g()) == ("w(f)", "w(f)")
    assert set(only(pm).rebound) == {f"{same_name.__name__}.f", f"{renamed.__name__}.g"}
    pm.revert()
    assert same(before[0], snapshot(same_name))
    assert same(before[1], snapshot(renamed))


def test_reference_taken_after_apply_is_given_back_too(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    stock = m.f
    patch(pm, m, "f", wrap=tag("w"))
    late = make(f"from {m.__name__} import f as g")
    assert late.g() == "w(f)"
    pm.revert()
    assert late.g is stock


def test_modules_are_searched_again_only_if_something_refers_to_the_installed_function(
    pm: PatchManager, make: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []

    def search(ids: Mapping[int, Any] | set[int]) -> Iterable[Reference]:
        searches.append(len(ids))
        return find_references(ids)

    monkeypatch.setattr(manager, "find_references", search)
    m = make("def f(): return 'f'\ndef g(): return 'g'")
    user = make(f"from {m.__name__} import f")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.register_patch(f"{m.__name__}.g", wrap=tag("w"))
    pm.apply()
    assert searches == [4]
    assert (user.f(), m.g()) == ("w(f)", "w(g)")
    pm.revert()
    assert searches == [4]
    pm.apply()
    late = make(f"from {m.__name__} import g as h")
    pm.revert()
    assert searches == [4, 4, 1]
    assert late.h() == "g"
    assert not hasattr(late.h, "__ovpatch__")


def test_reference_that_somebody_changed_meanwhile_is_left_alone(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    user = make(g=m.f)
    patch(pm, m, "f", wrap=tag("w"))
    theirs = user.g = tag("theirs")(user.g)
    pm.revert()
    assert user.g is theirs
    assert user.g() == "theirs(f)"


def test_only_real_modules_are_looked_at(
    pm: PatchManager, make: MakeModule, monkeypatch: object
) -> None:
    import sys

    class Fake:
        __class__ = types.ModuleType  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    sys.modules["fake_module_of_a_test"] = Fake()  # type: ignore[assignment]
    try:
        pm.apply()
        pm.revert()
    finally:
        del sys.modules["fake_module_of_a_test"]


def test_method_patches_rebind_nothing(pm: PatchManager, make: MakeModule) -> None:
    m = make("class C:\n    def f(self): return 'f'")
    user = make(g=m.C.f)
    patch(pm, m, "C.f", wrap=tag("w"))
    assert user.g(m.C()) == "f"
    assert only(pm).rebound == ()


def test_held_wrapper_goes_to_the_original_after_revert(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'\nclass C:\n    def g(self): return 'g'")
    for path in ("f", "C.g"):
        pm.register_patch(f"{m.__name__}.{path}", wrap=tag("w"))
    pm.apply()
    held = [m.f, m.C().g, functools.partial(m.f), {"f": m.f}["f"]]
    assert [one() for one in held] == ["w(f)", "w(g)", "w(f)", "w(f)"]
    pm.revert()
    assert [one() for one in held] == ["f", "g", "f", "f"]


def test_explicit_target_in_the_authors_own_package_is_patched(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'\ndef new(): return 'new'")
    patch(pm, m, "f", m.new)
    assert m.f() == "new"
