"""Data parallelism of experts: their gradients are averaged over the ranks with copies of them.

[Note: factor] Each of the dp ranks has its own loss. The result must be the gradient of their
mean: 1/dp times the sum over ranks. For an expert, the backward of the all-to-all has already
summed over the ep ranks of its expert-parallel group. The sum over its dp/ep copies is therefore
the sum over all ranks, and the result must be 1/ep times the average over the copies. Each
contribution is multiplied by 1/ep as it comes, and the accumulated gradient is averaged. The part
that an earlier backward has averaged is the same on all copies, so another average leaves it as it
is.

The collectives start in the order of ``named_parameters()``, on which the ranks have agreed: each
as soon as its gradient and all before it are complete, the rest at the end of the backward. A rank
that has no gradient of an expert, because it has no tokens for it, adds zeros. If no copy has a
gradient, it becomes zeros.

The experts' hooks do not fire on a rank without a single token, and peers would wait for it. So a
backward is recognized by the outputs of a synchronized forward, which all ranks run in the same
order. A second backward through the same outputs stays local, as the gradients of the dense
parameters do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.autograd import add_hook
from ovpatch.overlap.comm.consensus import check_consistent
from ovpatch.overlap.comm.lifetimes import param_record
from ovpatch.overlap.data_parallel.backward_plan import PlanFacts
from ovpatch.overlap.data_parallel.grad_hooks import GradHooks, watch_outputs
from ovpatch.overlap.data_parallel.grad_reducer import GradReducer, ReducerConfig, ReducerOwner
from ovpatch_plugins.pipe_experts.layer import ExpertParallelFFN
from ovpatch_plugins.pipe_experts.pipe_experts_options import make_communicator

_WRAP_AGAIN: Final = "Wrap the module itself again: expert_data_parallel(ddp.module, ...)."

_ERROR_REPLACED: Final = (
    f"ovpatch: a later wrapper has taken the experts of this model. {_WRAP_AGAIN}"
)

_CONFIG: Final = ReducerConfig(
    facts=PlanFacts(has_experts=True),
    feature="pipe_experts",
    remedy="declare its contributions (ovpatch.overlap.data_parallel.grad_sync.expect_gradients)",
    # A bucket without a gradient on any rank needs no collective. All ranks freeze the same
    # experts.
    skips_unused=True,
)


class _ExpertCalls(ReducerOwner):
    """The source of all parameters' nodes, since a rank may have no token for its experts."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params

    def find_nodes(self, hooks: GradHooks) -> Sequence[Node]:
        """Return the present nodes of the parameters that are trained."""
        del hooks
        return [get_gradient_edge(param).node for param in self._params if param.requires_grad]


