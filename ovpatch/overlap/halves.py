"""Numbers of half precision that are roundings of fp32 ones, kept beside them.

[Note: by value] Scripts write to parameters and gradients: they clip them, zero them through ``.data``, reduce them.
Not all of that can be noticed when it happens; versions of tensors do not change with ``.data`` nor with collectives.
So an fp32 number counts as long as its rounding is what stands there; otherwise what stands there does.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Dtypes of half precision.
HALVES: Final = (torch.bfloat16, torch.float16)


def followed(wide: Tensor, rounded: Tensor) -> Tensor:
    """Make fp32 numbers, in place, what stands where they are not what is rounded any more; see [Note: by value].

    Args:
        wide: The fp32 numbers.
        rounded: What should be their rounding, of the same shape.
    """
    return torch.where(wide.to(rounded.dtype) == rounded, wide, rounded.to(torch.float32), out=wide)
