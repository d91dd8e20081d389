"""``weight_stash=pipedream``: each microbatch is one update, and its backward has the weights of its forward.

PipeDream (Narayanan et al., SOSP 2019) steps the optimizer before the pipeline is empty. A stage steps after each
backward. A microbatch whose forward is done by then keeps the weights of its forward, its *stash*. The order of
computations stays torch's. The results differ, because weights are older than in a run without a pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch.overlap.comm.lifetimes import attached_values
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.runtime.deferred_linears import has_hooks, walk_modules
from ovpatch_plugins.pipeline.runtime.pipeline_shape import StageInfo
from ovpatch_plugins.pipeline.runtime.stage import Stage, StageOptions
from ovpatch_plugins.pipeline.runtime.stage_replicas import is_data_parallel

# The key of the optimizers that attach_optimizer() names for a schedule.
_OPTIMIZERS: Final = "pipeline: optimizers"
_REMEDY: Final = "Correct that on all ranks, or set OVPATCH_PIPELINE_WEIGHT_STASH=off."


class WeightStashError(RuntimeError):
    """The error that a stage or an optimizer cannot be used with stashed weights; the message has the remedy."""


def attach_optimizer(schedule: Any, *optimizers: torch.optim.Optimizer) -> None:
    """Name the optimizers that ``schedule.step()`` steps after each backward with ``weight_stash=pipedream``.

    Without that option the call has no effect. With it, gradients are None when ``schedule.step()`` returns, and the
    script's own ``optimizer.step()`` finds nothing to do.

    Args:
        schedule: A schedule of ``torch.distributed.pipelining``.
        optimizers: The optimizers of all trained parameters of this rank's stages, and of no other parameters with
            gradients. They replace the optimizers of an earlier call.
    """
    attached_values(schedule).setdefault(_OPTIMIZERS, [])[:] = optimizers


def find_reason_against(schedule: Any, stages: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the reason for which this rank cannot stash weights, or ""."""
    if options["schedule"] not in ("as-given", "1f1b"):
        return f"weight_stash needs schedule=as-given or 1f1b, not {options['schedule']}"
    if not attached_values(schedule).get(_OPTIMIZERS):
        return "weight_stash needs ovpatch_plugins.pipeline.attach_optimizer(schedule, optimizer)"
    if getattr(schedule, "_shared_grads", None):
        return "weight_stash cannot add up gradients of weights that several stages share"
    for stage in stages:
        if is_data_parallel(stage.submod):
            return f"weight_stash cannot reduce the gradients of stage {stage.stage_index} over replicas"
        if any(compiled for _, compiled in walk_modules(stage.submod)):
            return f"weight_stash cannot change the weights of stage {stage.stage_index}, which is compiled"
    return ""


def raise_reason(schedule: Any, reason: str) -> None:
    """Raise an error, because the results of stock PyTorch would differ from those of stashed weights."""
    raise WeightStashError(f"{type(schedule).__name__}: {reason.rstrip('.')}. {_REMEDY}")


