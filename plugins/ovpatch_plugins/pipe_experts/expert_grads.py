"""Averages the gradients of experts over the ranks that hold copies of them.

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

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d as c10d
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.data_parallel.bucket import GradBucket
from ovpatch.overlap.data_parallel.grad_hooks import GradHooks, watch_outputs, will_accumulate
from ovpatch.overlap.data_parallel.grad_sync import GradSync, register_reducer
from ovpatch.overlap.data_parallel.reducer import BackwardReducer, ReducerState
from ovpatch.overlap.tensors.param_state import param_state

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
            state = param_state(param)
            earlier = state.experts()
            if earlier is not None:  # with the hooks of both, gradients would be scaled twice
                earlier.retire()
            state.experts = weakref.ref(self)
        if self._factor != 1:
            self._scaling += [param.register_hook(_multiplied(self._factor)) for param in self._params]
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

        Raises:
            RuntimeError: The module was wrapped once more, or this is a copy, and its process group is not here.
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


def _multiplied(factor: float) -> Any:
    def hook(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * factor

    return hook


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
