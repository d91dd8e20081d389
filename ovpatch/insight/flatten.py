"""Nested results as one flat table of named values."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

#: What a name can stand for: a tensor, a number, or a value that is equal or not.
Leaf: TypeAlias = Any

#: Name of a value that stands alone.
ROOT: Final = "value"

_EXACT = (str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Empty:
    """An empty container; it has a name of its own, so that losing it is seen."""

    kind: str


def flatten(values: Any) -> dict[str, Leaf]:
    """Return the leaves of nested mappings and sequences by dotted name, for example ``state.0.exp_avg``.

    Lists and tuples are the same. Array-likes of numpy become tensors that share their memory.

    Args:
        values: Nested mappings and sequences of tensors, numbers, strings, None, dtypes, devices and enum members.

    Raises:
        TypeError: If a leaf is of another type; the text names it.
        ValueError: If two leaves would have one name, for example ``{1: a, "1": b}``.
    """
    flat: dict[str, Leaf] = {}
    for name, leaf in _walk(values, ""):
        if name in flat:
            raise ValueError(f"two values are both called {name!r}; rename one of their keys")
        flat[name] = leaf
    return flat


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, Leaf]]:
    children: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        kind, children = "mapping", [(str(key), child) for key, child in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        kind, children = "sequence", [(str(index), child) for index, child in enumerate(value)]
    else:
        yield prefix or ROOT, _leaf(value, prefix or ROOT)
        return
    if not children:
        yield prefix or ROOT, Empty(kind)
    for key, child in children:
        yield from _walk(child, f"{prefix}.{key}" if prefix else key)


def _leaf(value: Any, name: str) -> Leaf:
    if isinstance(value, torch.Tensor):
        return _plain(value, name)
    if value is None or isinstance(value, (numbers.Number, *_EXACT)):
        return value
    if hasattr(value, "__array_interface__"):
        return torch.as_tensor(value)
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared; "
        "leave it out, or turn it into tensors, numbers or text"
    )


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor without its graph, or say why its values cannot be compared here."""
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError(f"{name} is a DTensor; compare its .full_tensor() or .to_local()")
    if tensor.is_meta:
        raise TypeError(f"{name} is on the meta device and has no values; compare it after materialisation")
    if tensor.is_quantized:
        raise TypeError(f"{name} is quantized; compare its .int_repr() and scales")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; compare its .unbind()")
    return tensor.detach()


def mismatch(stock: Leaf, patched: Leaf) -> str:
    """Say how two leaves differ other than by an amount; nothing if they are equal or can be subtracted."""
    for what, of in (("type", _kind), ("dtype", _dtype), ("shape", _shape), ("layout", _layout)):
        a, b = of(stock), of(patched)
        if a != b:
            return f"{what} {a} became {b}"
    if not isinstance(stock, (torch.Tensor, numbers.Number)) and stock != patched:
        return f"{stock!r} became {patched!r}"
    return ""


def _kind(leaf: Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    if isinstance(leaf, Empty):
        return f"empty {leaf.kind}"
    if isinstance(leaf, bool) or not isinstance(leaf, numbers.Number):
        return type(leaf).__name__
    if isinstance(leaf, numbers.Integral):  # numpy's scalars count as Python's
        return "int"
    return "float" if isinstance(leaf, numbers.Real) else "complex"


def _dtype(leaf: Leaf) -> str:
    return str(leaf.dtype) if isinstance(leaf, torch.Tensor) else ""


def _shape(leaf: Leaf) -> list[int]:
    return list(leaf.shape) if isinstance(leaf, torch.Tensor) else []


def _layout(leaf: Leaf) -> str:
    return str(leaf.layout) if isinstance(leaf, torch.Tensor) else ""
