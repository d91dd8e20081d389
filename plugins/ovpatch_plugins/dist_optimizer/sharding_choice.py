"""Whether a model's gradients and state are sharded with ``shard=auto``: only where a step is not longer for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.consensus import gather_values
from ovpatch.overlap.tensors.linear_ops import is_compiled
from ovpatch.overlap.tensors.memory import can_be_sharded
from ovpatch_plugins.dist_optimizer.main_params import is_half, min_sharded_numel

#: How many elements of each sharded tensor, on average, a rank must no longer update. To shard a tensor costs the host
#: some 50 us a step. It saves the device the update of the other ranks' shards: AdamW reads and writes 28 bytes an
#: element, so on a GPU of 3 TB/s, 4 Mi elements take 40 us. A CPU updates far more slowly, but gloo's ranks share its
#: memory, and its collectives cost the host more. Measured with 2 ranks: a GPT of 1B (5.1M elements) is faster by it on
#: NCCL; on gloo, linears of 0.03M are slower, those of 2.1M faster, and those of 0.5M as fast as stock.
MIN_SPARED_NUMEL: Final = {("nccl", "cuda"): 4 * 2**20, ("gloo", "cpu"): 2**20}

#: How many times as many it must be where modules are compiled. Their kernels take the device less time, so that the
#: host is sooner the limit. Measured on NCCL, blocks compiled one by one: 5.1M elements (a GPT of 1B on 2 ranks) are
#: slower. 9.0M (the same on 8) are faster only for a rank without its peers, for which its host need not wait. 17.7M (a
#: GPT of 3.8B on 8) keep the device busy for longer than the host by far.
COMPILED_FACTOR: Final = 3

_APART: Final = "its ranks did not build it together, so they cannot decide together"


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model when ``DistributedDataParallel`` is built.

    Attributes:
        tensors: How many parameters can be sharded.
        numel: How many elements they have together.
        nbytes: What they take, in bytes.
        world: Number of ranks.
        backend: What runs collectives, and the type of device: ``("nccl", "cuda")``.
        compiled: Whether modules are compiled, the whole or one by one.
    """

    tensors: int
    numel: int
    nbytes: int
    world: int
    backend: tuple[str, str]
    compiled: bool = False

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
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
            compiled=any(map(is_compiled, module.modules())),
        )

    def objection(self) -> str:
        """Return why a step would be longer with shards, or could be; "" if it would not."""
        if not self.tensors:
            return "no parameter is dense and has min_param_numel elements"
        size = f"{_short(self.numel)} parameters in {self.tensors} tensors on {self.world} ranks"
        least = MIN_SPARED_NUMEL.get(self.backend)
        if least is None:
            return f"{size}: not measured with backend {self.backend[0]} on {self.backend[1]}"
        spared = self.numel // self.tensors * (self.world - 1) // self.world
        if spared >= least * (COMPILED_FACTOR if self.compiled else 1):
            return ""
        compiled = ", as modules are compiled" if self.compiled and spared >= least else ""
        saved = f"shard=always would save {self._saved()}"
        return f"{size}: the host is the limit{compiled}; a step would be longer ({saved})"

    def gain(self) -> str:
        """Return what shards save."""
        return f"{_short(self.numel)} parameters on {self.world} ranks save {self._saved()}"

    def _saved(self) -> str:
        nbytes = 2 * self.nbytes * (self.world - 1) // self.world  # two numbers an element
        unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")
        return f"{nbytes / unit:.1f} {name} of AdamW's state a rank"


def choose_sharding(
    options: Mapping[str, Any],
    note: Callable[[str], object],
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
        note: Called with the choice in words.
        module: The model.
        params: Its parameters.
        group: The process group over which they are reduced.
        sparse: Those, by index, whose gradients are sparse.
        together: Whether all ranks are here.
    """
    if options["main_params_in_fp32"] and any(map(is_half, params)):
        return True
    facts = ModelFacts.of(module, params, group, min_numel=lambda one: min_sharded_numel(options, one), sparse=sparse)
    reason = facts.objection() if together else _APART
    if together:  # one rank may have compiled what another has not
        reason = next(filter(None, gather_values(group, "dist_optimizer: shard", reason)), "")
    note(f"{type(module).__name__} (shard=auto): " + (f"off: {reason}" if reason else f"on: {facts.gain()}"))
    return not reason


def _short(number: int) -> str:
    """Return a number of parameters as the field writes it: 3.8B, 0.2M."""
    if number < 50_000:
        return str(number)
    return f"{number / 1e9:.1f}B" if number >= 0.95e9 else f"{number / 1e6:.1f}M"
