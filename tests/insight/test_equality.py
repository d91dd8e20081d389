"""Each part of the equality rule is tested by a pair of runs that it must distinguish."""

from __future__ import annotations

import copy
import enum
import json
import math
import struct
from functools import partial

import numpy
import pytest
import torch

from ovpatch.insight import equality as differences
from ovpatch.insight.equality import Verdict
from tests.support.equality import compare

NAN, INF = math.nan, math.inf


class Mode(enum.Enum):
    TRAIN = "train"


def run():
    """A run's result of every kind of value."""
    torch.manual_seed(0)
    return {
        "loss": [torch.tensor(0.5), torch.tensor(0.25)],
        "model": {"w": torch.randn(4, 3), "b": torch.zeros(3), "steps": torch.tensor(7)},
        "half": {"bf16": torch.randn(5).bfloat16(), "fp16": torch.randn(5).half()},
        "mask": torch.tensor([True, False]),
        "spectrum": torch.randn(3, 2, dtype=torch.complex64),
        "nothing": torch.empty(0, 3),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "name": "decay", "count": 1}],
        "dtype": torch.float32,
        "mode": Mode.TRAIN,
        "state": {},
        "array": numpy.arange(3.0),
    }


def only_row(stock, patched, *reruns, **noise_runs):
    named = {key: {"w": run} for key, run in noise_runs.items()}
    (row,) = compare(
        {"w": stock}, {"w": patched}, reruns=[{"w": run} for run in reruns], **named
    ).rows
    return row


def test_a_run_equals_itself_bitwise():
    comparison = compare(run(), run())
    comparison.assert_bitwise()
    comparison.assert_equal()
    assert comparison.verdict is Verdict.BITWISE
    names = [row.name for row in comparison.rows]
    assert {"loss.1", "model.w", "groups.0.betas.1", "state"} <= set(names)
    assert len(names) == 20


def _set(path, change):
    def mutate(result):
        *way, last = path
        for step in way:
            result = result[step]
        result[last] = change(result[last])

    return mutate


