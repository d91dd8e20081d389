"""Random generators and numbers outside of a block's modules, found by the names in their code.

A forward may draw from a generator that is a global variable, a variable of a closure, or an attribute of an
object that several modules share. It may also count its calls in such a place. Names in its code lead to
each of these. So the code of the modules' classes is read, and then the code of the functions and objects that it
names.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from ovpatch.overlap.tensors.linear_ops import is_generator_class

# Methods that are called without their names.
_IMPLICIT: Final = frozenset(
    {"__call__", "__enter__", "__exit__", "__getitem__", "__iadd__", "__next__", "__setitem__"}
)
# Packages whose code is not read, in addition to those in the folders of installed packages.
_LIBRARIES: Final = frozenset(
    {*sys.stdlib_module_names, "numpy", "ovpatch", "ovpatch_plugins", "torch"}
)
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_CONTAINERS: Final = (list, tuple, dict, Counter, OrderedDict, defaultdict)
# Code and objects beyond this number are not read, nor are more items of a list or dictionary.
_MOST_OBJECTS: Final = 2000
_MOST_ITEMS: Final = 1000


def find_generators(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the generators to which the code of some modules leads, but not the modules' own attributes."""
    return list(_Search(modules).generators.values())


class _Names(NamedTuple):
    """The names in a function's code, and in the functions inside of it.

    Attributes:
        variables: The names of global variables.
        attributes: The names of attributes and methods.
    """

    variables: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _read_names(code: CodeType) -> _Names:
    inner = [_read_names(value) for value in code.co_consts if isinstance(value, CodeType)]
    variables = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")
    }
    # The name of a variable may be that of an attribute, too, so all names are among them.
    return _Names(
        frozenset(variables).union(*(names.variables for names in inner)),
        frozenset(code.co_names).union(*(names.attributes for names in inner)),
    )


class _Search:
    """A search for generators and for places of numbers.

    Args:
        modules: The modules whose code is read.

    Attributes:
        generators: The generators, by identity.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.generators: dict[int, Any] = {}
        # The names of attributes and methods in all code that was read.
        self._names = {"forward", *_IMPLICIT}
        # The objects that were visited, by identity. They stay alive, so identities differ.
        self._visited: dict[int, Any] = {id(module): module for module in modules}
        # The attributes of classes, objects and modules of Python that were visited.
        self._scopes: list[Mapping[str, Any]] = []
        # The lists, dictionaries and variables of closures that were visited, by identity.
        self._containers: dict[int, NumberPlace] = {}
        # The global variables that functions name, by the identity of the dictionary that holds them.
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        # The attributes of the modules, whose generators belong to the modules' state.
        own: list[Mapping[str, Any]] = []
        for module in modules:
            cls: Any = type(module)
            if _is_class_of_script(cls):
                own.append(vars(module))
                self._visit_class(cls)
        kept = {id(value) for values in own for value in values.values()}
        # Each pass may find names and values that lead to more.
        before, now = -1, 0
        while before < now:
            before = now
            for values in [*own, *self._scopes]:
                self._visit_all(map(values.get, self._names.intersection(values)))
            now = len(self._visited) + len(self._names)
        for found in (self.generators, self._containers):
            for key in kept.intersection(found):
                del found[key]

    def list_places(self) -> list[NumberPlace]:
        """Return the places of numbers that the code may write to."""
        return [
            *(NumberPlace(values, names) for values, names in self._globals.values()),
            *(NumberPlace(values, self._names) for values in self._scopes),
            *self._containers.values(),
        ]

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in itertools.islice(values, _MOST_ITEMS):
            if id(value) not in self._visited and len(self._visited) < _MOST_OBJECTS:
                self._visit(value)

    def _visit(self, value: Any) -> None:
        """Note a generator, or follow what the value leads to."""
        cls: Any = type(value)
        if is_generator_class(cls):
            self.generators[id(value)] = value
        elif cls is FunctionType:
            self._visited[id(value)] = value
            self._visit_function(value)
        elif cls in (staticmethod, classmethod, MethodType):
            self._visit_all([value.__func__])
        elif cls is property:
            self._visit_all([value.fget])
        elif cls is functools.partial:
            self._visit_all([value.func, *value.args, *value.keywords.values()])
        elif cls in _CONTAINERS:
            self._visited[id(value)] = value
            if cls is not tuple and len(value) <= _MOST_ITEMS:
                self._containers[id(value)] = NumberPlace(value)
            self._visit_all(value.values() if issubclass(cls, dict) else value)
        elif cls is ModuleType:
            if _is_script(value.__name__):
                self._add_scope(value, vars(value))
        elif isinstance(value, type):
            self._visit_class(value)
        elif _has_attributes(value):
            self._add_scope(value, vars(value))
            self._visit_class(cls)

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._visited and _is_script(base.__module__):
                self._add_scope(base, vars(base))

    def _visit_function(self, function: FunctionType) -> None:
        # A decorator of a library may hold a function of the script.
        self._visit_all(_read_closure(function))
        values = function.__globals__
        if _is_script(values.get("__name__", "")):
            names = _read_names(function.__code__)
            self._names |= names.attributes
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            self._containers |= {id(cell): NumberPlace(cell, (name,)) for name, cell in cells}
            self._globals.setdefault(id(values), (values, set()))[1].update(names.variables)
            self._visit_all(map(values.get, names.variables))

    def _add_scope(self, owner: object, values: Mapping[str, Any]) -> None:
        self._visited[id(owner)] = owner
        self._scopes.append(values)


def _read_closure(function: FunctionType) -> Collection[Any]:
    """Return the values of the variables of a closure."""
    return [value for cell in function.__closure__ or () for value in _read(cell)]


def _read(cell: CellType) -> Collection[Any]:
    """Return the value of a closure's variable, or nothing if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _has_attributes(value: Any) -> bool:
    """Return whether a value is an object of the script whose attributes may be generators or numbers."""
    cls: Any = type(value)
    is_object = cls is SimpleNamespace or _is_class_of_script(cls)
    return is_object and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module))


