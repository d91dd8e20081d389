"""Buckets are launched in one order, when they are full, each once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch.overlap.data_parallel.bucket import Bucket, GradBucket, SparseBucket
from ovpatch.overlap.data_parallel.grad_sync import GradSync
from tests.overlap.gradients import backward, params

LAYOUT = ((4, 5), (2, 3), (0, 1))  # the buckets' indices: gradients come from the last parameter to the first


class Setup:
    """Six parameters in three buckets."""

    def __init__(self, **options: Any) -> None:
        group = dist.distributed_c10d._get_default_group()
        self.world, self.rank = group.size(), group.rank()
        self.params = params(*[(i + 2, 3) for i in range(6)])
        self.buckets: list[Bucket] = [GradBucket(part, [self.params[i] for i in part]) for part in LAYOUT]
        self.reduction = GradSync(self.buckets, group, feature="test", **options)
        self.launched: list[int] = []
        for number, bucket in enumerate(self.buckets):
            bucket.pack = partial(self._note_and_pack, number, bucket.pack)

    def _note_and_pack(self, number: int, pack: Any, *args: Any, **kwargs: Any) -> Any:
        self.launched.append(number)
        return pack(*args, **kwargs)

    def arrive(self, *indices: int) -> list[bool]:
        in_time = []
        for index in indices:
            self.reduction.count_grad(index)
            in_time.append(self.reduction.register_grad_ready(index))
            self.reduction.start_ready_buckets()
        return in_time

    def finish(self, skip: tuple[int, ...] = ()) -> None:
        self.reduction.start_grad_sync()
        self.reduction.wait()
        self.reduction.finish_grad_sync(skip)

    def fill(self, *left_out: int) -> list[torch.Tensor | None]:
        """Give gradients that differ by rank; return the averages over ranks, None for what is left out."""
        torch.manual_seed(self.rank)
        values = backward(self.params)
        averages: list[torch.Tensor | None] = []
        for i, (param, value) in enumerate(zip(self.params, values, strict=True)):
            dist.all_reduce(value)
            averages.append(None if i in left_out else value / self.world)
            if i in left_out:
                param.grad = None
        return averages

    def check(self, expected: list[torch.Tensor | None]) -> None:
        for param, want in zip(self.params, expected, strict=True):
            assert (param.grad is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(param.grad, want)


def in_order(arrivals: list[int], log: list[list[int]]) -> None:
    setup = Setup()
    for _ in range(2):
        expected = setup.fill()
        setup.reduction.start_backward()
        for index, launched in zip(arrivals, log, strict=True):
            assert setup.arrive(index) == [True]
            assert setup.launched == launched, index
        setup.finish()
        assert setup.launched == [0, 1, 2]
        setup.check(expected)
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


def ranks_in_other_orders() -> None:
    setup = Setup()
    expected = setup.fill()
    setup.arrive(*[[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [2, 0, 3, 5, 4, 1]][setup.rank])
    setup.finish()
    setup.check(expected)


def test_ranks_whose_gradients_come_in_other_orders_pair_the_same_buckets(ranks):
    ranks(3)(ranks_in_other_orders)


def cut_short() -> list[int]:
    """Let a rank fail after all was launched, or before; return how often each backward was attended."""
    setup = Setup()
    found: list[int] = []
    (collectives,) = setup.reduction._collectives.values()
    collectives.end_reduction = lambda: found.append(setup.reduction.launched)  # type: ignore[method-assign]
    for arrived in ((5, 4), (5, 4, 3, 2, 1, 0)):
        setup.fill()
        setup.reduction.start_backward()
        setup.arrive(*arrived)
        if len(arrived) == 6:
            setup.reduction.start_grad_sync()
        setup.reduction.start_zeros()
        setup.reduction.wait()
        setup.reduction.drop_inputs()
    return found


def test_a_backward_is_attended_once_behind_all_that_was_launched(ranks):
    assert ranks(2)(cut_short) == [[3, 3]] * 2


def without_some() -> None:
    setup = Setup()
    expected = setup.fill(3, 1)
    setup.reduction.start_backward()
    for index in (3, 1, 3):  # to say it twice changes nothing
        setup.reduction.skip_param(index)
    assert setup.arrive(4, 5, 2, 0) == [True] * 4
    assert setup.launched == [0, 1, 2]
    setup.finish(skip=(1, 3))
    setup.check(expected)


def test_parameters_that_are_left_out_are_not_waited_for(ranks):
    ranks(2)(without_some)


def came_after_all() -> None:
    setup = Setup()
    setup.fill()
    for index in (3, 4):
        setup.reduction.skip_param(index)
    assert setup.arrive(3) == [True]  # its bucket is still there, and does not wait for it twice
    assert setup.reduction.absent == {4}
    assert setup.arrive(5, 2) == [True, True]
    assert setup.launched == [0, 1]
    assert setup.arrive(4) == [False]
    setup.finish()


def test_a_gradient_that_was_taken_for_absent_is_told_whether_it_is_too_late(ranks):
    ranks(2)(came_after_all)


def skipping(skip_absent: bool) -> list[int]:
    setup = Setup(skip_absent=skip_absent)
    expected = setup.fill(2, 3, 1)
    setup.reduction.start_backward()
    for index in (1, 2, 3):
        setup.reduction.skip_param(index)
    setup.arrive(5, 4, 0)
    setup.finish(skip=(1, 2, 3))
    setup.check(expected)
    return setup.launched


def failing_after_the_first(skip_absent: bool) -> list[int]:
    """The second bucket is left out, the third is launched with zeros."""
    setup = Setup(skip_absent=skip_absent)
    zeros: list[int] = []
    for number, bucket in enumerate(setup.buckets):
        made = bucket.make_zeros()
        bucket.make_zeros = lambda number=number, made=made: zeros.append(number) or made
    setup.reduction.start_backward()
    for index in (2, 3):
        setup.reduction.skip_param(index)
    setup.reduction.start_zeros()
    setup.reduction.wait()
    return zeros


def test_buckets_to_which_nothing_is_added_are_left_out_if_told_so(ranks):
    assert ranks(2)(skipping, True) == [[0, 2]] * 2
    assert ranks(2)(skipping, False) == [[0, 1, 2]] * 2
    assert ranks(2)(failing_after_the_first, True) == [[0, 2]] * 2
    assert ranks(2)(failing_after_the_first, False) == [[0, 1, 2]] * 2


def one_failed() -> None:
    """Rank 1's backward ends after its first bucket; the others wait for the rest, of which it gives nothing."""
    setup = Setup()
    expected = setup.fill()
    values = [torch.zeros_like(p) if setup.rank == 1 and i < 4 else p.grad.clone() for i, p in enumerate(setup.params)]
    for value in values[:4]:
        dist.all_reduce(value)
    setup.arrive(5, 4)
    if setup.rank == 1:
        setup.reduction.start_zeros()
        setup.reduction.wait()
        setup.reduction.drop_inputs()
    else:
        setup.arrive(3, 2, 1, 0)
        setup.finish()
        setup.check([value / setup.world for value in values[:4]] + expected[4:])
    expected = setup.fill()
    setup.reduction.start_backward()
    setup.arrive(5, 4, 3, 2, 1, 0)
    setup.finish()
    setup.check(expected)


