"""Schedule ``bulk``: in backward, a collective of one product hides under the other product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ovpatch.overlap.works import Pending
from ovpatch_plugins.tp_linear.products import input_grad
from ovpatch_plugins.tp_linear.schedules.stock import Schedule, WeightGrads
from ovpatch_plugins.tp_linear.wires import Wires


class Bulk(Schedule):
    """Products stay whole.

    [Note: weight gradients last] The input's gradient is what others wait for, so its product comes first, under which
    the input is gathered anew for the weights' gradients if it has not been kept; and their product is launched behind
    the input gradient's reduce-scatter, which it hides. Both products and both collectives are of one autograd node, so
    no order of nodes can pull them apart; hooks of gradients and of parameters fire as ever.
    """

    name = "bulk"

    def gather_linear_backward(
        self,
        wires: Wires,
        grads: Sequence[Tensor | None],
        kept: Tensor | None,
        weights: Sequence[Tensor],
        weight_grads: WeightGrads | None,
        input_dtype: torch.dtype | None,
        extra: Tensor | None = None,
        *,
        anew: bool = False,
    ) -> Tensor | None:
        """See :meth:`Schedule.gather_linear_backward`."""
        whole, gathering = kept, Pending(())
        if anew and kept is not None and weight_grads is not None:
            whole, gathering = wires.all_gather(kept)
        result, scattering = None, Pending(())
        if input_dtype is not None:
            result, scattering = wires.reduce_scatter(input_grad(grads, weights, extra).to(input_dtype))
        gathering.wait()
        if whole is not None and weight_grads is not None:
            weight_grads(whole, grads)
        scattering.wait()
        return result

    def replicated_linear_backward(
        self,
        wires: Wires,
        grads: Sequence[Tensor | None],
        x: Tensor | None,
        weights: Sequence[Tensor],
        weight_grads: WeightGrads | None,
        input_dtype: torch.dtype | None,
    ) -> Tensor | None:
        """See :meth:`Schedule.replicated_linear_backward`."""
        result, reducing = None, Pending(())
        if input_dtype is not None:
            result = input_grad(grads, weights).to(input_dtype)
            reducing = wires.all_reduce(result)
        if x is not None and weight_grads is not None:
            weight_grads(x, grads)
        reducing.wait()
        return result