class StashedStage(Stage):
    """A stage that steps its optimizers after each backward.

    Args:
        info: The stage in its pipeline.
        options: Its options.
        schedule: The schedule.
    """

    def __init__(self, info: StageInfo, options: StageOptions, *, schedule: Any) -> None:
        super().__init__(
            info,
            replace(options, delay_wgrad_compute="off", is_fused=False, sends=False, splits=False),
        )
        self.objection = "weight_stash steps the optimizer after each backward"
        self.report.objection = self.objection
        self._optimizers: list[torch.optim.Optimizer] = attached_values(schedule)[_OPTIMIZERS]
        # The trained parameters, with the modules that have them and their names there.
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        # Copies of the newest weights, by the id of the parameter.
        self._version: dict[int, Tensor] = {}
        # The weights of each microbatch's forward, by the id of the parameter.
        self._stashes: dict[int, dict[int, nn.Parameter]] = {}

    def start_step(self, *, finalizes: bool) -> None:
        """Start a step.

        Raises:
            WeightStashError: A parameter has hooks or a gradient, or no optimizer.
        """
        super().start_step(finalizes=finalizes)
        self._drop()
        # A script may add and freeze parameters between steps.
        modules = dict.fromkeys(self.stage.submod.modules())
        found = [
            (module, name, p)
            for module in modules
            for name, p in module._parameters.items()
            if p is not None
        ]
        self._places = [place for place in found if place[2].requires_grad]
        owned = {
            id(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for place in self._places:
            self._check(place, owned)

    def _check(self, place: tuple[nn.Module, str, nn.Parameter], owned: set[int]) -> None:
        param = place[2]
        if type(param) is not nn.Parameter:
            self._refuse(
                place,
                f"is of class {type(param).__name__}, which weight_stash cannot copy. Leave it as "
                "it was",
            )
        if id(param) not in owned:
            self._refuse(place, "is in no optimizer of attach_optimizer(). Add it, or freeze it")
        if has_hooks(param):
            self._refuse(place, "has hooks, which weight_stash would not call. Remove them")
        if param.grad is not None:
            self._refuse(
                place,
                "has a gradient when schedule.step() begins. Call optimizer.zero_grad() before",
            )

    def forward(self, microbatch: int, args: Any, kwargs: Any, keep_output: bool) -> Any:
        """Compute F with the newest weights, and stash them."""
        if not self._version:
            self._version = {id(param): param.detach().clone() for *_, param in self._places}
        # Each microbatch has its own parameters, because backwards of two with the same weights may overlap.
        stash = {id(param): _alias(param, self._version[id(param)]) for *_, param in self._places}
        self._stashes[microbatch] = stash
        with self._swapped(stash):
            return super().forward(microbatch, args, kwargs, keep_output)

    def backward(self, microbatch: int, loss: Any, microbatches: int) -> bool:
        """Compute the full backward with the weights of the forward, which a checkpoint reads again."""
        with self._swapped(self._stashes[microbatch]):
            return super().backward(microbatch, loss, microbatches)

    def finish_backward(self, microbatch: int, check_peers: Callable[[], None]) -> None:
        """Step the optimizers with the gradients of this microbatch alone; its input gradient is in flight."""
        super().finish_backward(microbatch, check_peers)
        # An update with the zeros of a failed rank could not be undone.
        check_peers()
        for place in self._places:
            if place[2].grad is not None:
                self._refuse(
                    place,
                    "is read around its module, which has the stashed one. Read it from its module",
                )
        stash = self._stashes.pop(microbatch)
        params = list(dict.fromkeys(param for *_, param in self._places))
        for param in params:
            param.grad = stash[id(param)].grad
        for optimizer in self._optimizers:
            optimizer.step()
        for param in params:
            param.grad = None
        self._version = {}
        COUNTERS.microbatch_updates += 1

    def reduce(self, scale: int, *, by_perform: bool, waits: bool) -> None:
        """Leave gradients alone, because each update had the mean gradient of its microbatch."""

    def clear(self) -> None:
        """Drop the remains of an interrupted step; updates that were made stay."""
        super().clear()
        self._drop()

    def _drop(self) -> None:
        self._version = {}
        self._stashes = {}

    def _refuse(self, place: tuple[nn.Module, str, nn.Parameter], fault: str) -> None:
        module, name, _ = place
        where = f"stage {self.stage.stage_index}: {name} of a {type(module).__name__}"
        raise WeightStashError(f"{where} {fault}, or set OVPATCH_PIPELINE_WEIGHT_STASH=off.")

    @contextlib.contextmanager
    def _swapped(self, stash: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """Put stashed parameters into the stage's modules."""
        try:
            for module, name, param in self._places:
                module._parameters[name] = stash[id(param)]
            yield
        finally:
            for module, name, param in self._places:
                module._parameters[name] = param


def _alias(param: nn.Parameter, weights: Tensor) -> nn.Parameter:
    # The alias shares the memory of the weights and has the script's attributes.
    alias = nn.Parameter(weights)
    alias.__dict__.update(param.__dict__)
    return alias
