"""Stock with its matrix products in pieces: the yardstick for features that compute products otherwise.

A product's elements are sums, which kernels add up in an order of their own; it depends on shapes, and a feature that
cuts products, or adds one to another, changes them. Here each sum is cut into pieces, for every product of the script,
forward and backward: the kernels below DTensor, autograd and torch.compile are replaced for the rest of the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library: torch.library.Library | None = None  # its kernels are gone when it is


def reorder(pieces: int) -> None:
    """Let all matrix products of this process add up their sums in so many pieces."""
    global _library
    _library = torch.library.Library("aten", "IMPL")

    def product(a: Tensor, b: Tensor) -> Tensor:
        cuts = [a.shape[1] * (4 * i - 1) // (4 * pieces) for i in range(1, pieces)]  # kernels, too, cut in halves
        parts = zip(a.tensor_split(cuts, dim=1), b.tensor_split(cuts, dim=0), strict=True)
        first, *others = [_product(*part) for part in parts]
        for other in others:
            first += other
        return first

    def with_bias(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        result = product(a, b)
        result = result if alpha == 1 else result * alpha
        return result if beta == 0 else result.add_(bias, alpha=beta)

    with warnings.catch_warnings():  # that they were registered before, which is the point
        warnings.simplefilter("ignore")
        for key in ("CPU", "CUDA"):
            for name, kernel in (("mm", product), ("addmm", with_bias)):
                _library.impl(name, kernel, key)
                _library.impl(f"{name}.out", _into(kernel), key)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices by an operator that is not replaced."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = kernel(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return run
