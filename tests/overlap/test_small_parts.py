"""Labels, layouts, streams, ballots."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch.overlap.ballot import Ballots
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.lanes import Producers
from ovpatch.overlap.layout import arrival_layout, initial_layout


def test_labels_show_in_the_profile_and_cost_nothing_without_one():
    text = label("ddp", "all_reduce", "bucket 3")
    assert text == "ovpatch::ddp::all_reduce (bucket 3)"
    assert label("ddp", "recover") == "ovpatch::ddp::recover"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, span(text):
        torch.zeros(1)
    assert text in {event.name for event in profile.events()}
    assert span(text) is span(text)


def test_layouts_cut_every_parameter_once_by_dtype_and_size():
    params = [nn.Parameter(torch.zeros(100, dtype=d)) for d in (torch.float32, torch.float64, torch.float32) * 3]
    whole = initial_layout(params, [400], bucketed=False)
    assert sorted(len(b.indices) for b in whole) == [3, 6]
    cut = initial_layout(params, [400], bucketed=True)
    assert sorted(i for b in cut for i in b.indices) == list(range(9))
    assert max(b.nbytes for b in cut) <= 800
    order = [8, 0, 7, 1, 6, 2, 5, 3, 4]
    arrived = arrival_layout(params, [sys.maxsize], order)
    assert [i for b in arrived for i in b.indices if params[i].dtype == torch.float32] == [8, 0, 6, 2, 5, 3]


def test_producers_do_nothing_without_streams():
    producers = Producers(torch.device("cpu"))
    producers.note()
    producers.join([torch.zeros(1)])
    producers.clear()


def vote(failing: list[int]) -> list[list[int]]:
    ballots = Ballots(dist.distributed_c10d._get_default_group(), torch.device("cpu"))
    for step in range(4):
        ballots.count(step, failed=dist.get_rank() in failing and step == 2)
    return [list(steps) for steps in ballots.losses()]


@pytest.mark.parametrize("failing", [[], [1], [0, 1, 2]])
def test_ballots_tell_those_that_went_well_and_only_them(ranks, failing):
    for rank, found in enumerate(ranks(3)(vote, failing)):
        assert found == ([[2]] if failing and rank not in failing else [])
