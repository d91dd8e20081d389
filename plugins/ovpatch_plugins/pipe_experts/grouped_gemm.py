"""Products of rows that lie by expert with each expert's weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 16  # bytes, what the grouped kernel asks of a row


class Groups:
    """How many rows each expert has.

    Args:
        sizes: Rows of each.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._ends: Tensor | None = None

    def ends(self, device: torch.device) -> Tensor:
        """Return where each expert's rows end, ``[e]`` of int32; copied to the device once."""
        if self._ends is None:
            ends = torch.tensor(list(itertools.accumulate(self.sizes)), dtype=torch.int32)
            self._ends = ends.pin_memory().to(device, non_blocking=True)
        return self._ends


def grouped(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Return each expert's rows times its weight, transposed: ``[rows, k]``, ``[e, n, k]`` -> ``[rows, n]``.

    Args:
        x: Rows, those of an expert one behind the other.
        weight: Of each expert.
        groups: Whose rows.
    """
    return _grouped(x, weight.transpose(-2, -1), groups)


def grouped_back(grad: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Return the gradient of what :func:`grouped` was given: ``[rows, n]``, ``[e, n, k]`` -> ``[rows, k]``."""
    return _grouped(grad, weight, groups)


def add_weight_grads(total: Tensor | None, grad: Tensor, x: Tensor, groups: Groups, fresh: Sequence[bool]) -> Tensor:
    """Add the weights' gradients to what is there: ``[rows, n]``, ``[rows, k]`` -> ``[e, n, k]``.

    Args:
        total: What is there, ``[e, n, k]``, of the rows' dtype or of float32; None for nothing.
        grad: Gradient of what :func:`grouped` returned.
        x: What it was given.
        groups: Whose rows.
        fresh: Of each expert, whether nothing is there yet; then its memory is written, not read.

    Returns:
        The sums, in the memory of ``total`` if there is any.
    """
    if total is None:
        if min(groups.sizes) and _has_kernel(grad, x, groups):
            return torch.nn.functional.grouped_mm(grad.t(), x, offs=groups.ends(x.device))
        total = x.new_empty((len(groups.sizes), grad.shape[1], x.shape[1]))
    split = zip(grad.split(groups.sizes), x.split(groups.sizes), total, fresh, strict=True)
    for of_output, rows, into, is_fresh in split:
        if not len(rows):
            if is_fresh:
                into.zero_()
        elif into.dtype != rows.dtype:
            (into.copy_ if is_fresh else into.add_)(_wide_product(of_output.t(), rows, into.dtype))
        elif is_fresh:
            torch.mm(of_output.t(), rows, out=into)
        else:
            into.addmm_(of_output.t(), rows)
    return total


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices of half precision and round no result to it."""
    # The CPU has no such kernel, and addmm's with out_dtype add to float32 in place in newer versions of torch alone.
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def _grouped(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Return each expert's rows times its matrix: ``[rows, k]``, ``[e, k, n]`` -> ``[rows, n]``."""
    if _has_kernel(x, weight, groups):
        return torch.nn.functional.grouped_mm(x, weight, offs=groups.ends(x.device))
    found = x.new_empty((len(x), weight.shape[2]))
    for rows, matrix, out in zip(x.split(groups.sizes), weight, found.split(groups.sizes), strict=True):
        if len(rows):
            torch.mm(rows, matrix, out=out)
    return found


def _has_kernel(x: Tensor, other: Tensor, groups: Groups) -> bool:
    """Tell whether torch's grouped kernel takes two factors; a single expert's product needs none."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or len(groups.sizes) == 1 or not len(x):
        return False
    readable = _is_readable(x) and _is_readable(other)
    return readable and hasattr(torch.nn.functional, "grouped_mm")


def _is_readable(factor: Tensor) -> bool:
    """Tell whether rows, or columns, begin where the kernel can begin to read; an activation may return any view."""
    strides = sorted(factor.stride())
    return strides[0] == 1 and all(
        place % _ALIGNED == 0 for place in (factor.data_ptr(), *(n * factor.element_size() for n in strides[1:]))
    )
