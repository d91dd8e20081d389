"""One optimizer whose work is divided among the ranks.

[Note: innermost] While torch's own ``step`` runs, the optimizer's parameters, their gradients and their state are this
rank's share, and it gets all back whatever happens. That is done around the class's own ``step`` function, inside of
everything that others put around it: step hooks, LR schedulers, profilers and closures see all parameters, whole, as
under stock.

[Note: also after an error] A step may raise on one rank and not on another, whose part is another. The others wait for
the parameters, so a rank hands on what it has before the error goes up.

[Note: captured steps] A replay of a CUDA graph makes new state, and no host hears of it. Its whole is put together from
what the hosts of all ranks know to be of the same step; so no step by parts is captured. A script that is going to says
so by ``capturable=True``, if its optimizer has that, and then this one stays stock (kinds.py).
"""

from __future__ import annotations

import abc
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ovpatch.overlap.comm.streams import is_capturing
from ovpatch_plugins.dist_optimizer import sharded_grads, supported_optimizers
from ovpatch_plugins.dist_optimizer.main_params import MainParamsOfModel, forget_mains, round_state
from ovpatch_plugins.dist_optimizer.owned_state import OwnedStateOfModel
from ovpatch_plugins.dist_optimizer.param_all_gather import ParamAllGathers
from ovpatch_plugins.dist_optimizer.param_broadcast import ParamBroadcasts
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, leaving_out, standing_in
from ovpatch_plugins.dist_optimizer.sharded_state import ShardedState, ShardedStateOfModel, put_in_order

Inner = Callable[..., Any]

LOCAL = (
    "it stepped with gradients that DistributedDataParallel had not reduced (no_sync(), or a forward around the "
    "wrapper), so ranks may want to differ"
)

LEFT = (
    "its model got the stock reducer back (join(), a communication hook), under which ranks may step unevenly, or with "
    "gradients that differ"
)

IN_BACKWARD = (
    "it stepped inside of a backward, as in a hook on a parameter, where gradients are this rank's own, so ranks may "
    "want to differ"
)

_CAPTURED = (
    "ovpatch: the step of {} was to be captured into a CUDA graph, but each rank has a part of its state, which could "
    "not be put together after a replay. Make it with capturable=True, if it has that, and it stays stock; or turn "
    "dist_optimizer off."
)


_INSIDE = (
    "ovpatch: state_dict() of {} was called inside of its own update, where each rank has a part of the state, in the "
    "middle of being changed. Call it after step(), or in a step hook; or turn dist_optimizer off."
)


class Exchange(Protocol):
    """What makes parameters the same on all ranks after a step."""

    def launch(self, parts: Sequence[ShardedParam]) -> None:
        """Start; all ranks do so for the same parameters."""

    def settle(self) -> None:
        """Wait for what is still on its way."""


