"""Runs of a training loop in one worker, stock and patched, with records of all values that a user could read."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.support.worker import freeze_remainder

Record = dict[str, Any]
Loop = Callable[..., list[Record]]
Cases = Mapping[str, Mapping[str, Any]]


def reduced_in_place(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Make a loop reduce its small gradients in their own memory, like large gradients, and not in a flat tensor.

    The returned loop has an argument ``in_place``. With False, gradients are reduced in the flat tensor.
    """

    @functools.wraps(loop)
    def run(*args: Any, in_place: bool = True, **kwargs: Any) -> Any:
        from ovpatch.overlap.data_parallel.grad_bucket import GradBucket

        # A patch of the module's constant would stay in modules that import it during the loop, in this process only.
        with mock.patch.object(GradBucket, "flat_below", 1) if in_place else nullcontext():
            return loop(*args, **kwargs)

    return run


def both(
    loop: Loop,
    *args: Any,
    options: dict[str, Any] | None = None,
    apply: Callable[[], AbstractContextManager[Any]] | None = None,
    counters: Callable[[], dict[str, int]] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run ``loop`` stock, then patched, from the same seeds.

    Args:
        loop: The loop, which is called with ``args`` and ``kwargs``.
        options: The options of ``ddp``.
        apply: Turns other features on. Default: ``ddp`` alone is on.
        counters: Returns the counters of the features. Default: the counters of ``ddp`` and ``dist_optimizer``.

    Returns:
        ``stock`` and ``patched``, the results of the loop, and ``counters``, their growth in the patched arm.
    """
    stock = seeded(loop, *args, **kwargs)
    with apply() if apply else ovpatch.applied("ddp", options={"ddp": options or {}}):
        return {"stock": stock, **counted(loop, *args, counters=counters, **kwargs)}


def all_both(
    loop: Loop,
    cases: Cases,
    *,
    options: dict[str, Any] | None = None,
    apply: Callable[[], AbstractContextManager[Any]] | None = None,
    counters: Callable[[], dict[str, int]] | None = None,
    again: Callable[[], AbstractContextManager[Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run every case like :func:`both`, but under one ``apply()``, which takes longer than a short loop.

    Args:
        loop: The loop, which is called with the keyword arguments of each case.
        cases: The keyword arguments by the name of the case.
        options: As for :func:`both`.
        apply: As for :func:`both`.
        counters: As for :func:`both`.
        again: The context of a second stock run, whose result is ``reordered``. Default: there is no such run.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in cases}
    for name, kwargs in cases.items():
        with named(name):
            results[name]["stock"] = seeded(loop, **kwargs)
    for name, kwargs in cases.items() if again else ():
        with named(name), again():
            results[name]["reordered"] = seeded(loop, **kwargs)
    with apply() if apply else ovpatch.applied("ddp", options={"ddp": options or {}}):
        for name, kwargs in cases.items():
            with named(name):
                results[name] |= counted(loop, counters=counters, **kwargs)
            # The next case must not find the model of this case.
            gc.collect()
            freeze_remainder()
    return results


def table(**axes: Iterable[Any]) -> Cases:
    """Return the cases of all combinations, named by their values: ``table(cap=[1, 25], how=["a"])``."""
    rows = ([*zip(axes, values, strict=True)] for values in itertools.product(*axes.values()))
    return {
        ", ".join(f"{key} {getattr(value, '__name__', value)}" for key, value in row): dict(row)
        for row in rows
    }


def seeded(loop: Loop, *args: Any, **kwargs: Any) -> list[Record]:
    torch.manual_seed(0)
    return loop(*args, **kwargs)


def counted(
    loop: Loop, *args: Any, counters: Callable[[], dict[str, int]] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Run the loop; return its result, and by how much the counters of the features have grown."""
    count = counters or _counters
    before = count()
    patched = seeded(loop, *args, **kwargs)
    return {
        "patched": patched,
        "counters": {name: value - before[name] for name, value in count().items()},
    }


@contextmanager
def named(case: str) -> Iterator[None]:
    """Make an exception name the case in which it was raised."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error


def seen(model: nn.Module, loss: torch.Tensor | None = None, **more: Any) -> Record:
    """Return copies of the loss, of every gradient and of every parameter."""
    named = dict(model.named_parameters())
    return {
        "loss": None if loss is None else loss.detach().clone(),
        "grad": {n: None if p.grad is None else p.grad.detach().clone() for n, p in named.items()},
        "param": {n: p.detach().clone() for n, p in named.items()},
        **more,
    }


def record_steps(
    model: nn.Module,
    losses: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    set_to_none: bool = True,
) -> list[Record]:
    """Run the backward of each loss, record it, step, and drop or zero the gradients.

    A loss is computed when its turn comes, because ``losses`` may be a generator.
    """
    records = []
    for loss in losses:
        loss.backward()
        records.append(seen(model, loss))
        # This frees the graph before the next forward.
        del loss
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=set_to_none)
    return records


def stock_and_patched(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return the results of a function in stock PyTorch, and with the feature."""
    stock = function(*args)
    dist.barrier()
    with ovpatch.applied("ddp"):
        return stock, function(*args)


def is_patched() -> bool:
    """Return whether a model that is wrapped now gets the patched reducer.

    Loops that stock PyTorch cannot run use this to leave a part out in the stock arm.
    """
    from ovpatch_plugins.ddp.reducer_stub import ReducerStub

    return isinstance(DistributedDataParallel(nn.Linear(1, 1).to(device())).reducer, ReducerStub)


def device() -> torch.device:
    """Return the device on which this rank trains: its own GPU with NCCL, otherwise the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def data(step: int, *shape: int, micro: int = 0) -> torch.Tensor:
    """Return random input that differs by step, microbatch and rank and is the same in both arms."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(device())


def _counters() -> dict[str, int]:
    from ovpatch_plugins.ddp.ddp_report import COUNTERS
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS as SHARDED

    return COUNTERS.as_dict() | SHARDED.as_dict()
