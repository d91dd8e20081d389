"""What is checked before anything is written: conflicts, order, signatures, versions."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest

from ovpatch.patching import IncompatiblePatchError, PatchConflictError, PatchError, PatchManager
from ovpatch.patching.wrapper_chain import compare_signatures

from .conftest import MakeModule
from .tools import patch, same, snapshot, states, tag

# Order


def test_wrappers_stack_by_order_then_registration(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    for name, order in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        pm.register_patch(f"{m.__name__}.f", wrap=tag(name), order=order)
    pm.apply()
    assert m.f() == "b(d(a(c(f))))"


def test_replacement_is_innermost_whenever_it_comes(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"), order=-9, feature="wrapper")
    pm.register_patch(f"{m.__name__}.f", lambda: "new", order=9, feature="replacement")
    pm.apply("wrapper")
    held = m.f
    assert held() == "w(f)"
    pm.apply("replacement")
    assert m.f() == held() == "w(new)"
    pm.revert("replacement")
    assert m.f() == "w(f)"


def test_wrapper_can_be_put_between_two_others(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    for name in "abc":
        pm.register_patch(f"{m.__name__}.f", wrap=tag(name), feature=name)
    pm.apply("a", "c")
    assert m.f() == "c(a(f))"
    pm.apply("b")
    assert m.f() == "c(b(a(f)))"
    for _ in range(3):
        m.f()
    assert [status.calls for status in pm.statuses()] == [5, 4, 5]
    pm.revert("b")
    assert m.f() == "c(a(f))"
    pm.revert("c")
    assert m.f() == "a(f)"
    pm.revert("a")
    assert m.f() == "f"
    assert [status.calls for status in pm.statuses()] == [7, 4, 6]


def test_inner_patch_that_is_never_reached_counts_no_calls(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("inner"))
    pm.register_patch(f"{m.__name__}.f", wrap=lambda original: lambda: "short cut", order=1)
    pm.apply()
    assert m.f() == "short cut"
    assert [status.calls for status in pm.statuses()] == [0, 1]


# Conflicts


def test_second_replacement_is_a_conflict_and_changes_nothing(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("class C:\n    def f(self): return 'f'")
    patch(pm, m, "C.f", lambda self: "one", feature="one")
    before = snapshot(m.C)
    pm.register_patch(f"{m.__name__}.C.f", lambda self: "two", feature="two")
    with pytest.raises(PatchConflictError, match="OVPATCH_ONE=0 or OVPATCH_TWO=0"):
        pm.apply()
    assert same(before, snapshot(m.C))
    assert states(pm) == ["applied", "conflict"]
    pm.revert("one")
    pm.apply("two")
    assert m.C().f() == "two"


@pytest.mark.parametrize(
    ("name", "path"), [("home", "home.C.f"), ("C", "C.f")], ids=["module", "class"]
)
def test_alias_is_seen_as_the_same_target(
    pm: PatchManager, make: MakeModule, name: str, path: str
) -> None:
    home = make("class C:\n    def f(self): return 'f'")
    facade = make(**{name: home if name == "home" else home.C})
    pm.register_patch(f"{home.__name__}.C.f", lambda self: "one", feature="one")
    pm.register_patch(f"{facade.__name__}.{path}", lambda self: "two", feature="two")
    with pytest.raises(PatchConflictError, match=f"{facade.__name__}.{path}"):
        pm.apply()
    assert home.C().f() == "f"


def test_alias_is_seen_across_two_calls_of_apply(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    facade = make(g=home.f)
    patch(pm, home, "f", lambda: "one", feature="one")
    pm.register_patch(f"{facade.__name__}.g", lambda: "two", feature="two")
    with pytest.raises(PatchConflictError):
        pm.apply()
    assert home.f() == facade.g() == "one"


# Atomicity


@pytest.mark.parametrize("failing", range(4))
def test_half_failing_set_is_rolled_back(pm: PatchManager, make: MakeModule, failing: int) -> None:
    m = make("def f(): return 'f'\nclass C:\n    def g(self): return 'g'\nclass D(C): pass")
    user = make(h=m.f)
    owners = (m, m.C, m.D, user)
    before = [snapshot(owner) for owner in owners]
    installed: list[int] = []

    class Handle:
        def __init__(self, number: int) -> None:
            if number == failing:
                raise RuntimeError("no room")
            installed.append(number)
            self.number = number

        def remove(self) -> None:
            installed.remove(self.number)

    for path in ("f", "C.g", "D.g"):
        pm.register_patch(f"{m.__name__}.{path}", wrap=tag("w"))
    for number in range(4):
        pm.register_hook(f"hook {number}", functools.partial(Handle, number))
    with pytest.raises(PatchError, match="no room"):
        pm.apply()
    assert installed == []
    assert all(same(old, snapshot(owner)) for old, owner in zip(before, owners, strict=True))
    assert states(pm)[:3] == ["registered"] * 3


def test_failure_while_writing_is_rolled_back(
    pm: PatchManager, make: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ovpatch.patching.slot as slots

    m = make("def f(): return 'f'\nclass C:\n    def g(self): return 'g'")
    user = make(h=m.f)
    owners = (m, m.C, user)
    before = [snapshot(owner) for owner in owners]
    write_slot, seen = slots.write_slot, []

    def fail_late(owner: Any, name: str, value: object) -> None:
        seen.append(name)
        if len(seen) == 3:
            raise MemoryError
        write_slot(owner, name, value)

    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.register_patch(f"{m.__name__}.C.g", wrap=tag("w"))
    monkeypatch.setattr(slots, "write_slot", fail_late)
    with pytest.raises(MemoryError):
        pm.apply()
    assert seen[:3] == ["f", "g", "h"]
    assert all(same(old, snapshot(owner)) for old, owner in zip(before, owners, strict=True))
    assert states(pm) == ["registered", "registered"]
    monkeypatch.undo()
    sys.modules[m.__name__], sys.modules[user.__name__] = m, user
    pm.apply()
    assert (m.f(), m.C().g(), user.h()) == ("w(f)", "w(g)", "w(f)")
    pm.revert()
    del sys.modules[m.__name__], sys.modules[user.__name__]


def test_apply_is_idempotent(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    built: list[object] = []

    def wrap(original: Any) -> Any:
        built.append(original)
        return tag("w")(original)

    pm.register_patch(f"{m.__name__}.f", wrap=wrap)
    for _ in range(3):
        pm.apply()
    assert (m.f(), len(built)) == ("w(f)", 1)


# Signatures


def original(self: object, a: int, b: int = 1, *, c: int, d: int = 2) -> None: ...


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (lambda self, a, b=1, *, c, d=2: None, None),
        (lambda this, a, b=1, *, c, d=2: None, "'self' is called 'this'"),
        (lambda this, *args, **kwargs: None, "'self' is called 'this'"),
        (lambda self, a, b=5, *, c, d=2: None, "'b' has the default 5 and had 1"),
        (lambda self, a, b=1, *, c, d=None: None, "'d' has the default None and had 2"),
        (lambda *args, **kwargs: None, None),
        (lambda self, *args, **kwargs: None, None),
        (lambda self, a, *args, **kwargs: None, None),
        (functools.wraps(original)(lambda *args, **kwargs: None), None),
        (lambda self, x, b=1, *, c, d=2: None, "'a' is called 'x'"),
        (lambda self, a, b, *, c, d=2: None, "'b' has no default"),
        (lambda self, a=1, b=1, *, c, d=2: None, "'a' has a new default"),
        (lambda self, a, b=1, *, d=2: None, "'c' of the original is missing"),
        (lambda self, a, b=1, e=3, *, c, d=2: None, "'e' is not in the original"),
        (lambda self, a, b=1, c=1, d=2: None, "'c' is positional or keyword"),
        (lambda self, b=1, a=2, *, c, d=2: None, "default"),
        # A "/" applies to all parameters before it, so the first one is reported.
        (
            lambda self, a, /, b=1, *, c, d=2: None,
            "'self' is positional-only and was positional or keyword",
        ),
        (
            lambda self, /, *args, **kwargs: None,
            "'self' is positional-only and was positional or keyword",
        ),
        # A call with self= would fail.
        (lambda *args: None, "'self' of the original is missing"),
        (lambda self, a, **kwargs: None, "'b' of the original is missing"),
        (lambda self, a, *args, c, d=2: None, "'b' of the original is missing"),
    ],
)
def test_signature(new: Any, problem: str | None) -> None:
    found = compare_signatures(original, new)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_later_parameter_must_stay_callable_by_keyword() -> None:
    def first_by_position(self: object, /, a: int, b: int) -> None: ...

    assert compare_signatures(first_by_position, lambda self, /, a, b: None) is None
    found = compare_signatures(first_by_position, lambda self, a, /, b: None)
    assert found == "parameter 'a' is positional-only and was positional or keyword"


def test_refusal_names_target_plugin_and_both_signatures(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("class C:\n    def f(self, a=1): return 'f'")
    pm.register_patch(
        f"{m.__name__}.C.f", wrap=lambda original: lambda this, a=1: "new", feature="shouting"
    )
    with pytest.raises(IncompatiblePatchError, match="'self' is called 'this'") as caught:
        pm.apply()
    assert all(
        text in str(caught.value)
        for text in (f"{m.__name__}.C.f", "shouting", "(self, a=1)", "(this, a=1)")
    )
    assert m.C().f() == "f"


def narrow_by(how: str) -> Any:
    """Return a wrapper that shows the original's signature and takes less."""
    import functools
    import inspect

    @functools.wraps(original)
    def wrapper(self: Any, a: Any, *, c: Any) -> None:
        original(self, a, c=c)

    if how == "__signature__":
        del wrapper.__wrapped__
        wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return wrapper