class ExpertGradients:
    """The experts of one ``DistributedDataParallel`` object.

    The wrapper holds this object by its forward hooks, so both are copied and pickled together.
    The copy finds the process group by its name and ranks.

    Args:
        params: The experts' parameters, in an order that is the same on all ranks.
        names: Their fully qualified names.
        dense: All other parameters of the model.
        factor: The number by which each contribution is multiplied; see [Note: factor].
        group: The ranks that hold copies, on a communicator that nothing else uses during a
            backward; None if there are no copies.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        dense: Sequence[nn.Parameter],
        factor: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._params = list(params)
        self._names = list(names)
        self._dense = list(dense)
        self._factor = factor
        # The name and the ranks of the group, by which a copy finds it.
        self._place: tuple[str, list[int]] | None = None
        if group is not None:
            self._place = (str(group.group_name), dist.get_process_group_ranks(group))
        self._begin_life(group)

    def __getstate__(self) -> Mapping[str, Any]:
        """Return the state of a copy, without the group, which cannot be pickled."""
        copied = ("_params", "_names", "_dense", "_factor", "_place")
        return {name: value for name, value in vars(self).items() if name in copied}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._begin_life(None)

    def _begin_life(self, group: dist.ProcessGroup | None) -> None:
        # True once a later wrapper has the experts.
        self._is_replaced = False
        self._scaling_handles: list[RemovableHandle] = []
        # None if there are no copies, and in a copy of this object before its first forward.
        self._reducer: GradReducer | None = None
        for param in self._params:
            record = param_record(param)
            earlier = record.experts()
            # With the hooks of both wrappers, gradients would be scaled twice.
            if earlier is not None:
                earlier.retire()
            record.experts = weakref.ref(self)
        if self._factor != 1:
            scale = functools.partial(_scale, self._factor)
            self._scaling_handles += [
                add_hook(param, "_backward_hooks", scale) for param in self._params
            ]
        weakref.finalize(self, _remove, self._scaling_handles).atexit = False
        if group is not None:
            self._reducer = self._make_reducer(group)

    def _make_reducer(self, group: dist.ProcessGroup) -> GradReducer:
        calls = _ExpertCalls([*self._dense, *self._params])
        return GradReducer(self._params, self._names, group, _CONFIG, calls)

    def retire(self) -> None:
        """Leave the parameters to the wrapper that comes after this one."""
        _remove(self._scaling_handles)
        if self._reducer is not None:
            self._reducer.recover()
            self._reducer.hooks.remove()
        self._is_replaced = True

    # ---------------------------------------------------------------- hooks of the wrapper

    @torch._disable_dynamo
    def before_forward(self, _ddp: nn.Module, _args: Any) -> None:
        """Complete the last backward if it failed.

        Raises:
            RuntimeError: A later wrapper has the experts, or this is a copy and its process group
                does not exist here.
        """
        if self._is_replaced:
            raise RuntimeError(_ERROR_REPLACED)
        if self._place is None:
            return
        if self._reducer is None:
            self._reducer = self._make_reducer(_find_group(*self._place))
        self._reducer.prepare_for_forward()

    @torch._disable_dynamo
    def after_forward(self, ddp: Any, _args: Any, output: Any) -> None:
        """Reduce the backward that follows, if ``DistributedDataParallel`` reduces it."""
        reducer = self._reducer
        if reducer is None or not torch.is_grad_enabled() or not ddp.require_backward_grad_sync:
            return
        reducer.arm()
        watch_outputs(output, reducer)


def _scale(factor: float, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad * factor


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _find_group(name: str, ranks: list[int]) -> dist.ProcessGroup:
    for group, known in c10d._world.pg_names.items():
        if known == name and dist.get_process_group_ranks(group) == ranks:
            return group
    raise RuntimeError(
        f"ovpatch: this copy of a model averages its experts over the ranks {ranks}, and their "
        f"process group does not exist here. {_WRAP_AGAIN}"
    )


# --- models with experts ---


# Stock PyTorch broadcasts as many bytes at a time.
_BROADCAST_BYTES: Final = 250 * 1024 * 1024

_REMEDY_SAME_EXPERTS: Final = (
    "Give expert_data_parallel() the group of the ranks that hold the same experts, and the same "
    "experts on all of them: dist.new_group([0, 2]) on ranks 0 and 2, if ranks 0 and 1 have all "
    "experts between them, and ranks 2 and 3 as well."
)


def expert_data_parallel(
    model: nn.Module,
    experts: Iterable[nn.Parameter | nn.Module],
    group: dist.ProcessGroup | None,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """Replace ``DistributedDataParallel(model, **ddp_arguments)`` if each rank has other experts.

    Dense parameters are averaged over the wrapper's process group, experts over ``group``. So
    every gradient is the gradient of the mean of all ranks' losses. The layer's all-to-all has to
    sum over the ranks that sent tokens in its backward, as
    ``torch.distributed.nn.functional.all_to_all_single`` does. ``no_sync()``, accumulation and
    checkpointing work as for dense parameters. An expert with several declared contributions
    (:func:`.grad_sync.expect_gradients`) is reduced when all are marked. Code that adds to
    ``grad`` without autograd multiplies by the number of copies over the number of ranks itself.

    Buffers of the experts' modules are local to a rank, and never broadcast. ``clip_grad_norm_``
    uses the norm of this rank's experts, which differs from rank to rank, with and without this
    function.

    Args:
        model: The model, with this rank's experts.
        experts: Parameters, or modules with all their parameters, in any order; of an
            :class:`ExpertParallelFFN` its shared experts are dense. Parameters that are frozen now
            are broadcast once, and never averaged.
        group: The ranks with the same experts, this rank included; None if there are no copies.
        **ddp_arguments: As for ``DistributedDataParallel``. With ``init_sync=False`` experts are
            neither broadcast nor compared.

    Returns:
        An ordinary wrapper; copies and pickles of it include the experts' reduction.

    Raises:
        ValueError: An expert is no parameter of the model, or on another device; or the group
            lacks this rank, or has ranks that the wrapper's process group lacks.
        RankMismatchError: The ranks of ``group`` have different experts.
    """
    chosen = list(experts)
    tensors = [tensor for item in chosen for tensor in _list_tensors(item)]
    params = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    named = _find_names(model, params)
    _check_devices(model, named)
    _check_membership(group)
    ignored = {
        *getattr(model, "_ddp_params_and_buffers_to_ignore", ()),
        *_list_all_names(model, chosen),
    }
    model._ddp_params_and_buffers_to_ignore = sorted(ignored)  # type: ignore[assignment]
    ddp = DistributedDataParallel(model, **ddp_arguments)
    copies = _count_copies(group, ddp.process_group)
    if group is not None and ddp_arguments.get("init_sync", True):
        terms = {
            "experts": [
                f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named.items()
            ]
        }
        check_consistent(group, "pipe_experts", terms, remedy=_REMEDY_SAME_EXPERTS)
        dist._broadcast_coalesced(
            group, [param.detach() for param in named.values()], _BROADCAST_BYTES, 0
        )
    trained = {name: param for name, param in named.items() if param.requires_grad}
    if trained:
        expert_ids = {id(param) for param in trained.values()}
        dense = [param for param in model.parameters() if id(param) not in expert_ids]
        factor = copies / ddp.process_group.size()
        own_group = _make_own_group(group, ddp.process_group)
        gradients = ExpertGradients(list(trained.values()), list(trained), dense, factor, own_group)
        ddp.register_forward_pre_hook(gradients.before_forward)
        ddp.register_forward_hook(gradients.after_forward)
    return ddp


def _find_names(model: nn.Module, params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the experts by name, in the order of the model, the same on all ranks of a group."""
    wanted = {id(param) for param in params}
    named = {name: param for name, param in model.named_parameters() if id(param) in wanted}
    unknown = wanted - {id(param) for param in named.values()}
    for number, param in enumerate(params):
        if id(param) in unknown:
            raise ValueError(
                f"ovpatch: expert parameter {number}, of shape {tuple(param.shape)}, is no "
                f"parameter of {type(model).__name__}. Give expert_data_parallel() the model that "
                "has the experts, before it is wrapped, and parameters as they are in it now."
            )
    return named


