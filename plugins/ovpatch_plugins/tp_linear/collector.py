"""Gradients of an operator's weights and biases."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ovpatch_plugins.tp_linear.dtensors import like
from ovpatch_plugins.tp_linear.products import weight_grad
from ovpatch_plugins.tp_linear.weights import accumulates


class Collector:
    """Gathers the gradients of an operator's weights and biases, each as what the parameter is.

    Args:
        fuse: Add weights' gradients to what is there already, where nobody would notice.
        weights: The weights.
        biases: The biases.
        wanted: Which of the weights, and then of the biases, need a gradient.

    Attributes:
        weights: Gradients of the weights.
        biases: Gradients of the biases.
    """

    __slots__ = ("_biases", "_fuse", "_wanted", "_weights", "biases", "weights")

    def __init__(
        self, fuse: bool, weights: Sequence[Tensor], biases: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self._fuse, self._weights, self._biases, self._wanted = fuse, weights, biases, wanted
        self.weights: list[Tensor | None] = [None] * len(weights)
        self.biases: list[Tensor | None] = [None] * len(weights)

    @property
    def needs_any(self) -> bool:
        """Whether any weight or bias needs a gradient."""
        return any(self._wanted)

    def take(self, x: Tensor | None, grads: Sequence[Tensor | None]) -> None:
        """Compute the weights' gradients from the whole input, which frozen ones do not need, and the outputs'."""
        for i, grad in enumerate(grads):
            if x is not None and grad is not None and self._wanted[i]:
                self.weights[i] = self._weight(self._weights[i], grad, x)

    def take_biases(self, grads: Sequence[Tensor | None]) -> None:
        """Compute the biases' gradients from the outputs' gradients."""
        for i, grad in enumerate(grads):
            bias = self._biases[i]
            if bias is not None and grad is not None and self._wanted[len(self.weights) + i]:
                self.biases[i] = like(grad.sum(0).to(bias.dtype), bias)

    def _weight(self, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
        target = accumulates(weight) if self._fuse else None
        if target is not None:
            if target.dtype == grad.dtype:
                target.addmm_(grad.t(), x)
            else:
                target.add_(weight_grad(grad, x))
            return None
        found = weight_grad(grad, x)
        return like(found if found.dtype is weight.dtype else found.to(weight.dtype), weight)
