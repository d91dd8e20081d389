"""Random module and class trees, random sequences of calls, against a model that is too simple to be wrong."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ovpatch.patching import PatchConflictError, PatchError, PatchManager
from tests.support.rarely import ALL_CASES

from .tools import same, snapshot, tag

FEATURES = "abc"
KINDS = ("method", "class", "static", "property")


@dataclass(frozen=True)
class Tree:
    """Two modules; classes by name with the index of their base (or None), their outer class and own attributes."""

    functions: int
    classes: tuple[tuple[int | None, int | None, tuple[str, ...]], ...]
    imports: tuple[bool, ...]

    def source(self) -> str:
        lines = [f"def f{index}(): return 'f{index}'" for index in range(self.functions)]
        for index, (base, _, attributes) in enumerate(self.classes):
            lines.append(f"class C{index}({'' if base is None else f'C{base}'}):")
            lines.append("    pass")
            lines += [line for kind in attributes for line in _attribute(index, kind)]
        lines += [
            f"C{outer}.C{index} = C{index}"
            for index, (_, outer, _) in enumerate(self.classes)
            if outer is not None
        ]
        return "\n".join(lines)

    def mro(self, index: int | None) -> Iterator[int]:
        while index is not None:
            yield index
            index = self.classes[index][0]

    def definer(self, index: int, kind: str) -> int | None:
        return next((one for one in self.mro(index) if kind in self.classes[one][2]), None)

    def slots(self) -> list[tuple[int | None, str]]:
        """Every attribute that can be patched: functions, and kinds of a class that owns or inherits them."""
        functions = [(None, f"f{index}") for index in range(self.functions)]
        owned = range(len(self.classes))
        return functions + [
            (one, kind) for one in owned for kind in KINDS if self.definer(one, kind) is not None
        ]


def _attribute(index: int, kind: str) -> list[str]:
    decorator = {
        "method": "",
        "class": "classmethod",
        "static": "staticmethod",
        "property": "property",
    }[kind]
    argument = {"method": "self", "class": "cls", "static": "", "property": "self"}[kind]
    lines = [f"    @{decorator}"] if decorator else []
    return [*lines, f"    def {kind}_({argument}): return '{index}.{kind}'"]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 4))
    classes = []
    for index in range(count):
        earlier = st.none() if index == 0 else st.none() | st.integers(0, index - 1)
        attributes = draw(st.sets(st.sampled_from(KINDS)))
        classes.append((draw(earlier), draw(earlier), tuple(sorted(attributes))))
    functions = draw(st.integers(1, 3))
    return Tree(
        functions,
        tuple(classes),
        tuple(draw(st.lists(st.booleans(), min_size=functions, max_size=functions))),
    )


@contextmanager
def built(tree: Tree) -> Iterator[tuple[types.ModuleType, types.ModuleType]]:
    home, user = types.ModuleType("random_home"), types.ModuleType("random_user")
    exec(tree.source(), home.__dict__)
    for index, imported in enumerate(tree.imports):
        if imported:
            setattr(user, f"renamed{index}", getattr(home, f"f{index}"))
    sys.modules.update(random_home=home, random_user=user)
    try:
        yield home, user
    finally:
        del sys.modules["random_home"], sys.modules["random_user"]


def path_of(tree: Tree, slot: tuple[int | None, str], nested: bool) -> str:
    index, name = slot
    if index is None:
        return f"random_home.{name}"
    outer = tree.classes[index][1]
    way = f"C{outer}.C{index}" if nested and outer is not None else f"C{index}"
    return f"random_home.{way}.{name}_"


def call(home: types.ModuleType, slot: tuple[int | None, str]) -> str:
    index, name = slot
    if index is None:
        return str(getattr(home, name)())
    value = getattr(getattr(home, f"C{index}")(), f"{name}_")
    return str(value if name == "property" else value())


class Model:
    """What every call must return: for each slot the names of the active patches, by rank."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.declared: list[tuple[tuple[int | None, str], str, str, int]] = []
        self.active: set[int] = set()

    def conflict(self, wanted: set[int]) -> bool:
        replaced = [self.declared[one][0] for one in wanted if self.declared[one][2] == "replace"]
        return len(replaced) != len(set(replaced))

    def of(self, features: tuple[str, ...]) -> set[int]:
        return {
            one
            for one, (_, feature, *_) in enumerate(self.declared)
            if not features or feature in features
        }

    def expected(self, slot: tuple[int | None, str]) -> str:
        index, name = slot
        if index is None:
            return self._stacked(slot, name)
        chain = list(self.tree.mro(index))
        last = chain.index(self.tree.definer(index, name))  # type: ignore[arg-type]
        result = f"{chain[last]}.{name}"
        for one in reversed(chain[: last + 1]):
            result = self._stacked((one, name), result)
        return result

    def _stacked(self, slot: tuple[int | None, str], result: str) -> str:
        here = [one for one in self.active if self.declared[one][0] == slot]
        for one in sorted(
            here, key=lambda one: (self.declared[one][2] == "wrap", self.declared[one][3], one)
        ):
            result = f"w{one}({result})" if self.declared[one][2] == "wrap" else f"r{one}"
        return result


