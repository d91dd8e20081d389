"""What is kept of one value of a run: enough to tell whether it is equal, and by how much it differs."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.insight.verify.digests import digest
from ovpatch.insight.verify.sketches import not_finite, sketch
from ovpatch.overlap import placeholders

#: Tensors with at most so many elements are kept as they are.
WHOLE: Final = 1 << 14

#: Form of a value that cannot be read, such as a tensor on the meta device; its digest is its class.
UNREAD: Final = "unread"

_SCALARS: Final = (bool, int, float, complex)


class Kept(NamedTuple):
    """One value, as it is stored.

    Attributes:
        form: What it is, for example ``float32 [3, 4]``, ``float``, ``text`` or ``none``.
        digest: Stands for all its bits.
        values: The value itself, or the sketch of a large tensor; None if the digest says it all.
        folded: Whether it is a sketch.
        not_finite: For a sketch, how many NaNs and infinities there are and where.
    """

    form: str
    digest: str
    values: Any = None
    folded: bool = False
    not_finite: str = ""


def text(value: str) -> Kept:
    """Keep a text, such as the digest of something."""
    return Kept("text", value)


@torch.no_grad()
def keep(value: Any) -> Kept:
    """Keep a value as it is now; of one that cannot be read, only that there is one.

    Args:
        value: A tensor, a number, a text or None. Of a DTensor this rank's part is kept.
    """
    if isinstance(value, Tensor):
        return _tensor(placeholders.peek(value))
    if value is None:
        return Kept("none", "")
    if isinstance(value, str):
        return text(value)
    return Kept(type(value).__name__, repr(value), value) if type(value) in _SCALARS else _unread(value)


def _unread(value: Any) -> Kept:
    return Kept(UNREAD, type(value).__name__)


def _tensor(tensor: Tensor) -> Kept:
    # By name: importing DTensor takes half a second, and a torch without torch.distributed has none.
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        tensor = tensor.to_local()  # type: ignore[attr-defined]  # DTensor's; mypy knows only of a Tensor
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return _unread(tensor)
    try:
        return _of(tensor.to_dense() if tensor.layout is not torch.strided else tensor)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # what torch raises where there are no values:
        # not initialised yet, or of a class that has no plain ones. There is no way to ask for either beforehand.
        return _unread(tensor)


def _of(tensor: Tensor) -> Kept:
    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    bits = digest(tensor)
    if tensor.numel() <= WHOLE:
        return Kept(form, bits, tensor.detach().to("cpu", copy=True).contiguous())
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if real.is_floating_point() and real.element_size() == 1:
        real = real.to(torch.float32)  # float8 has next to no functions
    return Kept(form, bits, sketch(real).cpu(), True, not_finite(real))
