"""Numbers of half precision that are roundings of fp32 ones, kept beside them.

[Note: by value] Scripts write to parameters and gradients: they clip them, zero them through ``.data``, reduce them.
Not all of that can be noticed when it happens; versions of tensors do not change with ``.data`` nor with collectives.
So an fp32 number counts as long as its rounding is what stands there; otherwise what stands there does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ovpatch.overlap.symm_mem.support import triton_unavailable_reason

#: Dtypes of half precision.
HALVES: Final = (torch.bfloat16, torch.float16)


def followed(wide: Tensor, rounded: Tensor) -> Tensor:
    """Make fp32 numbers, in place, what stands where they are not what is rounded any more; see [Note: by value].

    Args:
        wide: The fp32 numbers.
        rounded: What should be their rounding, of the same shape.
    """
    return torch.where(wide.to(rounded.dtype) == rounded, wide, rounded.to(torch.float32), out=wide)


class Following:
    """:func:`followed` of many tensors, on GPUs by one kernel, which reads each number once.

    The addresses are kept on the device from one call to the next, as long as they are the same.
    """

    def __init__(self) -> None:
        self._tables: dict[torch.dtype, tuple[list[tuple[int, int, int]], Tensor]] = {}

    def __call__(self, wides: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
        """Make fp32 numbers, in place, what stands where they are not what is rounded any more.

        Args:
            wides: The fp32 numbers, contiguous.
            rounded: What should be their roundings, contiguous, of the same shapes and on the same device.
        """
        if not wides or not wides[0].is_cuda or triton_unavailable_reason():
            for wide, half in zip(wides, rounded, strict=True):
                followed(wide, half)
            return
        for dtype in dict.fromkeys(half.dtype for half in rounded):
            self._follow([(wide, half) for wide, half in zip(wides, rounded, strict=True) if half.dtype is dtype])

    def _follow(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        from ovpatch.overlap.following import follow

        dtype = pairs[0][1].dtype
        places = [(wide.data_ptr(), half.data_ptr(), wide.numel()) for wide, half in pairs]
        known, table = self._tables.get(dtype, ([], None))
        if table is None or known != places:
            table = torch.tensor(places, dtype=torch.int64, device=pairs[0][0].device)
            self._tables[dtype] = places, table
        follow(table, dtype, max(numel for *_, numel in places))
