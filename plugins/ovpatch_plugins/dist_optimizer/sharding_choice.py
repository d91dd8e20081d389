"""Whether a model's gradients and state are sharded with ``shard=auto``: only where a step is not longer for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.consensus import gather_values, identify_host
from ovpatch.overlap.data_parallel.fp32_accumulation import LOW_PRECISION_DTYPES
from ovpatch.overlap.tensors.shard import can_be_sharded
from ovpatch_plugins.dist_optimizer.report import note_choice

#: How many elements of each sharded tensor, on average, a rank must no longer update. To shard a tensor costs the host
#: time; it saves the device the update of the other ranks' shards. The border is that of compiled models: scripts
#: compile behind DistributedDataParallel as well as before, so it is not known here. What was measured on both sides
#: is in docs/features/dist_optimizer-reference.md.
MIN_SPARED_NUMEL: Final = {("nccl", "cuda"): 10_000_000, ("gloo", "cpu"): 2_000_000}

_APART: Final = "its ranks did not build it together, so they cannot decide together"


def is_half(param: Tensor) -> bool:
    """Return whether a parameter is of half precision."""
    return param.dtype in LOW_PRECISION_DTYPES


def get_min_sharded_numel(options: Mapping[str, Any], param: Tensor) -> int:
    """Return with how many elements a parameter is sharded; with a main parameter, any number is worth it."""
    return 1 if options["main_params_in_fp32"] and is_half(param) else int(options["min_param_numel"])


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model when ``DistributedDataParallel`` is built.

    Attributes:
        tensors: How many parameters can be sharded.
        numel: How many elements they have together.
        nbytes: What they take, in bytes.
        world: Number of ranks.
        backend: What runs collectives, and the type of device: ``("nccl", "cuda")``.
    """

    tensors: int
    numel: int
    nbytes: int
    world: int
    backend: tuple[str, str]

    @classmethod
    def of(
        cls,
        params: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        min_numel: Callable[[torch.Tensor], int],
        sparse: Collection[int] = (),
    ) -> ModelFacts:
        """Look at a model; ``min_numel`` returns how many elements make a parameter worth sharding."""
        world, device = group.size(), params[0].device
        sharded = [
            param
            for index, param in enumerate(params)
            if index not in sparse and can_be_sharded(param, world, min_numel(param))
        ]
        return cls(
            tensors=len(sharded),
            numel=sum(param.numel() for param in sharded),
            nbytes=sum(param.numel() * param.element_size() for param in sharded),
            world=world,
            backend=(backend_name(group, device), device.type),
        )

    def objection(self) -> str:
        """Return why a step would be longer with shards, or could be; "" if it would not."""
        if not self.tensors:
            return "no parameter is dense and has min_param_numel elements"
        least = MIN_SPARED_NUMEL.get(self.backend)
        if least is None:
            return self._off(f"not measured with backend {self.backend[0]} on {self.backend[1]}")
        spared = self.numel // self.tensors * (self.world - 1) // self.world
        return "" if spared >= least else self._off("the host may be the limit; a step could be longer")

    def objection_to_hosts(self, hosts: int) -> str:
        """Return why a step on so many hosts could be longer with shards; "" if it would not."""
        return self._off(f"not measured on {hosts} hosts") if hosts > 1 else ""

    def _off(self, why: str) -> str:
        size = f"{_short(self.numel)} parameters in {self.tensors} tensors on {self.world} ranks"
        return f"{size}: {why} (shard=always would save {self._saved()})"

    def gain(self) -> str:
        """Return what shards save."""
        return f"{_short(self.numel)} parameters on {self.world} ranks save {self._saved()}"

    def _saved(self) -> str:
        nbytes = 2 * self.nbytes * (self.world - 1) // self.world  # two numbers an element
        unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")
        return f"{nbytes / unit:.1f} {name} of AdamW's state a rank"


def choose_sharding(
    options: Mapping[str, Any],
    prepare: Callable[[], str],
    module: torch.nn.Module,
    params: Sequence[torch.nn.Parameter],
    group: dist.ProcessGroup,
    *,
    sparse: Collection[int],
    together: bool,
) -> bool:
    """Return whether a model is sharded, the same on all ranks: a ``ShardingChoice``.

    A parameter of half precision that has a main parameter is always sharded: ``main_params_in_fp32`` says what is
    computed, and not only how.

    Args:
        options: Resolved options of the feature.
        prepare: Gets this process ready for sharded models; returns why that failed, or "".
        module: The model.
        params: Its parameters.
        group: The process group over which they are reduced.
        sparse: Those, by index, whose gradients are sparse.
        together: Whether all ranks are here.
    """
    if options["main_params_in_fp32"] and any(map(is_half, params)):
        return True
    facts = ModelFacts.of(params, group, min_numel=lambda one: get_min_sharded_numel(options, one), sparse=sparse)
    reason = (facts.objection() or prepare()) if together else _APART
    if together:
        answers = gather_values(group, "dist_optimizer: shard", [reason, identify_host()])
        reasons, hosts = zip(*answers, strict=True)
        reason = next(filter(None, reasons), "") or facts.objection_to_hosts(len(set(hosts)))
    note_choice(f"{type(module).__name__} (shard=auto): " + (f"off: {reason}" if reason else f"on: {facts.gain()}"))
    return not reason


def _short(number: int) -> str:
    """Return a number of parameters as the field writes it: 3.8B, 0.2M."""
    if number < 50_000:
        return str(number)
    return f"{number / 1e9:.1f}B" if number >= 0.95e9 else f"{number / 1e6:.1f}M"
