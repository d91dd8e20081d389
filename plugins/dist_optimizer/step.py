"""One optimizer whose parameters are updated by parts.

[Note: innermost] While torch's own ``step`` runs, the optimizer's parameters, their gradients and their state are this
rank's slices, and it gets the whole ones back whatever happens. That is done around the class's own ``step`` function,
inside of everything that others put around it: step hooks, LR schedulers, profilers and closures see whole parameters,
as under stock.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ovpatch.overlap import grad_shards
from ovpatch_plugins.dist_optimizer.counters import COUNTERS
from ovpatch_plugins.dist_optimizer.gathers import Gathers
from ovpatch_plugins.dist_optimizer.parts import Part, standing_in
from ovpatch_plugins.dist_optimizer.state import ShardedState, put_in_order

Inner = Callable[..., Any]

LOCAL = (
    "it stepped with gradients that DistributedDataParallel had not reduced (no_sync(), or a forward around the "
    "wrapper), so ranks may want to differ"
)


class ShardedOptimizer:
    """What the feature knows of one optimizer.

    Args:
        optimizer: The optimizer; held weakly.
        gathers: What gathers its parameters.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
    """

    def __init__(self, optimizer: Optimizer, gathers: Gathers, stand_down: Callable[[Optimizer, str], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stand_down = stand_down
        self._inside = False
        self._gathers = gathers
        self.state = ShardedState(optimizer)

    def step(self, inner: Inner, *args: Any, **kwargs: Any) -> Any:
        """Run ``inner``, the class's own step, on this rank's parts, and gather the parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._inside:  # the class's step calls that of a base class
            return inner(optimizer, *args, **kwargs)
        args, kwargs = _with_loss(args, kwargs)
        self._gathers.settle()  # a second step without a forward in between
        parts = self.parts(optimizer)
        if any(part.shards.local for part in parts):
            self.release()
            self._stand_down(optimizer, LOCAL)
            parts = []
        if not parts:
            return inner(optimizer, *args, **kwargs)
        COUNTERS.grads_by_parts += sum(part.shards.is_pending(part.index) for part in parts)
        result = self._update(parts, functools.partial(inner, optimizer, *args, **kwargs), optimizer)
        self._gathers.launch(parts)
        COUNTERS.steps += 1
        COUNTERS.params_updated += len(parts)
        return result

    def _update(self, parts: list[Part], inner: Callable[[], Any], optimizer: Optimizer) -> Any:
        known = len(optimizer.state)
        with (
            standing_in(optimizer, parts) as stand_ins,
            self.state.written(parts, stand_ins),
            self._being_inside(),
        ):
            result = inner()
        put_in_order(optimizer, known)
        # They were changed behind their backs; a graph that still needs the old values must notice.
        torch.autograd.graph.increment_version([part.param for part in parts])
        return result

    @contextmanager
    def _being_inside(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def parts(self, optimizer: Optimizer) -> list[Part]:
        """Return the parameters with a gradient that are to be updated by parts, and ask for their gradients so."""
        found = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = grad_shards.find(param)
                if entry is not None and entry[0].want(entry[1]) and param.grad is not None:
                    found.append(Part(param, *entry))
        return found

    def release(self) -> None:
        """Make everything whole again: the optimizer goes on as stock."""
        self._gathers.settle()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for part in self.parts(optimizer):
            part.shards.want(part.index, wanted=False)
        self.state.release()


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Evaluate a closure first, which reads whole parameters and gradients; hand on one that returns its loss."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if args:
        return (lambda: loss, *args[1:]), kwargs
    return args, kwargs | {"closure": lambda: loss}
