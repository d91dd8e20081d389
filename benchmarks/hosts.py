"""A step that is bound by the links between hosts: stock DDP, ``ddp`` and ``dist_optimizer``, in one run.

    python -m benchmarks.hosts --json benchmarks/results/hosts.jsonl

It needs root on a Linux machine and no GPU: hosts are network namespaces, and ``tc`` limits their links
(``tests/support/hosts.py``).

Few cores cannot compute for eight ranks, so each layer waits for the time that a device
would compute, and makes gradients without computing them. Parameters, buckets, optimizer and traffic are real.

Each layout of hosts and ranks is a job in which the arms alternate. A row has the step of each arm, and its
communication alone: the same step if layers take no time. The compute alone is the same step without any reduction.
The counters of the links give the bytes that a host sends in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks.runs import described
from ovpatch.insight.bench import scaling
from tests.support.hosts import hosts, read_sent_bytes, reason_to_skip

_SHARDED: Final = ("ddp", "dist_optimizer")
_FLAT: Final = {"ddp": {"hierarchical": "off"}}
_SMALL: Final = {"min_param_numel": 8}

# The features of each arm, and their options. Those before the last two are in the tables.
ARMS: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "stock": ((), {}),
    "ddp": (("ddp",), {}),
    "dist_optimizer": (_SHARDED, {"dist_optimizer": _SMALL}),
    "ddp, flat": (("ddp",), _FLAT),
    "dist_optimizer, world": (
        _SHARDED,
        {**_FLAT, "dist_optimizer": {**_SMALL, "shard_over": "world"}},
    ),
}
_FLAT_ARMS: Final = ("ddp, flat", "dist_optimizer, world")
COMPUTE: Final = "compute"
LAYOUTS: Final = ((2, 1), (2, 2), (4, 1), (4, 2))
_MICROBATCHES: Final = (1, 8)
# An MLP of equal layers, so that buckets become ready evenly over the backward.
_WIDTH: Final = 1024
_LAYERS: Final = 6
_BUCKET_MB: Final = 4


class _Compute(torch.autograd.Function):
    """A layer on a device: it takes a time, and its gradients come from nowhere."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, layer: Layer) -> Tensor:
        """Take a third of the layer's time."""
        ctx.layer = layer
        time.sleep(layer.seconds / 3)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Take the rest of the layer's time."""
        time.sleep(ctx.layer.seconds * 2 / 3)
        return grad, *ctx.layer.grads, None


