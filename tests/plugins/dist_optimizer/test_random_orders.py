"""Forwards, backwards and steps in random orders, against averages by hand."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.ddp.arms import data
from tests.plugins.ddp.refusal import Refusal
from tests.plugins.dist_optimizer.checks import SMALL

SEQUENCES = 100 if os.environ.get("ALL_CASES") else 8
# The relative frequency of each operation.
WEIGHTS = {
    "forward": 2,
    "local forward": 2,
    "forward, backward": 4,
    "local forward, backward": 4,
    "backward": 5,
    "backward in a thread": 1,
    "backward that raises": 1,
    "sum's backward": 1,
    "grad": 1,
    "backward without the wrapper": 1,
    "zero": 1,
    "step": 2,
}


class Net(nn.Module):
    """A stem in whose middle a backward may fail, and two heads, one of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2)])

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        h = self.second(torch.tanh(Refusal.apply(self.first(x))))
        return torch.cat([self.heads[i](h) for i in heads], dim=-1)


class ByHand(nn.Module):
    """A wrapper by hand: :meth:`average` averages all gradients that were accumulated since its last call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.used = module, set()
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.used.add)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.module(*args)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def average(self) -> None:
        for param in self.module.parameters():
            if param in self.used:
                # The script may have set the gradient to None since.
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size())
        self.used.clear()


class Trainer:
    """A script that runs random operations. :attr:`armed` is whether the next backward must average gradients."""

    def __init__(self, seed: int, wrap: Callable[[Net], Any], *, partly: bool, reads: bool) -> None:
        torch.manual_seed(seed)
        self.model, self.random = Net(), random.Random(seed)
        self.wrapped = wrap(self.model)
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.pending: list[torch.Tensor] = []
        self.armed, self.count, self.partly, self.reads = False, 0, partly, reads

    def start(self, synchronised: bool, module: Any = None) -> torch.Tensor:
        self.count += 1
        heads = self.random.choice([(0,), (1,), (0, 1)]) if self.partly else (0, 1)
        with contextlib.nullcontext() if synchronised else self.wrapped.no_sync():
            return (module or self.wrapped)(data(self.count, 4, 6), heads).square().mean()

    def end(self, loss: torch.Tensor, *, keep: bool = False, on_thread: bool = False) -> None:
        if on_thread:
            thread = threading.Thread(target=loss.backward, kwargs={"retain_graph": keep})
            thread.start()
            thread.join()
        else:
            loss.backward(retain_graph=keep)
        # A second backward through one forward stays local, as in stock PyTorch.
        if self.armed and isinstance(self.wrapped, ByHand):
            self.wrapped.average()
        self.armed = False

    def take(self, name: str) -> None:
        synchronised, keep = not name.startswith("local"), self.random.random() < 0.5
        if name.endswith("forward, backward"):
            self.armed |= synchronised
            self.end(self.start(synchronised))
        elif name.endswith("forward"):
            self.armed |= synchronised
            self.pending.append(self.start(synchronised))
        elif name == "backward without the wrapper":
            self.end(self.start(True, self.model))
        elif name == "zero":
            self.opt.zero_grad(set_to_none=keep)
        elif name == "step":
            # The graphs of these losses contain the parameters that now change.
            self.pending.clear()
            self.opt.step()
            if keep:
                self.opt.zero_grad()
        elif self.pending:
            self.take_up(name, keep)

    def take_up(self, name: str, keep: bool) -> None:
        loss = self.pending.pop(self.random.randrange(len(self.pending)))
        if name == "grad":
            torch.autograd.grad(
                loss, list(self.model.parameters()), retain_graph=True, allow_unused=True
            )
            self.pending.append(loss)
        elif name == "backward that raises":
            # tests/plugins/ddp/test_failures.py tests failures of backwards that average.
            if not self.armed:
                Refusal.armed = True
                with contextlib.suppress(ValueError):
                    loss.backward()
                Refusal.armed = False
        elif name == "sum's backward" and self.pending:
            self.end(loss + self.pending.pop())
        else:
            self.end(loss, keep=keep, on_thread=name.endswith("thread"))
            if keep:
                self.pending.append(loss)

    def run(self) -> Iterator[tuple[str, list[torch.Tensor | None]]]:
        for name in self.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=14):
            self.take(name)
            params = list(self.model.parameters())
            found = [param.detach().clone() for param in params]
            if self.reads:
                found += [None if param.grad is None else param.grad.clone() for param in params]
            yield name, found


def differing(seeds: range) -> list[str]:
    """Return a message for each sequence that differs from averages by hand, with its operations."""
    found = []
    for seed in seeds:
        partly = seed % 3 == 2
        wrap = functools.partial(
            DistributedDataParallel, find_unused_parameters=partly, bucket_cap_mb=1e-4
        )
        for features, reads in ((("ddp",), True), (("ddp", "dist_optimizer"), False)):
            hand = list(Trainer(seed, ByHand, partly=partly, reads=reads).run())
            with ovpatch.applied(
                *features, options={"dist_optimizer": SMALL} if features[1:] else {}
            ):
                for index, (name, ours) in enumerate(
                    Trainer(seed, wrap, partly=partly, reads=reads).run()
                ):
                    if not same(ours, hand[index][1]):
                        found.append(
                            f"{features}, seed {seed}: differs after {name}: "
                            f"{[done for done, _ in hand[:index]]}"
                        )
                        break
            dist.barrier()
    return found


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def test_any_order_of_forwards_and_backwards_leaves_averages_by_hand(ranks):
    for found in ranks(2)(differing, range(SEQUENCES)):
        assert found == [], "\n".join(found)
