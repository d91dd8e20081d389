"""Grouped GEMM: products of rows by expert with each expert's weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; the grouped kernel asks it of every row


class GroupSizes:
    """The number of rows of each expert."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._offsets: Tensor | None = None

    def get_offsets(self, device: torch.device) -> Tensor:
        """Return the end of each expert's rows, ``[e]`` of int32; copied to the device once."""
        if self._offsets is None:
            offsets = torch.tensor(list(itertools.accumulate(self.sizes)), dtype=torch.int32)
            self._offsets = offsets.pin_memory().to(device, non_blocking=True)
        return self._offsets


def grouped_linear(x: Tensor, weight: Tensor, groups: GroupSizes) -> Tensor:
    """Return each expert's rows times its transposed weight: ``[rows, k]``, ``[e, n, k]`` -> ``[rows, n]``."""
    return _grouped_mm(x, weight.transpose(-2, -1), groups)


def grouped_dgrad(grad: Tensor, weight: Tensor, groups: GroupSizes) -> Tensor:
    """Return the gradient of the input of :func:`grouped_linear`: ``[rows, n]``, ``[e, n, k]`` -> ``[rows, k]``."""
    return _grouped_mm(grad, weight, groups)


def accumulate_wgrad(
    total: Tensor | None, grad: Tensor, x: Tensor, groups: GroupSizes, fresh: Sequence[bool]
) -> Tensor:
    """Add the weights' gradients to an accumulator: ``[rows, n]``, ``[rows, k]`` -> ``[e, n, k]``.

    ``grad`` is the gradient of the output of :func:`grouped_linear`, ``x`` its input. The accumulator is in the rows'
    dtype or float32; None allocates it. An expert that is ``fresh`` has an undefined accumulator, which is written, not
    read.
    """
    if total is None:
        if min(groups.sizes) and _has_kernel(grad, x, groups):
            return torch.nn.functional.grouped_mm(grad.t(), x, offs=groups.get_offsets(x.device))
        total = x.new_empty((len(groups.sizes), grad.shape[1], x.shape[1]))
    by_expert = zip(grad.split(groups.sizes), x.split(groups.sizes), total, fresh, strict=True)
    for expert_grad, rows, out, is_fresh in by_expert:
        if not len(rows):
            if is_fresh:
                out.zero_()
        elif out.dtype != rows.dtype:
            (out.copy_ if is_fresh else out.add_)(_multiply_wide(expert_grad.t(), rows, out.dtype))
        elif is_fresh:
            torch.mm(expert_grad.t(), rows, out=out)
        else:
            out.addmm_(expert_grad.t(), rows)
    return total


def _multiply_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply half-precision matrices with the result in ``dtype``."""
    # The CPU has no such kernel, and addmm with out_dtype adds to float32 in place in newer versions of torch only.
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def _grouped_mm(x: Tensor, weight: Tensor, groups: GroupSizes) -> Tensor:
    """Return each expert's rows times its matrix: ``[rows, k]``, ``[e, k, n]`` -> ``[rows, n]``."""
    if _has_kernel(x, weight, groups):
        return torch.nn.functional.grouped_mm(x, weight, offs=groups.get_offsets(x.device))
    out = x.new_empty((len(x), weight.shape[2]))
    for rows, matrix, into in zip(x.split(groups.sizes), weight, out.split(groups.sizes), strict=True):
        if len(rows):
            torch.mm(rows, matrix, out=into)
    return out


def _has_kernel(x: Tensor, other: Tensor, groups: GroupSizes) -> bool:
    """Tell whether torch's grouped kernel takes two factors; a single expert's product needs none."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or len(groups.sizes) == 1 or not len(x):
        return False
    return _is_aligned(x) and _is_aligned(other) and hasattr(torch.nn.functional, "grouped_mm")


def _is_aligned(factor: Tensor) -> bool:
    """Tell whether all rows, or columns, start at an aligned address; an activation may return any view."""
    strides = sorted(factor.stride())
    return strides[0] == 1 and all(
        place % _ALIGNMENT == 0 for place in (factor.data_ptr(), *(n * factor.element_size() for n in strides[1:]))
    )
