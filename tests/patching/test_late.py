"""Targets that are not imported when apply() is called."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import weakref

import pytest

from ovpatch.patching import PatchManager, TargetNotFoundError, target

from .conftest import MakeModule, WritePackage
from .tools import states, tag


def test_apply_imports_nothing_of_the_target(pm: PatchManager, package: WritePackage) -> None:
    package({"heavy/__init__.py": "", "heavy/part.py": "raise AssertionError('imported')"})
    pm.register_patch("heavy.part.f", wrap=tag("w"))
    pm.apply()
    pm.statuses()
    assert "heavy" not in sys.modules
    importlib.import_module("heavy")
    pm.apply()
    assert (states(pm), "heavy.part" in sys.modules) == (["pending"], False)


def test_references_inside_the_importing_package_are_patched(
    pm: PatchManager, package: WritePackage
) -> None:
    package(
        {
            "early/__init__.py": "from early.inner import f as renamed\nfrom early.other import call",
            "early/inner.py": "def f(): return 'f'",
            "early/other.py": "from early.inner import f\ndef call(): return f()",
        }
    )
    pm.register_patch("early.inner.f", wrap=tag("w"))
    pm.apply()
    early = importlib.import_module("early")
    assert (early.renamed(), early.call()) == ("w(f)", "w(f)")


def test_target_that_turns_out_missing_fails_quietly(
    pm: PatchManager, package: WritePackage
) -> None:
    package({"moved.py": "def elsewhere(): pass", "other_late.py": "def f(): return 'f'"})
    pm.register_patch("moved.f", wrap=tag("w"), feature="a")
    pm.register_patch("moved.g", wrap=tag("w"), feature="b", optional=True)
    pm.register_patch("other_late.f", wrap=tag("w"), feature="a")
    pm.apply()
    importlib.import_module("moved")
    assert states(pm) == ["failed", "skipped", "pending"]
    assert "has no 'f'" in pm.statuses()[0].reason
    assert importlib.import_module("other_late").f() == "w(f)"
    with pytest.raises(TargetNotFoundError):
        pm.apply()


def test_failing_wrap_never_breaks_the_import(pm: PatchManager, package: WritePackage) -> None:
    package(
        {
            "imported.py": "def f(): return 'f'\ndef g(): return 'g'",
            "second.py": "def f(): return 'f'",
        }
    )

    def broken(original: object) -> object:
        import a_dependency_of_the_plugin  # type: ignore[import-not-found]  # noqa: F401

        return original

    pm.register_patch("imported.f", wrap=broken, feature="bad")  # type: ignore[arg-type]
    pm.register_patch("imported.g", wrap=tag("left out"), feature="bad")
    pm.register_patch("imported.g", wrap=tag("w"), feature="good")
    pm.register_patch("second.f", wrap=tag("w"), feature="bad")
    pm.apply()
    module = importlib.import_module("imported")
    assert (module.f(), module.g()) == ("f", "w(g)")
    assert importlib.import_module("second").f() == "w(f)"
    assert states(pm) == ["failed", "failed", "applied", "applied"]
    assert "a_dependency_of_the_plugin" in pm.statuses()[0].reason
    assert "left out because" in pm.statuses()[1].reason


def test_listener_that_raises_stops_neither_the_import_nor_the_others(
    package: WritePackage,
) -> None:
    package({"listened.py": ""})
    heard: list[str] = []
    target.call_after_import("listened", lambda name: heard.append(str(int("not a number"))))
    target.call_after_import("listened", heard.append)
    importlib.import_module("listened")
    assert heard == ["listened"]


def test_finder_that_lacks_a_dependency_does_not_make_its_module_missing(
    pm: PatchManager, make: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name in ("odd_parent.there", "odd_parent.gone"):
                raise ModuleNotFoundError(name="a_dependency" if name.endswith("there") else name)

    make("", "odd_parent", __path__=[])
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    for name in ("there", "gone"):
        pm.register_patch(f"odd_parent.{name}.f", wrap=tag("w"), optional=True)
    pm.apply()
    assert states(pm) == ["pending", "skipped"]


def test_conflict_that_shows_at_import_is_reported(pm: PatchManager, package: WritePackage) -> None:
    package({"contested.py": "def f(): return 'f'"})
    pm.register_patch("contested.f", lambda: "one", feature="one")
    pm.register_patch("contested.f", lambda: "two", feature="two")
    pm.apply()
    assert importlib.import_module("contested").f() == "one"
    assert states(pm) == ["applied", "conflict"]


def test_revert_before_the_import_cancels_it(pm: PatchManager, package: WritePackage) -> None:
    package({"cancelled.py": "def f(): return 'f'"})
    pm.register_patch("cancelled.f", wrap=tag("w"))
    pm.apply()
    pm.revert()
    assert states(pm) == ["reverted"]
    assert importlib.import_module("cancelled").f() == "f"
    pm.apply()
    assert importlib.import_module("cancelled").f() == "w(f)"


def test_module_is_watched_once_however_often_apply_is_called(
    pm: PatchManager, package: WritePackage
) -> None:
    import wrapt.importer  # type: ignore[import-untyped]

    package({"watched.py": "def f(): return 'f'"})
    pm.register_patch("watched.f", wrap=tag("w"))
    for _ in range(5):
        pm.apply()
    pm.revert()
    pm.apply()
    assert (
        len(wrapt.importer._post_import_hooks["watched"]) == len(target._listeners["watched"]) == 1
    )
    assert importlib.import_module("watched").f() == "w(f)"


def test_revert_also_cancels_what_was_skipped(pm: PatchManager, package: WritePackage) -> None:
    pm.register_patch("skipped_then_reverted.f", wrap=tag("w"), optional=True)
    pm.apply()
    pm.revert()
    package({"skipped_then_reverted.py": "def f(): return 'f'"})
    assert importlib.import_module("skipped_then_reverted").f() == "f"
    assert states(pm) == ["skipped"]


def test_skipped_package_that_appears_later_is_patched(
    pm: PatchManager, package: WritePackage
) -> None:
    pm.register_patch("appears_later.f", wrap=tag("w"), optional=True)
    pm.apply()
    assert states(pm) == ["skipped"]
    package({"appears_later.py": "def f(): return 'f'"})
    assert importlib.import_module("appears_later").f() == "w(f)"
    assert states(pm) == ["applied"]


def test_late_patch_survives_reload_and_reimport(pm: PatchManager, package: WritePackage) -> None:
    package({"twice.py": "def f(): return 'f'\nclass C:\n    def g(self): return 'g'"})
    pm.register_patch("twice.f", wrap=tag("w"))
    pm.register_patch("twice.C.g", wrap=tag("w"))
    pm.apply()
    first = importlib.import_module("twice")
    importlib.reload(first)
    assert states(pm)[0] == "shadowed"
    assert "executed again" in pm.statuses()[0].reason
    pm.apply()
    assert (first.f(), first.C().g()) == ("w(f)", "w(g)")
    del sys.modules["twice"]
    pm.apply()
    second = importlib.import_module("twice")
    assert second is not first
    assert (second.f(), second.C().g()) == ("w(f)", "w(g)")
    assert (first.f(), first.C().g()) == ("w(f)", "w(g)")
    pm.revert()
    assert (second.f(), first.f(), second.C().g(), first.C().g()) == ("f", "f", "g", "g")


def test_forgotten_manager_does_not_patch(package: WritePackage) -> None:
    package({"orphaned.py": "def f(): return 'f'"})
    manager = PatchManager()
    manager.register_patch("orphaned.f", wrap=tag("w"))
    manager.apply()
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    assert importlib.import_module("orphaned").f() == "f"


def test_import_in_a_wrap_function_cannot_deadlock_with_another_apply(
    pm: PatchManager, package: WritePackage
) -> None:
    package(
        {
            "slow_import.py": """
import time
from tests.patching import shared_by_late
shared_by_late.importing.set()
shared_by_late.wrapping.wait(60)
shared_by_late.other.apply()
""",
            "plain.py": "def f(): return 'f'\ndef g(): return 'g'",
        }
    )
    plain = importlib.import_module("plain")
    from . import shared_by_late

    def wrap(original: object) -> object:
        shared_by_late.wrapping.set()
        importlib.import_module("slow_import")
        return tag("w")(original)  # type: ignore[arg-type]

    shared_by_late.other = pm
    pm.register_patch("plain.g", wrap=tag("w"))
    mine = PatchManager()
    mine.register_patch("plain.f", wrap=wrap)  # type: ignore[arg-type]
    importing = threading.Thread(target=importlib.import_module, args=("slow_import",))
    importing.start()
    assert shared_by_late.importing.wait(60)
    applying = threading.Thread(target=mine.apply)
    applying.start()
    for thread in (importing, applying):
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    assert (plain.f(), plain.g()) == ("w(f)", "w(g)")
    mine.revert()
