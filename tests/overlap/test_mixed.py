"""Parameters whose whole is there in half precision: what autocast casts finds that, any other reader the whole."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ovpatch.overlap import mixed
from ovpatch.overlap.mixed import Mixed, MixedParameter
from ovpatch.overlap.pending import any_unread, plainly, refusal, settle_all
from tests.overlap.reading import READERS
from tests.overlap.stale import entrances, same, tensors


class Wholes:
    """Has the values of some parameters, as the ranks together would."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.lock, self.reads = threading.RLock(), []
        self.params = list(params)
        self.nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.params if p.requires_grad]
        with plainly():
            self.values = [param.data.clone() for param in self.params]
        for index, param in enumerate(self.params):
            half = nn.Parameter(param.detach().bfloat16(), requires_grad=False)
            assert not refusal(param)
            mixed.lower(param, Mixed(self, index, half, torch.empty_like(param.data, device="meta")))

    def make_whole(self, indices: Sequence[int], reader: str) -> None:
        with self.lock, plainly():
            for index in indices:
                if mixed.find(self.params[index]) is not None:
                    mixed.give_back(self.params[index], self.values[index].clone())
                    self.reads.append(reader)

    def main(self, index: int) -> torch.Tensor:
        return self.values[index]


def lowered(model: nn.Module) -> Wholes:
    params = [p for p in dict.fromkeys(model.parameters()) if p.dtype == torch.float32 and p.is_contiguous()]
    return Wholes([p for p in params if not refusal(p)])


@pytest.fixture(autouse=True)
def _entrances():
    with entrances():
        yield
        mixed.make_whole([], reader="the end of the test")
        settle_all()
    assert not any_unread()


# The first reads raw memory, where it finds NaN; the second refuses what has weak references, as gradients' hooks do.
OTHERS = ("scripted function", "swap_tensors")


@pytest.mark.parametrize("name", [name for name in READERS if name not in OTHERS])
def test_a_reader_finds_the_values(name):
    make, read = READERS[name]
    torch.manual_seed(0)
    model = make()
    expected = tensors(read(copy.deepcopy(model)))
    lowered(model)
    assert same(tensors(read(model)), expected)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def gradients(layer: nn.Linear, uses: int, **context: bool) -> list[torch.Tensor]:
    layer.zero_grad()
    x = torch.arange(8.0).view(2, 4)
    with torch.autocast("cpu", torch.bfloat16, **context):
        y = sum(F.linear(x + i, layer.weight, layer.bias).square() for i in range(uses))
    y.float().mean().backward()
    return [y.detach(), layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_gradients_are_those_of_autocasts_own_cast(linear, uses, cached):
    expected = gradients(copy.deepcopy(linear), uses, cache_enabled=cached)
    holder = lowered(linear)
    clear = torch.clear_autocast_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "clear_autocast_cache", mixed.forgetting_casts(clear))
        found = gradients(linear, uses, cache_enabled=cached)
    assert not holder.reads
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not mixed._casts


def written(kept: Mixed) -> int:
    with plainly():
        return mixed.writable_copy(kept).data_ptr()


def test_a_graph_keeps_the_copy_that_it_was_made_with(linear):
    holder = lowered(linear)
    kept = mixed.find(linear.weight)
    before = written(kept)
    assert written(kept) == before
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(torch.ones(2, 4, requires_grad=True))
    torch.clear_autocast_cache()
    mixed._casts.clear()
    fresh = written(kept)
    assert fresh != before
    del y
    assert written(kept) == fresh
    assert not holder.reads


def test_who_does_not_ask_finds_nan(linear):
    holder = lowered(linear)
    with torch._C.DisableTorchFunctionSubclass():
        assert linear.weight.isnan().all()
        assert linear.weight.untyped_storage().nbytes() == 4
    assert not holder.reads


@pytest.mark.parametrize("how", ["plain", "out", "fp16", "no autocast", "keyword", "method", "list"])
def test_what_autocast_does_not_cast_reads_the_whole(linear, how):
    expected = linear.weight.detach().clone()
    holder = lowered(linear)
    x = torch.ones(2, 4)
    reads = {"plain": 0, "out": 1, "fp16": 1, "no autocast": 1, "keyword": 0, "method": 0, "list": 1}[how]
    dtype = torch.float16 if how == "fp16" else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=how != "no autocast"), torch.no_grad():
        if how == "out":
            torch.mm(linear.weight, x.t(), out=torch.empty(3, 2))
        elif how == "method":
            x.matmul(torch.ones(4, 3)).mm(linear.weight)
        elif how == "list":
            torch._foreach_norm([linear.weight])
        elif how == "keyword":
            F.linear(x, weight=linear.weight)
        else:
            F.linear(x, linear.weight)
    assert len(holder.reads) == reads
    assert isinstance(linear.weight, MixedParameter) == (not reads)
    assert torch.equal(linear.weight.detach(), expected)
