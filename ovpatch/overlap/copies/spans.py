"""What is copied or added up, told by where it lies.

[Note: by address] A step moves hundreds of pieces. A tensor for each, to be asked where it lies, takes the host longer
than the copy takes the device; so pieces are numbers, and a tensor is made where one is needed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Copies, in any order among themselves.

    Attributes:
        to: Addresses to copy to.
        of: Addresses to copy from.
        sizes: Bytes.
    """

    to: list[int]
    of: list[int]
    sizes: list[int]


class Span(NamedTuple):
    """Elements that lie one behind the other.

    Attributes:
        memory: A contiguous tensor that they are in.
        begin: The first of them, in ``memory``.
        numel: How many.
        address: Of the first.
    """

    memory: Tensor
    begin: int
    numel: int
    address: int

    def tensor(self) -> Tensor:
        """Return them as a tensor, ``[numel]``."""
        return self.memory.view(-1).narrow(0, self.begin, self.numel)


class Addend(NamedTuple):
    """What a rank adds itself to what the others have sent to it.

    Attributes:
        own: Its own term.
        out: Where the sum goes, as long.
        at: Where the others' terms begin in their slots.
    """

    own: Span
    out: Span
    at: int
