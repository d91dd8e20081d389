"""Parameters of half precision that are updated in fp32, each rank its shards."""

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
from ovpatch_plugins.dist_optimizer.elementwise_state import ElementwiseState
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_state import Key, States, Swapped
from ovpatch_plugins.dist_optimizer.sharding_choice import is_low_precision
from ovpatch_plugins.dist_optimizer.step_log import Turn

#: The name of the main parameter in the optimizer's state.
MAIN: Final = "main_param"


class MainParamRefresher:
    """:func:`refresh_fp32` of many tensors, on GPUs by one kernel, which reads each number once.

    The addresses are kept on the device from one call to the next, as long as they are the same.
    """

    def __init__(self) -> None:
        self._tables: dict[torch.dtype, tuple[list[tuple[int, int, int]], Tensor]] = {}

    def __call__(self, wides: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
        """Refresh fp32 tensors by their roundings, all contiguous and on one device."""
        from ovpatch.overlap.symm_mem.memory import triton_unavailable_reason

        if not wides or not wides[0].is_cuda or triton_unavailable_reason():
            for wide, half in zip(wides, rounded, strict=True):
                refresh_fp32(wide, half)
            return
        for dtype in dict.fromkeys(half.dtype for half in rounded):
            self._launch([(wide, half) for wide, half in zip(wides, rounded, strict=True) if half.dtype is dtype])

    def _launch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        from ovpatch_plugins.dist_optimizer.triton_main_params import launch_refresh

        dtype = pairs[0][1].dtype
        places = [(wide.data_ptr(), half.data_ptr(), wide.numel()) for wide, half in pairs]
        known, table = self._tables.get(dtype, ([], None))
        if table is None or known != places:
            table = torch.tensor(places, dtype=torch.int64, device=pairs[0][0].device)
            self._tables[dtype] = places, table
        launch_refresh(table, dtype, max(numel for *_, numel in places))


class MainParamsState(ElementwiseState):
    """Shards of state, fp32 where the parameter is of half precision, and with its shard of the main parameter.

    [Note: main parameters] A bfloat16 weight loses every update below 1/512 of itself. So each rank keeps its shard in
    fp32, the main parameter, and updates that; the parameter is its rounding. The main parameter is one more tensor of
    the optimizer's state, which is fp32, too, and is saved with it. Where a parameter is not the rounding of its main
    parameter any more, the script has written to it since, and the main parameter follows.
    ``Optimizer.load_state_dict`` casts state to the dtype of its parameter; what was saved in fp32 is put back before
    other hooks see it (:func:`load_in_fp32`).
    """

    def __init__(self, shards: ShardedGrads, turn: Turn) -> None:
        self._refresh_main = MainParamRefresher()
        super().__init__(shards, turn)  # from here on peers ask

    def _swap_in(self, swapped: Swapped, states: States) -> None:
        super()._swap_in(swapped, states)
        with outside_modes():
            known: list[tuple[Tensor, Tensor]] = []
            for one, shard_param in swapped:
                if not is_low_precision(one.param):
                    continue
                main, rounded = states.get(shard_param, {}).pop(MAIN, None), shard_param.detach()
                shard_param.grad = None
                if isinstance(main, Tensor):
                    known.append((main, rounded))
                else:
                    main = rounded.float()
                shard_param.data = main
                shard_param.grad = one.shards.local_shard(one.index).to(torch.float32)
            self._refresh_main([main for main, _ in known], [rounded for _, rounded in known])

    def _write_back(self, swapped: Swapped, states: States) -> None:
        low: Swapped = []
        try:
            low = [(one, main) for one, main in swapped if main.dtype != one.param.dtype]
            with outside_modes():
                rounded = [
                    shard_view(one.param.data, one.shard) if one.memory is None else one.memory for one, _ in low
                ]
                for _, main in low:
                    states.setdefault(main, {})[MAIN] = main.data  # whose writes are no writes to the parameter
                if low:
                    torch._foreach_copy_(rounded, [main.detach() for _, main in low])
        finally:
            try:
                super()._write_back(swapped, states)
            finally:
                for one, _ in low:
                    one.set_memory(one.memory)

    def _shard_tensor(self, key: Key, whole: Tensor, state: dict[Any, Any]) -> None:
        if is_low_precision(whole) and is_low_precision(self._shards.params[key[0]]):  # as a stock run has saved it
            whole = state[key[1]] = whole.float()
        super()._shard_tensor(key, whole, state)


def load_in_fp32(optimizer: Optimizer, load: Callable[[], None]) -> None:
    """Call ``Optimizer.load_state_dict`` and keep what was saved in fp32; see [Note: main parameters]."""
    given: list[Mapping[str, Any]] = []  # as the script's own hooks leave it
    hooks = (
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: given.append(state_dict)),
        optimizer.register_load_state_dict_post_hook(lambda _: _restore_fp32(optimizer, given[-1]), prepend=True),
    )
    try:
        load()
    finally:
        for hook in hooks:
            hook.remove()


def round_state(optimizer: Optimizer) -> None:
    """Round an optimizer's whole state to its parameters' dtype, as stock, which goes on with it, has it."""
    for param, state in optimizer.state.items():
        if is_low_precision(param) and _has_main(param):
            for name, value in state.items():
                if isinstance(value, Tensor) and not isinstance(value, LazyTensor) and value.shape == param.shape:
                    state[name] = value.to(param.dtype)


def drop_main_params(optimizer: Optimizer) -> None:
    """Drop an optimizer's main parameters."""
    for param, state in optimizer.state.items():
        if is_low_precision(param):
            state.pop(MAIN, None)


def _has_main(param: Tensor) -> bool:
    entry = sharded_grads.find(param)
    return entry is not None and entry[0].can_be_sharded(entry[1])


def _restore_fp32(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(saved, params, strict=True):
        if is_low_precision(param) and param in optimizer.state:
            state = optimizer.state[param]
            if not _has_main(param):
                state.pop(MAIN, None)
                continue
            for name, value in state_dict["state"][number].items():
                if isinstance(value, Tensor) and value.dtype is torch.float32 and value.shape == param.shape:
                    state[name] = value.to(param.device)
