"""Names for parameters: those of the model that owns them, whatever it is wrapped in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from ovpatch.insight.models import roots

_WRAPPERS: Final = re.compile(r"^(?:module\.|_orig_mod\.|_forward_module\.)+|(?<=\.)_orig_mod\.")


class Names:
    """Finds out the names of parameters that optimizers hold, and of the buffers beside them.

    Both runs must find the same ones, so nothing here depends on addresses, or on when garbage is collected.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[ref[Tensor], str]] = {}
        self._taken: dict[str, ref[Tensor]] = {}
        self._roots: dict[int, list[ref[nn.Module]]] = {}

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

    def buffers(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the models whose parameters an optimizer holds."""
        return _each_once(found for root in self._models(index) for found in root.named_buffers())

    def frozen(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of these models that no optimizer so far holds."""
        every = (found for root in self._models(index) for found in root.named_parameters())
        return _each_once(found for found in every if self._known(found[1]) is None)

    def _models(self, index: int) -> list[nn.Module]:
        roots = [weak() for weak in self._roots.get(index, ())]
        return [root for root in roots if root is not None]

    def _known(self, parameter: Tensor) -> str | None:
        weak, name = self._names.get(id(parameter), (None, None))
        return name if weak is not None and weak() is parameter else None

    def _learn(self, places: list[tuple[str, Tensor]], index: int) -> None:
        owned: dict[int, str] = {}
        self._roots[index] = []
        for root in _owners({id(parameter): position for position, (_, parameter) in enumerate(places)}):
            self._roots[index].append(ref(root))
            owned = {id(parameter): strip(name) for name, parameter in root.named_parameters()} | owned
        for place, parameter in places:
            if self._known(parameter) is None:
                name = self._free(owned.get(id(parameter), f"optimizer{index}.{place}"), index)
                self._taken[name] = ref(parameter)
                self._names[id(parameter)] = ref(parameter), name

    def _free(self, name: str, index: int) -> str:
        """Return a name that no parameter ever had, however long it is gone."""
        return name if name not in self._taken else _primed(f"optimizer{index}:{name}", self._taken)


def strip(name: str) -> str:
    """Return a parameter's name without what DistributedDataParallel, torch.compile and their like add."""
    return _WRAPPERS.sub("", name)


def _each_once(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor once, under its stripped name, and no name twice."""
    seen: set[int] = set()
    names: set[str] = set()
    for name, tensor in named:
        if id(tensor) in seen:
            continue
        unique = _primed(strip(name), names)
        seen.add(id(tensor))
        names.add(unique)
        yield unique, tensor


def _places(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"param_groups[{number}].params[{position}]", parameter


def _primed(name: str, taken: Collection[str]) -> str:
    return _primed(name + "'", taken) if name in taken else name


def _owners(positions: Mapping[int, int]) -> list[nn.Module]:
    """Return the modules that are no other's child and own such parameters: the first parameter's first.

    Args:
        positions: Where parameters stand in their optimizer, by ``id``.
    """
    found = []
    for root in roots():
        owned = [positions[id(parameter)] for parameter in root.parameters() if id(parameter) in positions]
        if owned:
            found.append((min(owned), -len(owned), root))
    return [root for *_, root in sorted(found, key=lambda one: one[:2])]
