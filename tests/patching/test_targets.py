"""What a target can be, and what happens when it is none."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest

from ovpatch.patching import (
    DeclarationError,
    IncompatiblePatchError,
    PatchManager,
    PatchState,
    TargetNotFoundError,
)

from .conftest import MakeModule, WritePackage
from .tools import only, patch, same, snapshot, states, tag

CLASSES = """
class Base:
    def method(self, x="x"): return f"{type(self).__name__}.method {x}"
    @classmethod
    def make(cls, x="x"): return f"{cls.__name__}.make {x}"
    @staticmethod
    def pure(x="x"): return f"pure {x}"
    @property
    def size(self): return f"size {getattr(self, '_size', 0)}"
    @size.setter
    def size(self, value): self._size = value
    class Inner:
        def run(self): return "Inner.run"
        class Deep:
            def run(self): return "Deep.run"
    def run(self): return "Base.run"

class Heir(Base):
    pass
"""


# Kinds of targets


@pytest.mark.parametrize(
    ("path", "call", "stock"),
    [
        ("Base.method", lambda m: m.Base().method(1), "Base.method 1"),
        ("Base.method", lambda m: m.Base.method(m.Base(), x=1), "Base.method 1"),
        ("Base.make", lambda m: m.Base.make(1), "Base.make 1"),
        ("Base.make", lambda m: m.Heir().make(1), "Heir.make 1"),
        ("Base.pure", lambda m: m.Base.pure(1), "pure 1"),
        ("Base.pure", lambda m: m.Base().pure(1), "pure 1"),
        ("Base.size", lambda m: m.Base().size, "size 0"),
        ("Base.Inner.run", lambda m: m.Base.Inner().run(), "Inner.run"),
        ("Base.Inner.Deep.run", lambda m: m.Base.Inner.Deep().run(), "Deep.run"),
        ("Heir.method", lambda m: m.Heir().method(1), "Heir.method 1"),
        ("Heir.make", lambda m: m.Heir.make(1), "Heir.make 1"),
        ("Heir.pure", lambda m: m.Heir().pure(1), "pure 1"),
        ("Heir.size", lambda m: m.Heir().size, "size 0"),
        ("Heir.Inner.run", lambda m: m.Heir.Inner().run(), "Inner.run"),
    ],
)
def test_attribute_of_a_class(
    pm: PatchManager, make: MakeModule, path: str, call: Any, stock: str
) -> None:
    m = make(CLASSES)
    classes = [m.Base, m.Heir, m.Base.Inner, m.Base.Inner.Deep]
    before = [snapshot(owner) for owner in classes]
    pm.register_patch(f"{m.__name__}.{path}", wrap=tag("w"))
    assert call(m) == stock
    pm.apply()
    assert call(m) == f"w({stock})"
    assert only(pm).calls == 1
    pm.revert()
    assert call(m) == stock
    assert all(same(old, snapshot(owner)) for old, owner in zip(before, classes, strict=True))


def test_setter_of_a_patched_property_still_works(pm: PatchManager, make: MakeModule) -> None:
    m = make(CLASSES)
    patch(pm, m, "Base.size", property(lambda self: f"new {self._size}"))
    base = m.Base()
    base.size = 3
    assert base.size == "new 3"


def test_replacement_in_the_descriptor_of_its_target(pm: PatchManager, make: MakeModule) -> None:
    m = make(CLASSES)
    pm.register_patch(
        f"{m.__name__}.Base.make", classmethod(lambda cls, x="x": f"new {cls.__name__} {x}")
    )
    pm.register_patch(f"{m.__name__}.Base.pure", staticmethod(lambda x="x": f"new {x}"))
    pm.apply()
    assert (m.Heir.make(1), m.Base().pure(1)) == ("new Heir 1", "new 1")


def test_replacement_in_another_descriptor_is_refused(pm: PatchManager, make: MakeModule) -> None:
    m = make(CLASSES)
    pm.register_patch(f"{m.__name__}.Base.pure", classmethod(lambda cls, x="x": x))
    with pytest.raises(IncompatiblePatchError, match=r"static method.*pass a plain function"):
        pm.apply()


def test_builtin_in_a_class_stays_unbound(pm: PatchManager, make: MakeModule) -> None:
    m = make("class C:\n    count = len")
    patch(pm, m, "C.count", wrap=tag("w"))
    assert m.C().count("abc") == "w(3)"


def test_cached_function_keeps_its_cache_methods(pm: PatchManager, make: MakeModule) -> None:
    m = make("import functools\n@functools.lru_cache\ndef f(x): return x")
    patch(pm, m, "f", wrap=tag("w"))
    assert (m.f(1), m.f(1), m.f.cache_info().hits) == ("w(1)", "w(1)", 1)


# Inherited attributes


def test_inherited_patch_follows_later_changes_of_the_base(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make(CLASSES)
    pm.register_patch(f"{m.__name__}.Heir.method", wrap=tag("heir"), feature="heir")
    pm.register_patch(f"{m.__name__}.Base.method", wrap=tag("base"), feature="base")
    pm.apply("heir")
    pm.apply("base")
    assert m.Heir().method() == "heir(base(Heir.method x))"
    pm.revert("base")
    assert m.Heir().method() == "heir(Heir.method x)"


def test_inherited_patch_keeps_the_order_of_several_bases(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make(
        """
        class Root:
            def f(self): return "root"
        class Left(Root): pass
        class Right(Root):
            def f(self): return "right"
        class Both(Left, Right): pass
        """
    )
    patch(pm, m, "Left.f", wrap=tag("w"))
    assert (m.Left().f(), m.Both().f()) == ("w(root)", "w(right)")


# Targets that are none


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("nothing", "has no 'nothing'"),
        ("Base.metod", "Did you mean 'method'"),
        ("Bse.method", "Did you mean 'Base'"),
        ("Base.Base.run", "no 'Base'"),
    ],
)
def test_missing_target_is_an_error_and_creates_nothing(
    pm: PatchManager, make: MakeModule, path: str, hint: str
) -> None:
    m = make(CLASSES)
    before, base = snapshot(m), snapshot(m.Base)
    pm.register_patch(f"{m.__name__}.{path}", wrap=tag("w"), feature="mine")
    with pytest.raises(TargetNotFoundError, match=hint) as caught:
        pm.apply()
    assert "feature 'mine'" in str(caught.value)
    assert str(caught.value).endswith("register the patch with optional=True")
    assert same(before, snapshot(m))
    assert same(base, snapshot(m.Base))
    assert only(pm).state is PatchState.FAILED


def test_missing_optional_target_is_skipped_with_the_reason(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make(CLASSES)
    pm.register_patch(f"{m.__name__}.nothing", wrap=tag("w"), optional=True)
    pm.register_patch(f"{m.__name__}.Base.method", wrap=tag("w"))
    pm.register_patch("no_such_package_here.a.f", wrap=tag("w"), optional=True)
    pm.apply()
    assert states(pm) == ["skipped", "applied", "skipped"]
    assert pm.statuses()[0].reason == f"module {m.__name__} has no 'nothing'"
    assert pm.statuses()[2].reason == "there is no package 'no_such_package_here'"


def test_missing_submodule_of_an_imported_package(pm: PatchManager, package: WritePackage) -> None:
    package({"outer/there.py": "def f(): pass"})
    __import__("outer")
    pm.register_patch("outer.gone.f", wrap=tag("w"))
    with pytest.raises(TargetNotFoundError, match="module outer has no 'gone'"):
        pm.apply()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("Base", "is a class.*patch its methods, for example"),
        ("Base.Inner", "is a class.*patch its methods"),
        ("number", "is 3, not a function"),
        ("nothing", "is None, not a function"),
        ("json", "is a module"),
        ("part", "not a plain function"),
        ("thing.method", "an object of type Base.*Patch the method on its class"),
        ("Base.__new__", "inherited from object"),
        ("Base.number", "is 4, not a function"),
    ],
)
def test_what_cannot_be_patched_is_refused_with_the_remedy(
    pm: PatchManager, make: MakeModule, path: str, text: str
) -> None:
    m = make(
        CLASSES
        + "\nimport json, functools\nnumber = 3\nnothing = None\npart = functools.partial(len)"
    )
    m.thing, m.Base.number = m.Base(), 4
    pm.register_patch(f"{m.__name__}.{path}", wrap=tag("w"))
    with pytest.raises(IncompatiblePatchError, match=text):
        pm.apply()
    optional = PatchManager()
    optional.register_patch(f"{m.__name__}.{path}", wrap=tag("w"), optional=True)
    optional.apply()
    assert states(optional) == ["incompatible"]


def test_builtin_class_is_refused(pm: PatchManager) -> None:
    pm.register_patch("collections.deque.append", wrap=tag("w"))
    with pytest.raises(IncompatiblePatchError, match="built-in class"):
        pm.apply()


# Declarations


def test_declarations_that_can_never_work(pm: PatchManager) -> None:
    with pytest.raises(DeclarationError, match="exactly one"):
        pm.register_patch("a.b")
    with pytest.raises(DeclarationError, match="exactly one"):
        pm.register_patch("a.b", len, wrap=tag("w"))
    with pytest.raises(DeclarationError, match="not callable"):
        pm.register_patch("a.b", 0)
    with pytest.raises(DeclarationError, match="not callable"):
        pm.register_patch("a.b", wrap=3)  # type: ignore[arg-type]
    for target in ("f", "", "a..b", "a.b c", ".a", 3):
        with pytest.raises(DeclarationError, match="dotted path"):
            pm.register_patch(target, len)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"order='first' .* pass a whole number"):
        pm.register_patch("a.b", len, order="first")  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"feature=None .* pass a string"):
        pm.register_patch("a.b", len, feature=None)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="version range"):
        pm.register_patch("a.b", len, torch="2.11 to 2.15")
    with pytest.raises(DeclarationError, match="not callable"):
        pm.register_hook("h", None)  # type: ignore[arg-type]
    assert pm.statuses() == ()


def test_the_same_declaration_twice_counts_once(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    wrap = tag("w")
    for _ in range(2):
        pm.register_patch(f"{m.__name__}.f", wrap=wrap)
    pm.apply()
    assert m.f() == "w(f)"


def test_partial_and_bound_wrap_functions(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'\ndef g(): return 'g'")

    class Author:
        def wrap(self, original: Any, name: str = "bound") -> Any:
            return tag(name)(original)

    author = Author()
    pm.register_patch(f"{m.__name__}.f", wrap=author.wrap)
    pm.register_patch(f"{m.__name__}.f", wrap=author.wrap)
    pm.register_patch(f"{m.__name__}.g", wrap=functools.partial(author.wrap, name="partial"))
    pm.apply()
    assert (m.f(), m.g()) == ("bound(f)", "partial(g)")


# Looking


def test_resolution_runs_no_lazy_attributes(pm: PatchManager, make: MakeModule) -> None:
    asked: list[str] = []
    lazy = make(name="lazy_module_of_a_test")
    lazy.__dict__["__getattr__"] = asked.append
    m = make("def f(): return 'f'")
    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.register_patch("lazy_module_of_a_test.f", wrap=tag("w"), optional=True)
    pm.apply()
    pm.statuses()
    pm.revert()
    assert asked == []
    assert "makes its attributes on demand" in pm.statuses()[1].reason


def test_installed_function_names_its_patches(pm: PatchManager, make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    patch(pm, m, "f", wrap=tag("w"), feature="mine")
    assert type(m.f) is types.FunctionType
    mark = m.f.__ovpatch__
    assert mark.target == f"{m.__name__}.f"
    assert [patch.feature for patch in mark.patches] == ["mine"]
    assert "feature 'mine'" in repr(mark)


def test_blocked_module_is_a_missing_one(pm: PatchManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blocked_package", None)
    pm.register_patch("blocked_package.f", wrap=tag("w"), optional=True)
    pm.apply()
    assert states(pm) == ["skipped"]


def test_object_in_place_of_a_module_is_named_as_what_it_is(
    pm: PatchManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stand:
        def f(self) -> str:
            return "f"

    monkeypatch.setitem(sys.modules, "stand_in", Stand())
    pm.register_patch("stand_in.f", wrap=tag("w"))
    with pytest.raises(
        IncompatiblePatchError, match=r"stand_in is an object of type Stand, .*Patch the method on"
    ):
        pm.apply()