class ShardedOptimizer(abc.ABC):
    """What the feature knows of one optimizer.

    Args:
        optimizer: The optimizer; held weakly.
        exchange: What gives its parameters to all ranks.
        state: Its state.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: Exchange,
        state: ShardedState[Any],
        stand_down: Callable[[Optimizer, str], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stand_down = stand_down
        self._inside = self._agreed = False
        self._updating = threading.RLock()  # while the optimizer has this rank's share
        self._exchange = exchange
        self._state = state

    def step(self, inner: Inner, *args: Any, **kwargs: Any) -> Any:
        """Run ``inner``, the class's own step, on this rank's share, and hand on the parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._inside:  # the class's step calls that of a base class
            return inner(optimizer, *args, **kwargs)
        args, kwargs = _with_loss(args, kwargs)
        self._exchange.settle()  # a second step without a forward in between
        parts = self.parts(optimizer)
        if any(is_capturing(device) for device in {part.shards.editions.device for part in parts}):
            raise RuntimeError(_CAPTURED.format(type(optimizer).__name__))
        if reason := self._objection(optimizer, parts):
            self.release()
            self._stand_down(optimizer, reason)
            parts = []
        if not parts:
            return inner(optimizer, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            COUNTERS.grads_by_parts += sum(part.shards.is_pending(part.index) for part in parts)
        self._state.come()
        result = self._update(parts, functools.partial(inner, optimizer, *args, **kwargs), optimizer)
        COUNTERS.steps += 1
        COUNTERS.params_updated += len(parts)
        return result

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Keep steps from beginning meanwhile; a step that runs in another thread is waited for.

        Raises:
            RuntimeError: This thread is inside of the step itself.
        """
        with self._updating:
            if self._inside:
                raise RuntimeError(_INSIDE.format(type(self._optimizer()).__name__))
            yield

    def _objection(self, optimizer: Optimizer, parts: Sequence[ShardedParam]) -> str:
        """Return why the optimizer has to go on as stock from now on, the same on all ranks; "" if it has not."""
        if torch._C._current_graph_task_id() != -1:
            return IN_BACKWARD
        if any(part.shards.left for part in parts):
            return LEFT
        for shards in dict.fromkeys(part.shards for part in parts):
            shards.tell_if_local()
        if any(part.shards.local for part in parts):
            return LOCAL
        if self._agreed:
            return ""
        self._agreed = True
        reason = supported_optimizers.rank_mismatch(optimizer)
        COUNTERS.optimizers += not reason
        return reason

    def _update(self, parts: list[ShardedParam], inner: Callable[[], Any], optimizer: Optimizer) -> Any:
        known = len(optimizer.state)
        try:
            with self._updating, self._divided(optimizer, parts), self._being_inside():
                result = inner()
        except Exception:
            self._hand_on(optimizer, parts)
            self._state.refill()
            raise
        self._hand_on(optimizer, parts)
        self._state.refill()
        put_in_order(optimizer, known)
        return result

    def _hand_on(self, optimizer: Optimizer, parts: Sequence[ShardedParam]) -> None:
        del optimizer
        # They were changed behind their backs; a graph that still needs the old values must notice.
        torch.autograd.graph.increment_version([part.param for part in parts])
        for shards in self._to_meet(parts):
            shards.meet()
        self._exchange.launch(parts)

    def _to_meet(self, parts: Sequence[ShardedParam]) -> Iterable[ShardedGrads]:
        """Return by which hosts meet before the parameters' exchange, one for each process group."""
        return {part.shards.group: part.shards for part in parts}.values()

    @contextmanager
    def _being_inside(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def parts(self, optimizer: Optimizer) -> list[ShardedParam]:
        """Return the parameters with a gradient whose update is divided."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():  # whatever parameters are now, that they have a gradient is plain
            for group in optimizer.param_groups:
                for param in group["params"]:
                    entry = sharded_grads.find(param)
                    if entry is not None and self._divides(*entry) and param.grad is not None:
                        found.append(ShardedParam(param, *entry))
        return found

    @abc.abstractmethod
    def _divides(self, shards: ShardedGrads, index: int) -> bool:
        """Tell whether a parameter's update can be divided, and ask for what that takes of its gradient."""

    @abc.abstractmethod
    def _divided(self, optimizer: Optimizer, parts: Sequence[ShardedParam]) -> AbstractContextManager[None]:
        """Show the optimizer nothing but this rank's share, for the time of a step."""

    def release(self) -> None:
        """Make everything whole again: the optimizer goes on as stock."""
        self._exchange.settle()
        self._state.release()


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


# An optimizer whose parameters are updated by slices, of which each rank has one.


class ElementwiseOptimizer(ShardedOptimizer):
    """What the feature knows of one element-wise optimizer.

    Args:
        optimizer: The optimizer; held weakly.
        gathers: What gathers its parameters.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
        quiet: The class is known to ask for nothing in its step that other ranks have.
        in_fp32: Update parameters of half precision in fp32.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gathers: ParamAllGathers,
        stand_down: Callable[[Optimizer, str], None],
        *,
        quiet: bool = False,
        in_fp32: bool = False,
    ) -> None:
        state = ShardedState(optimizer, MainParamsOfModel if in_fp32 else ShardedStateOfModel)
        super().__init__(optimizer, gathers, state, stand_down)
        self._quiet, self._in_fp32 = quiet, in_fp32

    def _divides(self, shards: ShardedGrads, index: int) -> bool:
        return shards.want(index)

    def _update(self, parts: list[ShardedParam], inner: Callable[[], Any], optimizer: Optimizer) -> Any:
        self._state.take_over(parts)
        for shards in self._to_meet(parts) if self._quiet else ():
            shards.come()  # HostBarrier.arrive
        return super()._update(parts, inner, optimizer)

    @contextmanager
    def _divided(self, optimizer: Optimizer, parts: Sequence[ShardedParam]) -> Iterator[None]:
        with standing_in(optimizer, parts) as stand_ins, self._state.written(parts, stand_ins):
            yield

    def release(self) -> None:
        """Make everything whole again, and ask for no parts of gradients any more."""
        optimizer = self._optimizer()
        if optimizer is None:
            return super().release()
        if self._in_fp32:
            forget_mains(optimizer)
        super().release()
        if self._in_fp32:
            round_state(optimizer)
        for part in self.parts(optimizer):
            part.shards.want(part.index, wanted=False)


# An optimizer whose parameters are updated whole, each by one rank, its owner.
#
# [Note: gradients stay whole] An owner needs a whole gradient, and gradients are all-reduced in buckets under backward.
# Reducing each to its owner would send half as much, but in a collective of its own for each; and whoever reads one
# would have to ask for it.


class OwnedParamOptimizer(ShardedOptimizer):
    """What the feature knows of one optimizer that needs whole parameters.

    Args:
        optimizer: The optimizer; held weakly.
        handouts: What hands out its parameters.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
        steady: Whether the form of a parameter's state is known not to change once it is there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        handouts: ParamBroadcasts,
        stand_down: Callable[[Optimizer, str], None],
        *,
        steady: bool,
    ) -> None:
        self._wholes = ShardedState(optimizer, OwnedStateOfModel)
        self._steady = steady
        super().__init__(optimizer, handouts, self._wholes, stand_down)

    def _divides(self, shards: ShardedGrads, index: int) -> bool:
        return shards.can_be_sharded(index)

    @contextmanager
    def _divided(self, optimizer: Optimizer, parts: Sequence[ShardedParam]) -> Iterator[None]:
        for ones in self._by_model(parts).values():
            owners = self._wholes.model(ones[0].shards).owners(part.index for part in ones)
            for part, owner in zip(ones, owners, strict=True):
                part.owner = owner
        with leaving_out(optimizer, parts) as own, self._wholes.written(parts, own):
            yield
        COUNTERS.params_owned += len(own)

    def _hand_on(self, optimizer: Optimizer, parts: Sequence[ShardedParam]) -> None:
        try:
            for ones in self._by_model(parts).values():
                self._wholes.model(ones[0].shards).learn(ones, optimizer.state, steady=self._steady)
        finally:  # the others wait for the collective in any case
            super()._hand_on(optimizer, parts)

    @staticmethod
    def _by_model(parts: Sequence[ShardedParam]) -> dict[int, list[ShardedParam]]:
        found: dict[int, list[ShardedParam]] = {}
        for part in parts:
            found.setdefault(id(part.shards), []).append(part)
        return found
