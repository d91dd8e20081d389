"""Random generators and numbers outside of a block's modules, found by the names in their code.

A forward may draw from a generator that is a global variable, a variable of a closure, or an attribute of an
object that several modules share, or count its calls in such a place. Names in its code lead to each of
these. So the code of the modules' classes is read, and then the code of the functions and objects that it
names.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
# Code and objects beyond this number are not read, nor are more items of a list or dictionary.
_MOST_OBJECTS: Final = 2000
_MOST_ITEMS: Final = 1000


def search_outside(modules: Sequence[nn.Module]) -> tuple[list[Any], list[NumberPlace]]:
    """Return the generators and the places of numbers to which the code of some modules leads.

    The modules' own attributes are not among them.
    """
    search = _Search(modules)
    return list(search.generators.values()), search.list_places()


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
        # The attributes of classes, objects and modules of Python that were visited, with the class or the
        # dictionary that holds them.
        self._scopes: list[tuple[Any, Mapping[str, Any]]] = []
        # The lists, dictionaries and cells of closures that were visited, by identity.
        self._containers: dict[int, Any] = {}
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
            for values in [*own, *(values for _, values in self._scopes)]:
                self._visit_all(map(values.get, self._names.intersection(values)))
            now = len(self._visited) + len(self._names)
        for found in (self.generators, self._containers):
            for key in kept.intersection(found):
                del found[key]

    def list_places(self) -> list[NumberPlace]:
        """Return the places of numbers that the code may write to."""
        return [
            *(NumberPlace(values, names) for values, names in self._globals.values()),
            *(NumberPlace(owner, self._names) for owner, _ in self._scopes),
            *map(NumberPlace, self._containers.values()),
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
        elif cls in (list, tuple, dict):
            self._visited[id(value)] = value
            if cls is not tuple and len(value) <= _MOST_ITEMS:
                self._containers[id(value)] = value
            self._visit_all(value.values() if cls is dict else value)
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
            self._containers |= {id(cell): cell for cell in function.__closure__ or ()}
            self._globals.setdefault(id(values), (values, set()))[1].update(names.variables)
            self._visit_all(map(values.get, names.variables))

    def _add_scope(self, owner: object, values: Mapping[str, Any]) -> None:
        self._visited[id(owner)] = owner
        self._scopes.append((owner if isinstance(owner, type) else values, values))


def _read_closure(function: FunctionType) -> Collection[Any]:
    """Return the values of the variables of a closure."""
    cells = function.__closure__ or ()
    return [value for cell in cells for value in _read_cell(cell).values()]


def _read_cell(cell: CellType) -> dict[str, Any]:
    """Return the value of a closure's variable, or nothing if it has no value yet."""
    try:
        return {"": cell.cell_contents}
    except ValueError:
        return {}


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

# Types of numbers. A flag is none: if it says that something is prepared, a second forward must not prepare it again.
_NUMBERS: Final = (int, float)
# Types that a value may have before it becomes another number.
_PLAIN: Final = (*_NUMBERS, type(None))


class _Missing:
    """The value of a key that does not exist."""


class _Other:
    """The value of a key whose value is not to be restored, and may hold a graph."""


class NumberPlace(NamedTuple):
    """A place that may hold numbers.

    Attributes:
        owner: A dictionary, a list, a class, or the cell of a closure's variable.
        names: The keys or attributes that are read; None for all of them.
    """

    owner: Any
    names: Collection[str] | None = None

    def read(self) -> dict[Any, Any]:
        """Return the values by key."""
        owner = self.owner
        if type(owner) is CellType:
            return _read_cell(owner)
        if type(owner) is list:
            return dict(enumerate(owner))
        # Another thread may add an item while this one looks for numbers, so it looks in a copy.
        items = dict(vars(owner) if isinstance(owner, type) else owner)
        keys = items if self.names is None else items.keys() & self.names
        return {key: items[key] for key in keys}

    def is_changed(self, before: Any, now: float) -> bool:
        """Return whether a number is another one than before the forward, and can be restored."""
        if type(before) in _PLAIN:
            return bool(before != now)
        # From anything but a dictionary, a number that the forward has added cannot be removed.
        return before is _Missing and type(self.owner) is dict

    def write(self, key: Any, value: Any) -> None:
        """Write a value, or remove it from a dictionary if it is missing."""
        owner = self.owner
        if isinstance(owner, type):
            setattr(owner, key, value)
        elif type(owner) is CellType:
            owner.cell_contents = value
        elif type(owner) is dict and value is _Missing:
            owner.pop(key, None)
        elif type(owner) is dict or key < len(owner):
            owner[key] = value


class OutsideNumbers:
    """The numbers outside of a block's modules that its forward changes, as they are before it.

    The recomputation starts from these numbers and then restores the current values, so each number changes
    once, as in stock PyTorch.

    Args:
        places: The places that the forward may write to.
    """

    def __init__(self, places: Sequence[NumberPlace]) -> None:
        # The values of each place before the forward: all of them during it, and after it the numbers that it changed.
        self._before: list[tuple[NumberPlace, dict[Any, Any]]] = []
        for place in places:
            values = place.read().items()
            before = {key: value if type(value) in _PLAIN else _Other for key, value in values}
            self._before.append((place, before))

    def end_forward(self) -> bool:
        """Keep the numbers that the forward has changed, and return whether there are any."""
        all_before, self._before = self._before, []
        for place, before in all_before:
            changed = {
                key: before.get(key, _Missing)
                for key, value in place.read().items()
                if type(value) in _NUMBERS and place.is_changed(before.get(key, _Missing), value)
            }
            if changed:
                self._before.append((place, changed))
        return bool(self._before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the numbers of before the forward in this context; afterwards, restore the current values."""
        current = []
        for place, before in self._before:
            items = place.read()
            current.append({key: items.get(key, _Missing) for key in before})
        try:
            self._write([before for _, before in self._before])
            yield
        finally:
            self._write(current)

    def _write(self, values_by_place: Sequence[Mapping[Any, Any]]) -> None:
        for (place, _), values in zip(self._before, values_by_place, strict=True):
            for key, value in values.items():
                place.write(key, value)
