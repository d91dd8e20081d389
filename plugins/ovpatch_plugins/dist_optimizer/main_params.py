"""Main parameters: bf16 and fp16 parameters of which each rank updates its shards in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.data_parallel.fp32_accumulation import refresh_fp32
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.shard import shard_view
from ovpatch_plugins.dist_optimizer import sharded_grads
from ovpatch_plugins.dist_optimizer.agreement import OptimizerName
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_state import ElementwiseState, Key, States, Swapped
from ovpatch_plugins.dist_optimizer.sharding_choice import is_low_precision

#: The name of the main parameter in the optimizer's state.
MAIN: Final = "main_param"


class MainParamRefresher:
    """:func:`refresh_fp32` for many tensors; on GPUs one kernel, which reads each element once."""

    def __init__(self) -> None:
        # By dtype of the roundings, the addresses and sizes of the last call, and their copy on the
        # device. Memory seldom moves between steps, so most calls copy nothing to the device.
        self._tables: dict[torch.dtype, tuple[list[tuple[int, int, int]], Tensor]] = {}

    def __call__(self, wides: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
        """Refresh fp32 tensors from their roundings, all contiguous and on one device."""
        from ovpatch.overlap.kernels.symmetric_memory import triton_unavailable_reason

        if not wides or not wides[0].is_cuda or triton_unavailable_reason():
            for wide, rounding in zip(wides, rounded, strict=True):
                refresh_fp32(wide, rounding)
            return
        for dtype in dict.fromkeys(rounding.dtype for rounding in rounded):
            pairs = [
                (wide, rounding)
                for wide, rounding in zip(wides, rounded, strict=True)
                if rounding.dtype is dtype
            ]
            self._launch(pairs)

    def _launch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        from ovpatch_plugins.dist_optimizer.triton_main_params import launch_refresh

        dtype = pairs[0][1].dtype
        places = [(wide.data_ptr(), rounding.data_ptr(), wide.numel()) for wide, rounding in pairs]
        known, table = self._tables.get(dtype, ([], None))
        if table is None or known != places:
            table = torch.tensor(places, dtype=torch.int64, device=pairs[0][0].device)
            self._tables[dtype] = places, table
        launch_refresh(table, dtype, max(numel for *_, numel in places))


class MainParamsState(ElementwiseState):
    """The state of an element-wise optimizer that updates low-precision parameters in fp32.

    [Note: main parameters] A bf16 weight loses every update below 1/512 of itself. So each rank
    keeps its shard in fp32, the main parameter, and updates that; the parameter is the rounding of
    it. The main parameter is one more tensor of the optimizer's state, which is fp32, too, and is
    saved with the state. If a parameter is no longer the rounding of its main parameter, the script
    has written to it since, and the main parameter follows. ``Optimizer.load_state_dict`` casts
    state to the dtype of its parameter; :func:`load_in_fp32` restores the saved fp32 tensors before
    other hooks see the state.
    """

    def __init__(self, shards: ShardedGrads, name: OptimizerName) -> None:
        self._refresh_main = MainParamRefresher()
        # Peers may call from here on, so all other attributes must exist.
        super().__init__(shards, name)

    def _swap_in_state(self, swapped: Swapped, states: States) -> None:
        super()._swap_in_state(swapped, states)
        with outside_modes():
            mains: list[Tensor] = []
            roundings: list[Tensor] = []
            for sharded, shard_param in swapped:
                if not is_low_precision(sharded.param):
                    continue
                main = states.get(shard_param, {}).pop(MAIN, None)
                rounding = shard_param.detach()
                # A gradient in the parameter's dtype must not be left on the fp32 parameter.
                shard_param.grad = None
                if isinstance(main, Tensor):
                    mains.append(main)
                    roundings.append(rounding)
                else:
                    # The first step, or a step after a checkpoint without main parameters.
                    main = rounding.float()
                shard_param.data = main
                shard_param.grad = sharded.shards.local_shard(sharded.index).to(torch.float32)
            # The script may have written to the parameters since the last step.
            self._refresh_main(mains, roundings)

    def _write_back(self, swapped: Swapped, states: States) -> None:
        updated: Swapped = []
        try:
            updated = [
                (sharded, main) for sharded, main in swapped if main.dtype != sharded.param.dtype
            ]
            with outside_modes():
                # The memory of this rank's elements of the parameters themselves.
                rounded = [
                    shard_view(sharded.param.data, sharded.shard)
                    if sharded.memory is None
                    else sharded.memory
                    for sharded, _ in updated
                ]
                for _, main in updated:
                    # `data` has its own version counter: later writes to the main parameter are no
                    # writes to the parameter.
                    states.setdefault(main, {})[MAIN] = main.data
                if updated:
                    torch._foreach_copy_(rounded, [main.detach() for _, main in updated])
        finally:
            try:
                super()._write_back(swapped, states)
            finally:
                for sharded, _ in updated:
                    sharded.set_memory(sharded.memory)

    def _shard_tensor(self, key: Key, full: Tensor, state: dict[Any, Any]) -> None:
        # A stock run has saved this tensor in the dtype of its parameter.
        if is_low_precision(full) and is_low_precision(self._shards.params[key[0]]):
            full = full.float()
            state[key[1]] = full
        super()._shard_tensor(key, full, state)


def load_in_fp32(optimizer: Optimizer, load: Callable[[], None]) -> None:
    """Load state and keep the dtype of saved fp32 tensors; see [Note: main parameters].

    Args:
        optimizer: The optimizer.
        load: Calls ``Optimizer.load_state_dict``.
    """
    # The state dict that the script's own hooks leave, since they run before this one.
    loaded: list[Mapping[str, Any]] = []

    def restore(_optimizer: Optimizer) -> None:
        _restore_fp32(optimizer, loaded[-1])

    handles = (
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state_dict: loaded.append(state_dict)
        ),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        load()
    finally:
        for handle in handles:
            handle.remove()


def round_state(optimizer: Optimizer) -> None:
    """Round full state to the dtype of its parameters, in which stock PyTorch continues."""
    for param, state in optimizer.state.items():
        if not (is_low_precision(param) and _has_main(param)):
            continue
        for name, value in state.items():
            is_full = isinstance(value, Tensor) and not isinstance(value, LazyTensor)
            if is_full and value.shape == param.shape:
                state[name] = value.to(param.dtype)


def drop_main_params(optimizer: Optimizer) -> None:
    """Drop the main parameters of an optimizer."""
    for param, state in optimizer.state.items():
        if is_low_precision(param):
            state.pop(MAIN, None)


def _has_main(param: Tensor) -> bool:
    location = sharded_grads.find(param)
    return location is not None and location[0].can_be_sharded(location[1])


def _restore_fp32(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(saved, params, strict=True):
        if not is_low_precision(param) or param not in optimizer.state:
            continue
        state = optimizer.state[param]
        # The torch step of such a parameter would not know the main parameter.
        if not _has_main(param):
            state.pop(MAIN, None)
            continue
        for name, value in state_dict["state"][number].items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and value.dtype is torch.float32 and value.shape == param.shape:
                state[name] = value.to(param.device)
