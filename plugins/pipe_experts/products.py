"""Products of rows that lie by expert with each expert's weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 16  # bytes, what the grouped kernel asks of a row


def grouped(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each expert's rows times its weight, transposed: ``[rows, k]``, ``[e, n, k]`` -> ``[rows, n]``.

    Args:
        x: Rows, those of an expert one behind the other.
        weight: Of each expert.
        sizes: Rows of each expert.
    """
    return _grouped(x, weight.transpose(-2, -1), sizes)


def grouped_back(grad: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the gradient of what :func:`grouped` was given: ``[rows, n]``, ``[e, n, k]`` -> ``[rows, k]``."""
    return _grouped(grad, weight, sizes)


def add_weight_grads(total: Tensor, grad: Tensor, x: Tensor, sizes: Sequence[int], fresh: Sequence[bool]) -> None:
    """Add the weights' gradients to what is there: ``[rows, n]``, ``[rows, k]`` -> ``[e, n, k]``.

    Args:
        total: Where, ``[e, n, k]``.
        grad: Gradient of what :func:`grouped` returned.
        x: What it was given.
        sizes: Rows of each expert.
        fresh: Of each expert, whether nothing is there yet; then its memory is written, not read.
    """
    split = zip(grad.split(list(sizes)), x.split(list(sizes)), total, fresh, strict=True)
    for of_output, rows, into, is_fresh in split:
        if not len(rows):
            if is_fresh:
                into.zero_()
        elif is_fresh:
            torch.mm(of_output.t(), rows, out=into)
        else:
            into.addmm_(of_output.t(), rows)


def _grouped(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each expert's rows times its matrix: ``[rows, k]``, ``[e, k, n]`` -> ``[rows, n]``."""
    if _has_kernel(x, weight, sizes):
        return torch.nn.functional.grouped_mm(x, weight, offs=_ends(sizes, x.device))
    found = x.new_empty((len(x), weight.shape[2]))
    for rows, matrix, out in zip(x.split(list(sizes)), weight, found.split(list(sizes)), strict=True):
        if len(rows):
            torch.mm(rows, matrix, out=out)
    return found


def _has_kernel(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> bool:
    """Tell whether torch's grouped kernel takes it; a single expert's product needs none."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or len(sizes) == 1 or not len(x):
        return False
    aligned = all(size * x.element_size() % _ALIGNED == 0 for size in weight.shape[1:])
    return aligned and hasattr(torch.nn.functional, "grouped_mm")


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)
