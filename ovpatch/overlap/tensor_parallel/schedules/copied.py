"""Schedule ``copy``: the copy engines of GPUs move rows, while the GEMMs of cuBLAS multiply other rows.

Neither copies nor the waits for them occupy multiprocessors. A rank multiplies its own rows while those of its peers
arrive. Of a sum over ranks it computes the terms of its peers first, which are copied while it computes its own.

A rank that does not copy would leave its peers waiting, so the choice depends only on facts that are the same on all
ranks, as in :mod:`.fused`. A captured graph would repeat the numbers that streams wait for, so it computes as ``bulk``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.autograd import is_in_backward
from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.comm.lifetimes import drop_values, group_state
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.kernels import copy_choice
from ovpatch.overlap.kernels.copy_choice import ROW_ENGINE, Chosen
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch.overlap.kernels.copy_window import allocate_window
from ovpatch.overlap.tensor_parallel import operator_counts
from ovpatch.overlap.tensor_parallel.schedules.overlapped import SplitGather
from ovpatch.overlap.tensor_parallel.schedules.stock import ColumnGrads, SentRows, linear
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup

# Bytes of a half of the window: 8192 rows of 8192 features in bf16, as four ranks send them. Larger
# calls compute as ``bulk``.
_SLOT_BYTES: Final = 128 * 1024 * 1024


class Copied(SplitGather):
    """The schedule in which copy engines move rows under GEMMs.

    If they cannot be used for a group or a call, it computes as :class:`.Bulk`.
    """

    name = "copy"

    def can_run(
        self,
        ranks: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        features: Sequence[int],
        sent: SentRows | None,
    ) -> bool:
        if not Engine.adds(dtype):
            return False
        engine = _find_engine(ranks.group, device)
        return engine is not None and (sent is None or engine.fits(sent.nbytes, is_sum=sent.is_sum))

    def prepare(self, ranks: TPGroup, device: torch.device) -> None:
        _find_engine(ranks.group, device)

    def has_memory(self, ranks: TPGroup, device: torch.device) -> bool:
        known = _find_choice(ranks.group, device)
        return known is not None and known.engine is not None

    def release(self, ranks: TPGroup, device: torch.device) -> None:
        # A choice without an engine has the reason, which holds for later calls.
        if self.has_memory(ranks, device):
            group_state(ranks.group).values.pop((ROW_ENGINE, device), None)

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        engine = _find_engine(ranks.group, x.device)
        if engine is None or not x.numel() or not engine.fits(x.nbytes):
            return super().gather_linear(ranks, x, weights, biases, needs_gathered)
        operator_counts.counts.copied += 1
        x = x.contiguous()
        gathered = x.new_empty((ranks.world * len(x), x.shape[1]))
        outs = [x.new_empty((len(gathered), len(weight))) for weight in weights]
        arrivals = engine.gather_in_turn(gathered, x)
        rows_by_rank = gathered.view(ranks.world, *x.shape)
        params = list(zip(weights, biases, strict=True))
        split = _select_split(weights)
        split_outs = {i: outs[i].view(ranks.world, len(x), -1) for i in split}
        for i in split:
            linear(x, *params[i], out=split_outs[i][ranks.rank])
        for owner, arrival in arrivals:
            arrival.wait()
            for i in split:
                linear(rows_by_rank[owner], *params[i], out=split_outs[i][owner])
        for i, out in enumerate(outs):
            if i not in split:
                linear(gathered, *params[i], out=out)
        return outs, gathered

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        engine = _find_engine(ranks.group, x.device)
        result = x.new_empty((len(x) // ranks.world, len(weight)))
        if (
            engine is None
            or not x.numel()
            or not engine.fits(result.nbytes, is_sum=True)
            or not engine.adds(result.dtype)
        ):
            return super().linear_scatter(ranks, x, weight, bias)
        operator_counts.counts.copied += 1
        rows_by_rank = x.view(ranks.world, -1, x.shape[1])
        engine.scatter_in_turn(
            result, lambda owner: linear(rows_by_rank[owner], weight, bias)
        ).wait()
        return result

    def start_input_grad_scatter(
        self, ranks: TPGroup, request: ColumnGrads, dtype: torch.dtype
    ) -> tuple[Tensor, WorkGroup]:
        total = request.compute_input_grad(dtype)
        engine = _find_engine(ranks.group, total.device)
        if engine is None or not engine.adds(dtype):
            return ranks.reduce_scatter(total)
        operator_counts.counts.copied += 1
        part = total.new_empty((len(total) // ranks.world, total.shape[1]))
        return part, WorkGroup(engine.scatter([part], [total.contiguous()], average=False))

    def recover(self, ranks: TPGroup, device: torch.device) -> None:
        known = _find_choice(ranks.group, device)
        if known is not None and known.engine is not None:
            known.engine.failed_everywhere()


def _select_split(weights: Sequence[Tensor]) -> list[int]:
    """Return the indices of the linears that are computed rank by rank while rows arrive.

    Half a small GEMM takes nearly as long as the whole one, and the large ones hide the copies. So the linears with
    less than half of the outputs of the largest one are computed once all rows are there.
    """
    most = max(map(len, weights), default=0)
    return [i for i, weight in enumerate(weights) if 2 * len(weight) >= most]


def _find_engine(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine of a group, created by the first call, which is a collective; None if there can be none.

    A backward creates none: the engine of its forward may have been dropped, and one rank may run a backward alone.
    """
    if is_capturing(device):
        return None
    known = _find_choice(group, device)
    if known is None:
        if group.size() == 1 or dist.get_backend(group) == "fake" or is_in_backward():
            return None
        known = copy_choice.find_row_engine(group, device, _SLOT_BYTES, allocate=allocate_window)
    return known.engine


def _find_choice(group: dist.ProcessGroup, device: torch.device) -> Chosen | None:
    found: Chosen | None = group_state(group).values.get((ROW_ENGINE, device))
    return found


def find_copy_objection(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason against copies for a group on a device; "" if there is none.

    This is a collective. All ranks get the same result.
    """
    _find_engine(group, device)
    known = _find_choice(group, device)
    return "" if known is None else known.reason


def list_copy_objections() -> list[str]:
    """Return the reasons for which groups with this schedule cannot use copy engines."""
    return copy_choice.list_row_objections()


def drop_copy_support() -> None:
    """Let the copies in flight end, and drop the engines of all groups."""
    copy_choice.finish()
    drop_values(ROW_ENGINE)
