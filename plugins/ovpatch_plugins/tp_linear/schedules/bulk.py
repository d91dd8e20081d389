"""Schedule ``bulk``: in backward, a collective of one product hides under the other product."""

from __future__ import annotations

import torch
from torch import Tensor

from ovpatch.overlap.comm.work import WorkGroup
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads, Schedule
from ovpatch_plugins.tp_linear.tp_group import TPGroup


class Bulk(Schedule):
    """Products stay whole.

    [Note: weight gradients last] The input's gradient is what others wait for, so its product comes first, under which
    the input is gathered anew for the weights' gradients if it has not been kept; and their product is launched behind
    the input gradient's reduce-scatter, which it hides. Both products and both collectives are of one autograd node, so
    no order of nodes can pull them apart; hooks of gradients and of parameters fire as ever.
    """

    name = "bulk"

    def gather_linear_backward(self, wires: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """See :meth:`Schedule.gather_linear_backward`."""
        whole, gathering = asked.kept, WorkGroup(())
        if asked.anew and asked.kept is not None and asked.weight_grads is not None:
            whole, gathering = wires.all_gather(asked.kept)
        result, scattering = None, WorkGroup(())
        if asked.input_dtype is not None:
            result, scattering = self.scattered(wires, asked, asked.input_dtype)
        gathering.wait()
        if whole is not None and asked.weight_grads is not None:
            asked.weight_grads(whole, asked.grads)
        scattering.wait()
        return result

    def scattered(self, wires: TPGroup, asked: ColumnGrads, dtype: torch.dtype) -> tuple[Tensor, WorkGroup]:
        """Start to add up the input's gradient over the ranks; return where this rank's rows will be, ``[m, k]``."""
        return wires.reduce_scatter(asked.of_input(dtype))

    def replicated_linear_backward(self, wires: TPGroup, asked: ColumnGrads) -> Tensor | None:
        """See :meth:`Schedule.replicated_linear_backward`."""
        result, reducing = None, WorkGroup(())
        if asked.input_dtype is not None:
            result = asked.of_input(asked.input_dtype)
            reducing = wires.all_reduce(result)
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(asked.kept, asked.grads)
        reducing.wait()
        return result