def test_zeros_stand_in_for_the_buckets_of_a_failed_backward(ranks):
    ranks(3)(one_failed)


def staged() -> None:
    setup = Setup()
    expected = setup.fill()
    for index in (5, 4, 3, 2, 1, 0):
        setup.reduction.register_grad_ready(index)
        setup.reduction.stage_grad(index)
        setup.params[index].grad.fill_(99.0)
    setup.finish()
    setup.check(expected)


def test_staged_gradients_are_reduced_as_they_were(ranks):
    ranks(2)(staged)


def divisors(average: bool) -> list[int]:
    """What buckets are told to divide by. They give nothing to the collective, for gloo cannot average."""
    setup = Setup(average=average)
    said: list[int] = []
    for bucket in setup.buckets:
        bucket.pack = lambda divisor, **_: said.append(divisor) or []
        bucket.stage_grad = lambda _index, divisor: said.append(divisor)
    setup.reduction.stage_grad(0)
    setup.reduction.start_grad_sync()
    return said


def test_nothing_is_divided_before_a_collective_that_averages(ranks):
    assert ranks(3)(divisors, True) == [[1] * 4] * 3
    assert ranks(3)(divisors, False) == [[3] * 4] * 3


def of_many_kinds() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    embedding = nn.Embedding(5, 2, sparse=True)
    low, wide = params((3, 3), dtype=torch.bfloat16)[0], params((3, 3), dtype=torch.float64)[0]
    buckets: list[Bucket] = [SparseBucket(0, embedding.weight), GradBucket([1], [low], dtype=torch.float32)]
    buckets += [GradBucket([2], [wide], flat_below=100)]
    embedding(torch.tensor([rank, 3])).sum().backward()
    low.grad, wide.grad = torch.full_like(low, 1.0 + rank), torch.full_like(wide, 1.0 - rank)
    reduction = GradSync(buckets, group, feature="test")
    for index in range(3):
        reduction.stage_grad(index)
        reduction.register_grad_ready(index)
    reduction.start_ready_buckets()
    reduction.wait()
    reduction.finish_grad_sync(())
    rows = torch.zeros(5, 2)
    rows[0] = rows[1] = 0.5
    rows[3] = 1
    assert torch.equal(embedding.weight.grad.to_dense(), rows)
    assert torch.equal(low.grad, torch.full((3, 3), 1.5, dtype=torch.bfloat16))
    assert torch.equal(wide.grad, torch.full((3, 3), 0.5, dtype=torch.float64))


def test_sparse_wide_and_flat_buckets_beside_each_other(ranks):
    ranks(2)(of_many_kinds)
