"""Taking patches back: exactly, alone, under foreign patches, a thousand times."""

from __future__ import annotations

import functools
import unittest.mock
from typing import Any

import pytest

from ovpatch.patching import PatchError, PatchManager

from .conftest import MakeModule
from .tools import only, patch, same, snapshot, states, tag

# Somebody else on top


def test_foreign_wrapper_on_a_class_stays_and_ours_lets_through(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("class C:\n    def f(self): return 'f'\n    @classmethod\n    def g(cls): return 'g'")
    for path in ("f", "g"):
        pm.register_patch(f"{m.__name__}.C.{path}", wrap=tag("ours"))
    pm.apply()
    m.C.f = tag("theirs")(m.C.f)
    inner = vars(m.C)["g"]
    m.C.g = classmethod(lambda cls: f"theirs({inner.__get__(None, cls)()})")
    assert (m.C().f(), m.C.g()) == ("theirs(ours(f))", "theirs(ours(g))")
    assert states(pm) == ["applied", "applied"]
    pm.revert()
    assert (m.C().f(), m.C.g()) == ("theirs(f)", "theirs(g)")
    assert states(pm) == ["shadowed", "shadowed"]


def test_slot_is_restored_once_the_foreign_patch_is_gone(
    pm: PatchManager, make: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = make("def f(): return 'f'")
    stock = m.f
    patch(pm, m, "f", wrap=tag("ours"))
    with monkeypatch.context() as patched:
        patched.setattr(m, "f", tag("theirs")(m.f))
        pm.revert()
        assert states(pm) == ["shadowed"]
        assert "tools.py" in only(pm).reason
        assert "was left alone" in only(pm).reason
    assert m.f() == "f"
    pm.revert()
    assert m.f is stock
    assert states(pm) == ["reverted"]


def _closure(inner: Any) -> Any:
    return lambda: f"theirs({inner()})"


def _default(inner: Any) -> Any:
    def theirs(inner: Any = inner) -> str:
        return f"theirs({inner()})"

    return theirs


def _partial(inner: Any) -> Any:
    return functools.partial(lambda function: f"theirs({function()})", inner)


def _mock(inner: Any) -> Any:
    return unittest.mock.Mock(side_effect=_closure(inner))


@pytest.mark.parametrize("cover", [_closure, _default, _partial, _mock, tag("theirs")])
def test_foreign_wrapper_of_any_make_is_recognised(
    pm: PatchManager, make: MakeModule, cover: Any
) -> None:
    m = make("def f(): return 'f'")
    patch(pm, m, "f", wrap=tag("ours"))
    m.f = cover(m.f)
    assert states(pm) == ["applied"]
    pm.apply()
    assert m.f() == "theirs(ours(f))"


def test_foreign_wrapper_that_names_a_global_is_recognised(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    patch(pm, m, "f", wrap=tag("ours"))
    other = make("def theirs(): return f'theirs({stock()})'", stock=m.f)
    m.f = other.theirs
    pm.apply()
    assert m.f() == "theirs(ours(f))"


def test_patch_that_was_overwritten_is_put_on_again_above(
    pm: PatchManager, make: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = make("def f(): return 'f'")
    stock = m.f
    patch(pm, m, "f", wrap=tag("ours"))
    monkeypatch.setattr(m, "f", lambda: "theirs")
    assert states(pm) == ["shadowed"]
    assert "call apply() again" in only(pm).reason
    pm.apply()
    assert m.f() == "ours(theirs)"
    pm.revert()
    assert m.f() == "theirs"
    monkeypatch.undo()
    pm.revert()
    m.__dict__  # noqa: B018 - the module left sys.modules with monkeypatch.undo()
    assert m.f is stock


def test_hidden_foreign_wrapper_never_makes_a_patch_run_twice(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    patch(pm, m, "f", wrap=tag("ours"))
    hiding_place = [m.f]

    class Hidden:
        __slots__ = ()

        def __call__(self) -> str:
            return f"theirs({hiding_place[0]()})"

    hidden = Hidden()
    m.f = lambda: hidden()
    pm.apply()
    assert m.f() in ("ours(theirs(f))", "theirs(ours(f))")


def test_replacement_under_a_foreign_wrapper_keeps_it_when_applied_again(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    patch(pm, m, "f", lambda: "new")
    m.f = tag("theirs")(m.f)
    pm.revert()
    assert m.f() == "theirs(f)"
    pm.apply()
    assert m.f() == "theirs(new)"
    assert states(pm) == ["applied"]


def test_second_manager_is_a_third_party(make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    stock = m.f
    one, other = PatchManager(), PatchManager()
    for manager, name in ((one, "one"), (other, "other")):
        manager.register_patch(f"{m.__name__}.f", wrap=tag(name))
        manager.apply()
    assert m.f() == "other(one(f))"
    one.revert()
    assert m.f() == "other(f)"
    other.revert()
    one.revert()
    assert m.f is stock


def test_attribute_that_somebody_deleted_stays_deleted(pm: PatchManager, make: MakeModule) -> None:
    m = make("class C:\n    def f(self): return 'f'")
    patch(pm, m, "C.f", wrap=tag("w"))
    del m.C.f
    pm.revert()
    assert not hasattr(m.C, "f")
    assert states(pm) == ["reverted"]


# Hooks


class Handle:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        log.append(f"+{name}")

    def remove(self) -> None:
        self.log.append(f"-{self.name}")
        if self.name == "broken":
            raise ValueError("stuck")


def test_hooks_come_and_go_with_their_feature(pm: PatchManager) -> None:
    log: list[str] = []
    for name in "ab":
        pm.register_hook(
            f"hook {name}", functools.partial(Handle, log, name), feature=name, why="official"
        )
    pm.apply("a")
    pm.apply()
    assert log == ["+a", "+b"]
    assert [(status.kind, status.state.value, status.target) for status in pm.statuses()] == [
        ("hook", "applied", "hook a"),
        ("hook", "applied", "hook b"),
    ]
    pm.revert("a")
    pm.revert()
    assert log == ["+a", "+b", "-a", "-b"]
    assert states(pm) == ["reverted", "reverted"]


def test_handle_that_cannot_be_removed_does_not_stop_the_rest(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    log: list[str] = []
    pm.register_hook("first", functools.partial(Handle, log, "first"))
    pm.register_hook("broken", functools.partial(Handle, log, "broken"))
    patch(pm, m, "f", wrap=tag("w"))
    with pytest.raises(PatchError, match=r"hook 'broken'.*stuck"):
        pm.revert()
    assert log[2:] == ["-broken", "-first"]
    assert m.f() == "f"


def test_install_that_returns_no_handle_is_told(pm: PatchManager) -> None:
    pm.register_hook("bad", lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(PatchError, match="must return a handle"):
        pm.apply()


# Declarations that go


def test_unregister_only_what_is_reverted(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"), feature="a")
    pm.register_patch("json.tool.main", wrap=tag("w"), feature="b")
    pm.apply("a")
    with pytest.raises(PatchError, match="revert"):
        pm.unregister("a")
    pm.revert("a")
    pm.unregister("a")
    assert [status.feature for status in pm.statuses()] == ["b"]
    pm.unregister("unknown")


def test_apply_of_what_nobody_registered_is_an_error(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"), feature="overlap")
    text = r"nothing is registered for feature 'overlpa'\. Did you mean 'overlap'\? Correct the name, or register"
    with pytest.raises(PatchError, match=text):
        pm.apply("overlap", "overlpa")
    with pytest.raises(PatchError, match=text), pm.applied("overlap", "overlpa"):
        raise AssertionError("the block was entered")
    assert (m.f(), states(pm)) == ("f", ["registered"])
    with pytest.raises(PatchError, match=r"'q'\. Correct"):
        pm.apply("q")
    PatchManager().apply()  # all of nothing
    pm.revert("q")  # and nothing of it is left


def test_applied_leaves_what_was_on_and_survives_exceptions(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("class C:\n    def f(self): return 'f'")
    before = snapshot(m.C)
    for name in "ab":
        pm.register_patch(f"{m.__name__}.C.f", wrap=tag(name), feature=name)
    pm.apply("a")

    def fail_within() -> None:
        with pm.applied("a", "b"):
            assert m.C().f() == "b(a(f))"
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert m.C().f() == "a(f)"
    pm.revert()
    assert same(before, snapshot(m.C))
