"""Recorded values: digests that miss no bit, sketches that are linear, and names that survive wrappers."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ovpatch.insight.verify import recording
from ovpatch.insight.verify.probes import ParameterNames, list_contents, strip_wrappers

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
)


# --- digests ---


@settings(max_examples=60)
@given(st.sampled_from(DTYPES), st.integers(0, 2**31), st.integers(0, 63), st.integers(1, 40))
def test_any_flipped_bit_changes_the_digest(dtype, position, bit, size):
    ints = torch.randint(-100, 100, (size,)).to({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        dtype.itemsize
    ])  # fmt: skip
    flipped = ints.clone()
    width = 8 * dtype.itemsize
    mask = 1 << bit % width
    index = position % size
    flipped[index] ^= (
        mask - (1 << 64) if bit % width == 63 else torch.tensor(mask).to(flipped.dtype)
    )
    assert not torch.equal(ints, flipped)
    both = recording.compute_digest(ints.view(dtype)), recording.compute_digest(flipped.view(dtype))
    assert len(both[0]) == 32
    assert both[0][:16] != both[1][:16]  # each of the two sums alone sees it
    assert both[0][16:] != both[1][16:]


def test_a_flipped_bit_in_any_chunk_changes_the_digest(monkeypatch):
    tensor = torch.zeros(2 * recording.CHUNK + 5)
    before = recording.compute_digest(tensor)
    for index in (0, recording.CHUNK - 1, recording.CHUNK, 2 * recording.CHUNK + 4):
        tensor[index] = -0.0
        assert recording.compute_digest(tensor) != before
        tensor[index] = 0.0
    assert recording.compute_digest(tensor) == before


def test_values_that_change_places_change_the_digest():
    tensor = torch.arange(10.0)
    swapped = tensor.flip(0)
    assert recording.compute_digest(tensor) != recording.compute_digest(swapped)
    far = torch.zeros(recording.CHUNK * 2)
    far[0] = 1.0
    assert recording.compute_digest(far) != recording.compute_digest(far.roll(recording.CHUNK))


def test_the_digest_is_of_the_values_and_not_of_how_they_lie():
    tensor = torch.randn(3, 4, 5, 6)
    assert recording.compute_digest(tensor) == recording.compute_digest(
        tensor.to(memory_format=torch.channels_last)
    )
    assert recording.compute_digest(torch.empty(0)) == recording.compute_digest(torch.empty(0, 3))
    number = torch.tensor([1 + 2j])
    assert recording.compute_digest(number.conj()) == recording.compute_digest(
        torch.tensor([1 - 2j])
    )


# --- sketches ---


def test_the_difference_of_sketches_is_the_sketch_of_the_difference():
    a, b = torch.randn(2, 3 * recording.BUCKETS + 17, dtype=torch.float64)
    torch.testing.assert_close(
        recording.compute_sketch(a) - recording.compute_sketch(b),
        recording.compute_sketch(a - b),
        rtol=0,
        atol=1e-12,
    )


def test_noise_keeps_its_size_and_a_lone_difference_is_spread_thin():
    noise = torch.randn(1000 * recording.BUCKETS)
    assert 0.9 < recording.compute_sketch(noise).std() < 1.1
    lone = torch.zeros(100 * recording.BUCKETS)
    lone[12345] = 1.0
    assert recording.compute_sketch(lone).abs().max() == 0.1
    assert recording.compute_sketch(lone).count_nonzero() == 1


def test_signs_differ_between_chunks():
    period = torch.ones(2 * recording.CHUNK)
    # With the same signs in all chunks it would cancel out.
    period[recording.CHUNK :] = -1
    rows = 2 * recording.CHUNK // recording.BUCKETS
    assert (recording.compute_sketch(period) * rows**0.5).abs().max() > 4


def test_a_nan_does_not_hide_changes_of_its_neighbors():
    tensor = torch.randn(4 * recording.BUCKETS)
    tensor[7] = float("nan")
    neighbor = tensor.clone()
    neighbor[7 + recording.BUCKETS] += 1
    assert recording.describe_nonfinite(tensor) == recording.describe_nonfinite(neighbor) != ""
    assert (
        recording.compute_sketch(tensor) - recording.compute_sketch(neighbor)
    ).abs().max().item() == pytest.approx(0.5, abs=1e-6)
    moved = tensor.roll(1)
    assert recording.describe_nonfinite(moved) != recording.describe_nonfinite(tensor)
    assert recording.describe_nonfinite(torch.tensor([1.0])) == ""


# --- values ---


def test_small_tensors_are_copies_and_large_ones_are_folded():
    small = torch.ones(3)
    kept = recording.keep_value(small)
    small.add_(1)
    assert kept.values.tolist() == [1.0, 1.0, 1.0]
    assert (kept.form, kept.folded) == ("float32 [3]", False)
    large = recording.keep_value(torch.ones(recording.MAX_KEPT_ELEMENTS + 1))
    assert large.folded
    assert large.values.shape == (recording.BUCKETS,)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
def test_of_what_cannot_be_read_only_the_class_is_kept():
    assert recording.keep_value(torch.empty(3, device="meta")).form == recording.UNREAD
    assert recording.keep_value(object()).form == recording.UNREAD
    assert recording.keep_value(nn.parameter.UninitializedParameter()).form == recording.UNREAD
    assert (
        recording.keep_value(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])).form
        == recording.UNREAD
    )
    assert (
        recording.keep_value(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)).form
        == recording.UNREAD
    )
    assert recording.keep_value(None).form == "none"


def test_large_tensors_of_eight_bit_floats():
    tensor = torch.ones(20_000).to(torch.float8_e4m3fn)
    kept = recording.keep_value(tensor)
    assert (kept.form, kept.folded, kept.not_finite) == ("float8_e4m3fn [20000]", True, "")
    tensor[7] = float("nan")
    assert recording.keep_value(tensor).not_finite.startswith("1 not finite")


def test_a_sparse_gradient_equals_the_dense_one():
    dense = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert recording.keep_value(dense.to_sparse()).digest == recording.keep_value(dense).digest


def test_keeping_draws_no_random_number_and_builds_no_graph():
    before = torch.get_rng_state()
    kept = recording.keep_value(torch.ones(recording.MAX_KEPT_ELEMENTS + 1, requires_grad=True) * 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert not kept.values.requires_grad


# --- names ---


def test_wrappers_are_stripped_and_the_models_own_names_are_not():
    assert strip_wrappers("module._orig_mod.net.module.0.weight") == "net.module.0.weight"
    assert strip_wrappers("_orig_mod.blocks.0._orig_mod.bias") == "blocks.0.bias"


def test_parameters_are_named_by_the_model_or_by_their_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapper = nn.Module()
    wrapper.module = model
    lone = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [lone]}], lr=0.1)
    names = ParameterNames()
    found = [name for name, _ in names.name_parameters(optimizer, 0)]
    assert found == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "optimizer0.param_groups[1].params[0]",
    ]
    assert [name for name, _ in names.list_buffers(0)] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    linear = nn.Linear(2, 2)
    twin = nn.Sequential(linear)
    second = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert [name for name, _ in names.name_parameters(second, 1)] == [
        "optimizer1:0.weight",
        "optimizer1:0.bias",
    ]
    later = nn.Linear(2, 2)
    second.add_param_group({"params": list(later.parameters())})
    assert [name for name, _ in names.name_parameters(second, 1)][2:] == ["weight", "bias"]


def test_parameters_that_no_optimizer_holds_are_known_as_frozen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    names = ParameterNames()
    names.name_parameters(torch.optim.SGD(model[0].parameters(), lr=0.1), 0)
    assert [(name, id(found)) for name, found in names.list_frozen(0)] == [
        ("1.weight", id(model[1].weight)),
        ("1.bias", id(model[1].bias)),
        ("2.bias", id(model[2].bias)),
    ]
    names.name_parameters(torch.optim.SGD(model[2].parameters(), lr=0.1), 1)
    assert [name for name, _ in names.list_frozen(0)] == ["1.bias"]


def test_two_wrappers_of_one_model_and_two_models_with_the_same_names():
    model, twin = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    wrappers = [nn.Module(), nn.Module()]
    for wrapper in wrappers:
        wrapper.module = model
    optimizer = torch.optim.SGD([*model.parameters(), *twin.parameters()], lr=0.1)
    names = ParameterNames()
    assert {name for name, _ in names.name_parameters(optimizer, 0)} == {
        "weight", "bias", "optimizer0:weight", "optimizer0:bias"
    }  # fmt: skip
    found = [(name.rstrip("'"), id(buffer)) for name, buffer in names.list_buffers(0)]
    assert len(found) == 6
    assert set(found) == {
        (name, id(buffer)) for net in (model, twin) for name, buffer in net.named_buffers()
    }


def test_a_name_is_not_given_twice_even_when_its_parameter_is_gone():
    names = ParameterNames()
    for expected in ("weight", "optimizer1:weight", "optimizer1:weight'"):
        net = nn.Linear(1, 1, bias=False)
        index = 0 if expected == "weight" else 1
        assert [
            name
            for name, _ in names.name_parameters(torch.optim.SGD(net.parameters(), lr=0.1), index)
        ] == [expected]
        del net
        gc.collect()


# --- checkpoints ---


def test_the_contents_of_a_checkpoint_by_key():
    saved = {
        "model": {"w": torch.ones(2, 3)},
        "steps": [1, 2.0],
        "none": {},
        "net": nn.Linear(1, 1, bias=False),
    }
    saved["lazy"] = torch.ones(4, device="meta")
    kept = list_contents(saved)
    found = {
        name: value.digest if value.form == "text" else value.form for name, value in kept.items()
    }
    assert torch.equal(kept["model.w"].values, torch.ones(2, 3))
    assert found == {
        "model.w": "float32 [2, 3]",
        "lazy": "float32 [4]",
        "steps.0": "int",
        "steps.1": "float",
        "none": "empty dict",
        "net.weight": "float32 [1, 1]",
    }
    round_trip: list[object] = []
    round_trip.append(round_trip)
    assert list_contents(round_trip)["0"].digest == "list"
