"""Helpers of the tests of the feature's contract: they run many cases stock and patched, and check each result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.insight.equality import FLOOR
from tests.plugins.ddp.arms import Cases, Loop, Record, all_both, data
from tests.plugins.ddp.arms import both as run_both
from tests.plugins.ddp.checks import check_all as check_each
from tests.plugins.ddp.checks import on as on
from tests.plugins.ddp.checks import some as some
from tests.support.equality import compare

# The models of the tests are small, and all but their smallest parameters must be sharded. With overlap, more can
# go wrong.
SMALL = {"min_param_numel": 8, "overlap_param_gather": True}


def both(
    loop: Loop, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Run ``loop`` stock, then patched, from the same seeds; see :func:`tests.plugins.ddp.arms.both`."""
    return run_both(loop, *args, apply=partial(apply, options), **kwargs)


def apply(options: dict[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Turn the features on, with :data:`SMALL` unless ``options`` override it; peaks of counters begin at 0."""
    reset_peaks()
    return ovpatch.applied(
        "ddp", "dist_optimizer", options={"dist_optimizer": SMALL | (options or {})}
    )


def reset_peaks() -> None:
    """Let the counters of optimizer state begin at 0 in a process that has run other tests."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    COUNTERS.state_bytes = COUNTERS.state_bytes_whole = 0


# Not empty while a stock run measures the noise of stock PyTorch. :func:`ddp` then makes other buckets, so more than
# two ranks add in another order.
_reordered: list[bool] = []


def ddp(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    """Wrap a model, with other buckets in the run that measures the noise of stock PyTorch."""
    return DistributedDataParallel(
        model, **({"bucket_cap_mb": 1e-4} | kwargs if _reordered else kwargs)
    )


def all_cases(
    loop: Callable[..., list[Any]], cases: Cases, options: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Run every case in both arms, and on more than two ranks also stock with its sums in another order."""
    again = _other_buckets if dist.get_world_size() > 2 else None
    return all_both(loop, cases, apply=partial(apply, options), again=again)


@contextmanager
def _other_buckets() -> Iterator[None]:
    _reordered.append(True)
    yield
    _reordered.clear()


def check(
    results: list[dict[str, Any]],
    *,
    steps: int = 1,
    by_parts: bool | None = True,
    stock: int = 0,
    bitwise: bool = True,
    floor: float = FLOOR,
) -> None:
    """Demand the values of stock PyTorch, bitwise on two ranks, and that the patch ran.

    Args:
        results: The results of :func:`all_cases` for one case, by rank.
        steps: The least number of sharded steps. 0: no step may be sharded.
        by_parts: Whether gradients were reduced and scattered. None: both are right.
        stock: The number of optimizers that fell back to torch.
        bitwise: Demand the bits of stock PyTorch on two ranks.
        floor: The difference allowed on more ranks if a second order of the sums does not show it.
    """
    for rank, result in enumerate(results):
        compared = compare(
            result["stock"], result["patched"], reordered=result.get("reordered"), floor=floor
        )
        (compared.assert_bitwise if bitwise and len(results) <= 2 else compared.assert_equal)()
        counters = result["counters"]
        assert (counters["steps"] >= steps) if steps else counters["steps"] == 0, (rank, counters)
        if by_parts is not None:
            assert (counters["grads_sharded"] > 0) == (by_parts and steps > 0), (rank, counters)
        assert counters["stock_optimizers"] == stock, (rank, counters)


# Check every case, by default by :func:`check`.
check_all = partial(check_each, check=check)


def params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters, which reads them."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_step(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    """Train one step of :func:`tests.plugins.dist_optimizer.test_loops.net`."""
    opt.zero_grad()
    model(data(step, 5, 6)).square().mean().backward()
    opt.step()


def train_steps(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> list[Record]:
    """Train some steps; return the parameters after each of them."""
    records = []
    for step in range(steps):
        train_step(model, opt, step)
        records.append(params(model))
    return records


def versions(model: nn.Module) -> dict[str, int]:
    """Return how many writes autograd has counted for each parameter."""
    return {name: param._version for name, param in model.named_parameters()}
