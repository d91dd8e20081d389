"""Random delays of ranks at the places where they meet, which bring out orders that an idle machine never shows."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch.distributed as dist

#: The longest delay. A rank's peers need less time from one meeting to the next.
_MAX_S: Final = 0.02


@contextlib.contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Delay this rank before some calls of each kind that peers reply to or wait for, and after others."""
    from ovpatch.overlap.comm.host_barrier import HostBarrier
    from ovpatch.overlap.peer_rpc.rpc import PeerRpc
    from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads

    rng = random.Random(f"{seed} of rank {dist.get_rank()}")
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (PeerRpc, "call"),
            (HostBarrier, "arrive"),
            (HostBarrier, "wait"),
            (ShardedGrads, "cast_vote"),
        ):
            # A rank that is always late at one place loses more time than one that is late now and then.
            before, after = (rng.choice((0.0, 0.3, 1.0)) for _ in range(2))
            late = _delay(vars(owner)[name], rng, before, after)
            stack.enter_context(mock.patch.object(owner, name, late))
        yield


def _delay(
    function: Callable[..., Any], rng: random.Random, before: float, after: float
) -> Callable[..., Any]:
    """Return a function with pauses: the probabilities of one before the call, and of one after it."""

    @functools.wraps(function)
    def late(*args: Any, **kwargs: Any) -> Any:
        if rng.random() < before:
            _pause(rng)
        result = function(*args, **kwargs)
        if rng.random() < after:
            _pause(rng)
        return result

    return late


def _pause(rng: random.Random) -> None:
    # Peers cannot read an object that the collector frees.
    if rng.random() < 0.5:
        gc.collect()
    else:
        time.sleep(rng.uniform(0, _MAX_S))
