"""Collectives of buckets start once each, in one order, when their buckets are full."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.data_parallel.backward_plan import PlanFacts, plan_backward
from ovpatch.overlap.data_parallel.grad_bucket import Bucket, GradBucket
from ovpatch.overlap.data_parallel.grad_sync import GradReadiness, GradSync
from tests.overlap.gradients import backward, params

# The indices of the buckets. Gradients come from the last parameter to the first.
LAYOUT = ((4, 5), (2, 3), (0, 1))


class Setup:
    """Six parameters in three buckets, and a record of the started buckets."""

    def __init__(self, **options: Any) -> None:
        group = dist.distributed_c10d._get_default_group()
        self.world, self.rank = group.size(), group.rank()
        self.params = params(*[(i + 2, 3) for i in range(6)])
        self.buckets: list[Bucket] = [
            GradBucket(part, [self.params[i] for i in part]) for part in LAYOUT
        ]
        self.readiness = GradReadiness(self.params, LAYOUT)
        self.reduction = GradSync(self.buckets, self.readiness, group, feature="test", **options)
        self.launched: list[int] = []
        for number, bucket in enumerate(self.buckets):
            bucket.pack = partial(self._note_and_pack, number, bucket.pack)

    def _note_and_pack(self, number: int, pack: Any, *args: Any, **kwargs: Any) -> Any:
        self.launched.append(number)
        return pack(*args, **kwargs)

    def begin(self) -> None:
        self.readiness.begin(plan_backward(PlanFacts(has_order=True), False))
        self.reduction.begin()

    def arrive(self, *indices: int) -> list[bool]:
        in_time = []
        for index in indices:
            assert self.readiness.count(index)
            in_time.append(self.readiness.bucket_of[index] >= self.reduction.started)
            self.reduction.start_ready_buckets()
        return in_time

    def fill(self) -> list[torch.Tensor]:
        """Give gradients that differ by rank; return the averages over ranks."""
        torch.manual_seed(self.rank)
        averages = []
        for value in backward(self.params):
            dist.all_reduce(value)
            averages.append(value / self.world)
        return averages


def in_order(arrivals: list[int], log: list[list[int]]) -> None:
    setup = Setup()
    for _ in range(2):
        expected = setup.fill()
        setup.begin()
        for index, launched in zip(arrivals, log, strict=True):
            assert setup.arrive(index) == [True]
            assert setup.launched == launched, index
        setup.reduction.start_remaining()
        setup.reduction.wait()
        setup.reduction.write_grads(())
        assert setup.launched == [0, 1, 2]
        torch.testing.assert_close([param.grad for param in setup.params], expected)
        setup.launched.clear()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("arrivals", "log"),
    [
        ([5, 4, 3, 2, 1, 0], [[], [0], [0], [0, 1], [0, 1], [0, 1, 2]]),
        ([0, 1, 2, 3, 4, 5], [[], [], [], [], [], [0, 1, 2]]),
        ([2, 5, 3, 4, 0], [[], [], [], [0, 1], [0, 1]]),  # parameter 1 never comes
    ],
)
def test_a_full_bucket_waits_for_those_before_it(ranks, world, arrivals, log):
    ranks(world)(in_order, arrivals, log)


def cut_short() -> list[int]:
    """Fail after all collectives have started, or before; return the started buckets at each call of the end hook."""
    setup = Setup()
    found: list[int] = []
    (collectives,) = setup.reduction._collectives.values()
    collectives.end_reduction = lambda: found.append(setup.reduction.started)  # type: ignore[method-assign]
    for arrived in ((5, 4), (5, 4, 3, 2, 1, 0)):
        setup.fill()
        setup.begin()
        setup.arrive(*arrived)
        if len(arrived) == 6:
            setup.reduction.start_remaining()
        setup.reduction.start_zeros()
        setup.reduction.wait()
        setup.reduction.drop_inputs()
    return found


def test_a_backward_is_attended_once_after_all_started_collectives(ranks):
    assert ranks(2)(cut_short) == [[3, 3]] * 2


def without_some() -> list[int]:
    setup = Setup()
    setup.fill()
    setup.begin()
    # A second call for the same parameter changes nothing.
    for index in (3, 1, 3):
        setup.readiness.skip(index)
    assert setup.arrive(4, 5, 2, 0) == [True] * 4
    launched = list(setup.launched)
    setup.reduction.start_remaining()
    setup.reduction.wait()
    return launched


def test_buckets_do_not_wait_for_parameters_that_are_skipped(ranks):
    assert ranks(2)(without_some) == [[0, 1, 2]] * 2


def came_after_all() -> None:
    setup = Setup()
    setup.fill()
    setup.begin()
    for index in (3, 4):
        setup.readiness.skip(index)
    # The bucket of this parameter has not started, and does not count the gradient twice.
    assert setup.arrive(3) == [True]
    assert setup.readiness.absent == {4}
    assert setup.arrive(5, 2) == [True, True]
    assert setup.launched == [0, 1]
    assert setup.arrive(4) == [False]
    setup.reduction.start_remaining()
    setup.reduction.wait()


def test_a_skipped_gradient_that_comes_is_in_time_until_its_bucket_starts(ranks):
    ranks(2)(came_after_all)


def failing_after_the_first(skip_absent: bool) -> list[int]:
    """Fail in a backward in which the second bucket is skipped; return the buckets that start with zeros."""
    setup = Setup(skip_absent=skip_absent)
    zeros: list[int] = []
    for number, bucket in enumerate(setup.buckets):
        made = bucket.make_zeros()
        bucket.make_zeros = lambda number=number, made=made: zeros.append(number) or made
    setup.begin()
    for index in (2, 3):
        setup.readiness.skip(index)
    setup.reduction.start_zeros()
    setup.reduction.wait()
    return zeros


def test_a_failed_backward_leaves_skipped_buckets_out_with_skip_absent(ranks):
    assert ranks(2)(failing_after_the_first, True) == [[0, 2]] * 2
    assert ranks(2)(failing_after_the_first, False) == [[0, 1, 2]] * 2


def divisors(average: bool) -> list[int]:
    """Return the divisors that buckets get. They pack no tensors, because gloo cannot average."""
    setup = Setup(average=average)
    found: list[int] = []
    for bucket in setup.buckets:
        bucket.pack = lambda divisor, **_: found.append(divisor) or []
        bucket.stage_grad = lambda _index, divisor: found.append(divisor)
    setup.reduction.copy_grad(0)
    setup.reduction.start_remaining()
    return found


def test_nothing_is_divided_before_a_collective_that_averages(ranks):
    assert ranks(3)(divisors, True) == [[1] * 4] * 3
    assert ranks(3)(divisors, False) == [[3] * 4] * 3