MUTATIONS = {
    "a value": _set(["model", "w"], lambda w: w + 1e-3 * torch.eye(4, 3)),
    "a last loss": _set(["loss", 1], lambda loss: loss + 1),
    "a dtype": _set(["model", "w"], torch.Tensor.double),
    "a wider integer": _set(["model", "steps"], torch.Tensor.int),
    "a shape": _set(["model", "w"], lambda w: w.T),
    "a shape of the same size": _set(["model", "w"], lambda w: w.reshape(3, 4)),
    "an empty tensor's shape": _set(["nothing"], lambda t: t.reshape(3, 0)),
    "a layout": _set(["model", "w"], torch.Tensor.to_sparse),
    "an integer": _set(["model", "steps"], lambda s: s + 1),
    "a bool": _set(["mask"], torch.Tensor.logical_not),
    "an imaginary part": _set(["spectrum"], torch.Tensor.conj),
    "a bf16": _set(["half", "bf16"], lambda t: t * 1.01),
    "a fp16": _set(["half", "fp16"], lambda t: t * 1.01),
    "a python float": _set(["groups", 0, "lr"], lambda lr: lr * 2),
    "a number's type": _set(["groups", 0, "count"], float),
    "a number made a bool": _set(["groups", 0, "count"], bool),
    "a number made a tensor": _set(["groups", 0, "lr"], torch.tensor),
    "a tensor made a number": _set(["loss", 0], float),
    "None made False": _set(["groups", 0, "foreach"], lambda _: False),
    "None made 0.0": _set(["groups", 0, "foreach"], lambda _: 0.0),
    "a tensor made None": _set(["model", "b"], lambda _: None),
    "a text": _set(["groups", 0, "name"], str.upper),
    "a torch dtype": _set(["dtype"], lambda _: torch.float16),
    "an enum made its value": _set(["mode"], lambda mode: mode.value),
    "an empty mapping made a sequence": _set(["state"], lambda _: []),
    "an empty mapping filled": _set(["state"], lambda _: {0: torch.zeros(1)}),
    "an array": _set(["array"], lambda a: a + 1),
    "a missing name": lambda result: result["model"].pop("b"),
    "a missing empty mapping": lambda result: result.pop("state"),
    "an extra name": lambda result: result["model"].update(extra=torch.zeros(1)),
    "a shorter list": lambda result: result["loss"].pop(),
    "a NaN": _set(["model", "b"], lambda b: torch.tensor([0.0, NAN, 0.0])),
    "an infinity": _set(["model", "b"], lambda b: torch.tensor([0.0, 0.0, INF])),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
@pytest.mark.parametrize("swapped", [False, True], ids=["patched", "stock"])
def test_every_mutation_is_different(mutation, swapped):
    mutated = copy.deepcopy(run())
    mutation(mutated)
    comparison = compare(mutated, run()) if swapped else compare(run(), mutated)
    assert comparison.verdict is Verdict.DIFFERENT
    with pytest.raises(AssertionError, match="bitwise equal"):
        comparison.assert_bitwise()
    with pytest.raises(AssertionError, match="different"):
        comparison.assert_equal()


def test_floor_of_noise():
    base = torch.zeros(3, dtype=torch.float64)
    inside, outside = base.clone(), base.clone()
    inside[1], outside[1] = 1e-6, 1.01e-6
    row = only_row(base, inside)
    assert (row.verdict, row.max_abs_diff, row.allowed, row.first_index) == (
        Verdict.WITHIN_NOISE,
        1e-6,
        1e-6,
        (1,),
    )
    assert only_row(base, outside).verdict is Verdict.DIFFERENT
    comparison = compare([base], [inside])
    comparison.assert_equal()
    with pytest.raises(AssertionError, match="not bitwise equal"):
        comparison.assert_bitwise()


@pytest.mark.parametrize("reordered", [True, False])
def test_twice_the_noise_run_is_allowed_and_not_more(reordered):
    base = torch.zeros(2, 2, dtype=torch.float64)
    noisy = base + 0.125
    only = partial(only_row, reordered=noisy) if reordered else lambda *runs: only_row(*runs, noisy)
    row = only(base, base - 0.25)
    assert (row.verdict, row.allowed) == (Verdict.WITHIN_NOISE, 0.25)
    assert only(base, base - 0.2501).verdict is Verdict.DIFFERENT
    assert only_row(base, base - 0.25).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("kind", [torch.tensor, lambda values: torch.tensor(values).to_sparse()])
def test_units_in_the_last_place_are_noise_if_they_are_named(kind):
    unit = 2.0**-14
    stock, patched = kind([683.0, -INF, 1.0]), kind([683.0 + unit, -INF, 1.0])
    assert only_row(stock, patched, stock).verdict is Verdict.DIFFERENT
    ((row,), (far,)) = (
        compare([stock], [moved], reruns=[[stock]], noise_units=1).rows
        for moved in (patched, kind([683.0 + 4 * unit, -INF, 1.0]))
    )
    assert (row.verdict, far.verdict) == (Verdict.WITHIN_NOISE, Verdict.DIFFERENT)
    assert (
        compare([kind([1000.0, 1.0]).half()], [kind([1000.0, 1.5]).half()], noise_units=1).verdict
        is Verdict.DIFFERENT
    )
    for number in (7, True):
        assert compare([number], [number + 1], noise_units=1).verdict is Verdict.DIFFERENT
    assert compare([1e9], [1e9 + 1e-7], floor=0.0, noise_units=1).verdict is Verdict.WITHIN_NOISE


def test_the_largest_noise_run_counts():
    base = torch.zeros(2)
    for reordered, *reruns in ((base + 1, base), (base, base, base + 1)):
        assert (
            only_row(base, base + 2, *reruns, reordered=reordered).verdict is Verdict.WITHIN_NOISE
        )


def test_noise_of_one_tensor_allows_nothing_to_another():
    stock = {"a": torch.zeros(1), "b": torch.zeros(1)}
    patched = {"a": torch.zeros(1), "b": torch.ones(1)}
    reordered = {"a": torch.ones(1), "b": torch.zeros(1)}
    assert compare(stock, patched, reordered=reordered).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    "noise_run",
    [
        None,
        torch.full((2, 2), INF),
        torch.full((2, 2), NAN),
        torch.ones(4),
        torch.ones(2, 2).double(),
    ],
)
def test_a_useless_noise_run_allows_nothing(noise_run):
    base = torch.zeros(2, 2)
    row = only_row(base, base + 0.1, reordered=noise_run)
    assert (row.verdict, row.allowed) == (Verdict.DIFFERENT, 1e-6)


