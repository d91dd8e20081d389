"""Averages the gradients of experts over the ranks that hold copies of them, and wraps models with such experts.

[Note: factor] Each of the dp ranks has a loss of its own, and the gradient of their mean is wanted: 1/dp times the sum
over ranks. For an expert, the backward of the all-to-all has summed over the ep ranks of its expert-parallel group, so
the sum over its dp/ep copies is the sum over all ranks, and what is wanted is 1/ep times the average over the copies.
Contributions are multiplied by 1/ep as they come, and what has accumulated is averaged: what an earlier backward has
averaged is the same on all copies, and stays what it is.

The collectives are launched in the order of ``named_parameters()``, on which the ranks have
agreed: each as soon as its gradient and all before it are complete, the others at the end of the backward. A rank that
has no gradient of an expert, for want of tokens, adds zeros there; if no copy has one, the gradient becomes zeros.

A rank without a single token would not hear of a backward from the experts' hooks, and the
others would wait for it. So backwards are recognised by the outputs of a synchronised forward. All ranks run those
alike; this holds for a second backward through the same outputs, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.consensus import check_consistent
from ovpatch.overlap.comm.lifetimes import param_record
from ovpatch.overlap.data_parallel.backward_reducer import BackwardReducer, ReducerState
from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
from ovpatch.overlap.data_parallel.grad_hooks import GradHooks, watch_outputs
from ovpatch.overlap.data_parallel.grad_sync import GradSync, register_reducer
from ovpatch.overlap.data_parallel.graph_tasks import will_accumulate
from ovpatch_plugins.pipe_experts.layer import ExpertParallelFFN
from ovpatch_plugins.pipe_experts.options import make_communicator

_WRAP_AGAIN = "Wrap the module itself again: expert_data_parallel(ddp.module, ...)."


class ExpertGradients(BackwardReducer):
    """The experts of one ``DistributedDataParallel`` object, which holds it by its forward hooks.

    So it is copied and pickled with that object. The copy finds the process group by its name and ranks. ``params`` are
    the experts' parameters, in an order that is the same on all ranks, ``others`` all other parameters of the model.
    Each contribution is multiplied by ``factor``; see [Note: factor]. ``group`` are the ranks that hold copies, if any,
    on a communicator that nothing else uses during a backward.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        others: Sequence[torch.nn.Parameter],
        factor: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._params, self._names, self._others = list(params), list(names), list(others)
        self._factor = factor
        self._place = None if group is None else (str(group.group_name), dist.get_process_group_ranks(group))
        self._begin_life(group)

    def __getstate__(self) -> Mapping[str, Any]:
        """Return what a copy needs: no group, which cannot be pickled, and nothing of a backward."""
        kept = ("_params", "_names", "_others", "_factor", "_place")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._begin_life(None)

    def _begin_life(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._group: dist.ProcessGroup | None = None
        self._retired = False
        self._unfinished: list[GradSync] = []
        self._scaling: list[RemovableHandle] = []
        for param in self._params:
            state = param_record(param)
            earlier = state.experts()
            if earlier is not None:  # with the hooks of both, gradients would be scaled twice
                earlier.retire()
            state.experts = weakref.ref(self)
        if self._factor != 1:
            scale = functools.partial(_scale, self._factor)
            self._scaling += [param.register_hook(scale) for param in self._params]
        weakref.finalize(self, _remove, self._scaling).atexit = False
        if group is not None:
            self._attach(group)

    def _attach(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._hooks = GradHooks(self._params, self)
        register_reducer(self._params, self)
        self._sync = self._new_sync()

    def _new_sync(self) -> GradSync:
        assert self._group is not None
        # A bucket for each: weights of many experts are stacked, and large.
        buckets = [GradBucket([i], [param]) for i, param in enumerate(self._params)]
        remedy = "declare its contributions (ovpatch.overlap.data_parallel.grad_sync.expect_gradients)"
        feature, names = "pipe_experts", self._names
        return GradSync(buckets, self._group, feature=feature, names=names, remedy=remedy, skip_absent=True)

    def retire(self) -> None:
        """Leave the parameters to the wrapper that comes after this one."""
        self.recover()
        _remove(self._scaling)
        if self._group is not None:
            self._hooks.remove()
        self._retired = True

    # ---------------------------------------------------------------- hooks of the wrapper

    @torch._disable_dynamo
    def before_forward(self, _ddp: torch.nn.Module, _args: Any) -> None:
        """Complete the collectives of a backward that an exception cut short, and see that the hooks are in place.

        RuntimeError if the module was wrapped once more, or if this is a copy and its process group is not here.
        """
        if self._retired:
            raise RuntimeError(f"ovpatch: the experts of this model belong to a later wrapper by now. {_WRAP_AGAIN}")
        if self._place is None:
            return
        self.recover()
        if self._group is None:
            self._attach(_found(*self._place))
        elif self._hooks.are_lost():
            self._hooks.remove()
            self._attach(self._group)

    @torch._disable_dynamo
    def after_forward(self, ddp: Any, _args: Any, output: Any) -> None:
        """Reduce the backward that follows, if ``DistributedDataParallel`` will reduce it."""
        # A checkpoint may recompute the forward.
        inside = self.state is ReducerState.REDUCING and self._task.is_alive()
        if self._group is not None and not inside and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._arm()
            watch_outputs(output, self._output_reached)

    # ---------------------------------------------------------------- what happens in a backward

    def _output_reached(self) -> None:
        if self.state is ReducerState.FAILED or (self.state is ReducerState.REDUCING and self._task.queued):
            return
        trained = (param for param in (*self._others, *self._params) if param.requires_grad)
        # Not for torch.autograd.grad(), which adds to no gradient.
        if will_accumulate(get_gradient_edge(param).node for param in trained):
            if not self.armed:
                self._arm()  # a rank without tokens hears of the backward here only
            self._join_backward()

    def _arm(self, expected: Sequence[int] | None = None) -> None:
        super()._arm(expected)
        self._sync.skip_unused([int(param.requires_grad) for param in self._params])  # frozen since, on all ranks

    def _grad_complete(self, index: int, node_grad: Tensor | None) -> None:
        self._sync.register_grad_ready(index)
        self._sync.start_ready_buckets(node_grad)

    def _reduce_rest(self) -> None:
        self._sync.start_grad_sync()
        for earlier in self._unfinished:
            earlier.wait()
            earlier.drop_inputs()
        self._unfinished.clear()
        self._sync.wait()
        self._sync.finish_grad_sync(())

    def _complete_failed(self) -> None:
        """Add zeros to what other ranks may wait for. Not waited for here: they may have to recover first, too."""
        self._sync.start_zeros()
        self._unfinished.append(self._sync)
        self._sync = self._new_sync()


def _scale(factor: float, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad * factor


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _found(name: str, ranks: list[int]) -> dist.ProcessGroup:
    for group, known in c10d._world.pg_names.items():
        if known == name and dist.get_process_group_ranks(group) == ranks:
            return group
    raise RuntimeError(
        f"ovpatch: this copy of a model averages its experts over the ranks {ranks}, and their process group does not "
        f"exist here. {_WRAP_AGAIN}"
    )


# --- models with experts ---


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
    return make_communicator(group, "ovpatch experts")
