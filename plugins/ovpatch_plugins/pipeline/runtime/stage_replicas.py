"""Data parallelism around a stage whose backward is split.

Stock PyTorch keeps gradients local during a step and reduces them with the last microbatch. If weight gradients
come after the last backward, the reduction must wait for them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ovpatch.overlap.autograd import accumulate_grads
from ovpatch_plugins.pipeline.runtime.step_failures import Replicas
from ovpatch_plugins.pipeline.runtime.torch_compat import reset_fsdp


class LocalGradients:
    """A stage without data parallelism, or a stage whose reduction torch starts itself at the end of the step.

    Attributes:
        objection: The reason for which weight gradients of the stage cannot be deferred, or "".
        has_replicas: Whether gradients are reduced around the computations of a step, not in each.
        reduces_in_backward: Whether the last backward reduces them if nothing is deferred.
        wraps_weight_grads: Whether each W runs in :meth:`computing_weight_grads`, and :meth:`reduce` follows the
            last W.
        replicas: The ranks that reduce the same gradients.
    """

    has_replicas = False
    reduces_in_backward = False
    wraps_weight_grads = False

    def __init__(self, objection: str = "", groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.objection = objection
        self._groups = list(groups)
        self.replicas = Replicas(groups)

    def should_start_stock(self, splits: bool) -> bool:
        """Return whether stock PyTorch computes the first step.

        Args:
            splits: Whether the order is of a class that splits backwards.
        """
        del splits
        return False

    def end_inference(self) -> None:
        """Prepare for a step with split backwards, after an inference of shapes."""

    def add_replicas(self, group: dist.ProcessGroup) -> None:
        """Let the replicas in another group decide as well. All ranks of the group call this."""
        self._groups.append(group)
        self.replicas = Replicas(self._groups)
        self.has_replicas = True

    def accumulate(self) -> None:
        """Do the work that follows each W."""

    def reduce(self) -> None:
        """Reduce deferred gradients after the last W of a step."""

    def clear(self) -> None:
        """Drop the remains of an interrupted step."""

    def computing_weight_grads(self, compute: Callable[[int], None], microbatch: int) -> None:
        """Compute the weight gradients of a microbatch without a reduction."""
        compute(microbatch)
        self.accumulate()


class DataParallel(LocalGradients):
    """A stage in ``DistributedDataParallel``, with the reducer of torch or of feature ``ddp``.

    [Note: first step of a wrapped stage] The metadata inference of torch 2.13 runs the wrapper's forward outside
    ``no_sync()``. The reducer is then armed, and torch's first step reduces the first microbatch once more. After
    a split backward the reducer would find gradients missing, so stock PyTorch computes the first step. It does
    not if the class itself has such backwards, because torch's own first step then leaves the gradients of each
    replica local. In that case zeros complete the armed reduction, and the engine computes the step.

    Args:
        wrapper: The stage's module.
    """

    has_replicas = True
    reduces_in_backward = True
    wraps_weight_grads = True

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        searches = wrapper.find_unused_parameters or wrapper.static_graph
        super().__init__(
            "DistributedDataParallel(find_unused_parameters or static_graph) looks for parameters "
            "in the last backward"
            if searches
            else "",
            [wrapper.process_group],
        )
        self._wrapper: Any = wrapper

    def should_start_stock(self, splits: bool) -> bool:
        """Return whether stock PyTorch computes the first step; see [Note: first step of a wrapped stage]."""
        return not splits or bool(self.objection)

    def end_inference(self) -> None:
        """Complete the reduction that the forward of the inference has armed, with gradients of zeros."""
        if self.objection:
            return
        params = [param for param in self._wrapper.parameters() if param.requires_grad]
        # The reduction of zeros must leave the script's gradients as they are.
        kept = [param.grad for param in params]
        # Gradients may be views of buckets, which the reduction overwrites.
        contents = [None if grad is None else grad.clone() for grad in kept]
        with torch.no_grad(), _without_hooks(params):
            for param in params:
                param.grad = None
            accumulate_grads(params, [torch.zeros_like(param) for param in params])
            for param, grad, content in zip(params, kept, contents, strict=True):
                param.grad = grad
                if grad is not None:
                    grad.copy_(content)

    def computing_weight_grads(self, compute: Callable[[int], None], microbatch: int) -> None:
        """Compute the weight gradients of a microbatch; the reducer counts none of them."""
        with self._wrapper.no_sync():
            compute(microbatch)

    def reduce(self) -> None:
        """Pass all gradients to the reducer as the gradients of one backward."""
        params = [
            param
            for param in self._wrapper.parameters()
            if param.requires_grad and param.grad is not None
        ]
        # The reducer expects contributions from autograd, so each gradient is accumulated once more.
        grads: list[Tensor] = [param.grad for param in params]
        # An armed reducer takes the following accumulation as the backward of a synchronized forward.
        self._wrapper.reducer.prepare_for_backward([])
        for param in params:
            param.grad = None
        with torch.no_grad():
            accumulate_grads(params, grads)


@contextlib.contextmanager
def _without_hooks(params: Sequence[Any]) -> Iterator[None]:
    """Remove the script's hooks from parameters while the block runs; reducers have their hooks elsewhere."""
    # Autograd holds these tables, so they are emptied and filled in place.
    tables = [
        table
        for param in params
        for table in (param._backward_hooks, param._post_accumulate_grad_hooks)
        if table
    ]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, script_hooks in zip(tables, hooks, strict=True):
            table.update(script_hooks)


