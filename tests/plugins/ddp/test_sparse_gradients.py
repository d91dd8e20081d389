"""Embeddings made with ``sparse=True``."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from tests.plugins.ddp.arms import Record, both, data, table
from tests.plugins.ddp.checks import average_by_hand, check, check_cases
from tests.support.equality import compare

WORLDS = [2, 3]
TINY = 0.0001


class Words(nn.Module):
    """Two sparse tables, one of them pooled, with dense layers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.words = nn.Embedding(20, 6, sparse=True)
        self.bags = nn.EmbeddingBag(20, 6, mode="mean", sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, words: bool = True) -> torch.Tensor:
        index = (x.abs() * 10).long() % 20
        h = self.scale(self.bags(index))
        return self.head(h + self.words(index).sum(1)) if words else self.head(h)


def seen(model: nn.Module) -> Record:
    """Return gradients as dense tensors, the rows of sparse gradients, and parameters."""
    grads = {n: p.grad for n, p in model.named_parameters()}
    sparse = {
        n: None
        if g is None or not g.is_sparse
        else sorted(set(g.coalesce().indices().flatten().tolist()))
        for n, g in grads.items()
    }
    return {
        "grad": {n: None if g is None else g.detach().to_dense().clone() for n, g in grads.items()},
        "rows": sparse,
        "param": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def optimizers(model: Words, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), 0.1)]
    tables = [model.words.weight, model.bags.weight]
    return [
        torch.optim.SparseAdam(tables, 0.01),
        torch.optim.AdamW([*model.scale.parameters(), *model.head.parameters()], 0.01),
    ]


def loop(
    kind: str, ddp: dict[str, Any], *, micro: int = 1, zero: bool = True, seed: int = 0
) -> list[Record]:
    model = Words()
    wrapped = DDP(model, **ddp)
    chosen = optimizers(model, kind)
    records = []
    for step in range(4):
        for m in range(micro):
            with wrapped.no_sync() if m < micro - 1 else contextlib.nullcontext():
                wrapped(data(seed + step, 3, 4, micro=m)).square().mean().backward()
        records.append(seen(model))
        for optimizer in chosen:
            optimizer.step()
            if zero:
                optimizer.zero_grad()
    return [*records, seen(model)]


@pytest.mark.parametrize("world", WORLDS)
def test_sparse_tables_with_dense_layers_and_accumulation(ranks, world):
    ddp = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": TINY}]
    cases = table(kind=["sgd", "adam"], ddp=ddp)
    cases |= table(kind=["sgd"], ddp=[{}], micro=[1, 3], zero=[True, False])
    for result in check_cases(ranks(world), loop, cases, backwards=4):
        for case in result.values():
            rows = case["patched"][0]["rows"]
            assert rows["head.weight"] is None
            assert 0 < len(rows["words.weight"]) < 20, "the gradients are still sparse"


@pytest.mark.parametrize(
    "option",
    [
        {"bucket_granularity": "layer"},
        {"bucket_granularity": "module"},
        {"overlap_grad_reduce": False},
    ],
    ids=str,
)
def test_options_leave_sparse_gradients_alone(ranks, option):
    check(ranks(2)(both, loop, "adam", {}, options=option), backwards=4)


def unused(users: list[int], before: bool) -> dict[str, Any]:
    """Look words up on some ranks only. Stock PyTorch raises, so the average is computed by hand."""
    mine = dist.get_rank() in users
    torch.manual_seed(0)
    with ovpatch.applied("ddp"):
        model = Words()
        reference = Words()
        reference.load_state_dict(model.state_dict())
        wrapped = DDP(model, find_unused_parameters=True)
        records: dict[str, list[Any]] = {"ours": [], "by hand": []}
        for step in range(3):
            takes_part = mine or (before and step == 0)
            wrapped(data(step, 3, 4), words=takes_part).square().mean().backward()
            reference(data(step, 3, 4), words=takes_part).square().mean().backward()
            if users or (before and step == 0):
                for param in reference.parameters():
                    dense = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
                    param.grad = dense
            average_by_hand(reference)
            for name, module in {"ours": model, "by hand": reference}.items():
                grads = {n: p.grad for n, p in module.named_parameters()}
                records[name].append(
                    {n: None if g is None else g.to_dense().clone() for n, g in grads.items()}
                )
                module.zero_grad()
        return records


@pytest.mark.parametrize("users", [[0], [1], [0, 2]], ids=str)
def test_a_table_that_only_some_ranks_use_gets_their_average(ranks, users):
    for before in (True, False):
        for result in ranks(3)(unused, users, before):
            compare(result["by hand"], result["ours"]).assert_equal()


def unused_everywhere() -> list[Record]:
    with ovpatch.applied("ddp"):
        model = Words()
        wrapped = DDP(model, find_unused_parameters=True)
        records = []
        for step in range(3):
            wrapped(data(step, 3, 4), words=step == 0).square().mean().backward()
            records.append(seen(model))
            model.zero_grad()
        return records


def test_a_table_that_no_rank_uses_gets_no_gradient(ranks):
    for records in ranks(2)(unused_everywhere):
        assert [record["grad"]["words.weight"] is None for record in records] == [False, True, True]
        assert all(record["grad"]["bags.weight"] is not None for record in records)
