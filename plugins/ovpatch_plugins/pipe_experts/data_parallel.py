"""``DistributedDataParallel`` for models with expert parallelism: each rank has other experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ovpatch.overlap.comm.consensus import check_consistent
from ovpatch_plugins.pipe_experts.expert_grads import ExpertGradients
from ovpatch_plugins.pipe_experts.module import ExpertParallelFFN

_BROADCAST_BYTES = 250 * 1024 * 1024  # at a time, as DistributedDataParallel does

_SAME_EXPERTS = (
    "Give expert_data_parallel() the group of the ranks that hold the same experts, and the same experts on all of "
    "them: dist.new_group([0, 2]) on ranks 0 and 2, if ranks 0 and 1 have all experts between them, and ranks 2 and "
    "3 as well."
)


def expert_data_parallel(
    model: nn.Module,
    experts: Iterable[nn.Parameter | nn.Module],
    group: dist.ProcessGroup | None,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """Replace ``DistributedDataParallel(model, **ddp_arguments)`` where each rank has other experts.

    Dense parameters are averaged over the wrapper's process group, experts over ``group``, so that every gradient is
    that of the mean of all ranks' losses. The layer's all-to-all has to sum over the ranks that sent tokens in its
    backward, as ``torch.distributed.nn.functional.all_to_all_single`` does. ``no_sync()``, accumulation and
    checkpointing work as for dense parameters. An expert with several declared contributions
    (:func:`.grad_sync.expect_gradients`) is reduced when all are marked. Code that adds to ``grad`` without autograd
    multiplies by the number of copies over the number of ranks itself.

    Buffers of the experts' modules are local to a rank, and never broadcast. ``clip_grad_norm_`` uses the norm of this
    rank's experts, which differs from rank to rank, with and without this function.

    Args:
        model: The model, with this rank's experts.
        experts: Parameters, or modules with all their parameters, in any order; of an :class:`ExpertParallelFFN` its
            shared experts are dense. Parameters that are frozen now are broadcast once, and never averaged.
        group: The ranks with the same experts, this rank included; None if there are no copies.
        **ddp_arguments: As for ``DistributedDataParallel``. With ``init_sync=False`` experts are neither
            broadcast nor compared.

    Returns:
        An ordinary wrapper; copies and pickles of it include the experts' reduction.

    Raises:
        ValueError: An expert is no parameter of the model, or on another device; or the group lacks this rank, or has
            ranks that the wrapper's process group lacks.
        RankMismatchError: The ranks of ``group`` have different experts.
    """
    chosen = list(experts)
    params = [one for item in chosen for one in _list_tensors(item) if isinstance(one, nn.Parameter)]
    named = _find_names(model, params)
    _check_devices(model, named)
    _check_membership(group)
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *_list_all_names(model, chosen)}
    model._ddp_params_and_buffers_to_ignore = sorted(ignored)  # type: ignore[assignment]
    ddp = DistributedDataParallel(model, **ddp_arguments)
    copies = _count_copies(group, ddp.process_group)
    if group is not None and ddp_arguments.get("init_sync", True):
        terms = {"experts": [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named.items()]}
        check_consistent(group, "pipe_experts", terms, remedy=_SAME_EXPERTS)
        dist._broadcast_coalesced(group, [param.detach() for param in named.values()], _BROADCAST_BYTES, 0)
    trained = {name: param for name, param in named.items() if param.requires_grad}
    if trained:
        expert_ids = {id(param) for param in trained.values()}
        dense = [param for param in model.parameters() if id(param) not in expert_ids]
        factor, own_group = copies / ddp.process_group.size(), _make_own_group(group, ddp.process_group)
        gradients = ExpertGradients(list(trained.values()), list(trained), dense, factor, own_group)
        ddp.register_forward_pre_hook(gradients.before_forward)
        ddp.register_forward_hook(gradients.after_forward)
    return ddp


def _find_names(model: nn.Module, params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the experts by name, in the model's order, which all ranks with the same experts share."""
    wanted = {id(param) for param in params}
    named = {name: param for name, param in model.named_parameters() if id(param) in wanted}
    unknown = wanted - {id(param) for param in named.values()}
    for number, param in enumerate(params):
        if id(param) in unknown:
            raise ValueError(
                f"ovpatch: expert parameter {number}, of shape {tuple(param.shape)}, is no parameter of "
                f"{type(model).__name__}. Give expert_data_parallel() the model that has the experts, before it is "
                "wrapped, and parameters as they are in it now."
            )
    return named


def _list_all_names(model: nn.Module, chosen: Iterable[nn.Parameter | nn.Module]) -> Iterator[str]:
    """Yield every name of the experts' parameters and buffers; a tied one has several.

    ``DistributedDataParallel`` looks up the root module's own tensors both with and without a leading dot.
    """
    wanted = {id(tensor) for item in chosen for tensor in _list_tensors(item)}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in wanted:
                yield f"{prefix}.{name}"
                if not prefix:
                    yield name


def _list_tensors(item: nn.Parameter | nn.Module) -> list[torch.Tensor]:
    if isinstance(item, ExpertParallelFFN):
        return [item.up, item.down]
    return [*item.parameters(), *item.buffers()] if isinstance(item, nn.Module) else [item]


def _check_devices(model: nn.Module, named: dict[str, nn.Parameter]) -> None:
    device = next((param.device for name, param in model.named_parameters() if name not in named), None)
    for name, param in named.items():
        if device is not None and param.device != device:
            raise ValueError(
                f"ovpatch: expert '{name}' is on {param.device}, and the model's dense parameters are on {device}. "
                "Move all of the model to one device before expert_data_parallel()."
            )


def _check_membership(group: dist.ProcessGroup | None) -> None:
    # The placeholder that new_group() returns to other ranks has no rank either.
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"ovpatch: rank {dist.get_rank()} is not in the group of its own experts. {_SAME_EXPERTS}")


def _count_copies(group: dist.ProcessGroup | None, dense_group: dist.ProcessGroup) -> int:
    """Return the number of ranks that have this rank's experts."""
    if group is None:
        return 1
    ranks, all_ranks = dist.get_process_group_ranks(group), dist.get_process_group_ranks(dense_group)
    if not set(ranks) <= set(all_ranks) or len(all_ranks) % len(ranks):
        raise ValueError(
            f"ovpatch: experts are averaged over ranks {ranks}, dense parameters over {all_ranks}, which cannot be "
            f"divided into groups like that. {_SAME_EXPERTS}"
        )
    return len(ranks)


def _make_own_group(group: dist.ProcessGroup | None, dense_group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return a communicator for the experts' collectives alone.

    The order of these relative to the dense parameters' collectives, and to those of scripts in the default group,
    depends on each rank's tokens.
    """
    if group is None or group.size() == 1:
        return None
    if group is not dense_group and group is not c10d._get_default_group():
        return group
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    own_group = dist.new_group(ranks, backend=backend, use_local_synchronization=True, group_desc="ovpatch experts")
    return cast(dist.ProcessGroup, own_group)
