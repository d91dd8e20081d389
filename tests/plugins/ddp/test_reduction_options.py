"""The effect of each option on the reduction, and results that the option must not change."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from tests.plugins.ddp.arms import Record, both, data, record_steps, seen, table
from tests.plugins.ddp.checks import check, check_cases
from tests.support.equality import compare

WORLDS = [2, 3]
TINY = 0.0001
LOW_PRECISION_DTYPES = [torch.float16, torch.bfloat16]


class Stack(nn.Module):
    """Three numbered layers between two layers without a number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 8, dtype=dtype))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x.to(self.embed.weight.dtype))
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def loop(ddp: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> list[Record]:
    model = Stack(dtype)
    wrapped = DDP(model, **(ddp or {}))
    losses = (wrapped(data(step, 4, 6)).float().square().mean() for step in range(4))
    return record_steps(model, losses, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


OPTIONS = [
    {"overlap_grad_reduce": False},
    {"bucket_granularity": "layer"},
    {"bucket_granularity": "module"},
    {"average_in_collective": False},
    # The gradients are already in fp32.
    {"grad_reduce_in_fp32": True},
    {"bucket_cap_mb": TINY},
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_that_change_no_result(ranks, world, options):
    ddp = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    cases = table(ddp=ddp if world == 2 else [ddp[OPTIONS.index(options) % len(ddp)]])
    check_cases(ranks(world), loop, cases, options=options, backwards=4, bitwise=False)


def test_without_overlap_no_collective_starts_during_the_backward(ranks):
    ddp = {"bucket_cap_mb": TINY}
    for overlap in (True, False):
        for result in ranks(2)(both, loop, ddp, options={"overlap_grad_reduce": overlap}):
            # The first backward finds the order, and reduces one bucket.
            assert result["counters"]["collectives"] == 1 + 3 * 8
            # The last bucket of a backward starts with its last gradient, so no gradient hides it.
            early = result["counters"]["collectives_in_backward"]
            assert early == (3 * 7 if overlap else 0)


def contents(granularity: str) -> dict[str, list[list[str]]]:
    with ovpatch.applied("ddp", options={"ddp": {"bucket_granularity": granularity}}):
        wrapped = DDP(Stack(), bucket_cap_mb=TINY)
        found = {}
        for step in range(3):
            reducer = wrapped.reducer.grad_reducer
            names, buckets = reducer.names, reducer.sync.buckets
            found[f"step {step}"] = [[names[i] for i in bucket.indices] for bucket in buckets]
            wrapped(data(step, 4, 6)).square().mean().backward()
            wrapped.zero_grad()
        return found


def test_a_bucket_per_layer(ranks):
    for found in ranks(2)(contents, "layer"):
        layers = [
            {name.split(".")[0] if "layers" not in name else name[:8] for name in b}
            for b in found["step 2"]
        ]
        assert layers == [{"head"}, {"layers.2"}, {"layers.1"}, {"layers.0"}, {"embed"}]
        assert [len(bucket) for bucket in found["step 2"]] == [2, 4, 4, 4, 2]


def test_one_bucket_for_the_module_whatever_its_capacity(ranks):
    for found in ranks(2)(contents, "module"):
        assert [len(bucket) for bucket in found["step 0"]] == [16]
        assert [len(bucket) for bucket in found["step 2"]] == [16]
    for found in ranks(2)(contents, "size"):
        assert len(found["step 2"]) > 5


def averaged_in_fp32(dtype: torch.dtype, ddp: dict[str, Any]) -> dict[str, list[bool]]:
    """Take steps from the same weights; return for each gradient whether it is the exact average, rounded once."""
    local, stock = Stack(dtype), DDP(Stack(dtype), **ddp)
    right: dict[str, list[bool]] = {"ours": [], "stock": []}
    with ovpatch.applied("ddp", options={"ddp": {"grad_reduce_in_fp32": True}}):
        ours = DDP(Stack(dtype), **ddp)
        for step in range(4):
            grads = []
            for module in (local, stock, ours):
                torch.manual_seed(step)
                for param in module.parameters():
                    param.data.normal_()
                module.zero_grad()
                module(data(step, 4, 6)).float().square().mean().backward()
                grads.append([param.grad for param in module.parameters()])
            for mine, *averages in zip(*grads, strict=True):
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                for name, average in zip(("stock", "ours"), averages, strict=True):
                    right[name].append(is_rounded_once(average, torch.stack(parts).double()))
    return right


def is_rounded_once(average: torch.Tensor, parts: torch.Tensor) -> bool:
    exact = parts.mean(0)
    # If the exact average is half-way between two values of the dtype, an error of fp32 may decide the rounding.
    slack = parts.abs().mean(0) * 2.0**-22 if len(parts) > 2 else 0.0
    least, most = (exact - slack).to(average.dtype), (exact + slack).to(average.dtype)
    return bool(((least <= average) & (average <= most)).all())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize(
    "ddp", [{}, {"find_unused_parameters": True, "bucket_cap_mb": TINY}], ids=str
)
def test_low_precision_gradients_are_averaged_in_fp32_and_rounded_once(ranks, world, dtype, ddp):
    for right in ranks(world)(averaged_in_fp32, dtype, ddp):
        assert all(right["ours"])
        # On two ranks stock PyTorch rounds only once as well, because a division by 2 is exact.
        if world == 3:
            assert not all(right["stock"])


def refusal(options: dict[str, Any]) -> str:
    with (
        ovpatch.applied("ddp", options={"ddp": options}),
        pytest.raises(ValueError, match="ovpatch") as caught,
    ):
        DDP(Stack())
    return str(caught.value)


@pytest.mark.parametrize("options", [{"average_in_collective": True}, {"max_ctas": 4}], ids=str)
def test_options_that_gloo_does_not_have_are_refused_with_the_remedy(ranks, options):
    (name,) = options
    for text in ranks(2)(refusal, options):
        assert text.startswith(
            f"ovpatch: option {name}={options[name]} of feature 'ddp' cannot act here: it needs "
            "NCCL"
        )
        assert "and gloo reduces the gradients" in text
        assert (
            f"Set OVPATCH_DDP_{name.upper()}=none on all ranks, or remove the variable and the "
            "argument" in text
        )


def different_values(name: str, value: Any, value_of_rank_0: Any) -> str:
    """Return the error of a wrap with an option that differs on rank 0."""
    options = {name: value if dist.get_rank() else value_of_rank_0, "agreement_timeout_s": 5.0}
    with ovpatch.applied("ddp", options={"ddp": options}), pytest.raises(RuntimeError) as caught:
        DDP(Stack())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "value_of_rank_0"),
    [
        ("overlap_grad_reduce", False, True),
        ("bucket_granularity", "layer", "size"),
        ("grad_reduce_in_fp32", True, False),
        ("bucket_cap_mb", 7, 9),
    ],
)
def test_an_option_that_differs_between_ranks_is_an_error(ranks, name, value, value_of_rank_0):
    for text in ranks(2)(different_values, name, value, value_of_rank_0):
        assert ("bucket sizes in bytes is" if name == "bucket_cap_mb" else f"{name} is") in text
        assert "on rank 1" in text
        assert "same OVPATCH variables" in text


# --- skip_all_reduce_unused_params: buckets that no rank uses are not reduced ---


class Frozen(nn.Module):
    """A model with branches that are never used but take part in the reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.taken, self.left = (
            nn.Linear(8, 8),
            nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.taken(self.stem(x))


def loop_skipping(skip: bool) -> list[Record]:
    model = Frozen()
    wrapped = DDP(
        model, find_unused_parameters=True, bucket_cap_mb=TINY, skip_all_reduce_unused_params=skip
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    records = []
    for step in range(4):
        loss = wrapped(data(step, 4, 8)).square().mean()
        loss.backward()
        records.append(seen(model, loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*records, seen(model)]


@pytest.mark.parametrize("world", [2, 3])
def test_skipped_buckets_are_not_reduced_and_change_nothing(ranks, world):
    unskipped = ranks(world)(both, loop_skipping, False)
    skipped = ranks(world)(both, loop_skipping, True)
    check(unskipped, backwards=4)
    check(skipped, backwards=4)
    for result, reference in zip(skipped, unskipped, strict=True):
        saved = {
            name: count - result["counters"][name] for name, count in reference["counters"].items()
        }
        # The first of the three unused layers shares its bucket with a used layer.
        assert saved["collectives"] == 4 * 2
        assert saved["bytes_reduced"] == 4 * 2 * 8 * 8 * 4
        assert result["patched"][0]["grad"]["left.0.weight"] is None


# --- max_ctas: the first backward that reduces makes the communicator, because all ranks take part in it ---


def train_alone_first(patched: bool) -> tuple[list[Record], list[str]]:
    """Run a forward with gradients enabled on rank 0 alone; then train on all ranks."""
    made: list[str] = []

    def get_budgeted_group(group: dist.ProcessGroup, max_ctas: int | None) -> dist.ProcessGroup:
        del group, max_ctas
        made.append(when)
        return dist.new_group()

    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)))
    records: list[Record] = []
    # gloo has no SM budget, but can have a second communicator.
    with mock.patch("ovpatch_plugins.ddp.reducer_stub.get_budgeted_group", get_budgeted_group):
        when = "alone"
        if dist.get_rank() == 0:
            model(data(0, 5, 6))
        when = "together"
        for number in range(3):
            model.zero_grad()
            model(data(number, 5, 6)).square().mean().backward()
            records.append(
                {
                    "grads": {
                        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
                    }
                }
            )
    assert made == ["together"] * patched
    return records, made


def both_alone_first() -> tuple[list[Record], list[Record]]:
    stock, _ = train_alone_first(patched=False)
    with ovpatch.applied("ddp"):
        patched, _ = train_alone_first(patched=True)
        dist.barrier()
    return stock, patched


def test_a_forward_of_one_rank_alone_makes_no_communicator(ranks):
    for stock, patched in ranks(2)(both_alone_first, timeout=60):
        compare(stock, patched).assert_bitwise()
