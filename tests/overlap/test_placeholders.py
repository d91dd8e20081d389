"""Lazy tensors are independent of each other, although they share the memory of one element."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazySource, LazyTensor, TensorMeta


class OnesSource(LazySource):
    """A source whose contents are all ones."""

    def fetch(self, placeholders: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        return [torch.ones(placeholder.shape) for placeholder in placeholders]


MAKE = [lazy_tensor.make_lazy, lazy_tensor.make_lazy_]


@pytest.mark.parametrize("make", MAKE)
def test_autograd_records_of_a_lazy_tensor_do_not_affect_others(make):
    first, second = (make(torch.empty(3), OnesSource(), key) for key in range(2))
    param = torch.nn.Parameter(torch.full((3,), 2.0))
    first.add_(param)
    assert first.tolist() == [3.0] * 3
    assert first.requires_grad
    later = make(torch.empty(3), OnesSource(), 2)
    for unused in (second, later):
        assert not unused.requires_grad
        assert unused.tolist() == [1.0] * 3


@pytest.mark.parametrize("make", MAKE)
def test_lazy_tensors_made_in_inference_mode_can_be_used_by_autograd(make):
    given = torch.empty(3)
    with torch.inference_mode():
        made = make(given, OnesSource(), 0)
    assert not made.is_inference()
    (torch.nn.Parameter(torch.ones(3)) * made).sum().backward()


@pytest.mark.parametrize("removed", [["source"], ["source", "key"]])
def test_a_lazy_tensor_that_a_thread_was_filling_at_a_fork_has_its_content(removed):
    """Check the state in the child, which lacks that thread: only the class of the tensor has not changed yet."""
    made = lazy_tensor.make_lazy_(torch.empty(3), OnesSource(), 0)
    with torch._C.DisableTorchFunctionSubclass():
        made.data = torch.full((3,), 2.0)
        for name in removed:
            delattr(made, name)
    assert (made + 0).tolist() == [2.0] * 3
    assert type(made) is torch.Tensor


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
def test_metadata_creates_a_dense_tensor_of_the_same_shape(tensor):
    meta = TensorMeta.of(tensor)
    made = meta.empty()
    assert (made.shape, made.dtype, meta.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert made.stride() == torch.empty_like(tensor, memory_format=torch.preserve_format).stride()


def test_a_source_takes_its_lock_before_that_of_lazy_tensors_once_per_read():
    events = []

    class Locked(OnesSource):
        @contextmanager
        def reading(self):
            # Another thread still gets the lock of lazy tensors, so it cannot wait for this one.
            with ThreadPoolExecutor() as pool:
                pool.submit(
                    lazy_tensor.materialize,
                    [lazy_tensor.make_lazy(torch.empty(1), OnesSource(), 0)],
                ).result()
            events.append("locked")
            yield
            events.append("unlocked")

        def fetch(self, placeholders, *, counts_as_read):
            events.append(f"fetched {len(placeholders)}")
            return super().fetch(placeholders, counts_as_read=counts_as_read)

    source = Locked()
    lazy_tensor.materialize(lazy_tensor.make_lazy(torch.empty(2), source, key) for key in range(3))
    assert events == ["locked", "fetched 3", "unlocked"]