def _list_all_names(model: nn.Module, chosen: Iterable[nn.Parameter | nn.Module]) -> Iterator[str]:
    """Yield every name of the experts' parameters and buffers; a tied one has several.

    ``DistributedDataParallel`` looks up the root module's own tensors both with and without a
    leading dot.
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
    device = next(
        (param.device for name, param in model.named_parameters() if name not in named), None
    )
    for name, param in named.items():
        if device is not None and param.device != device:
            raise ValueError(
                f"ovpatch: expert '{name}' is on {param.device}, and the model's dense parameters "
                f"are on {device}. Move all of the model to one device before "
                "expert_data_parallel()."
            )


def _check_membership(group: dist.ProcessGroup | None) -> None:
    # The placeholder that new_group() returns to other ranks has no rank either.
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"ovpatch: rank {dist.get_rank()} is not in the group that it gave for its experts. "
            f"{_REMEDY_SAME_EXPERTS}"
        )


def _count_copies(group: dist.ProcessGroup | None, dense_group: dist.ProcessGroup) -> int:
    """Return the number of ranks that have this rank's experts."""
    if group is None:
        return 1
    ranks = dist.get_process_group_ranks(group)
    all_ranks = dist.get_process_group_ranks(dense_group)
    if not set(ranks) <= set(all_ranks) or len(all_ranks) % len(ranks):
        raise ValueError(
            f"ovpatch: experts are averaged over ranks {ranks}, dense parameters over "
            f"{all_ranks}, which do not split into groups of that size. {_REMEDY_SAME_EXPERTS}"
        )
    return len(ranks)


def _make_own_group(
    group: dist.ProcessGroup | None, dense_group: dist.ProcessGroup
) -> dist.ProcessGroup | None:
    """Return a communicator for the experts' collectives alone."""
    # The tokens of a rank decide when its experts are complete. So the order of their collectives,
    # relative to the dense parameters' and to a script's in the default group, differs by rank.
    if group is None or group.size() == 1:
        return None
    if group is not dense_group and group is not c10d._get_default_group():
        return group
    return make_communicator(group, "ovpatch experts")
