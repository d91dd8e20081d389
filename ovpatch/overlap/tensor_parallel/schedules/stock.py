"""Schedule ``stock``: one after the other, as stock does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup

WeightGrads = Callable[[Tensor, Sequence[Tensor | None]], object]
"""Computes weights' gradients from the whole input, ``[M, k]``, and the outputs' gradients, ``[M, n_i]``."""

GradGather = tuple[Tensor, WorkGroup]
"""Where the gathered gradient of an output will be, ``[M, n]``, and its collective."""


class ColumnGrads(NamedTuple):
    """The arguments of a backward of linears that read one input."""

    grads: Sequence[
        Tensor | None
    ]  # gradients of the outputs, ``[M, n_i]`` each; None for an output that was not used
    kept: (
        Tensor | None
    )  # the input for the weights, if any needs it: ``[M, k]``, or ``[m, k]`` if ``anew``
    weights: Sequence[Tensor]  # the weights, ``[n_i, k]`` each
    weight_grads: WeightGrads | None  # computes the weights' gradients; None if no weight needs one
    input_dtype: (
        torch.dtype | None
    )  # in which the input's gradient is summed over the ranks, if it needs one
    extra: Tensor | None = None  # a further term of the whole input's gradient, ``[M, k]``
    anew: bool = False  # whether the input has to be gathered again for the weights' gradients
    gather: GradGather | None = (
        None  # the gather of the one output's gradient, if it has been started
    )

    def compute_input_grad(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's term of the whole input's gradient, ``[M, k]``."""
        return sum_input_grads(self.grads, self.weights, self.extra).to(dtype)


class Schedule:
    """The order of an operator's products and collectives; this class runs one after the other.

    All arguments are rows: ``m`` is a rank's number of rows, ``M = world * m``.
    """

    name = "stock"  # the option's value that selects it
    ahead = (
        False  # whether the products of a gathered input are computed with the gather, to hide it
    )
    # Whether linear_scatter_backward() gathers the whole gradient first. That is started before what forward kept is
    # asked for: a checkpoint computes it again then, under the gather.
    gathers_grad_at_once = False

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_whole: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather the input, and feed it to several linears.

        ``x`` is ``[m, k]``, weights are ``[n_i, k]``, biases ``[n_i]`` or None. Returns outputs ``[M, n_i]``, and the
        gathered input ``[M, k]``, which may be None unless ``needs_whole``.
        """
        whole, outs = ranks.gather_rows(x), []
        for weight, bias in zip(weights, biases, strict=True):
            outs.append(linear(whole, weight, bias))
        return outs, whole

    def can_run(
        self, ranks: TPGroup, device: torch.device, dtype: torch.dtype, features: Sequence[int]
    ) -> bool:
        """Return whether this schedule can run, and not only its substitute; a collective with one result on all ranks.

        ``dtype`` is that of the products, ``features`` are the numbers of features of inputs and outputs.
        """
        return True

    def gather_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """Return the input's gradient, ``[m, k]``; None if it needs none."""
        result: Tensor | None = None
        if asked.input_dtype is not None:
            result = ranks.scatter_rows(asked.compute_input_grad(asked.input_dtype))
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(
                ranks.gather_rows(asked.kept) if asked.anew else asked.kept, asked.grads
            )
        return result

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return this rank's rows of a product whose terms are on all ranks: ``[M, k]``, ``[n, k]`` -> ``[m, n]``.

        ``bias``, ``[n]``, is this rank's term of the bias; the ranks' terms are summed as well.
        """
        return ranks.scatter_rows(linear(x, weight, bias))

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        """Return the input's gradient: of ``[m, n]``, ``[n, k]`` -> ``[M, k]``; None if it is not needed.

        ``weight_grads`` is called with the gathered gradient, ``[M, n]``; None if no parameter needs a gradient.
        """
        return self.scatter_backward_of_gather(
            ranks.all_gather(grad), weight, weight_grads, needs_input
        )

    @staticmethod
    def scatter_backward_of_gather(
        gather: GradGather, weight: Tensor, weight_grads: WeightGrads | None, needs_input: bool
    ) -> Tensor | None:
        """Do what :meth:`linear_scatter_backward` does with a gradient whose gather has been started."""
        whole, gathering = gather
        gathering.wait()
        result = whole @ weight if needs_input else None
        if weight_grads is not None:
            weight_grads(whole, ())
        return result

    def linear_reduce(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return a product whose terms are on all ranks, on all ranks: ``[M, k]``, ``[n, k]`` -> ``[M, n]``.

        ``bias`` is as in :meth:`linear_scatter`.
        """
        result = linear(x, weight, bias)
        ranks.all_reduce(result).wait()
        return result

    def replicated_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """Return the gradient of an input that all ranks have, ``[M, k]``; None if it needs none."""
        result: Tensor | None = None
        if asked.input_dtype is not None:
            result = asked.compute_input_grad(asked.input_dtype)
            ranks.all_reduce(result).wait()
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(asked.kept, asked.grads)
        return result


# The products.


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.t() + bias``, in ``out`` if given.

    Shapes ``[m, k]``, ``[n, k]``, ``[n]`` -> ``[m, n]``.
    """
    if out is None:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def sum_input_grads(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor], extra: Tensor | None = None
) -> Tensor:
    """Return the gradient of an input that several linears share; products add to it in place.

    Shapes ``[m, n_i]``, ``[n_i, k]``, and a further term ``[m, k]`` -> ``[m, k]``.
    """
    total: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is not None:
            if total is None and extra is not None and extra.dtype == weight.dtype:
                total, extra = extra.clone(), None  # it may be written into
            total = grad @ weight if total is None else total.addmm_(grad, weight)
    if total is None:
        assert extra is not None
        return extra.clone()
    return total if extra is None else total.to(extra.dtype) + extra


def compute_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight: ``[m, n]``, ``[m, k]`` -> ``[n, k]``."""
    return grad.t() @ x
