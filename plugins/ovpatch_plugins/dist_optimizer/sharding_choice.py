"""The choice of the models to shard with ``shard=auto``: those whose steps do not become longer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.hookspecs import refuse_option
from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.consensus import gather_values
from ovpatch.overlap.comm.hosts import HostLayout, find_host_layout, find_shards_objection
from ovpatch.overlap.data_parallel.fp32_accumulation import LOW_PRECISION_DTYPES
from ovpatch.overlap.tensors.shard import can_be_sharded
from ovpatch_plugins.dist_optimizer.dist_optimizer_options import OPTIONS
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import note_choice

#: The average number of elements per sharded tensor whose update a rank must save, by backend and
#: device type. To shard a tensor costs the host time, but the device does not update the shards of
#: peers. The thresholds are for compiled models: scripts compile after
#: DistributedDataParallel as well as before it, so this function cannot know it. The measurements
#: on both sides are in docs/features/dist_optimizer-reference.md.
MIN_SAVED_NUMEL: Final = {("nccl", "cuda"): 10_000_000, ("gloo", "cpu"): 2_000_000}

_REASON_UNMEASURED: Final = "no measurement shows whether steps get longer"
_REASON_COPIES_BY_HOST: Final = (
    "they connect all ranks of a process group, and each host keeps all state (shard_over)"
)
_REASON_NOT_TOGETHER: Final = "its ranks did not build it at the same time, so they cannot agree"


def is_low_precision(param: Tensor) -> bool:
    """Return whether a parameter is in bf16 or fp16."""
    return param.dtype in LOW_PRECISION_DTYPES


def get_min_sharded_numel(options: Mapping[str, Any], param: Tensor) -> int:
    """Return the number of elements from which a parameter is sharded."""
    # A main parameter computes other values, so the cost of a shard does not matter.
    if options["main_params_in_fp32"] and is_low_precision(param):
        return 1
    return int(options["min_param_numel"])


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that decide whether it is sharded.

    Attributes:
        tensors: Number of parameters that can be sharded.
        numel: Number of their elements.
        nbytes: Their size in bytes.
        world: Number of ranks that share the state.
        backend: The backend of collectives and the type of the device: ``("nccl", "cuda")``.
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
        world: int | None = None,
    ) -> ModelFacts:
        """Return the facts of a model.

        Args:
            params: The parameters of the model.
            group: The process group that reduces its gradients.
            min_numel: Returns the number of elements from which a parameter is sharded.
            sparse: Indices of parameters with sparse gradients, which cannot be sharded.
            world: Number of ranks that share the state. Default: all ranks of the group.
        """
        world = group.size() if world is None else world
        device = params[0].device
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
        """Return the reason why a step may become longer with shards; "" if there is none."""
        if not self.tensors:
            return "its parameters are too small to shard, or sparse (see option min_param_numel)"
        threshold = MIN_SAVED_NUMEL.get(self.backend)
        if threshold is None:
            backend, device = self.backend
            return self._off(f"{_REASON_UNMEASURED} with backend {backend} on {device}")
        saved_numel = self.numel // self.tensors * (self.world - 1) // self.world
        if saved_numel >= threshold:
            return ""
        return self._off("its tensors are so small that steps could get longer")

    def objection_to_hosts(self, hosts: int, objection: str) -> str:
        """Return the reason why a step on several hosts may become longer; "" if there is none.

        Args:
            hosts: The number of hosts.
            objection: The reason why hosts do not keep all state each.
        """
        reason = f"{objection}, so parameters would cross the links of {hosts} hosts"
        return self._off(reason) if hosts > 1 else ""

    def _off(self, reason: str) -> str:
        size = f"{_shorten(self.numel)} parameters in {self.tensors} tensors on {self.world} ranks"
        return f"{reason} ({size}); shard=always would save {self._saved()}"

    def gain(self) -> str:
        """Return the memory that shards save, as a phrase."""
        return f"{_shorten(self.numel)} parameters on {self.world} ranks save {self._saved()}"

    def _saved(self) -> str:
        # AdamW has two tensors of state for each parameter.
        nbytes = 2 * self.nbytes * (self.world - 1) // self.world
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

    A model with main parameters is always sharded, because ``main_params_in_fp32`` changes the
    computed values and not only their cost.

    Args:
        options: The resolved options of the feature.
        prepare: Prepares this process for sharded models. It returns the reason for a failure, or
            "".
        module: The model.
        params: The parameters of the model.
        group: The process group that reduces their gradients.
        sparse: Indices of parameters with sparse gradients.
        together: Whether all ranks make this call.
    """
    if options["main_params_in_fp32"] and any(map(is_low_precision, params)):
        return True

    def min_numel(param: Tensor) -> int:
        return get_min_sharded_numel(options, param)

    if together:
        layout = find_host_layout(group)
        objection = _find_host_objection(options, params[0].device, group, layout)
        world = group.size() if objection else len(layout.own_ranks)
        facts = ModelFacts.of(params, group, min_numel=min_numel, sparse=sparse, world=world)
        # Only if no fact speaks against it: to prepare imports modules and applies patches.
        reason = facts.objection() or prepare()
        reasons = gather_values(group, "dist_optimizer: shard", reason)
        # One rank's reason counts for all ranks.
        reason = next(filter(None, reasons), "") or (
            facts.objection_to_hosts(len(layout.ranks), objection) if objection else ""
        )
    else:
        facts = ModelFacts.of(params, group, min_numel=min_numel, sparse=sparse)
        reason = _REASON_NOT_TOGETHER
    verdict = f"off: {reason}" if reason else f"on: {facts.gain()}"
    note_choice(f"{type(module).__name__} (shard=auto): {verdict}")
    return not reason


