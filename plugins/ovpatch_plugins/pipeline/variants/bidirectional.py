"""Two pipelines through the same ranks in opposite directions, with a replica of the model in each.

This is the schedule of Chimera (Li and Hoefler, SC 2021). A rank has a stage of the pipeline that runs down and a stage
of the pipeline that runs up. Each pipeline has half of a step's microbatches, and fills bubbles of the other. Two ranks
have the replicas of a stage. At the end of a step their gradients are added up, so the replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
)

from ovpatch.overlap.pipelining.ir import BidirectionalPlacement
from ovpatch_plugins.pipeline.runtime.pipeline_shape import PipelineShape, StageInfo
from ovpatch_plugins.pipeline.runtime.torch_compat import initialize_stages

_WAYS: Final = 2


class ScheduleBidirectional(PipelineScheduleMulti):
    """The schedule of two pipelines in opposite directions.

    Torch's part of it are two objects of ``Schedule1F1B``, or of ``ScheduleGPipe`` if there are few microbatches. These
    run sequentially; feature ``pipeline`` runs them as one. The first half of the microbatches goes down, from
    rank 0 to the last one, the second half goes up. So losses and outputs of the first half are on the last rank, and
    those of the second half on rank 0.

    Args:
        stages: This rank's stage of the pipeline that runs down, and its stage of the pipeline that runs up.
        n_microbatches: Number of microbatches in both pipelines together; must be even.
        loss_fn: As for torch's schedules.
        options: Other arguments of torch's schedules with several stages.

    Attributes:
        placement: Rank of each stage of both.
        replicas: This rank and the rank that has the replicas of its stages.
        ways: The schedules of torch.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        if n_microbatches < _WAYS or n_microbatches % _WAYS:
            raise ValueError(
                f"{n_microbatches} microbatches do not divide into two directions. Give an even "
                "n_microbatches."
            )
        super().__init__(list(stages), n_microbatches, loss_fn, **options)
        ranks = self.pp_group_size
        # Torch assumes that stage s is on rank s, so the pipeline that runs up gets its own map.
        stages[1].stage_index_to_group_rank = {stage: ranks - 1 - stage for stage in range(ranks)}
        self.placement = BidirectionalPlacement.of(ranks)
        self._num_stages = len(self.placement)
        half = n_microbatches // _WAYS
        # GPipe also takes fewer microbatches than there are ranks.
        cls = Schedule1F1B if half >= ranks else ScheduleGPipe
        self.ways: list[Any] = [cls(stage, half, loss_fn) for stage in stages]
        # Torch's own runtime runs them, also while feature ``pipeline`` is on.
        for way in self.ways:
            way.runs_stock = True
        group = stages[0].group or dist.distributed_c10d._get_default_group()
        self.replicas = group
        if ranks > _WAYS:
            own = sorted({self.rank, ranks - 1 - self.rank})
            members = [dist.get_global_rank(group, rank) for rank in own]
            self.replicas = dist.new_group(members, use_local_synchronization=True)

    def describe_shape(self) -> PipelineShape:
        """Return the pipeline as this rank sees it: both of its stages, numbered as in :attr:`placement`."""
        return PipelineShape(
            self.placement,
            tuple(
                StageInfo(
                    way * self.pp_group_size + stage.stage_index,
                    stage,
                    first_input=way * (self._n_microbatches // _WAYS),
                    replicas=self.replicas,
                )
                for way, stage in enumerate(self._stages)
            ),
        )

    def _initialize_stages(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None
    ) -> None:
        for way in self.ways:
            way._has_backward = self._has_backward
            initialize_stages(way, args, kwargs, target, loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        own: Any = super()  # untyped in torch
        # The losses of a stage that is not the last belong to the other pipeline.
        return own._maybe_get_loss(stage, mb_index) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        if losses is not None:
            losses[:] = self._internal_losses
        self._internal_losses.clear()

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run the pipelines sequentially, each by torch's 1F1B. Feature ``pipeline`` patches this method."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        extra = {} if loss_kwargs is None else {"loss_kwargs": loss_kwargs}
        half = self._n_microbatches // _WAYS
        for number, way in enumerate(self.ways):
            way._has_backward = self._has_backward
            way.scale_grads = self.scale_grads
            own = slice(number * half, (number + 1) * half)
            has_losses = losses is not None and way._stage.is_last
            targets = None if target_mbs is None else target_mbs[own]
            own_losses = losses if has_losses else None
            way._step_microbatches(
                arg_mbs[own], kwarg_mbs[own], targets, own_losses, return_outputs, **extra
            )


class ReplicaGrads:
    """The sums of the gradients of both replicas of this rank's stages, with one message for each dtype.

    Args:
        parts: This rank's stages by their index in the model.
        group: This rank and the rank with the replicas.
        pipeline: All ranks of the pipeline.
        left_out: Returns the parameters whose gradients are added up elsewhere.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        group: dist.ProcessGroup,
        pipeline: dist.ProcessGroup,
        left_out: Callable[[], Sequence[nn.Parameter]],
    ) -> None:
        self._parts = parts
        self._group = group
        self._pipeline = pipeline
        self._left_out = left_out
        self._are_checked = False
        # Copies of the gradients of earlier steps, while a step runs.
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def _list_params(self) -> list[nn.Parameter]:
        # Stages that share a parameter add up its gradients themselves.
        known = {id(param) for param in self._left_out()}
        params = [
            param for part in self._parts for param in part.parameters() if param.requires_grad
        ]
        return [param for param in dict.fromkeys(params) if id(param) not in known]

    def _check_equal(self) -> None:
        """Check before the first step, together with all ranks, that both replicas have the same weights.

        Raises:
            RuntimeError: They differ, as for a model that was made on the meta device and initialized by each rank.
        """
        named = dict(item for part in self._parts for item in part.named_parameters())
        sums = torch.stack([_local(param).detach().double().sum() for param in named.values()])
        # The maxima of the sums and of their negatives add up to the difference between both ranks.
        largest = torch.cat([sums, -sums])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        differs = largest[: len(sums)] + largest[len(sums) :] > 0
        any_differs = differs.any().int()
        dist.all_reduce(any_differs, dist.ReduceOp.MAX, group=self._pipeline)
        if any_differs.item():
            names = [name for name, differ in zip(named, differs.tolist(), strict=True) if differ]
            where = (
                f"{names[0]} and {len(names) - 1} more differ here"
                if names
                else "they differ on other ranks"
            )
            raise RuntimeError(
                "ovpatch: the two replicas of a bidirectional pipeline do not have the same weights: "
                f"{where}. Load a checkpoint, or initialize the weights of both replicas from one "
                "seed, before the first step."
            )

    def start_step(self) -> None:
        """Put the gradients of earlier steps aside, because they are already sums.

        Copies are kept, since a reducer's gradients may be views of its buckets, into which it writes again.
        """
        if not self._are_checked:
            self._check_equal()
            self._are_checked = True
        self._kept = [
            (param, param.grad.clone()) for param in self._list_params() if param.grad is not None
        ]
        for param, _ in self._kept:
            param.grad = None

    def restore(self) -> None:
        """Restore the gradients of earlier steps, after an error."""
        for param in self._list_params():
            param.grad = None
        for param, grad in self._kept:
            param.grad = grad
        self._kept = []

    def finish_step(self, scale: int) -> None:
        """Make each gradient the sum of both replicas', and add the gradients of earlier steps.

        Args:
            scale: The divisor by which torch's schedule divides gradients at the end of a step, earlier ones included.
                Each replica has divided its gradients by half of that.
        """
        params = self._list_params()
        # Both ranks must send as many gradients, so a missing one is zeros for now.
        unused = [param.grad is None for param in params]
        grads: dict[torch.dtype, list[Tensor]] = {}
        with torch.no_grad():
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                grad = param.grad
                local = _local(grad)
                grads.setdefault(local.dtype, []).append(local)
            for own in grads.values():
                flat = torch.cat([grad.flatten() for grad in own])
                dist.all_reduce(flat, group=self._group)
                if scale != 1:
                    flat /= _WAYS
                for grad, part in zip(own, flat.split([grad.numel() for grad in own]), strict=True):
                    grad.copy_(part.view(grad.shape))
            if params:
                self._drop_unused(params, unused)
            for param, kept in self._kept:
                if scale != 1:
                    kept.div_(scale)
                param.grad = kept if param.grad is None else kept.add_(param.grad)
        self._kept = []

    def _drop_unused(self, params: Sequence[nn.Parameter], unused: Sequence[bool]) -> None:
        """Remove the gradients of parameters that no microbatch of either direction has used."""
        flags = torch.tensor(unused, dtype=torch.uint8, device=params[0].device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=self._group)
        # Without such parameters on this rank, the host need not wait for the collective's result.
        if any(unused):
            for param, is_unused in zip(params, flags.tolist(), strict=True):
                if is_unused:
                    param.grad = None


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
