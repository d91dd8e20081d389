"""Runs a training loop twice in one worker, stock and patched, and records what a user could see."""

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

Record = dict[str, Any]
Loop = Callable[..., list[Record]]
Cases = Mapping[str, Mapping[str, Any]]


def reduced_in_place(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Have a loop's small gradients reduced in their own memory, as large ones are, and not in a flat tensor.

    The loop takes ``in_place=False`` besides its own arguments, which leaves them in the flat tensor.
    """

    @functools.wraps(loop)
    def run(*args: Any, in_place: bool = True, **kwargs: Any) -> Any:
        from ovpatch.overlap.data_parallel.grad_bucket import GradBucket

        # Not the module's constant: a module that is imported meanwhile would keep this value, in one rank's process.
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
        loop: Called with ``args`` and ``kwargs``.
        options: Of ``ddp``.
        apply: Turns other features on.
        counters: Returns their counters.

    Returns:
        ``stock`` and ``patched``: what the loop returned; ``counters``: what the features did in the patched arm.
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
    """Do what :func:`both` does for every case, under one ``apply()``: that takes longer than a short loop.

    Args:
        loop: Called with the keyword arguments of each case.
        cases: These, by the name of the case.
        options: As for :func:`both`.
        apply: Likewise.
        counters: Likewise.
        again: Around a further stock run, ``reordered``.
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
            gc.collect()  # the next case shall not meet this one's model
    return results


def table(**axes: Iterable[Any]) -> Cases:
    """Return the cases of all combinations, named by their values: ``table(cap=[1, 25], how=["a"])``."""
    rows = ([*zip(axes, values, strict=True)] for values in itertools.product(*axes.values()))
    return {
        ", ".join(f"{key} {getattr(one, '__name__', one)}" for key, one in row): dict(row)
        for row in rows
    }


def seeded(loop: Loop, *args: Any, **kwargs: Any) -> list[Record]:
    torch.manual_seed(0)
    return loop(*args, **kwargs)


def counted(
    loop: Loop, *args: Any, counters: Callable[[], dict[str, int]] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Return what the loop returns, and what the features did meanwhile."""
    count = counters or _counters
    before = count()
    patched = seeded(loop, *args, **kwargs)
    return {
        "patched": patched,
        "counters": {name: value - before[name] for name, value in count().items()},
    }


@contextmanager
def named(case: str) -> Iterator[None]:
    """Have an exception name the case that it is of."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error


def seen(model: nn.Module, loss: torch.Tensor | None = None, **more: Any) -> Record:
    """Record the loss, every gradient and every parameter as they are now."""
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
    """Run the backward of each loss, which is computed in its turn; record it, step, and drop or zero the gradients."""
    records = []
    for loss in losses:
        loss.backward()
        records.append(seen(model, loss))
        del loss  # and its graph, before the next forward
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=set_to_none)
    return records


def stock_and_patched(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return what a function returns under stock, and with the feature."""
    stock = function(*args)
    dist.barrier()
    with ovpatch.applied("ddp"):
        return stock, function(*args)


def is_patched() -> bool:
    """Return whether models that are wrapped now get our reducer, for loops that stock cannot run as they are."""
    from ovpatch_plugins.ddp.reducer_stub import ReducerStub

    return isinstance(DistributedDataParallel(nn.Linear(1, 1).to(device())).reducer, ReducerStub)


def device() -> torch.device:
    """Return where this rank trains: its own GPU under NCCL, otherwise the CPU."""
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
