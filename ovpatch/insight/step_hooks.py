"""The steps of optimizers, each seen once.

[Note: hooks in the middle of a step] torch gives a class's ``step()`` its hooks when the first optimizer of that class
is built. A ``step()`` that calls that of a base class, which may have hooks of its own, calls all of them again, as
often as it calls the base, with the step half done. Counting how deep it is cannot tell: after an exception torch calls
no post hook, and the count stays too high. So the stack is looked at, on which nothing is left over: a step as a whole
begins and ends where torch's wrapper is on it just once for the optimizer. Dynamo can compile the wrapper into code in
which it is not recognised: then the innermost end counts, which is the first post hook after a pre hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Before = Callable[[Optimizer, tuple[Any, ...], Mapping[str, Any]], None]
After = Callable[[Optimizer], None]

#: The code of what torch puts around every ``step()``; it is the same for all classes.
_WRAPPER: Final = Optimizer.profile_hook_step(lambda: None).__code__


class StepHooks:
    """Hooks around each step of every optimizer, from when this is made; see [Note: hooks in the middle of a step].

    Args:
        after: Called with the optimizer when its step is done, and not if it raises. Stock optimizers call it last,
            after the parameters have their new values.
        before: Called with the optimizer and the arguments of its ``step()``, of which the first is the optimizer.
    """

    def __init__(self, *, after: After, before: Before | None = None) -> None:
        self._before, self._after = before, after
        self._under_way: WeakSet[Optimizer] = WeakSet()  # and those whose step raised; their next begins it anew
        self._handles = register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @torch._disable_dynamo
    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_whole(optimizer):
            self._under_way.add(optimizer)
            if self._before is not None:
                self._before(optimizer, args, kwargs)

    @torch._disable_dynamo
    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer in self._under_way and _is_whole(optimizer):
            self._under_way.discard(optimizer)
            self._after(optimizer)


def _is_whole(optimizer: Optimizer) -> bool:
    """Whether a hook that is called now is that of the outermost ``step()`` of its optimizer."""
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and depth < 2:
        depth += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth < 2
