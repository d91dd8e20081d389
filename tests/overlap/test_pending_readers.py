"""Every reader finds new values, and the same bits as where nothing was ever pending."""

from __future__ import annotations

import copy

import pytest
import torch

from ovpatch.overlap.cuda_graphs import captures
from ovpatch.overlap.pending import any_pending, settle_all
from tests.overlap.reading import READERS
from tests.overlap.stale import entrances, same, stale, tensors


@pytest.fixture(autouse=True)
def _entrances():
    with entrances():
        yield
        settle_all()


@pytest.mark.parametrize("name", READERS)
def test_a_reader_finds_the_values(name):
    make, read = READERS[name]
    torch.manual_seed(0)
    model = make()
    expected = tensors(read(copy.deepcopy(model)))
    holder = stale(model)
    assert same(tensors(read(model)), expected)
    assert holder.settled == 1
    assert not any_pending()


@pytest.mark.parametrize("name", ["capture_begin", "replay"])
def test_cuda_graphs_begin_with_everything_settled(name):
    before, model = captures.total, torch.nn.Linear(4, 2)
    expected = model.weight.detach().clone()
    stale(model)
    with pytest.raises((TypeError, AttributeError)):  # torch's own, of nothing that could be captured or replayed
        getattr(torch.cuda.CUDAGraph, name)(None)
    assert not any_pending()
    assert torch.equal(model.weight, expected)
    assert captures.total == before + (name == "capture_begin")
    captures.total = before
