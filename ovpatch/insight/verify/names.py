"""Names for parameters: those of the model that owns them, whatever it is wrapped in."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Final
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

_WRAPPERS: Final = re.compile(r"^(?:module\.|_orig_mod\.|_forward_module\.)+|(?<=\.)_orig_mod\.")


class Names:
    """Finds out the names of parameters that optimizers hold, and of the buffers beside them."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[ref[Tensor], str]] = {}
        self._taken: dict[str, int] = {}
        self._roots: list[ref[nn.Module]] = []

    def of(self, optimizer: Optimizer, index: int) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer with their names, in its own order.

        Args:
            optimizer: The optimizer.
            index: Its number; parameters that no module owns are named by it, and so are those whose name is taken.
        """
        places = list(_places(optimizer))
        if any(self._known(parameter) is None for _, parameter in places):
            self._learn(places, index)
        return [(self._known(parameter) or "", parameter) for _, parameter in places]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all models that own such a parameter."""
        seen: set[str] = set()
        for number, root in enumerate(weak() for weak in self._roots):
            for name, buffer in root.named_buffers() if root is not None else ():
                plain = strip(name)
                unique = plain if plain not in seen else f"model{number}:{plain}"
                seen.add(unique)
                yield unique, buffer

    def _known(self, parameter: Tensor) -> str | None:
        weak, name = self._names.get(id(parameter), (None, None))
        return name if weak is not None and weak() is parameter else None

    def _learn(self, places: list[tuple[str, Tensor]], index: int) -> None:
        wanted = {id(parameter) for _, parameter in places}
        owned: dict[int, str] = {}
        for root in _roots():
            named = [(strip(name), parameter) for name, parameter in root.named_parameters()]
            if any(id(parameter) in wanted for _, parameter in named):
                self._roots += [] if any(weak() is root for weak in self._roots) else [ref(root)]
                owned = {id(parameter): name for name, parameter in reversed(named)} | owned
        for place, parameter in places:
            if self._known(parameter) is None:
                self._name(parameter, owned.get(id(parameter), f"optimizer{index}.{place}"), index)

    def _name(self, parameter: Tensor, name: str, index: int) -> None:
        if self._taken.setdefault(name, id(parameter)) != id(parameter):
            name = f"optimizer{index}:{name}"
        while self._taken.setdefault(name, id(parameter)) != id(parameter):
            name += "'"
        self._names[id(parameter)] = ref(parameter), name


def strip(name: str) -> str:
    """Return a parameter's name without what DistributedDataParallel, torch.compile and their like add."""
    return _WRAPPERS.sub("", name)


def _places(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"param_groups[{number}].params[{position}]", parameter


def _roots() -> list[nn.Module]:
    """Return all modules that are no other's child, those with the most parameters first."""
    # By type: isinstance() would ask objects for their __class__, which makes lazy proxies load what they stand for.
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    roots = [module for module in modules if id(module) not in children and "_modules" in vars(module)]
    return sorted(roots, key=lambda root: -sum(1 for _ in root.parameters()))
