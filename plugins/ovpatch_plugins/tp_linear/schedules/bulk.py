"""Schedule ``bulk``: in backward, a collective of one product hides under the other product."""

from __future__ import annotations

import torch
from torch import Tensor

from ovpatch.overlap.comm.work import WorkGroup
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads, Schedule
from ovpatch_plugins.tp_linear.tp_group import TPGroup


class Bulk(Schedule):
    """Products stay whole; the weights' gradients come last.

    Other ranks wait for the input's gradient, so its product comes first. The input is gathered anew under it, if it
    has not been kept. The weights' gradients are launched behind the input gradient's reduce-scatter, and hide it.
    Both products and both collectives belong to one autograd node, so the engine cannot separate them; hooks of
    gradients and of parameters fire as under stock.
    """

    name = "bulk"

    def gather_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """See :meth:`Schedule.gather_linear_backward`."""
        whole, gathering = asked.kept, WorkGroup(())
        if asked.anew and asked.kept is not None and asked.weight_grads is not None:
            whole, gathering = ranks.all_gather(asked.kept)
        result, scattering = None, WorkGroup(())
        if asked.input_dtype is not None:
            result, scattering = self.scattered(ranks, asked, asked.input_dtype)
        gathering.wait()
        if whole is not None and asked.weight_grads is not None:
            asked.weight_grads(whole, asked.grads)
        scattering.wait()
        return result

    def scattered(self, ranks: TPGroup, asked: ColumnGrads, dtype: torch.dtype) -> tuple[Tensor, WorkGroup]:
        """Start to add up the input's gradient over the ranks; return where this rank's rows will be, ``[m, k]``."""
        return ranks.reduce_scatter(asked.compute_input_grad(dtype))

    def replicated_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """See :meth:`Schedule.replicated_linear_backward`."""
        result, reducing = None, WorkGroup(())
        if asked.input_dtype is not None:
            result = asked.compute_input_grad(asked.input_dtype)
            reducing = ranks.all_reduce(result)
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(asked.kept, asked.grads)
        reducing.wait()
        return result
