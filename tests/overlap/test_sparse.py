"""Gradients of embeddings made with ``sparse=True``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch.overlap.comm.collectives import AllReduce
from ovpatch.overlap.data_parallel.grad_bucket import SparseBucket


def embedding(*looked_up: int, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    made = nn.Embedding(6, 3, sparse=True, dtype=dtype)
    if looked_up:
        values = torch.arange(3.0 * len(looked_up)).view(-1, 3) + 1
        (made(torch.tensor(looked_up)) * values).sum().backward()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_packed_gradient_is_divided_and_has_each_row_once(dtype):
    made = embedding(4, 1, 4, dtype=dtype)
    bucket = SparseBucket(7, made.weight)
    # Stock PyTorch divides before it adds rows that occur twice, and the bits must be the same.
    expected = (made.weight.grad / 3).to_dense()
    assert bucket.indices == (7,)
    assert bucket.nbytes == 0
    (piece,) = bucket.pack(3)
    assert piece.is_sparse
    assert piece.is_coalesced()
    assert piece._nnz() == 2
    assert torch.equal(piece.to_dense(), expected)
    assert bucket.nbytes == 2 * 8 + 2 * 3 * dtype.itemsize


def test_the_packed_gradient_has_its_own_memory():
    """Check that ``p.grad``, which a hook may read, does not change when the collective writes into the packed one."""
    made = embedding(2, 3)
    made.weight.grad = made.weight.grad.coalesce()
    before = made.weight.grad.to_dense()
    (piece,) = SparseBucket(0, made.weight).pack(1)
    piece._values().zero_()
    assert torch.equal(made.weight.grad.to_dense(), before)


def test_staging_dropping_and_skipping():
    made = embedding(0)
    bucket = SparseBucket(0, made.weight)
    grad, expected = made.weight.grad, made.weight.grad.to_dense() / 2
    bucket.stage_grad(0, 2)
    made.weight.grad = None
    assert torch.equal(bucket.pack(2)[0].to_dense(), expected)
    bucket.unpack(skip=(0,))
    assert made.weight.grad is None
    made.weight.grad = grad
    bucket.pack(2)
    bucket.drop_inputs()
    bucket.unpack()
    assert torch.equal(made.weight.grad.to_dense(), expected * 2)


ROWS = [(1, 2), (2, 3, 2), (0,)]


def summed(lacking: int | None, dense: bool) -> torch.Tensor:
    rank = dist.get_rank()
    made = embedding(*(() if rank == lacking else ROWS[rank]))
    if rank == lacking and dense:
        embedding_of_all = embedding(*ROWS[rank])
        made.weight.grad = embedding_of_all.weight.grad.to_dense()
    bucket = SparseBucket(0, made.weight)
    group = dist.distributed_c10d._get_default_group()
    for work in AllReduce(group, torch.device("cpu"))(bucket.pack(group.size())):
        work.wait()
    bucket.unpack()
    return made.weight.grad.to_dense()


@pytest.mark.parametrize(
    ("lacking", "dense"), [(None, False), (0, False), (2, False), (0, True), (2, True)], ids=str
)
def test_ranks_with_other_rows_or_none_or_a_dense_gradient_get_the_average(ranks, lacking, dense):
    expected = torch.zeros(6, 3)
    for rank, looked_up in enumerate(ROWS):
        for position, row in enumerate(looked_up):
            if rank != lacking or dense:
                expected[row] += torch.arange(3.0) + 1 + 3 * position
    for result in ranks(3)(summed, lacking, dense):
        torch.testing.assert_close(result, expected / 3)
