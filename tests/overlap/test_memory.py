"""Counts of references, and the AccumulateGrad node that holds a reference while its hooks run."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ovpatch.overlap.autograd import accumulate_deferred
from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
from ovpatch.overlap.tensors.shard import compute_contiguous_strides, has_same_layout
from ovpatch.overlap.tensors.tensor_memory import (
    count_sole_references,
    count_storage_references,
    is_dense,
)
from tests.overlap.gradients import ALONE, address, params

SHAPE = (30, 40)


def test_every_alias_counts_and_is_forgotten_with_its_last_user():
    tensor = torch.zeros(SHAPE)
    assert count_storage_references(tensor) == count_sole_references()
    same_object = tensor
    assert count_storage_references(same_object) == count_sole_references()
    aliases = [tensor.detach(), tensor.view(-1), tensor[1:2]]
    assert count_storage_references(tensor) == count_sole_references() + 3
    assert count_storage_references(aliases[2]) == count_sole_references() + 3
    aliases.clear()
    assert count_storage_references(tensor) == count_sole_references()
    storage = tensor.untyped_storage()
    assert count_storage_references(tensor) > count_sole_references()
    del storage
    assert count_storage_references(tensor) == count_sole_references()


def test_the_count_of_a_sole_reference_does_not_depend_on_the_mode():
    count_sole_references.cache_clear()
    with torch.inference_mode():
        inside = count_sole_references()
    count_sole_references.cache_clear()
    assert count_sole_references() == inside


LAYOUTS = {
    "contiguous": (lambda: torch.zeros(3, 4), True),
    "transposed": (lambda: torch.zeros(3, 4).t(), True),
    "channels last": (lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
    "scalar": (lambda: torch.zeros(()), True),
    "size one with any stride": (lambda: torch.empty_strided((3, 1, 4), (4, 99, 1)), True),
    "every other column": (lambda: torch.zeros(4, 10)[:, ::2], False),
    "expanded": (lambda: torch.zeros(1, 4).expand(3, 4), False),
    "part of a row": (lambda: torch.zeros(4, 10)[:, :5], False),
    "slice": (lambda: torch.zeros(10)[2:5], True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_tensor_uses_each_place_of_its_memory_once(name):
    make, dense = LAYOUTS[name]
    assert is_dense(make()) is dense


def test_layouts_differ_only_if_the_order_in_memory_differs():
    for shape in [(3, 4), (2, 0, 3), (), (5, 1)]:
        assert compute_contiguous_strides(torch.Size(shape)) == torch.empty(shape).stride()
    assert has_same_layout(torch.zeros(3, 4), (4, 1))
    assert not has_same_layout(torch.zeros(3, 4).t(), (3, 1))
    assert has_same_layout(torch.empty_strided((3, 1), (1, 77)), (1, 1))


class Packer:
    """A bucket that is packed in the hook of the AccumulateGrad node of its last parameter, as by the reducer.

    Args:
        given: The parameters.
        last: The index of the last parameter.
        passes_grad: Whether the bucket gets the gradient that the node still holds.
    """

    def __init__(self, given: list[nn.Parameter], last: int, *, passes_grad: bool = True) -> None:
        self.params, self.pieces, self._passes_grad = given, [], passes_grad
        self.bucket = GradBucket(range(len(given)), given, flat_below=ALONE)
        self._node: Any = given[last].view_as(given[last]).grad_fn.next_functions[0][0]
        self._node.register_hook(self._fire)

    def _fire(self, _results: Any, gradients: Any) -> None:
        self.pieces = self.bucket.pack(2, node_grad=gradients[0] if self._passes_grad else None)

    def packed_in_place(self) -> list[bool]:
        """Return for each gradient whether it was packed in its own memory."""
        return [
            address(piece) == address(p.grad)
            for piece, p in zip(self.pieces, self.params, strict=True)
        ]


def run_backward(given: list[nn.Parameter]) -> None:
    """Run a backward in which the engine visits the last parameter last."""
    x = torch.ones(SHAPE)
    for param in reversed(given):
        x = torch.tanh(x * param)
    x.square().sum().backward()


@pytest.mark.parametrize("before", ["stolen", "accumulated"])
def test_the_last_gradient_of_a_bucket_is_reduced_in_place_from_its_own_hook(before):
    given = params(SHAPE, SHAPE)
    if before == "accumulated":
        run_backward(given)
    packer = Packer(given, 1)
    run_backward(given)
    assert packer.packed_in_place() == [True, True]


def test_without_the_gradient_of_the_running_node_a_stolen_gradient_is_copied():
    given = params(SHAPE, SHAPE)
    packer = Packer(given, 1, passes_grad=False)
    run_backward(given)
    assert packer.packed_in_place() == [True, False]


@pytest.mark.parametrize("before", ["stolen", "accumulated"])
def test_an_alias_is_seen_from_the_hook_as_well(before):
    given = params(SHAPE)
    if before == "accumulated":
        run_backward(given)
    aliases: list[torch.Tensor] = []
    given[0].register_post_accumulate_grad_hook(lambda p: aliases.append(p.grad.view(-1)))
    packer = Packer(given, 0)
    run_backward(given)
    assert packer.packed_in_place() == [False]
    assert len(aliases) == 1


@pytest.mark.parametrize("before", ["stolen", "accumulated"])
def test_memory_that_two_leaves_share_is_not_reduced_in_place_from_the_hook_of_one(before):
    """Check two leaves with one memory: the gradient of the second leaf is added to it later."""
    given = params((4, 6), (6, 4))

    def run() -> None:
        (given[0].view(-1) + given[1].view(-1)).square().sum().backward()

    if before == "accumulated":
        run()
        assert address(given[0].grad) == address(given[1].grad), (
            "the gradients do not share memory, so the test shows nothing"
        )
    packers = [Packer([param], 0) for param in given]
    run()
    assert [packer.packed_in_place() for packer in packers] == [[False], [False]]


def test_deferred_gradients_run_hooks_and_are_not_copied():
    weight, bias = params((4, 3), (4,))
    seen: list[tuple[int, ...]] = []
    first = 0
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(tuple(param.grad.shape)))
    for step in (1, 2):
        held = [torch.full((4,), 2.0), torch.full((4, 3), 3.0)]
        first = first or held[1].data_ptr()
        with torch.no_grad():
            accumulate_deferred([([weight, bias], lambda held=held: [held.pop(), held.pop()])])
        assert weight.grad.data_ptr() == first, "the gradient was copied"
        assert weight.grad.eq(3 * step).all()
        assert bias.grad.eq(2 * step).all()
    assert seen == [(4, 3)] * 2


def test_deferred_gradients_are_computed_sequentially_and_free_their_inputs():
    first, second = params((4, 3), (3, 2))
    order: list[str] = []
    kept = [torch.ones(4, 3), torch.ones(3, 2)]
    kept_refs = [weakref.ref(tensor) for tensor in kept]

    def compute(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        order.append(f"{name}, {sum(ref() is None for ref in kept_refs)} freed")
        return [tensor * 2]

    for name, param in (("first", first), ("second", second)):
        param.register_post_accumulate_grad_hook(
            lambda _, name=name: order.append(f"{name} has it")
        )
    due = [
        ([first], functools.partial(compute, "first", kept.pop(0))),
        ([second], functools.partial(compute, "second", kept.pop(0))),
    ]
    with torch.no_grad():
        accumulate_deferred(due)
    assert order == ["first, 0 freed", "first has it", "second, 1 freed", "second has it"]
    assert first.grad.eq(2).all()
    assert second.grad.eq(2).all()
