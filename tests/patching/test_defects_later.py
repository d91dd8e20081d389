"""Defects 16 to 26 of the list in ``test_defects.py``: whole calls, reports and what happens over time."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import threading
from typing import Any

import pytest

from ovpatch.patching import (
    IncompatiblePatchError,
    PatchConflictError,
    PatchError,
    PatchManager,
)

from .conftest import MakeModule, WritePackage
from .tools import same, snapshot, states, tag


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


def test_17_managers_and_threads_share_no_state_by_accident(make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    one, other = PatchManager(), PatchManager()
    one.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    assert other.statuses() == ()
    seen: set[str] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(m.f())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        one.apply()
        one.revert()
    stop.set()
    reader.join()
    assert seen <= {"f", "w(f)"}


def test_18_revert_is_last_in_first_out(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    removed: list[str] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name

        def remove(self) -> None:
            removed.append(self.name)

    for name in ("first", "second", "third"):
        pm.register_hook(name, functools.partial(Handle, name), feature=name)
    stock = m.f
    pm.register_patch(f"{m.__name__}.f", wrap=tag("inner"), feature="first")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("outer"), feature="second")
    pm.apply()
    pm.revert()
    assert removed == ["third", "second", "first"]
    assert m.f is stock


def test_19_one_feature_reverts_alone_and_a_block_by_itself(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    stock = m.f
    for name in ("a", "b"):
        pm.register_patch(f"{m.__name__}.f", wrap=tag(name), feature=name)
    with pm.applied("a"):
        with pm.applied():
            assert m.f() == "b(a(f))"
        assert m.f() == "a(f)"
        assert states(pm) == ["applied", "reverted"]
    assert m.f is stock


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
        "test_defects_later.py",
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


def test_22_signature_and_version_are_checked(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(x, *, flag=False): return 'f'")
    for kwargs in ({"replacement": lambda y, *, flag=False: "r"}, {"wrap": lambda original: lambda x: "w"}):
        manager = PatchManager()
        manager.register_patch(f"{m.__name__}.f", **kwargs)
        with pytest.raises(IncompatiblePatchError, match="parameter"):
            manager.apply()
        assert states(manager) == ["incompatible"]
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"), torch=">=99")
    with pytest.raises(IncompatiblePatchError, match="needs torch >=99"):
        pm.apply()


def test_23_class_objects_are_never_replaced(pm: PatchManager, make: MakeModule) -> None:
    m = make("class C:\n    def f(self): return 'f'")
    pm.register_patch(f"{m.__name__}.C", type("New", (), {}))
    with pytest.raises(IncompatiblePatchError, match="patch its methods"):
        pm.apply()
    methods = PatchManager()
    old = m.C()
    methods.register_patch(f"{m.__name__}.C.f", wrap=tag("w"))
    with methods.applied():
        assert old.f() == "w(f)"
        assert isinstance(old, m.C)
        assert type(pickle.loads(pickle.dumps(old))) is type(copy.deepcopy(old)) is m.C


def test_24_compiled_code_follows_apply_and_revert(pm: PatchManager) -> None:
    torch = pytest.importorskip("torch")
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    compiled = torch.compile(lambda x: linear(x), backend="eager", fullgraph=True)
    stock = compiled(x)

    def wrap(original: Any) -> Any:
        return functools.wraps(original)(lambda self, input: original(self, input) + 1)

    pm.register_patch("torch.nn.Linear.forward", wrap=wrap)
    pm.apply()
    assert torch.equal(compiled(x), stock + 1)
    pm.revert()
    assert torch.equal(compiled(x), stock)


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


def test_26_reload_is_noticed_by_the_next_apply(pm: PatchManager, package: WritePackage) -> None:
    package({"reloaded.py": "def f(): return 'f'\nclass C:\n    def g(self): return 'g'"})
    module = importlib.import_module("reloaded")
    pm.register_patch("reloaded.f", wrap=tag("w"))
    pm.register_patch("reloaded.C.g", wrap=tag("w"))
    pm.apply()
    importlib.reload(module)
    assert module.f() == "f"
    pm.apply()
    assert (module.f(), module.C().g()) == ("w(f)", "w(g)")
    pm.revert()
    assert (module.f(), module.C().g()) == ("f", "g")
    assert states(pm) == ["reverted", "reverted"]