def test_noise_never_excuses_a_value_that_is_not_finite():
    base, broken = torch.zeros(2), torch.tensor([0.0, NAN])
    row = only_row(base, broken, reordered=broken)
    assert (row.verdict, row.max_abs_diff, row.first_index) == (Verdict.DIFFERENT, INF, (1,))
    huge = torch.full((2,), 1e308, dtype=torch.float64)
    assert only_row(base.double(), broken.double(), reordered=huge).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
)
def test_values_that_are_not_finite_equal_their_like(dtype):
    values = torch.tensor([NAN, INF, -INF, 0.0, 1.0]).to(dtype)
    assert only_row(values, values.clone()).verdict is Verdict.BITWISE
    for position, changed_value in [(0, 0.0), (0, INF), (1, -INF), (1, 1.0), (2, NAN), (3, NAN)]:
        changed = values.clone()
        changed[position] = changed_value
        row = only_row(values, changed)
        assert (row.verdict, row.first_index, row.max_abs_diff) == (
            Verdict.DIFFERENT,
            (position,),
            INF,
        )


def test_nan_payload_and_the_sign_of_zero_do_not_count():
    quiet, other_nan = (
        struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (0x7FC00000, 0x7FC00123)
    )
    assert (
        only_row(torch.tensor([quiet, 0.0]), torch.tensor([other_nan, -0.0])).verdict
        is Verdict.BITWISE
    )
    assert only_row(NAN, NAN).verdict is Verdict.BITWISE
    assert only_row(complex(NAN, 1), complex(NAN, 2)).verdict is Verdict.DIFFERENT
    assert only_row(0.0, -0.0).verdict is Verdict.BITWISE
    assert only_row(INF, INF).verdict is Verdict.BITWISE
    assert only_row(INF, -INF).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_integers(dtype):
    base = torch.tensor([1, 2, 3]).to(dtype)
    changed = torch.tensor([1, 5, 3]).to(dtype)
    assert only_row(base, base.clone()).verdict is Verdict.BITWISE
    row = only_row(base, changed)
    assert (row.verdict, row.max_abs_diff, row.first_index) == (Verdict.DIFFERENT, 3.0, (1,))


@pytest.mark.parametrize("of", [torch.tensor, int])
def test_neighbouring_huge_integers_differ(of):
    row = only_row(of(2**53), of(2**53 + 1))
    assert (row.verdict, row.max_abs_diff, row.first_index) == (Verdict.DIFFERENT, 1.0, ())
    assert only_row(10**400, 10**401).verdict is Verdict.DIFFERENT


def test_complex_is_compared_by_component():
    base = torch.zeros(2, 3, dtype=torch.complex64)
    moved = base.clone()
    moved[1, 2] = complex(3, 4)
    row = only_row(base, moved)
    assert (row.max_abs_diff, row.first_index) == (4.0, (1, 2))
    assert only_row(moved.conj(), moved.conj().resolve_conj()).verdict is Verdict.BITWISE


def test_first_index_is_the_first_and_the_difference_the_largest(monkeypatch):
    monkeypatch.setattr(differences, "CHUNK", 4)
    base = torch.zeros(3, 5)
    moved = base.clone()
    moved[1, 1], moved[1, 2], moved[2, 4] = 1.0, -3.0, 2.0
    row = only_row(base, moved)
    assert (row.first_index, row.max_abs_diff) == ((1, 1), 3.0)
    assert row.note == "0 became 1"
    moved[2, 0] = NAN
    assert only_row(base, moved).max_abs_diff == INF


def test_chunks_cover_everything(monkeypatch):
    monkeypatch.setattr(differences, "CHUNK", 4)
    base = torch.arange(11.0)
    base[0] = NAN  # leaves the fast way
    for position in range(1, 11):
        moved = base.clone()
        moved[position] += 1
        assert only_row(base, moved).first_index == (position,)


def test_a_tensor_of_any_strides_graph_and_class():
    base = torch.randn(4, 6)
    assert only_row(base.T, base.T.contiguous()).verdict is Verdict.BITWISE
    assert only_row(base, torch.nn.Parameter(base)).verdict is Verdict.BITWISE
    assert only_row(base, (base.clone().requires_grad_() * 1)).verdict is Verdict.BITWISE
    assert only_row(base, base.flip(0).T.contiguous().T.flip(0)).verdict is Verdict.BITWISE


SPARSE = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda tensor: tensor.to_sparse_bsr((2, 2)),
}