@functools.lru_cache(maxsize=1024)
def _is_class_of_script(cls: Any) -> bool:
    """Return whether a class or one of its bases belongs to the script; FSDP2 derives classes from it."""
    return any(_is_script(base.__module__) for base in cls.__mro__)


@functools.lru_cache(maxsize=1024)
def _is_script(module: str) -> bool:
    """Return whether a module of Python belongs to the script, and not to an installed package."""
    root = module.partition(".")[0]
    if root == "__main__" or root in _LIBRARIES:
        return root == "__main__"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return _INSTALLED.isdisjoint(Path(file).parts)


# --- numbers ---


class NumberPlace(NamedTuple):
    """A place that may hold numbers.

    Attributes:
        owner: A mapping, such as the attributes of an object, a list, or the cell of a closure's variable.
        names: The keys that are read, or the name of the variable; None for all keys.
    """

    owner: Any
    names: Collection[str] | None = None

    def read(self) -> dict[Any, float]:
        """Return the numbers by key."""
        owner, names = self.owner, self.names
        if type(owner) is CellType:
            items: dict[Any, Any] = {name: value for name in names or () for value in _read(owner)}
        elif type(owner) is list:
            items = dict(enumerate(owner))
        else:
            # Another thread may add an item while this one looks for numbers, so it looks in a copy.
            items = dict(owner)
        keys = items if names is None else items.keys() & names
        # Flags are bool.
        return {key: items[key] for key in keys if type(items[key]) in (int, float)}


class OutsideNumbers:
    """The numbers outside of a block's modules before its recomputation, which would count twice.

    Args:
        modules: The block and the modules inside of it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._before = [(place, place.read()) for place in _Search(modules).list_places()]

    def find_changed(self) -> str:
        """Return the name of a number that has changed, in words; "" if none has."""
        for place, before in self._before:
            now = place.read()
            for key in now.keys() | before.keys():
                # A NaN is itself, but not equal to itself.
                if now.get(key) is not before.get(key) and now.get(key) != before.get(key):
                    return key if isinstance(key, str) else f"with the key {key!r}"
        return ""
