"""A step that Ctrl-C interrupts in its swap leaves no shard in the optimizer."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer.checks import apply, ddp, params
from tests.plugins.dist_optimizer.checks import train_step as step
from tests.support.equality import compare

SWAP_FILES = ("sharded_state.py", "sharded_param.py")
# The remaining functions of this file are around the swap.
SWAP_FUNCTIONS = {
    "sharded_optimizer.py": ("_step_shards", "_swap_out"),
    "clip_grad.py": ("_call_with_shards",),
}
# Context managers of these files run in the standard library, which is interrupted there, too.
CALLERS = (*SWAP_FILES, "sharded_optimizer.py", "clip_grad.py")


def is_of_swap(frame: FrameType) -> bool:
    file = frame.f_code.co_filename.rpartition("/")[2]
    if file == "contextlib.py":
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename == frame.f_code.co_filename:
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename.rpartition("/")[2] in CALLERS
    return file in SWAP_FILES or frame.f_code.co_name in SWAP_FUNCTIONS.get(file, ())


def interrupted_at(number: int, function: Callable[[], Any]) -> str:
    """Call a function, and interrupt a swap in it. Return the place, or "" if it has fewer places.

    Python handles a signal at these places: at the start of a function, and after a call of a C function.
    """
    count = 0
    place = ""

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal count, place
        if event in ("call", "c_return") and is_of_swap(frame):
            count += 1
            if count == number:
                name = frame.f_code.co_filename.rpartition("/")[2]
                place = f"{name}:{frame.f_lineno} {event} {getattr(called, '__name__', '')}"
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return place


def interrupted_swaps(unscales: bool) -> dict[str, Any]:
    """Interrupt all ranks at each place of a swap in turn; return the shards and states that the interrupts left.

    Args:
        unscales: Whether a gradient scaler swaps shards in, and not the step.
    """
    with apply():
        model = ddp(torch.nn.Linear(6, 4))
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        # Gradients are sharded after the first step.
        for number in range(3):
            step(model, opt, number)
        groups = [[id(param) for param in group["params"]] for group in opt.param_groups]
        left: dict[str, Any] = {}
        for number in itertools.count(1):
            opt.zero_grad()
            model(data(number, 5, 6)).square().mean().backward()
            if unscales:
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
                scaler.scale(torch.zeros(()))
                place = interrupted_at(number, functools.partial(scaler.unscale_, opt))
            else:
                place = interrupted_at(number, opt.step)
            with torch._C.DisableTorchFunctionSubclass():
                shapes = [
                    (value.shape, param.shape)
                    for param, state in opt.state.items()
                    for value in state.values()
                    if isinstance(value, Tensor) and value.ndim
                ]
            if not torch._C._is_torch_function_enabled():
                left[place] = "torch functions off"
            if [[id(param) for param in group["params"]] for group in opt.param_groups] != groups:
                left[place] = "groups"
            if {id(param) for param in opt.state} - {*itertools.chain(*groups)}:
                left[place] = "shards of parameters"
            if any(found != wanted for found, wanted in shapes):
                left[place] = "shards of state"
            # The gather of this step makes parameters equal again, and the next step finds a warm cache.
            step(model, opt, number)
            if not place:
                break
        if not left:
            copy.deepcopy(opt.state_dict())
        return {"left": left, "number": number, "params": params(model)}


@pytest.mark.parametrize("unscales", [False, True])
def test_an_interrupt_in_a_swap_leaves_no_shards(ranks, unscales):
    first, second = ranks(2)(interrupted_swaps, unscales, timeout=120)
    assert first["left"] == second["left"] == {}
    assert first["number"] > (15 if unscales else 40)
    compare(first["params"], second["params"]).assert_bitwise()
