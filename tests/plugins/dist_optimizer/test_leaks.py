"""Objects that scripts make repeatedly take no more memory than in stock PyTorch, and leave no object of ovpatch."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer.checks import SMALL
from tests.support.rarely import ALL_CASES

# The number of runs of each loop, and the number of runs after which it must no longer grow.
TIMES, SETTLED = 20, 5

# Bytes that may differ, such as single numbers. A leak of one tensor in each run takes more.
NOISE = 256

# The number of measurements before bytes that another thread still holds count as a leak.
_MAX_MEASUREMENTS = 20

FEATURES: dict[str, tuple[str, ...]] = {
    "stock": (),
    "ddp": ("ddp",),
    "both": ("ddp", "dist_optimizer"),
}


class Script:
    """A model that is trained in stock PyTorch or patched. Each of :data:`LOOPS` does something to it repeatedly."""

    def __init__(self, features: tuple[str, ...]) -> None:
        self.features = features
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        self.group: dist.ProcessGroup | None = None
        self.wrap()
        self.opt = torch.optim.AdamW(self.net.parameters(), 0.01)

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.net, process_group=self.group)

    def loss(self, step: int) -> torch.Tensor:
        return self.model(data(step, 5, 6)).square().mean()

    def train(self, steps: int = 2) -> None:
        for step in range(steps):
            self.opt.zero_grad()
            self.loss(step).backward()
            self.opt.step()

    # --- loops ---

    def plain(self) -> None:
        self.train()

    def wrap_again(self) -> None:
        self.wrap()
        self.train()

    def wrap_and_evaluate(self) -> None:
        self.wrap()
        self.train(1)
        with torch.no_grad():
            self.loss(0)

    def new_optimizer(self) -> None:
        self.opt = torch.optim.AdamW(self.net.parameters(), 0.01)
        self.train()

    def new_model(self) -> None:
        self.net = copy.deepcopy(self.net)
        self.wrap()
        self.new_optimizer()

    def copy_both(self) -> None:
        self.net, self.opt = copy.deepcopy((self.net, self.opt))
        self.wrap()
        self.train()

    def copy_wrapper(self) -> None:
        self.train()
        copy.deepcopy(self.model)(data(0, 5, 6)).sum().backward()

    def evaluate(self) -> None:
        self.train()
        with torch.no_grad():
            self.model.eval()(data(0, 5, 6))
        self.model.train()

    def fail(self) -> None:
        """Fail in a backward on all ranks, and continue."""
        self.train()
        output = self.model(data(0, 5, 6))
        output.register_hook(lambda grad: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            output.sum().backward()
        self.opt.zero_grad()

    def load(self) -> None:
        self.train()
        self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))
        self.net.load_state_dict(self.net.state_dict())

    def save(self) -> None:
        """Save on one rank, as HF Trainer does."""
        self.train()
        if dist.get_rank() == 0:
            torch.save((self.net.state_dict(), self.opt.state_dict()), io.BytesIO())

    def read(self) -> None:
        """Read gradients and state."""
        self.train()
        for param in self.net.parameters():
            param.grad.sum()
            self.opt.state[param]["exp_avg"].sum()

    def accumulate(self) -> None:
        self.opt.zero_grad()
        with self.model.no_sync():
            self.loss(0).backward()
        self.loss(1).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.opt.step()

    def new_group(self) -> None:
        self.group = dist.new_group()
        self.wrap()
        self.train()
        self.opt.state_dict()
        del self.model
        gc.collect()
        dist.destroy_process_group(self.group)
        self.group = None
        self.opt = torch.optim.AdamW(self.net.parameters(), 0.01)

    def apply_again(self) -> None:
        if self.features:
            ovpatch.revert()
            ovpatch.apply(*self.features, options=options_of(self.features))
        self.wrap()
        self.train()

    def compile_again(self) -> None:
        torch._dynamo.reset()
        self.model = torch.compile(DistributedDataParallel(self.net), backend="eager")
        self.train()


_NAMES = [name for name in vars(Script) if not name.startswith("__")]
LOOPS = _NAMES[_NAMES.index("plain") :]


def options_of(features: tuple[str, ...]) -> dict[str, Any]:
    return {"dist_optimizer": SMALL} if "dist_optimizer" in features else {}


@contextlib.contextmanager
def turned_on(features: tuple[str, ...]) -> Iterator[None]:
    with (
        ovpatch.applied(*features, options=options_of(features))
        if features
        else contextlib.nullcontext()
    ):
        yield


Measured = tuple[int, collections.Counter[str]]


def measure(before: Measured | None = None) -> Measured:
    """Return the bytes in all storages, and the number of objects by class of ovpatch.

    While there is more than ``before``, measure again: gloo's thread may hold the tensors of a collective for a moment
    after its end. A leak stays.
    """
    for _ in range(_MAX_MEASUREMENTS):
        found = _measure_once()
        if before is None or (found[0] <= before[0] and found[1] <= before[1]):
            break
        time.sleep(0.05)
    return found


def _measure_once() -> Measured:
    gc.collect()
    sizes: dict[int, int] = {}
    counts: collections.Counter[str] = collections.Counter()
    with torch._C.DisableTorchFunctionSubclass():
        for found in gc.get_objects():
            cls = type(found)
            if str(cls.__module__).startswith("ovpatch"):
                counts[f"{cls.__module__}.{cls.__qualname__}"] += 1
            if issubclass(cls, torch.Tensor):
                for tensor in (found, found.grad if found.is_leaf else None):
                    # Some tensors have no memory.
                    with contextlib.suppress(RuntimeError, NotImplementedError):
                        storage = tensor.untyped_storage() if tensor is not None else None
                        sizes |= {} if storage is None else {storage.data_ptr(): storage.nbytes()}
    return sum(sizes.values()), counts


def compare(before: Measured, after: Measured) -> tuple[int, dict[str, int]]:
    """Return the growth of a loop between two measurements, in bytes and in objects by class."""
    return after[0] - before[0], dict(after[1] - before[1])


def grown(features: tuple[str, ...], loop: str) -> tuple[int, dict[str, int]]:
    """Return the growth of a loop once it has settled, in bytes and in objects by class."""
    with turned_on(features):
        script = Script(features)
        run: Callable[[], None] = getattr(script, loop)
        found = []
        # Each compilation takes most of a second.
        times = TIMES if loop != "compile_again" else SETTLED + 4
        for number in range(times):
            run()
            dist.barrier()
            if number + 1 in (SETTLED, times):
                found.append(measure(*found))
        return compare(*found)


def all_grown(features: str, loops: list[str]) -> dict[str, Any]:
    return {loop: grown(FEATURES[features], loop) for loop in loops}


def test_objects_that_are_made_repeatedly_take_no_more_memory(ranks):
    failures = []
    # With both features, ddp does what it does alone.
    alone = {"ddp": LOOPS[:-1]} if ALL_CASES else {}
    for features, loops in {**alone, "both": LOOPS}.items():
        patched = ranks(2)(all_grown, features, loops, timeout=200)
        growing = sorted({name for found in patched for name in found if found[name][0] > NOISE})
        stock = ranks(2)(all_grown, "stock", growing, timeout=200)
        failures += [
            f"{features}, {loop}, rank {rank}: {grown_bytes} bytes; objects: {objects}"
            for rank, by_loop in enumerate(patched)
            for loop, (grown_bytes, objects) in by_loop.items()
            if objects or grown_bytes > stock[rank].get(loop, (0,))[0] + NOISE
        ]
    assert not failures, "\n".join(failures)
