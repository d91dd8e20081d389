"""Every reader finds new values, with the same bits as without pending parameters."""

from __future__ import annotations

import copy

import pytest
import torch

from ovpatch.overlap.tensors.pending_param import PENDING, wait_for_all
from tests.overlap.reading import READERS
from tests.overlap.stale import entrances, same, stale, tensors


@pytest.fixture(autouse=True)
def _entrances():
    with entrances():
        yield
        wait_for_all()


@pytest.mark.parametrize("name", READERS)
def test_a_reader_finds_the_values(name):
    make, read = READERS[name]
    torch.manual_seed(0)
    model = make()
    expected = tensors(read(copy.deepcopy(model)))
    holder = stale(model)
    assert same(tensors(read(model)), expected)
    assert holder.settled == 1
    assert not PENDING
