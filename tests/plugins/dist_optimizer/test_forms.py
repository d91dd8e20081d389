"""What a state looks like, told to other ranks as data."""

from __future__ import annotations

import json

import pytest
import torch

from ovpatch.overlap.tensors.lazy_tensor import TensorMeta
from ovpatch_plugins.dist_optimizer.state_dict import pack, unpack

CPU = torch.device("cpu")


def told(state):
    packed, tensors = pack(state)
    return unpack(json.loads(json.dumps(packed)), tensors, CPU)


def test_numbers_texts_and_containers_stay_what_they_are():
    state = {
        "step": 3,
        "scale": 0.1,
        "inf": float("inf"),
        "on": True,
        "none": None,
        "shape": torch.Size([2, 3]),
        "nested": {"a": [1, (2.5, "x"), {}], 7: (), "dict": {"list": []}},
    }
    found = told({0: state})
    assert found == {0: state}
    assert [type(value) for value in found[0].values()] == [type(value) for value in state.values()]
    assert list(found[0]) == list(state)


def test_tensors_inside_travel_along():
    inside = torch.arange(6.0).view(2, 3).t()
    found = told({"both": [inside, {"again": inside}]})
    assert torch.equal(found["both"][0], inside)
    assert torch.equal(found["both"][1]["again"], inside)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(3, 4, dtype=torch.bfloat16).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(10)[::2],
        torch.zeros(1).expand(4),
        torch.zeros(0, 3, dtype=torch.int64),
    ],
    ids=str,
)
def test_metadata_makes_a_dense_tensor_of_the_same_shape(tensor):
    meta = told({"": TensorMeta.of(tensor)})[""]
    made = meta.empty()
    assert (made.shape, made.dtype, meta.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert made.stride() == torch.empty_like(tensor, memory_format=torch.preserve_format).stride()


def test_what_is_no_data_is_refused_with_a_remedy():
    with pytest.raises(TypeError, match=r"keeps a object .* take its class out of OVPATCH_DIST_OPTIMIZER_PER_PARA"):
        pack({"lock": [object()]})