class Layer(nn.Linear):
    """A linear layer that takes ``seconds`` for forward and backward."""

    def __init__(self) -> None:
        super().__init__(_WIDTH, _WIDTH)
        self.seconds = 0.0
        # A fresh tensor for each backward would cost the host more than the rest of the step.
        self.grads = [torch.full_like(param, 1e-3) for param in (self.weight, self.bias)]

    def forward(self, given: Tensor) -> Tensor:
        """Wait for the forward."""
        result: Tensor = _Compute.apply(given, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result


class Trainer:
    """The model of one arm, and its training steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._layers = [Layer() for _ in range(_LAYERS)]
        self.model = DistributedDataParallel(nn.Sequential(*self._layers), bucket_cap_mb=_BUCKET_MB)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._given = torch.ones(1, 1, requires_grad=True)

    def step(self, seconds: float, microbatches: int, *, reduces: bool = True) -> None:
        """Train for ``seconds`` of compute in ``microbatches``; without ``reduces`` nothing is communicated."""
        for layer in self._layers:
            layer.seconds = seconds / microbatches / len(self._layers)
        for micro in range(microbatches):
            is_quiet = not reduces or micro < microbatches - 1
            with self.model.no_sync() if is_quiet else contextlib.nullcontext():
                self.model(self._given).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def bucket_bytes(self) -> list[int]:
        """Return the sizes of the buckets of stock DDP, in the order of their reductions."""
        logged = self.model._get_ddp_logging_data()
        return [int(size) for size in logged["rebuilt_bucket_sizes"].split(",")]


def clock(step: Callable[[], None], count: int) -> dict[str, Any]:
    """Return the times of steps of the slowest rank in ms, their median, and the bytes of a step over this host's link.

    Steps follow each other without a barrier, as in training, because gathers overlap the next forward. The last one
    ends after a barrier. One step of about fifteen takes 70 to 150 ms longer, with any arm, so no mean is taken.
    """
    dist.barrier()
    before, times = read_sent_bytes(), [time.perf_counter()]
    for index in range(count):
        step()
        if index == count - 1:
            dist.barrier()
        times.append(time.perf_counter())
    spent = torch.tensor(times, dtype=torch.float64).diff() * 1e3
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return {
        "ms": statistics.median(spent.tolist()),
        "step_ms": spent.tolist(),
        "bytes": (read_sent_bytes() - before) / count,
    }


def measure_arm(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run one arm once, for each number of microbatches."""
    features, options = ARMS.get(name, ((), {}))
    applied = ovpatch.applied(*features, options=options) if features else contextlib.nullcontext()
    with applied:
        found = _measure_trainer(name, args)
        # State of a model that lives longer would be fetched from peers when the feature is turned off.
        gc.collect()
        dist.barrier()
    return {"arm": name, **found}


def _measure_trainer(name: str, args: dict[str, Any]) -> dict[str, Any]:
    trainer = Trainer()
    reduces = name != COMPUTE

    def run(seconds: float, microbatches: int) -> dict[str, Any]:
        return clock(lambda: trainer.step(seconds, microbatches, reduces=reduces), args["steps"])

    # The first reducing steps build the buckets and decide to shard.
    clock(lambda: trainer.step(0.0, 1), args["warmup"])
    found: dict[str, Any] = {"alone": run(0.0, 1)}
    for microbatches in _MICROBATCHES:
        found[str(microbatches)] = run(args["compute"], microbatches)
    if name == COMPUTE:
        found["buckets"] = trainer.bucket_bytes()
    return found


def measure_links(per_host: int) -> dict[str, float]:
    """Return the bytes per second of rings within a host and across hosts, and the ms of the least all-reduce.

    In an all-reduce a ring of n ranks sends ``2 (n - 1) / n`` times the bytes of the tensor over each of its links. An
    all-to-all and an all-gather, by which optimizers are sharded, together send as much.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    rings = {
        "within": [range(first, first + per_host) for first in range(0, world, per_host)],
        "across": [range(place, world, per_host) for place in range(per_host)],
    }
    found = {}
    for name, rings_of_ranks in rings.items():
        groups = [dist.new_group(list(ranks)) for ranks in rings_of_ranks]
        # One ring has a link for itself.
        used = groups if name == "within" else groups[:1]
        size = len(rings_of_ranks[0])
        tensors = [torch.zeros(16), torch.zeros(1 << 20)]
        shards = list(tensors[1].clone().chunk(size))

        def reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
            dist.all_reduce(tensor, group=group)

        def exchange(
            tensor: Tensor, group: dist.ProcessGroup, parts: list[Tensor] = shards
        ) -> None:
            dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)
            dist.all_gather(parts, tensor[: len(parts[0])], group=group)

        small, large, exchanged = (
            _time_collective(collective, tensor, used)
            for collective, tensor in (
                (reduce, tensors[0]),
                (reduce, tensors[1]),
                (exchange, tensors[1]),
            )
        )
        if size > 1:
            part = (size - 1) / size * tensors[1].nbytes
            found[f"{name}_ms"] = small
            found[f"{name}_bytes_per_s"] = 2 * part / large * 1e3
            found[f"{name}_shard_bytes_per_s"] = 2 * part / exchanged * 1e3
    # A rank outside of the ring across hosts measures nothing, so rank 0 counts.
    assert rank or "across_ms" in found
    return found


def _time_collective(
    collective: Callable[[Tensor, dist.ProcessGroup], None],
    tensor: Tensor,
    groups: list[dist.ProcessGroup],
) -> float:
    """Return the median time of a collective in ms."""
    spent = []
    for _ in range(7):
        dist.barrier()
        begin = time.perf_counter()
        for group in groups:
            if dist.get_rank(group) >= 0:
                collective(tensor, group)
        spent.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(spent)


def measure_all(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all arms alternately in one job; the main function of a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rows = [{"arm": "links", **measure_links(args["per_host"])}]
    for round_ in range(args["rounds"]):
        names = [COMPUTE, *args["arms"]]
        for name in names if round_ % 2 == 0 else reversed(names):
            rows.append({"round": round_, **measure_arm(name, args)})
    return rows


def summarize(
    layout: tuple[int, int], microbatches: int, by_rank: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return one row of the result: medians over rounds."""
    links, *rows = by_rank[0]
    by_rank = [rank[1:] for rank in by_rank]
    per_host = layout[1]

    def median(arm: str, kind: str) -> float:
        return statistics.median(row[kind]["ms"] for row in rows if row["arm"] == arm)

    compute = median(COMPUTE, str(microbatches))
    arms = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        if arm == COMPUTE:
            continue
        clocked = [row[str(microbatches)] for row in rows if row["arm"] == arm]
        rounds = [row["ms"] for row in clocked]
        step, alone = statistics.median(rounds), median(arm, "alone")
        # Each host counts its own link; the busiest one is the bound.
        sent = max(
            statistics.median(row[str(microbatches)]["bytes"] for row in host if row["arm"] == arm)
            for host in by_rank[::per_host]
        )
        arms[arm] = {
            "ms": round(step, 1),
            "round_ms": [round(ms, 1) for ms in rounds],
            "step_ms": [[round(ms, 1) for ms in row["step_ms"]] for row in clocked],
            "ratio": round(step / median("stock", str(microbatches)), 3),
            "communication_ms": round(alone, 1),
            "link_bytes": round(sent),
            "hidden": round(min(1.0, max(0.0, (compute + alone - step) / alone)), 3),
        }
    return {
        "hosts": layout[0],
        "per_host": per_host,
        "microbatches": microbatches,
        "buckets": next(row["buckets"] for row in rows if row["arm"] == COMPUTE),
        "compute_ms": round(compute, 1),
        # The host's own work: hooks, gradients that are made and added, the optimizer.
        "host_ms": round(median(COMPUTE, "alone"), 1),
        "links": {name: round(value, 1) for name, value in links.items() if name != "arm"},
        "arms": arms,
    }


def predict_row(row: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """Return the step of each arm in ms as ``ovpatch bench --what-if`` predicts it."""
    hosts_, per_host, links = row["hosts"], row["per_host"], row["links"]
    within, across = (
        scaling.Ring(
            rate,
            links[f"{name}_ms"] / (2 * (size - 1)),
            # Not all runs measured it.
            min(1.0, links.get(f"{name}_shard_bytes_per_s", rate) / rate),
        )
        if (rate := links.get(f"{name}_bytes_per_s"))
        else None
        for name, size in (("within", per_host), ("across", hosts_))
    )
    measured = scaling.Layout(hosts_, per_host, within, across)
    question = scaling.parse_question(f"hosts={hosts_},gpus={per_host},link={settings['rate']}")
    backward_ms = settings["compute"] * 1e3 * 2 / 3 / row["microbatches"]
    facts = scaling.StepFacts(
        row["compute_ms"], backward_ms / 2, backward_ms, tuple(row["buckets"]), is_gloo=True
    )
    layout = scaling.resolve(question, measured)
    return {arm: scaling.predict(arm, facts, layout).step_ms for arm in scaling.ARMS}


def pool_rows(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the rows of all runs with the settings; the runs of one layout are pooled to medians over all rounds."""
    groups: dict[tuple[int, ...], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in results:
        for row in run["rows"]:
            key = (row["hosts"], row["per_host"], row["microbatches"])
            groups.setdefault(key, []).append((row, run["settings"]))
    pooled = []
    for _, runs in sorted(groups.items()):
        rows = [row for row, _ in runs]
        compute_ms = statistics.median(row["compute_ms"] for row in rows)
        links = {
            name: statistics.median(row["links"][name] for row in rows) for name in rows[0]["links"]
        }
        arms: dict[str, dict[str, Any]] = {}
        for arm in rows[0]["arms"]:
            found = [row["arms"][arm] for row in rows]
            round_ms = [ms for row in found for ms in row["round_ms"]]
            step = statistics.median(round_ms)
            alone = statistics.median(row["communication_ms"] for row in found)
            arms[arm] = {
                "ms": step,
                "round_ms": round_ms,
                "ratio": step / arms.get("stock", {"ms": step})["ms"],
                "communication_ms": alone,
                "link_bytes": statistics.median(row["link_bytes"] for row in found),
                "hidden": min(1.0, max(0.0, (compute_ms + alone - step) / alone)),
            }
        merged = {**rows[0], "compute_ms": compute_ms, "links": links, "arms": arms}
        pooled.append((merged, runs[0][1]))
    return pooled


def make_table(results: list[dict[str, Any]]) -> str:
    """Return the table of all runs: a row for each layout and number of microbatches."""
    header = ["Hosts x ranks", "Microbatches", "Compute", "Communication, stock → `ddp`"]
    header += ["Stock", "`ddp`", "`dist_optimizer`"]
    header += ["Under compute: stock, `ddp`, `dist_optimizer`", "Bytes over a link / gradients"]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |"]
    lines += [
        f"| {' | '.join(_make_cells(row, settings))} |" for row, settings in pool_rows(results)
    ]
    rounds = [len(row["arms"]["stock"]["round_ms"]) for row, _ in pool_rows(results)]
    newest = results[-1]
    return "\n".join(lines) + (
        f"\n\nMilliseconds per step, median of {min(rounds)} to {max(rounds)} alternating rounds, on links of "
        f"{newest['settings']['rate']}; {newest['date']}, torch {newest['torch'].partition('+')[0]}, gloo, "
        f"{newest['settings']['parameters'] * 4 / 1e6:.0f} MB of gradients. In brackets: the ratio to stock "
        "PyTorch, and the error of the model of `ovpatch bench --what-if`. Raw data: "
        "`benchmarks/results/hosts.jsonl`."
    )


def _make_cells(row: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    arms, predicted = row["arms"], predict_row(row, settings)
    nbytes = settings["parameters"] * 4
    steps = {
        arm: f"{arms[arm]['ms']:.0f} ({arms[arm]['ratio']:.2f}x, model {predicted[arm] / arms[arm]['ms'] - 1:+.0%})"
        for arm in scaling.ARMS
    }
    steps["stock"] = steps["stock"].replace("1.00x, ", "")
    alone = " → ".join(f"{arms[arm]['communication_ms']:.0f}" for arm in ("stock", "ddp"))
    return [
        f"{row['hosts']} x {row['per_host']}",
        str(row["microbatches"]),
        f"{row['compute_ms']:.0f}",
        alone,
        *steps.values(),
        ", ".join(f"{arms[arm]['hidden']:.0%}" for arm in scaling.ARMS),
        ", ".join(f"{arms[arm]['link_bytes'] / nbytes:.2f}" for arm in scaling.ARMS),
    ]


def run_layout(layout: tuple[int, int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all arms on hosts of one layout; yield a row for each number of microbatches."""
    given = {name: getattr(args, name) for name in ("rounds", "steps", "warmup", "compute", "arms")}
    given["per_host"] = layout[1]
    if layout[1] == 1:
        # Hosts of one rank have nothing to reduce within.
        given["arms"] = [arm for arm in args.arms if arm not in _FLAT_ARMS]
    with (
        hosts(layout[0], rate=args.rate) as cluster,
        cluster.ranks(layout[1], measure_all, given) as job,
    ):
        by_rank = job.results(timeout=args.timeout)
    if bad := [result for result in by_rank if not isinstance(result, list)]:
        raise RuntimeError(f"a rank of {layout} failed: {bad[0]}")
    for microbatches in _MICROBATCHES:
        yield summarize(layout, microbatches, by_rank)


def main() -> None:
    """Run all layouts, print the rows, and append the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of each link, in both directions")
    parser.add_argument("--layouts", nargs="*", default=[f"{h}x{g}" for h, g in LAYOUTS])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument(
        "--compute", type=float, default=0.6, help="seconds of forward and backward in a step"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of a layout")
    parser.add_argument(
        "--json", type=Path, help="append the result to this file, one JSON object a line"
    )
    args = parser.parse_args()
    if reason := reason_to_skip():
        raise SystemExit(reason)
    found = []
    for text in args.layouts:
        count, per_host = map(int, text.split("x"))
        for row in run_layout((count, per_host), args):
            found.append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        parameters = _LAYERS * (_WIDTH + 1) * _WIDTH
        world = max(row["hosts"] * row["per_host"] for row in found)
        run = described("hosts", {**settings, "parameters": parameters}, world=world)
        with args.json.open("a") as file:
            file.write(json.dumps({**run, "rows": found}) + "\n")


if __name__ == "__main__":
    main()