def choose_shard_layout(
    options: Mapping[str, Any],
    params: Sequence[Tensor],
    group: dist.ProcessGroup,
    layout: HostLayout | None,
) -> HostLayout | None:
    """Return the hosts that keep all state each, the same on all ranks; None to keep it once in all.

    Args:
        options: The resolved options of the feature.
        params: The parameters of the model.
        group: The process group that reduces their gradients.
        layout: The hosts of its ranks; None if these did not build the model together.

    Raises:
        ovpatch.OptionError: The user named ``shard_over=host``, and hosts cannot keep all state. Or
            hosts keep all state, and the user named ``copy_engines=on``.
    """
    if layout is None or len(layout.ranks) < 2 or options["shard_over"] == "world":
        return None
    device = params[0].device
    counts = [len(ranks) for ranks in layout.ranks]
    nbytes = sum(param.numel() * param.element_size() for param in params)
    if objection := _find_host_objection(options, device, group, layout):
        if options["shard_over"] == "host":
            refuse_option("dist_optimizer", OPTIONS, "shard_over", "host", objection)
        sent = nbytes * (group.size() - 1) / group.size()
        note_choice(
            f"state is kept once over {len(counts)} hosts (shard_over=auto): {objection}. A step "
            f"sends {sent / 2**20:.1f} MiB of parameters over the link of each host (shard=auto "
            "would leave such models to ddp)"
        )
        return None
    if options["copy_engines"] == "on":
        refuse_option("dist_optimizer", OPTIONS, "copy_engines", "on", _REASON_COPIES_BY_HOST)
    saved = nbytes * (len(counts) - 1) / len(counts)
    note_choice(
        f"each of {len(counts)} hosts keeps all state, over its {counts[0]} ranks "
        f"(shard_over={options['shard_over']}): a step sends {saved / 2**20:.1f} MiB less over the "
        "link of each host"
    )
    return layout


def _find_host_objection(
    options: Mapping[str, Any], device: torch.device, group: dist.ProcessGroup, layout: HostLayout
) -> str:
    """Return the reason why hosts do not keep all state each; "" if there is none."""
    if options["shard_over"] == "world":
        return "shard_over=world"
    if len(layout.ranks) == 1:
        return "all ranks are on one host"
    if not layout.is_even:
        hosts = zip(layout.names, layout.ranks, strict=True)
        counts = ", ".join(f"{len(ranks)} on {name.split()[0]}" for name, ranks in hosts)
        return f"hosts have different numbers of ranks ({counts})"
    if not layout.is_hierarchical:
        return "each host has one rank, which would keep all state"
    return find_shards_objection(group, device)


def _shorten(number: int) -> str:
    """Return a number of parameters as the field writes it: 3.8B, 0.2M."""
    if number < 50_000:
        return str(number)
    return f"{number / 1e9:.1f}B" if number >= 0.95e9 else f"{number / 1e6:.1f}M"
