"""Ways in which an earlier patch manager of this kind went wrong; none of them exists here.

That manager's 32 recorded defects are the list. The first 26 have one test each, in its order, named after the
behaviour; from the 16th on in ``test_defects_later.py``. The other six are not about the manager and are avoided by
design:

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

import functools
import importlib
import sys
import types

import pytest

from ovpatch.patching import (
    DeclarationError,
    IncompatiblePatchError,
    PatchConflictError,
    PatchManager,
    TargetNotFoundError,
)

from .conftest import MakeModule, WritePackage
from .tools import only, same, snapshot, states, tag


def test_01_missing_attribute_is_an_error_and_not_created(pm: PatchManager, make: MakeModule) -> None:
    m = make("class C: pass")
    for path in ("gone", "C.gone"):
        manager = PatchManager()
        manager.register_patch(f"{m.__name__}.{path}", lambda: None)
        with pytest.raises(TargetNotFoundError, match="Nothing was created"):
            manager.apply()
    assert not hasattr(m, "gone")
    assert not hasattr(m.C, "gone")


def test_02_equal_constants_elsewhere_are_never_touched(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'\nversion = 1\noptional_fn = None\nclass C:\n    version = 1")
    other = make("version = 1\noptional_fn = None\nflag = True")
    before = snapshot(other)
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.apply()
    assert same(before, snapshot(other))
    for path in ("version", "optional_fn", "C.version"):
        manager = PatchManager()
        manager.register_patch(f"{m.__name__}.{path}", lambda: None)
        with pytest.raises(IncompatiblePatchError):
            manager.apply()


def test_03_nested_class_is_not_mistaken_for_its_outer_class(pm: PatchManager, make: MakeModule) -> None:
    m = make(
        """
        class Outer:
            def run(self): return "outer"
            class Inner:
                def run(self): return "inner"
        """
    )
    pm.register_patch(f"{m.__name__}.Outer.Inner.run", wrap=tag("w"))
    pm.apply()
    assert (m.Outer().run(), m.Outer.Inner().run()) == ("outer", "w(inner)")
    doubled = PatchManager()
    doubled.register_patch(f"{m.__name__}.Outer.Outer.run", wrap=tag("w"))
    with pytest.raises(TargetNotFoundError, match="no 'Outer'"):
        doubled.apply()


def test_04_class_and_static_methods_stay_what_they_are(pm: PatchManager, make: MakeModule) -> None:
    m = make(
        """
        class C:
            @classmethod
            def who(cls): return cls.__name__
            @staticmethod
            def twice(x): return str(2 * x)
        class D(C): pass
        """
    )
    for name in ("who", "twice"):
        pm.register_patch(f"{m.__name__}.C.{name}", wrap=tag("w"))
    pm.apply()
    assert [m.C.who(), m.C().who(), m.D.who(), m.D().who()] == ["w(C)", "w(C)", "w(D)", "w(D)"]
    assert [m.C.twice(2), m.C().twice(2), m.D().twice(2)] == ["w(4)"] * 3


def test_05_classmethods_and_inherited_attributes_are_really_removed(pm: PatchManager, make: MakeModule) -> None:
    m = make(
        """
        class C:
            @classmethod
            def who(cls): return cls.__name__
            def f(self): return "f"
        class D(C): pass
        """
    )
    before = snapshot(m.C), snapshot(m.D)
    for path in ("C.who", "D.f", "D.who"):
        pm.register_patch(f"{m.__name__}.{path}", wrap=tag("w"))
    pm.apply()
    pm.revert()
    assert same(before[0], snapshot(m.C))
    assert same(before[1], snapshot(m.D))
    assert m.D.who() == "D"


def test_06_target_without_replacement_is_an_error(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    with pytest.raises(DeclarationError, match="exactly one"):
        pm.register_patch(f"{m.__name__}.f")
    pm.apply()
    assert m.f() == "f"


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


def test_08_patch_put_on_in_between_survives_the_next_apply(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'\ndef g(): return 'g'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("ours"))
    pm.apply()
    m.f = tag("theirs")(m.f)
    pm.register_patch(f"{m.__name__}.g", wrap=tag("ours"))
    pm.apply()
    assert (m.f(), m.g()) == ("theirs(ours(f))", "ours(g)")
    pm.revert()
    assert m.f() == "theirs(f)"
    pm.apply()
    assert m.f() == "theirs(ours(f))"


def test_09_removal_under_a_foreign_wrapper_says_so(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("ours"))
    pm.apply()
    theirs = m.f = tag("theirs")(m.f)
    pm.revert()
    assert m.f is theirs
    assert m.f() == "theirs(f)"
    assert states(pm) == ["shadowed"]
    assert "tools.py" in only(pm).reason
    assert "was left alone" in only(pm).reason


def test_10_second_revert_touches_nothing(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    other = make("f = None\nhandler = None")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.apply()
    pm.revert()
    before = snapshot(m), snapshot(other)
    pm.revert()
    assert same(before[0], snapshot(m))
    assert same(before[1], snapshot(other))


def test_11_two_paths_to_one_function_are_one_target(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    facade = make(f=home.f)
    for module in (home, facade):
        pm.register_patch(f"{module.__name__}.f", wrap=tag(module.__name__), feature=module.__name__)
    pm.apply()
    assert home.f() == facade.f() == f"{facade.__name__}({home.__name__}(f))"
    rival = PatchManager()
    rival.register_patch(f"{home.__name__}.f", lambda: "one", feature="one")
    rival.register_patch(f"{facade.__name__}.f", lambda: "two", feature="two")
    with pytest.raises(PatchConflictError):
        rival.apply()


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


def test_13_names_of_functions_mean_nothing(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'\ndef g(): return 'g'")

    def wrapper() -> str:
        return "replaced"

    pm.register_patch(f"{m.__name__}.f", wrapper)
    pm.register_patch(f"{m.__name__}.g", wrap=functools.partial(tag("w")))
    pm.apply()
    assert (m.f(), m.g()) == ("replaced", "w(g)")


def test_14_author_keeps_the_original(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    make(name="author_package", __path__=[])
    source = f"from {home.__name__} import f\ndef new_f(): return 'new ' + f()"
    author = make(source, "author_package.patches")
    helper = make(f"from {home.__name__} import f as stock", "author_package.helper")
    pm.register_patch(f"{home.__name__}.f", author.new_f)
    pm.apply()
    assert home.f() == "new f"
    assert helper.stock() == "f"
    late = make(f"from {home.__name__} import f", "author_package.late")
    pm.revert()
    assert late.f is home.f


def test_14b_author_who_joins_later_gets_the_original_back(pm: PatchManager, make: MakeModule) -> None:
    home = make("def f(): return 'f'")
    author = make(f"from {home.__name__} import f\ndef new_f(): return 'new ' + f()", "single_author")
    pm.register_patch(f"{home.__name__}.f", wrap=tag("w"), feature="first")
    pm.apply()
    assert author.f() == "w(f)"
    pm.register_patch(f"{home.__name__}.f", author.new_f, feature="second")
    pm.apply()
    assert home.f() == "w(new f)"


def test_15_no_lazy_module_is_woken(pm: PatchManager, make: MakeModule) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"lazy attribute {name} asked for")

    lazy = Lazy("lazy_of_defect_15")
    sys.modules[lazy.__name__] = lazy
    torch_ops = sys.modules.get("torch.ops")
    before = len(vars(torch_ops)) if torch_ops else 0
    try:
        m = make("def a_name_that_torch_ops_lacks(): return 'f'")
        user = make(g=m.a_name_that_torch_ops_lacks)
        pm.register_patch(f"{m.__name__}.a_name_that_torch_ops_lacks", wrap=tag("w"))
        pm.apply()
        assert user.g() == "w(f)"
        pm.revert()
    finally:
        del sys.modules[lazy.__name__]
    assert (len(vars(torch_ops)) if torch_ops else 0) == before
