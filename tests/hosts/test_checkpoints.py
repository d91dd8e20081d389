"""Checkpoints that one layout of ranks on hosts writes, and another one reads: ``dist_optimizer`` on four ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.dist_optimizer.checks import params, train_step
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.equality import compare
from tests.support.hosts import fake_hosts
from tests.support.rarely import ALL_CASES

# The host of each rank, and the ranks over which state is sharded; None without ovpatch.
BY_HOST = "2 hosts x 2, by host"
LAYOUTS: dict[str, tuple[tuple[int, ...], str | None]] = {
    BY_HOST: ((0, 0, 1, 1), "host"),
    "2 hosts x 2, world": ((0, 0, 1, 1), "world"),
    "1 host x 4": ((0, 0, 0, 0), "auto"),
    "4 hosts x 1": ((0, 1, 2, 3), "auto"),
    "stock": ((0, 0, 1, 1), None),
}
STEPS = 4

Model = tuple[DistributedDataParallel, torch.optim.Optimizer]


@contextlib.contextmanager
def on_layout(layout: str, *, reordered: bool = False) -> Iterator[Model]:
    """Yield a new model and its optimizer, trained under a layout. All ranks leave together."""
    by_rank, shard_over = LAYOUTS[layout]
    options = {"dist_optimizer": {"min_param_numel": 1, "shard_over": shard_over}}
    features = ovpatch.applied("ddp", "dist_optimizer", options=options)
    # The ranks exchange their hosts once per group.
    group = dist.new_group()
    with fake_hosts(by_rank), features if shard_over else contextlib.nullcontext():
        cap = {"bucket_cap_mb": 1e-4} if reordered else {}
        model = DistributedDataParallel(net(), process_group=group, **cap)
        yield model, torch.optim.AdamW(model.parameters(), lr=0.01)


# --- ways to save and to load ---


def save_on_rank_0(model: Model, folder: Path) -> None:
    if dist.get_rank() == 0:
        states = {"model": model[0].module.state_dict(), "opt": model[1].state_dict()}
        torch.save(states, folder / "states")
    dist.barrier()


def load_on_all_ranks(model: Model, folder: Path) -> None:
    states = torch.load(folder / "states")
    model[0].module.load_state_dict(states["model"])
    model[1].load_state_dict(states["opt"])


def save_functions(model: Model, folder: Path) -> None:
    torch.save(get_state_dict(*model), folder / f"of rank {dist.get_rank()}")
    dist.barrier()


def load_functions(model: Model, folder: Path) -> None:
    # Each rank reads the file of another rank.
    states = torch.load(folder / f"of rank {3 - dist.get_rank()}")
    set_state_dict(*model, model_state_dict=states[0], optim_state_dict=states[1])


def save_distributed(model: Model, folder: Path) -> None:
    dcp.save(dict(zip(("model", "opt"), get_state_dict(*model), strict=True)), checkpoint_id=folder)


def load_distributed(model: Model, folder: Path) -> None:
    states = dict(zip(("model", "opt"), get_state_dict(*model), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(*model, model_state_dict=states["model"], optim_state_dict=states["opt"])


WAYS: dict[str, tuple[Callable[[Model, Path], None], Callable[[Model, Path], None]]] = {
    "rank 0": (save_on_rank_0, load_on_all_ranks),
    "get_state_dict": (save_functions, load_functions),
    "torch.distributed.checkpoint": (save_distributed, load_distributed),
}


# --- the table ---


def copy_values(model: Model) -> list[Any]:
    """Return copies of parameters and state, which reads them."""
    return [params(model[0].module), copy.deepcopy(model[1].state_dict())]


def write(layout: str, root: Path) -> list[Any]:
    """Train and save in each way; return the state that the script sees."""
    with on_layout(layout) as model:
        for step in range(STEPS):
            train_step(*model, step)
        for way, (save, _) in WAYS.items():
            save(model, root / layout / way)
        return copy_values(model)


def read(layout: str, way: str, folder: Path, *, reordered: bool = False) -> tuple[Any, Any]:
    """Load a checkpoint; return the values at first, and after two more steps, the second one sharded."""
    with on_layout(layout, reordered=reordered) as model:
        WAYS[way][1](model, folder)
        first = copy_values(model)
        for step in range(STEPS, STEPS + 3):
            train_step(*model, step)
        return first, copy_values(model)


def read_all(
    root: Path, writers: Iterable[str] = LAYOUTS, readers: Iterable[str] = LAYOUTS
) -> dict[str, dict[str, Any]]:
    """Let each layout write, and each layout read that; all ways take turns."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    ways = itertools.cycle(WAYS)
    found = {}
    for writer in writers:
        for way in WAYS:
            (root / writer / way).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        written = write(writer, root)
        for reader in readers:
            way = next(ways)
            # Layouts that do not shard by host also change in tests of one host.
            if not (ALL_CASES or BY_HOST in (writer, reader)):
                continue
            folder = root / writer / way
            before = COUNTERS.grads_sharded
            first, trained = read(reader, way, folder)
            sharded = COUNTERS.grads_sharded - before
            found[f"{writer} -> {reader}, {way}"] = {
                "written": written,
                "first": first,
                "trained": trained,
                "stock": read("stock", way, folder)[1],
                "reordered": read("stock", way, folder, reordered=True)[1],
                "sharded": sharded,
            }
    return found


def test_a_checkpoint_of_any_layout_is_read_by_any_other_one(ranks, tmp_path):
    check_table(ranks(4)(read_all, tmp_path, timeout=240))


def test_a_checkpoint_by_host_is_read_on_one_host(ranks, tmp_path):
    check_table(ranks(4)(read_all, tmp_path, (BY_HOST,), ("1 host x 4",)))


def check_table(results: list[Any]) -> None:
    """Demand that each layout has read what was written, and computes the same from it."""
    failures = []
    for rank, name in itertools.product(range(4), results[0]):
        case = results[rank][name]
        try:
            compare(case["written"], case["first"]).assert_bitwise()
            compare(case["stock"], case["trained"], reordered=case["reordered"]).assert_equal()
            # The state of all ranks is the same, whoever has written it.
            compare(results[0][name]["trained"], case["trained"]).assert_bitwise()
        except AssertionError as error:
            failures.append(f"{name}, rank {rank}: {error}")
        assert (case["sharded"] > 0) == ("-> stock" not in name), name
    assert not failures, "\n".join([f"{len(failures)} of {4 * len(results[0])}", *failures[:6]])