def replacement(number: int, slot: tuple[int | None, str]) -> Any:
    if slot[0] is None or slot[1] == "static":
        return lambda: f"r{number}"
    if slot[1] == "class":
        return lambda cls: f"r{number}"
    return lambda self: f"r{number}"


def check(model: Model, home: types.ModuleType, user: types.ModuleType) -> None:
    for slot in model.tree.slots():
        assert call(home, slot) == model.expected(slot), slot
    for index, imported in enumerate(model.tree.imports):
        if imported:
            assert getattr(user, f"renamed{index}")() == model.expected((None, f"f{index}"))


@settings(max_examples=500 if ALL_CASES else 60)
@given(trees(), st.data())
def test_random_sequences_agree_with_the_model(tree: Tree, data: st.DataObject) -> None:
    with built(tree) as (home, user):
        owners = [home, user, *(getattr(home, f"C{index}") for index in range(len(tree.classes)))]
        before = [snapshot(owner) for owner in owners]
        pm, model = PatchManager(), Model(tree)
        for _ in range(data.draw(st.integers(1, 12), "length")):
            step(data, pm, model)
            check(model, home, user)
            states = [status.state.value == "applied" for status in pm.statuses()]
            assert {one for one, applied in enumerate(states) if applied} == model.active
        pm.revert()
        assert all(same(old, snapshot(owner)) for old, owner in zip(before, owners, strict=True))


def step(data: st.DataObject, pm: PatchManager, model: Model) -> None:
    action = data.draw(
        st.sampled_from(["register", "register", "apply", "apply", "revert"]), "action"
    )
    if action == "register":
        register(data, pm, model)
        return
    features = tuple(data.draw(st.lists(st.sampled_from(FEATURES), max_size=2), "features"))
    if action == "revert":
        pm.revert(*features)
        model.active -= model.of(features)
        return
    wanted = model.active | model.of(features)
    known = {feature for _, feature, *_ in model.declared}.issuperset(features)
    try:
        pm.apply(*features)
    except PatchConflictError:
        assert model.conflict(wanted)
    except PatchError as error:
        if known:
            raise AssertionError("only conflicts are expected") from error
    else:
        assert known
        assert not model.conflict(wanted)
        model.active = wanted


def register(data: st.DataObject, pm: PatchManager, model: Model) -> None:
    slot = data.draw(st.sampled_from(model.tree.slots()), "slot")
    feature = data.draw(st.sampled_from(FEATURES), "feature")
    order = data.draw(st.integers(-1, 1), "order")
    kind = data.draw(st.sampled_from(["wrap", "wrap", "replace"]), "kind")
    number = len(model.declared)
    target = path_of(model.tree, slot, data.draw(st.booleans(), "nested"))
    if kind == "wrap":
        pm.register_patch(target, wrap=tag(f"w{number}"), feature=feature, order=order)
    else:
        pm.register_patch(target, replacement(number, slot), feature=feature, order=order)
    model.declared.append((slot, feature, kind, order))
