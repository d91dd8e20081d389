"""Matrix products that linears and their gradients are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ovpatch.overlap.tensors.autocast import autocast_dtype

# What autocast makes of a linear's tensors.


def cast(kind: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, weight and bias as autocast would have them for a linear."""
    dtype = autocast_dtype(kind, rows.dtype)
    if dtype is None:
        return rows, weight, bias
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.t() + bias``, in ``out`` if given.

    Shapes ``[m, k]``, ``[n, k]``, ``[n]`` -> ``[m, n]``.
    """
    if out is None:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def input_grad(grads: Sequence[Tensor | None], weights: Sequence[Tensor], extra: Tensor | None = None) -> Tensor:
    """Return the gradient of the input that several linears share, summed without a pass of its own.

    Shapes ``[m, n_i]``, ``[n_i, k]``, and a further term ``[m, k]`` -> ``[m, k]``.
    """
    used = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    if not used:
        assert extra is not None
        return extra.clone()  # it may be written into
    dtype = used[0][1].dtype
    total = extra.clone() if extra is not None and extra.dtype == dtype else None
    for grad, weight in used:
        total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None
    return total if extra is None or extra.dtype == dtype else total.to(extra.dtype) + extra


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight: ``[m, n]``, ``[m, k]`` -> ``[n, k]``."""
    return grad.t() @ x
