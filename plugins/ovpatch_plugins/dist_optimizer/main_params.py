"""Parameters of half precision that are updated in fp32, each rank its slices.

[Note: main parameters] A bfloat16 weight loses every update below 1/512 of itself. So each rank keeps its slice in
fp32, the main parameter, and updates that; the parameter is its rounding. It is kept and saved as one more tensor of
the optimizer's state, which is fp32, too. Where a parameter is not the rounding of its main parameter any more, the
script has written to it since, and the main parameter follows.

[Note: loaded in fp32] ``Optimizer.load_state_dict`` casts state to the dtype of its parameter, here to half precision.
What was saved in fp32 is put back before anybody else sees what was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.data_parallel.fp32_accumulation import HALVES, Following
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.shard import shard_view
from ovpatch_plugins.dist_optimizer import sharded_grads
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_state import ShardedStateOfModel, States, Updated

#: The name of the main parameter in the optimizer's state.
MAIN: Final = "main_param"


def is_low(param: Tensor) -> bool:
    """Tell whether a parameter is of half precision."""
    return param.dtype in HALVES


def smallest(options: Mapping[str, Any], param: Tensor) -> int:
    """Return how many elements make it worth to cut a parameter; with a main parameter, any number is."""
    return 1 if options["main_params_in_fp32"] and is_low(param) else int(options["min_param_numel"])


class MainParamsOfModel(ShardedStateOfModel):
    """Slices of state, fp32 where the parameter is of half precision, and with its slice of the main parameter."""

    def __init__(self, shards: ShardedGrads, number: int) -> None:
        self._follow = Following()
        super().__init__(shards, number)  # from here on peers ask

    def begin_update(self, updated: Updated, states: States) -> None:
        """Make stand-ins of half precision the main parameters."""
        with torch.inference_mode(False), torch.no_grad():
            low = [(part, stand_in) for part, stand_in in updated if is_low(part.param)]
            known: list[tuple[Tensor, Tensor]] = []
            for part, stand_in in low:
                main, rounded = states.get(stand_in, {}).pop(MAIN, None), stand_in.detach()
                stand_in.grad = None
                if isinstance(main, Tensor):
                    known.append((main, rounded))
                else:
                    main = rounded.float()
                stand_in.data = main
                stand_in.grad = part.shards.current_part(part.index).to(torch.float32)
            self._follow([main for main, _ in known], [rounded for _, rounded in known])

    def end_update(self, updated: Updated, states: States) -> None:
        """Round the main parameters, and keep them."""
        low = [(part, stand_in) for part, stand_in in updated if stand_in.dtype != part.param.dtype]
        slices = []
        with torch.inference_mode(False), torch.no_grad():
            for part, stand_in in low:
                own = self._shards.slice(part.index)
                slices.append(shard_view(part.param.data, own))
                states.setdefault(stand_in, {})[MAIN] = stand_in.detach()
            if slices:
                torch._foreach_copy_(slices, [stand_in.detach() for _, stand_in in low])

    def cut_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's slices of state that is whole; what a stock run has saved is of half precision."""
        index = self._index.get(id(param))
        if index is not None and self._shards.can_be_sharded(index) and is_low(param):
            for name, value in state.items():
                if isinstance(value, Tensor) and not self._is_ours(value) and value.shape == param.shape:
                    state[name] = value.float() if is_low(value) else value
        super().cut_whole(param, state)


def load_in_fp32(optimizer: Optimizer, load: Callable[[], None]) -> None:
    """Load state and keep what was saved in fp32; see [Note: loaded in fp32].

    Args:
        optimizer: An element-wise optimizer.
        load: Calls ``Optimizer.load_state_dict``.
    """
    given: list[Mapping[str, Any]] = []  # as the script's own hooks leave it
    hooks = (
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: given.append(state_dict)),
        optimizer.register_load_state_dict_post_hook(lambda _: _put_back(optimizer, given[-1]), prepend=True),
    )
    try:
        load()
    finally:
        for hook in hooks:
            hook.remove()


def round_state(optimizer: Optimizer) -> None:
    """Make an optimizer's whole state what stock would have, which goes on with it."""
    for param, state in optimizer.state.items():
        if is_low(param) and _has_main(param):
            state.pop(MAIN, None)
            for name, value in state.items():
                if isinstance(value, Tensor) and not isinstance(value, LazyTensor) and value.shape == param.shape:
                    state[name] = value.to(param.dtype)


def forget_mains(optimizer: Optimizer) -> None:
    """Drop an optimizer's main parameters."""
    for param, state in optimizer.state.items():
        if is_low(param):
            state.pop(MAIN, None)


def _has_main(param: Tensor) -> bool:
    entry = sharded_grads.find(param)
    return entry is not None and entry[0].can_be_sharded(entry[1])


def _put_back(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(saved, params, strict=True):
        if is_low(param) and param in optimizer.state:
            state = optimizer.state[param]
            if not _has_main(param):
                state.pop(MAIN, None)
                continue
            for name, value in state_dict["state"][number].items():
                if isinstance(value, Tensor) and value.dtype is torch.float32 and value.shape == param.shape:
                    state[name] = value.to(param.device)
