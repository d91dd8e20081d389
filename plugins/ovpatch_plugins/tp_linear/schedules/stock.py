"""Schedule ``stock``: one after the other, as stock does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ovpatch_plugins.tp_linear.gemm import input_grad, linear
from ovpatch_plugins.tp_linear.tp_group import TPGroup

WeightGrads = Callable[[Tensor, Sequence[Tensor | None]], None]
"""Takes the whole input, ``[M, k]``, and the outputs' gradients, ``[M, n_i]``; computes what weights are to get."""


class ColumnGrads(NamedTuple):
    """What the backward of linears that read one input is asked for.

    Attributes:
        grads: Of the outputs, ``[M, n_i]`` each; None where an output was not used.
        kept: The input: all of it, ``[M, k]``, or this rank's rows, ``[m, k]``, if ``anew``; None if no weight needs a
            gradient.
        weights: ``[n_i, k]`` each.
        weight_grads: Computes the weights' gradients; None if no weight needs one.
        input_dtype: In which the input's gradient is summed over the ranks; None if it needs no gradient.
        extra: A further term of the whole input's gradient, ``[M, k]``.
        anew: The input has to be gathered anew for the weights' gradients.
    """

    grads: Sequence[Tensor | None]
    kept: Tensor | None
    weights: Sequence[Tensor]
    weight_grads: WeightGrads | None
    input_dtype: torch.dtype | None
    extra: Tensor | None = None
    anew: bool = False

    def of_input(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's term of the whole input's gradient, ``[M, k]``."""
        return input_grad(self.grads, self.weights, self.extra).to(dtype)


class Schedule:
    """How four operators are computed; this class itself does one thing after the other.

    All on rows: ``m`` is a rank's number of rows, ``M = world * m``.

    Attributes:
        name: How it is selected.
        ahead: Whether products of a gathered input have to be computed where it is gathered, to hide that.
        chooses: Whether it is another schedule for each shape, so that :meth:`together` has to be asked.
    """

    name = "stock"
    ahead = False
    chooses = False

    def gather_linear(
        self, wires: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needs_whole: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather the input, and feed it to several linears.

        Args:
            wires: The ranks.
            x: This rank's rows, ``[m, k]``.
            weights: ``[n_i, k]`` each.
            biases: ``[n_i]`` each, or None.
            needs_whole: Whether somebody wants the gathered input.

        Returns:
            Outputs ``[M, n_i]``, and the gathered input ``[M, k]``, which may be None if nobody wants it.
        """
        whole = wires.gathered(x)
        return [linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)], whole

    def serves(self, wires: TPGroup, device: torch.device, dtype: torch.dtype, features: Sequence[int]) -> bool:
        """Tell whether this is another schedule than the one that stands in for it, the same on all ranks.

        All ranks call this at the same time.

        Args:
            wires: The ranks.
            device: Where.
            dtype: In which is computed.
            features: Of inputs and outputs.
        """
        return True

    def together(
        self, wires: TPGroup, device: torch.device, rows: int, k: int, features: Sequence[int], dtype: torch.dtype
    ) -> Schedule:
        """Return the schedule by which a gather for several linears is computed: here this very one.

        Args:
            wires: The ranks.
            device: Where.
            rows: Of a rank, m.
            k: Input features.
            features: Output features of each linear, n_i.
            dtype: In which is computed.
        """
        return self

    def gather_linear_backward(self, wires: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """Return the input's gradient, ``[m, k]``; None if it needs none."""
        result: Tensor | None = None
        if asked.input_dtype is not None:
            result, pending = wires.reduce_scatter(asked.of_input(asked.input_dtype))
            pending.wait()
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(wires.gathered(asked.kept) if asked.anew else asked.kept, asked.grads)
        return result

    def linear_scatter(self, wires: TPGroup, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's rows of a product whose terms are on all ranks: ``[M, k]``, ``[n, k]`` -> ``[m, n]``."""
        result, pending = wires.reduce_scatter(linear(x, weight))
        pending.wait()
        return result

    def linear_scatter_backward(
        self, wires: TPGroup, grad: Tensor, weight: Tensor, weight_grads: WeightGrads | None, needs_input: bool
    ) -> Tensor | None:
        """Return the input's gradient: of ``[m, n]``, ``[n, k]`` -> ``[M, k]``.

        Args:
            wires: The ranks.
            grad: Of this rank's rows of the output, ``[m, n]``.
            weight: ``[n, k]``.
            weight_grads: Computes what needs the gathered gradient, ``[M, n]``, which is its first argument.
            needs_input: Whether the input needs a gradient.
        """
        whole = wires.gathered(grad)
        result = whole @ weight if needs_input else None
        if weight_grads is not None:
            weight_grads(whole, ())
        return result

    def linear_reduce(self, wires: TPGroup, x: Tensor, weight: Tensor) -> Tensor:
        """Return a product whose terms are on all ranks, on all ranks: ``[M, k]``, ``[n, k]`` -> ``[M, n]``."""
        result = linear(x, weight)
        wires.all_reduce(result).wait()
        return result

    def replicated_linear_backward(self, wires: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """Return the gradient of an input that all ranks have, ``[M, k]``; None if it needs none."""
        result: Tensor | None = None
        if asked.input_dtype is not None:
            result = asked.of_input(asked.input_dtype)
            wires.all_reduce(result).wait()
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(asked.kept, asked.grads)
        return result


class Stock(Schedule):
    """One after the other."""
