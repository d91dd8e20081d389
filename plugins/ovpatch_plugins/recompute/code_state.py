"""State outside of a block's modules, found by the names in their code.

A forward may count its calls in a global variable or in its class, draw from a generator of a closure, or
write to an object that several modules share. Names in its code lead to each of these. So the code of the
modules' classes is read, and then the code of the functions and objects that it names.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
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
# Types whose values are no state.
_CODE: Final = (
    FunctionType,
    MethodType,
    ModuleType,
    type,
    property,
    staticmethod,
    classmethod,
    nn.Module,
)
# Code and objects beyond this number are not read, nor are more items of a list or dictionary.
_MOST_OBJECTS: Final = 2000
_MOST_ITEMS: Final = 1000

PLAIN: Final = frozenset(
    {bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
"""Types whose values cannot change."""


class NamedValues(MutableMapping[str, Any]):
    """The values of some names in a module, class, object or closure.

    Args:
        owner: What has the values.
        values: All of its values.
        names: The names.
    """

    def __init__(
        self, owner: object, values: MutableMapping[str, Any], names: Collection[str]
    ) -> None:
        self.owner = owner
        self._all_values = values
        self._names = names

    def __getitem__(self, name: str) -> Any:
        return self._all_values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all_values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all_values[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._all_values)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _ClassValues(MutableMapping[str, Any]):
    """The attributes of a class, which can be written."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __getitem__(self, name: str) -> Any:
        return vars(self._cls)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._cls))

    def __len__(self) -> int:
        return len(vars(self._cls))


class _ClosureValues(MutableMapping[str, Any]):
    """The variables of a closure."""

    def __init__(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            # The cell is empty.
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Scope(NamedTuple):
    """A module of Python, a class, an object or a closure, in which names are looked up.

    Attributes:
        owner: What has the values.
        values: The values, to read.
        writable: The values, to write.
    """

    owner: object
    values: Mapping[str, Any]
    writable: MutableMapping[str, Any]


class CodeState:
    """The state to which the code of some modules leads.

    Args:
        modules: The modules. Their own attributes do not count.

    Attributes:
        places: The values that a forward may change.
        generators: The random generators that are items of lists or dictionaries.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.generators: list[Any] = []
        # The names in all code that was read.
        self._names = {"forward", *_IMPLICIT}
        # The objects that were visited, by identity. They stay alive, so identities differ.
        self._visited: dict[int, Any] = {id(module): module for module in modules}
        # By the identity of the owner.
        self._scopes: dict[int, _Scope] = {}
        attributes: list[Mapping[str, Any]] = []
        for module in modules:
            cls: Any = type(module)
            if _is_class_of_script(cls):
                attributes.append(vars(module))
                self._visit_class(cls)
        # Each pass may find names and values that lead to more.
        before, now = -1, 0
        while before < now:
            before = now
            for values in [*attributes, *(scope.values for scope in self._scopes.values())]:
                for name in self._names.intersection(values):
                    self._visit(values[name])
            now = len(self._visited) + len(self._names)
        self.places: list[NamedValues] = []
        for owner, values, writable in self._scopes.values():
            found = self._names.intersection(values)
            if names := [name for name in found if not isinstance(values[name], _CODE)]:
                self.places.append(NamedValues(owner, writable, names))

    def _visit(self, value: Any) -> None:
        """Add the scopes of a value, unless it was visited."""
        cls: Any = type(value)
        if cls in PLAIN or id(value) in self._visited or len(self._visited) >= _MOST_OBJECTS:
            return
        self._visited[id(value)] = value
        if cls is FunctionType:
            self._visit_function(value)
        elif cls in (staticmethod, classmethod, MethodType):
            self._visit(value.__func__)
        elif cls is property:
            self._visit(value.fget)
        elif cls is functools.partial:
            self._visit_items([value.func, *value.args, *value.keywords.values()])
        elif cls in (list, tuple):
            self._visit_items(value)
        elif cls is dict:
            self._visit_items(value.values())
        elif cls is ModuleType:
            if _is_script(value.__name__):
                self._add_scope(value, vars(value), vars(value))
        elif isinstance(value, type):
            self._visit_class(value)
        elif _has_attributes(value):
            self._add_scope(value, vars(value), vars(value))
            self._visit_class(cls)

    def _visit_items(self, items: Collection[Any]) -> None:
        for item in itertools.islice(items, _MOST_ITEMS):
            cls: Any = type(item)
            if is_generator_class(cls):
                self.generators.append(item)
            self._visit(item)

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            self._visited[id(base)] = base
            if _is_script(base.__module__):
                self._add_scope(base, vars(base), _ClassValues(base))

    def _visit_function(self, function: FunctionType) -> None:
        is_script = _is_script(function.__globals__["__name__"])
        if function.__closure__:
            cells = _ClosureValues(function)
            values = dict(cells)
            # A library's decorator may hold a function of the script.
            self._visit_items(values.values())
            if is_script:
                self._names |= values.keys()
                self._add_scope(function, values, cells)
        if is_script:
            self._names |= _read_names(function.__code__)
            self._add_scope(function.__globals__, function.__globals__, function.__globals__)

    def _add_scope(
        self, owner: object, values: Mapping[str, Any], writable: MutableMapping[str, Any]
    ) -> None:
        self._scopes.setdefault(id(owner), _Scope(owner, values, writable))


def _has_attributes(value: Any) -> bool:
    """Return whether a value is an object of the script whose attributes may be state."""
    cls: Any = type(value)
    is_object = cls is SimpleNamespace or _is_class_of_script(cls)
    return is_object and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module))


@functools.lru_cache(maxsize=4096)
def _read_names(code: CodeType) -> frozenset[str]:
    """Return the names of globals, attributes and methods in code, and in the functions inside of it."""
    inner = [_read_names(value) for value in code.co_consts if isinstance(value, CodeType)]
    return frozenset(code.co_names).union(*inner)


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