class FullyShardedGradients(LocalGradients):
    """A stage in FSDP2 or ``replicate()``; ``perform_reduce_grad`` reduces it after all weight gradients.

    Args:
        module: The stage's module.
    """

    has_replicas = True
    wraps_weight_grads = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The parameters whose gradients accumulate in another dtype; None before the first W.
        self._params: list[Any] | None = None
        super().__init__(groups=self._list_process_groups())

    def accumulate(self) -> None:
        """Move the gradients into ``reduce_dtype``, because the next W would add in the dtype of the parameters."""
        if self._params is None:
            self._params = [
                param for param in self._list_params() if param.reduce_dtype is not None
            ]
        for param in self._params:
            if hasattr(param, "_unsharded_param") and hasattr(
                param, "to_accumulated_grad_if_needed"
            ):
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()

    def clear(self) -> None:
        """Drop unreduced gradients: ``zero_grad()`` does not reach them, and the next step would add to them."""
        reset_fsdp(self._module, self._list_modules())
        for param in self._list_params():
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(param):
                param.unsharded_accumulated_grad = None

    def _list_params(self) -> list[Any]:
        return [param for group in self._list_groups() for param in group.fsdp_params]

    def _list_process_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups over which gradients are reduced, in the same order on all ranks."""
        # Shard groups first, then replicate groups: all ranks of a stage must wait for them in the same
        # order.
        meshes = [group.mesh_info for group in self._list_groups()]
        names = ("shard_process_group", "replicate_process_group")
        found = [getattr(mesh, name, None) for name in names for mesh in meshes]
        return list(dict.fromkeys(group for group in found if group is not None))

    def _list_groups(self) -> list[Any]:
        states = (module._get_fsdp_state() for module in self._list_modules())
        return [group for state in states for group in _list_param_groups(state)]

    def _list_modules(self) -> list[Any]:
        return [module for module in self._module.modules() if is_fsdp2(module)]


def make_data_parallel(module: nn.Module) -> LocalGradients:
    """Return the data parallelism of a stage's module."""
    if isinstance(module, DistributedDataParallel):
        return DataParallel(module)
    if is_fsdp2(module):
        return FullyShardedGradients(module)
    if _is_fsdp1(module):
        return LocalGradients("FullyShardedDataParallel reduces in each backward")
    # The engine can defer the reduction of a wrapper around the full module alone.
    part = "only a part of the stage's module is wrapped for data parallelism"
    return LocalGradients(part if is_data_parallel(module) else "")


def is_data_parallel(module: nn.Module) -> bool:
    """Return whether a module or a part of it is wrapped for data parallelism."""
    return any(
        isinstance(inner, DistributedDataParallel) or is_fsdp2(inner) or _is_fsdp1(inner)
        for inner in module.modules()
    )


def _list_param_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def is_fsdp2(module: nn.Module) -> bool:
    """Return whether a module is in FSDP2 or ``replicate()``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