@pytest.mark.parametrize("how", ["functools.wraps", "__signature__"])
def test_a_wrapper_counts_as_it_can_be_called(how: str) -> None:
    found = compare_signatures(original, narrow_by(how))
    assert found is not None
    assert "of the original is missing" in found


def test_signature_of_functions_that_have_none_is_not_compared() -> None:
    assert compare_signatures(min, lambda x: None) is None
    assert compare_signatures(lambda *args, **kwargs: None, lambda *args, **kwargs: None) is None
    assert compare_signatures(lambda *args, **kwargs: None, lambda x: None) is not None
    assert compare_signatures(lambda a, b: None, lambda b, a: None) is not None


def test_optional_patch_with_another_signature_is_left_out(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(x): return 'f'")
    pm.register_patch(f"{m.__name__}.f", lambda y: "new", optional=True)
    pm.register_patch(f"{m.__name__}.f", wrap=lambda original: lambda z: "new", optional=True)
    pm.apply()
    assert states(pm) == ["incompatible", "incompatible"]
    assert m.f(1) == "f"
    patch(pm, m, "f", wrap=tag("w"))
    assert m.f(1) == "w(f)"


def test_installed_function_shows_the_original_signature(
    pm: PatchManager, make: MakeModule
) -> None:
    import inspect

    m = make(
        "class C:\n    def f(self, a: int, *, b: str = 'b') -> str:\n        'doc'\n        return "
        "a"
    )
    stock = inspect.signature(m.C.f)
    patch(pm, m, "C.f", wrap=lambda original: lambda *args, **kwargs: "w")
    assert inspect.signature(m.C.f) == stock
    assert (m.C.f.__name__, m.C.f.__qualname__, m.C.f.__doc__) == ("f", "C.f", "doc")
    assert m.C().f.__func__ is m.C.f


def test_marks_for_dynamo_are_not_copied(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    m.f._torchdynamo_disable, m.f.get_compiler_config, m.f.own = True, len, "kept"
    patch(pm, m, "f", wrap=tag("w"))
    assert not {"_torchdynamo_disable", "get_compiler_config"} & vars(m.f).keys()
    assert m.f.own == "kept"


# Results of wrap functions


def test_wrap_that_returns_nothing_is_told(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=lambda original: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(PatchError, match=r"returned None.*must return the wrapper"):
        pm.apply()
    assert m.f() == "f"


# Versions of torch


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.16", True),
        ("2.11.0a0+git5228986", ">=2.11", True),
        ("2.16.0.dev20270101", "<2.16", False),
        ("2.10.1", ">=2.11", False),
        ("strange", ">=2.11", False),
    ],
)
def test_version_range(
    pm: PatchManager,
    make: MakeModule,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    wanted: str,
    fits: bool,
) -> None:
    torch = types.ModuleType("torch")
    torch.__version__ = version  # type: ignore[attr-defined]
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"), torch=wanted, optional=True)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", torch)
        pm.apply()
    assert states(pm) == ["applied" if fits else "incompatible"]
    assert fits or "needs torch" in pm.statuses()[0].reason


def test_version_is_read_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from ovpatch.patching.patch import explain_torch_mismatch

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.12.0"}[name])
    assert explain_torch_mismatch(">=2.11") is None
    assert "this is torch 2.12.0" in str(explain_torch_mismatch("<2.12"))
    assert "torch" not in sys.modules


def test_replacement_is_checked_before_anything_is_called(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(x): return 'f'\ndef g(): return 'g'")
    called: list[object] = []
    pm.register_patch(f"{m.__name__}.g", wrap=lambda original: called.append(original) or original)  # type: ignore
    pm.register_patch(f"{m.__name__}.f", lambda: "new")
    with pytest.raises(IncompatiblePatchError, match="'x' of the original is missing"):
        pm.apply()
    assert called == []