@pytest.mark.parametrize("sparse", SPARSE.values(), ids=SPARSE.keys())
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse(sparse):
    dense = torch.tensor([[0.0, 1.0], [0.0, 0.0], [INF, 0.0], [0.0, NAN]])
    assert only_row(sparse(dense), sparse(dense)).verdict is Verdict.BITWISE
    moved = dense.clone()
    moved[0, 1] += 1e-3
    row = only_row(sparse(dense), sparse(moved))
    assert row.verdict is Verdict.DIFFERENT
    assert row.max_abs_diff == pytest.approx(1e-3, rel=1e-3)
    new = dense.clone()
    # The second pattern of nonzero elements differs.
    new[1, 0] = 2.0
    for a, b in ((dense, new), (new, dense)):
        row = only_row(sparse(a), sparse(b))
        assert (row.verdict, row.max_abs_diff) == (Verdict.DIFFERENT, 2.0)


def test_sparse_that_is_not_coalesced():
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    once = torch.sparse_coo_tensor([[1]], [3.0], (3,))
    assert only_row(twice, once).verdict is Verdict.BITWISE
    assert only_row(twice, once * 2).verdict is Verdict.DIFFERENT


def test_sparse_of_inference_mode():
    with torch.inference_mode():
        value = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    # A copy that is made outside of the mode still has parts of the mode.
    for copied in (value, value.clone()):
        assert only_row(value, copied).verdict is Verdict.BITWISE
        assert only_row(copied * 2, value).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged), "nested"),
        ({1, 2}, "builtins.set"),
        (object(), "cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_named(value, says):
    with pytest.raises(TypeError, match=rf"^out\.0 is .*{says}"):
        compare({"out": [value]}, {"out": [value]})


def test_a_dtensor_is_named_with_the_remedy(ranks):
    ranks(1)(_compare_dtensor)


def _compare_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    tensor = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(TypeError, match=r"DTensor; compare its \.full_tensor"):
        compare([tensor], [tensor])


def test_two_values_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"'a\.1'"):
        compare({"a": {1: 0.0, "1": 0.0}}, {})


def test_comparing_nothing_is_no_success():
    for empty in ({}, [], {"state": {}}):
        with pytest.raises(AssertionError, match="nothing was compared"):
            compare(empty, empty).assert_equal()


def test_message_shows_the_worst_first():
    stock = {f"p{i}": torch.zeros(2) for i in range(15)}
    patched = {f"p{i}": torch.tensor([0.0, i * 1e-3]) for i in range(15)} | {"extra": None}
    with pytest.raises(AssertionError) as caught:
        compare(stock, patched).assert_equal()
    lines = str(caught.value).splitlines()
    assert lines[0] == "15 of 16 values different; the worst:"
    assert [line.split("'")[1] for line in lines[1:4]] == ["extra", "p14", "p13"]
    assert len(lines) == 11


def test_a_row_is_valid_json():
    data = (
        compare({"a": torch.zeros(1), "b": 1.0}, {"a": torch.tensor([NAN]), "b": 1.0})
        .rows[0]
        .to_json()
    )
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data == {
        "name": "a",
        "verdict": "different",
        "max_abs_diff": "inf",
        "allowed": 1e-6,
        "first_index": [0],
        "note": "0 became nan",
        "rule": "",
    }


def test_a_huge_tensor_is_never_widened_as_a_whole(monkeypatch):
    monkeypatch.setattr(differences, "CHUNK", 1000)
    widest = 0
    chunk = differences._compare_chunk

    def watched(a, b):
        nonlocal widest
        widest = max(widest, a.numel())
        return chunk(a, b)

    monkeypatch.setattr(differences, "_compare_chunk", watched)
    base = torch.zeros(100_000)
    assert only_row(base, base + 1).max_abs_diff == 1.0
    assert widest == 1000


@pytest.mark.gpu
def test_tensors_on_different_devices():
    base = torch.randn(10)
    assert only_row(base, base.cuda()).verdict is Verdict.BITWISE
    assert only_row(base.cuda(), base).verdict is Verdict.BITWISE
    assert only_row(base.cuda(), base + 1).verdict is Verdict.DIFFERENT
    assert only_row(base.cuda(), base.cuda() + 1).verdict is Verdict.DIFFERENT
    assert only_row(base.to_sparse().cuda(), base.to_sparse()).verdict is Verdict.BITWISE
