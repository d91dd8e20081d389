"""Schedule ``stock``, which runs GEMMs and collectives sequentially, and the GEMMs of all schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup

WeightGrads = Callable[[Tensor, Sequence[Tensor | None]], object]
"""Computes weights' gradients from the gathered input, ``[M, k]``, and the outputs' gradients, ``[M, n_i]``."""

GradGather = tuple[Tensor, WorkGroup]
"""The memory of an output's gathered gradient, ``[M, n]``, and the collective that writes it."""


class ColumnGrads(NamedTuple):
    """The arguments of a backward of linears that read one input.

    Attributes:
        output_grads: The gradients of the outputs, ``[M, n_i]`` each; None for an unused output.
        saved_input: The input for the weights' gradients, ``[M, k]``, or ``[m, k]`` with ``regathers``. None if no
            weight needs a gradient.
        weights: The weights, ``[n_i, k]`` each.
        compute_weight_grads: Computes the weights' gradients; None if no weight needs one.
        input_grad_dtype: The dtype in which ranks sum the input's gradient; None if the input needs no gradient.
        extra_term: Another term of the gathered input's gradient, ``[M, k]``.
        regathers: Whether the input must be gathered again for the weights' gradients.
        grad_gather: The gather of the only output's gradient, if it has started.
    """

    output_grads: Sequence[Tensor | None]
    saved_input: Tensor | None
    weights: Sequence[Tensor]
    compute_weight_grads: WeightGrads | None
    input_grad_dtype: torch.dtype | None
    extra_term: Tensor | None = None
    regathers: bool = False
    grad_gather: GradGather | None = None

    def compute_input_grad(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's term of the gathered input's gradient, ``[M, k]``."""
        return sum_input_grads(self.output_grads, self.weights, self.extra_term).to(dtype)


class SentRows(NamedTuple):
    """The rows of one rank that are sent to, or received from, a peer.

    Attributes:
        nbytes: The largest number of their bytes.
        is_sum: Whether they are terms of a sum, of which each rank receives one from every peer.
    """

    nbytes: int
    is_sum: bool


class Schedule:
    """The order of an operator's GEMMs and collectives; this class runs them sequentially.

    All arguments are rows: ``m`` is a rank's number of rows, ``M = world * m``.

    Attributes:
        name: The value of option ``schedule`` that selects this schedule; ``chunk`` appends the number of chunks.
        computes_ahead: Whether the GEMMs of a gathered input are computed together with the gather, to hide it.
        starts_grad_gather_early: Whether :meth:`linear_scatter_backward` begins with a gather of the full gradient.
            Backward then starts the gather before it reads the tensors that forward saved, and a checkpoint recomputes
            these tensors under the gather.
    """

    name = "stock"
    computes_ahead = False
    starts_grad_gather_early = False

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather the input, and feed it to several linears.

        Args:
            ranks: The ranks.
            x: This rank's rows, ``[m, k]``.
            weights: The weights, ``[n_i, k]`` each.
            biases: The biases, ``[n_i]`` or None.
            needs_gathered: Whether the caller needs the gathered input.

        Returns:
            The outputs, ``[M, n_i]`` each, and the gathered input, ``[M, k]``. The latter may be None unless
            ``needs_gathered`` is True.
        """
        gathered, outs = ranks.gather_rows(x), []
        for weight, bias in zip(weights, biases, strict=True):
            outs.append(linear(gathered, weight, bias))
        return outs, gathered

    def can_run(
        self,
        ranks: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        features: Sequence[int],
        sent: SentRows | None,
    ) -> bool:
        """Return whether this schedule itself can run, and not only its substitute.

        This is a collective. All ranks get the same result.

        Args:
            ranks: The ranks.
            device: The device of the operands.
            dtype: The dtype of the GEMMs.
            features: The numbers of features of inputs and outputs.
            sent: The rows that a rank sends at a time; None if any number of rows can be sent.
        """
        return True

    def prepare(self, ranks: TPGroup, device: torch.device) -> None:
        """Allocate the memory that calls need on all ranks. This is a collective, and no backward calls it."""

    def has_memory(self, ranks: TPGroup, device: torch.device) -> bool:
        """Return whether this schedule keeps memory for the ranks."""
        return False

    def release(self, ranks: TPGroup, device: torch.device) -> None:
        """Free the memory of the ranks, none of whose calls are in flight. All ranks call this together."""

    def recover(self, ranks: TPGroup, device: torch.device) -> None:
        """Accept calls again after one that failed at the same place on all ranks."""

    def gather_linear_backward(self, ranks: TPGroup, request: ColumnGrads) -> Tensor | None:
        """Return the input's gradient, ``[m, k]``; None if it needs none."""
        result: Tensor | None = None
        if request.input_grad_dtype is not None:
            result = ranks.scatter_rows(request.compute_input_grad(request.input_grad_dtype))
        if request.saved_input is not None and request.compute_weight_grads is not None:
            request.compute_weight_grads(
                ranks.gather_rows(request.saved_input)
                if request.regathers
                else request.saved_input,
                request.output_grads,
            )
        return result

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return this rank's rows of a sum of GEMMs over the ranks: ``[M, k]``, ``[n, k]`` -> ``[m, n]``.

        ``bias``, ``[n]``, is this rank's term of the bias. The terms of all ranks are summed as well.
        """
        return ranks.scatter_rows(linear(x, weight, bias))

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        compute_weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        """Return the input's gradient: ``[m, n]``, ``[n, k]`` -> ``[M, k]``; None if it is not needed.

        ``compute_weight_grads`` is called with the gathered gradient, ``[M, n]``. It is None if no parameter needs a
        gradient.
        """
        return self.finish_scatter_backward(
            ranks.all_gather(grad), weight, compute_weight_grads, needs_input
        )

    @staticmethod
    def finish_scatter_backward(
        grad_gather: GradGather,
        weight: Tensor,
        compute_weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        """Finish :meth:`linear_scatter_backward` with a gradient whose gather has started."""
        gathered, pending = grad_gather
        pending.wait()
        result = gathered @ weight if needs_input else None
        if compute_weight_grads is not None:
            # The gathered tensor is the gradient of the only output, so there is no list of others.
            compute_weight_grads(gathered, ())
        return result

    def linear_reduce(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the sum of GEMMs over the ranks, on all ranks: ``[M, k]``, ``[n, k]`` -> ``[M, n]``.

        ``bias`` is as in :meth:`linear_scatter`.
        """
        result = linear(x, weight, bias)
        ranks.all_reduce(result).wait()
        return result

    def replicated_linear_backward(self, ranks: TPGroup, request: ColumnGrads) -> Tensor | None:
        """Return the gradient of an input that all ranks have, ``[M, k]``; None if it needs none."""
        result: Tensor | None = None
        if request.input_grad_dtype is not None:
            result = request.compute_input_grad(request.input_grad_dtype)
            ranks.all_reduce(result).wait()
        if request.saved_input is not None and request.compute_weight_grads is not None:
            request.compute_weight_grads(request.saved_input, request.output_grads)
        return result


# - The GEMMs


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.t() + bias``, in ``out`` if given.

    Shapes ``[m, k]``, ``[n, k]``, ``[n]`` -> ``[m, n]``.
    """
    if out is None:
        # nn.Linear calls this function, so stock PyTorch has the same bits.
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def sum_input_grads(
    output_grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    extra_term: Tensor | None = None,
) -> Tensor:
    """Return the gradient of an input that several linears share.

    The GEMMs after the first one add to its result in place.

    Shapes ``[m, n_i]``, ``[n_i, k]``, and another term ``[m, k]`` -> ``[m, k]``.
    """
    total: Tensor | None = None
    for grad, weight in zip(output_grads, weights, strict=True):
        if grad is not None:
            # The GEMM can add to the other term only in the same dtype.
            if total is None and extra_term is not None and extra_term.dtype == weight.dtype:
                # The GEMM writes into the total, and the term belongs to the caller.
                total, extra_term = extra_term.clone(), None
            # torch.mm() skips the dispatch of torch.matmul() on numbers of dimensions.
            total = torch.mm(grad, weight) if total is None else total.addmm_(grad, weight)
    if total is None:
        assert extra_term is not None
        # The caller's term must not share memory with the result, which the schedules sum over the ranks in place.
        return extra_term.clone()
    return total if extra_term is None else total.to(extra_term.dtype) + extra_term


def compute_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight: ``[m, n]``, ``[m, k]`` -> ``[n, k]``."""
    return grad.t() @ x
