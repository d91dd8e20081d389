"""The assignment of parameters to buckets."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel import bucket_assignment
from ovpatch.overlap.data_parallel.bucket_assignment import BucketAssignment, get_layer
from ovpatch.overlap.data_parallel.grad_bucket import Bucket, GradBucket, SparseBucket
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def layout(
    dtypes: list[torch.dtype], *, limits: tuple[int, ...] = (sys.maxsize,), **more: object
) -> BucketAssignment:
    given = [nn.Parameter(torch.zeros(100, dtype=dtype)) for dtype in dtypes]
    return BucketAssignment(
        given, more.pop("names", [f"p{i}.weight" for i in range(len(dtypes))]), limits, **more
    )


def list_indices(buckets: list[Bucket]) -> list[list[int]]:
    """Return the indices of each bucket, whose parameters must have one dtype."""
    for bucket in buckets:
        assert len({param.dtype for param in bucket.params}) == 1
    return [list(bucket.indices) for bucket in buckets]


def test_without_an_order_there_is_one_bucket_per_dtype():
    made = layout([F32, F64, F32] * 3).assign_initial(bucketed=False)
    assert sorted(list_indices(made)) == [[0, 2, 3, 5, 6, 8], [1, 4, 7]]


def test_buckets_by_size_in_reverse_registration_order():
    assert list_indices(layout([F32] * 5, limits=(400, 800)).assign_initial(bucketed=True)) == [
        [3, 4],
        [1, 2],
        [0],
    ]
    made = layout([F32, F64, F32] * 3, limits=(400,)).assign_initial(bucketed=True)
    assert sorted(i for group in list_indices(made) for i in group) == list(range(9))
    assert max(bucket.nbytes for bucket in made) <= 800


def test_buckets_by_size_along_the_order_of_arrival():
    order = [8, 0, 7, 1, 6, 2, 5, 3, 4]
    unlimited = layout([F32, F64, F32] * 3)
    assert sorted(list_indices(unlimited.assign_along(order))) == [[7, 1, 4], [8, 0, 6, 2, 5, 3]]
    assert list_indices(layout([F32] * 9, limits=(400, 800)).assign_along(order)) == [
        [8],
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]


def test_one_bucket_per_module_and_dtype():
    made = layout([F32, F64, F32] * 3, limits=(1,), granularity="module")
    for buckets in (
        made.assign_initial(bucketed=True),
        made.assign_initial(bucketed=False),
        made.assign_along(list(range(9))),
    ):
        assert sorted(sorted(group) for group in list_indices(buckets)) == [
            [0, 2, 3, 5, 6, 8],
            [1, 4, 7],
        ]


def test_one_bucket_per_layer_at_the_place_where_its_last_gradient_comes():
    names = [
        "embed.weight",
        "h.0.a.weight",
        "h.0.b.weight",
        "h.1.a.weight",
        "h.1.b.weight",
        "head.weight",
    ]
    made = layout([F32] * 6, limits=(1,), granularity="layer", names=names)
    assert list_indices(made.assign_initial(bucketed=True)) == [[5], [4, 3], [2, 1], [0]]
    assert list_indices(made.assign_along([5, 4, 2, 3, 0, 1])) == [[5], [4, 3], [0], [2, 1]]
    mixed = layout([F32, F32, F64, F32, F32, F32], granularity="layer", names=names)
    assert list_indices(mixed.assign_along([5, 4, 3, 2, 1, 0])) == [[5], [4, 3], [2], [1], [0]]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.3.attn.weight", "transformer.h.3"),
        ("transformer.h.13.mlp.2.weight", "transformer.h.13"),
        ("model.lm_head.weight", "model.lm_head"),
        ("0.weight", "0"),
        ("0.1.weight", "0"),
        ("conv1.weight", "conv1"),
        ("layer1.0.bn2.bias", "layer1.0"),
        ("weights.5", "weights.5"),
        ("weight", ""),
        ("a3b.0x.weight", "a3b.0x"),
    ],
)
def test_the_layer_of_a_parameter(name, layer):
    assert get_layer(name) == layer


@pytest.mark.parametrize("granularity", ["size", "layer", "module"])
def test_a_sparse_gradient_has_its_own_bucket(granularity):
    made = layout(
        [F32] * 4,
        granularity=granularity,
        names=["h.0.a", "h.0.b", "h.0.c", "h.0.d"],
        sparse=[False, True, False, True],
    )
    orders = [
        made.assign_initial(bucketed=True),
        made.assign_initial(bucketed=False),
        made.assign_along([3, 2, 1, 0]),
        made.assign_along(range(4)),
    ]
    for buckets in orders:
        kinds = {tuple(sorted(bucket.indices)): type(bucket) for bucket in buckets}
        assert kinds == {(0, 2): GradBucket, (1,): SparseBucket, (3,): SparseBucket}


@pytest.mark.parametrize("granularity", ["size", "layer", "module"])
def test_only_low_precision_buckets_are_widened(granularity):
    made = layout([F32, F16, BF16, F64, torch.complex64], granularity=granularity, in_fp32=True)
    buckets = {bucket.indices[0]: bucket for bucket in made.assign_along(list(range(5)))}
    assert [buckets[i].dtype for i in range(5)] == [F32, F32, F32, F64, torch.complex64]
    assert buckets[1].nbytes == 400
    narrow = layout([F16, BF16], granularity=granularity).assign_along([0, 1])
    assert {bucket.dtype for bucket in narrow} == {F16, BF16}


def mixed_sizes(
    large: set[int], dtypes: list[torch.dtype], min_small_bytes: int, **more: object
) -> list[list[int]]:
    """Assign parameters of 100 elements, of which some are large and sharded, to buckets of two."""
    sharder = GradSharder()
    sharder.sharded = frozenset(large)
    assignment = layout(dtypes, limits=(dtypes[0].itemsize * 200,), sharder=sharder, **more)
    with mock.patch.object(bucket_assignment, "_MIN_SMALL_BYTES", min_small_bytes):
        return list_indices(assignment.assign_along(range(len(dtypes))))


def test_small_gradients_among_sharded_ones_are_collected_into_larger_buckets():
    assert mixed_sizes({0, 2, 4, 6}, [F32] * 8, min_small_bytes=0) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert mixed_sizes({0, 2, 4, 6}, [F32] * 8, min_small_bytes=sys.maxsize) == [
        [0],
        [2],
        [4],
        [1, 3, 5, 6, 7],
    ]
    assert mixed_sizes({0, 2, 4, 6}, [F32] * 8, min_small_bytes=800) == [
        [0],
        [1, 2, 3],
        [4],
        [5, 6, 7],
    ]
    assert mixed_sizes({0, 6}, [F32] * 8, min_small_bytes=sys.maxsize) == [
        [0],
        [1, 2, 3, 4, 5, 6, 7],
    ], "there are no empty buckets"
    assert mixed_sizes(set(), [F32] * 8, min_small_bytes=sys.maxsize) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ], "the buckets of stock PyTorch"


def test_small_gradients_next_to_large_ones_are_collected_where_each_is_a_message():
    with mock.patch.object(bucket_assignment, "SMALL_NUMEL", 200):
        sizes = [300, 100, 300, 100, 300, 100]
        given = [nn.Parameter(torch.zeros(size)) for size in sizes]
        names = [f"p{i}.weight" for i in range(len(sizes))]
        found = {
            sends_each: list_indices(
                BucketAssignment(given, names, (1600,), sends_each=sends_each).assign_along(
                    range(len(sizes))
                )
            )
            for sends_each in (False, True)
        }
    assert found == {False: [[0, 1], [2, 3], [4, 5]], True: [[0], [2], [1, 3, 4, 5]]}
    many = layout([F32] * 8, limits=(800,), sends_each=True)
    with mock.patch.object(bucket_assignment, "_MIN_MESSAGE_BYTES", 800):
        assert list_indices(many.assign_along(range(8))) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_small_gradients_are_collected_by_kind():
    """Check that small gradients of another dtype and sparse ones have other buckets, and unsharded large ones stay."""
    dtypes = [F32, F32, F64, F32, F32, F64, F32, F32]
    assert mixed_sizes({0, 3, 4, 7}, dtypes, min_small_bytes=0) == [
        [0, 1],
        [2],
        [3, 4],
        [5],
        [6, 7],
    ]
    assert mixed_sizes({0, 3, 4, 7}, dtypes, min_small_bytes=sys.maxsize) == [
        [0],
        [3, 4],
        [2, 5],
        [1, 6, 7],
    ]
    sparse = [i == 1 for i in range(8)]
    found = mixed_sizes({0, 2, 4, 6}, [F32] * 8, min_small_bytes=sys.maxsize, sparse=sparse)
    assert found == [[0, 2], [1], [4], [6], [3, 5, 7]]
    with mock.patch.object(bucket_assignment, "SMALL_NUMEL", 10):
        assert mixed_sizes({0, 2, 4, 6}, [F32] * 8, min_small_bytes=sys.maxsize) == [
            [0, 1],
            [2, 3],
            [4, 5],
            [6, 7],
        ]
