"""DTensors that stand in the places of stale parameters: who reads them gets the true values, whichever way."""

from __future__ import annotations

import contextlib
import gc
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel import ddp as over_meshes
from torch.nn.parallel import DistributedDataParallel as DDP

from ovpatch.overlap.tensors.pending_param import (
    find_dtensor,
    is_pending,
    mark_lost,
    mark_pending,
    mark_ready,
)
from ovpatch.overlap.tensors.read_hooks import wrap_unflatten
from ovpatch.patching import PatchManager
from tests.overlap.stale import Stale, entrances
from tests.support.errors import error_of

SIZE = 4


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note views as a feature would."""
    patches = PatchManager()
    target = f"{over_meshes.__name__}._unflatten_tensor"
    patches.register_patch(target, wrap=wrap_unflatten, feature="views", why="tests")
    with entrances(), patches.applied("views"):
        yield


def trained() -> tuple[nn.Module, nn.Parameter, DTensor]:
    """Return a linear over a mesh behind its first step, its weight, and what stands in its place."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(SIZE, 2 * SIZE, bias=False)
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    wrapped = DDP(linear, device_mesh=mesh["dp"])
    (weight,) = wrapped.parameters()
    wrapped(torch.ones(2, SIZE)).sum().backward()
    weight.grad = None
    return linear, weight, linear.weight


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        return weight._local_tensor * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def saved(view: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(view.detach(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def called(view: Any, x: Any) -> Tensor:
    module = nn.Linear(SIZE, 2 * SIZE, bias=False)
    return torch.func.functional_call(module, {"weight": view}, (x,))


def unasked(view: Any, x: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # as within another tensor's __torch_function__
        return F.linear(x, view)


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda view, x: F.linear(x, view),
    "matmul": lambda view, x: x @ view.T,
    "in place of an argument": lambda view, x: torch.add(x[:1, :1], view),
    "in a list": lambda view, x: torch.stack([view, view]),
    "foreach": lambda view, x: torch._foreach_mul([view], 2.0)[0],
    "to_local": lambda view, x: view.to_local(),
    "full_tensor": lambda view, x: view.full_tensor(),
    "redistribute": lambda view, x: view.redistribute(placements=[Replicate()]),
    "detach": lambda view, x: view.detach(),
    "data": lambda view, x: view.data,
    "repr": lambda view, x: torch.tensor([hash(repr(view)) % 1000]),
    "local tensor": lambda view, x: view._local_tensor,
    "autograd.Function": lambda view, x: Reads.apply(view),
    "functional_call": lambda view, x: called(view, x),
    "torch.save": lambda view, x: saved(view),
    "linear, class not asked": unasked,
}


def plain(value: Any) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


def let_go(weight: nn.Parameter) -> None:
    """Wait until the threads of the last collective have let go of its tensors."""
    deadline = time.monotonic() + 60
    while reason := mark_pending([weight], lambda: None):
        gc.collect()
        assert time.monotonic() < deadline, reason
        time.sleep(0.01)
    mark_ready([weight])


def read() -> dict[str, Any]:
    """Return what each reader finds, of true values and of stale ones, and how often that settled."""
    found = {}
    with noted():
        linear, weight, view = trained()
        x = DTensor.from_local(
            torch.randn(2, SIZE), view.device_mesh, [Replicate()], run_check=False
        )
        for name, reader in READERS.items():
            true = plain(reader(view, x))
            let_go(weight)
            stale = Stale([weight]).mark()
            assert type(view) is not DTensor
            value = plain(reader(view, x))
            assert type(view) is DTensor
            assert not is_pending(weight)
            found[name] = (true, value, stale.settled)
        let_go(weight)
        stale = Stale([weight]).mark()
        weight.sum()
        found["the parameter itself"] = (
            weight.sum().detach(),
            view.to_local().sum().detach(),
            stale.settled,
        )
        let_go(weight)
        stale = Stale([weight]).mark()
        true = linear.weight._local_tensor.clone()
        found["a module's call"] = (
            F.linear(torch.ones(2, SIZE), true),
            linear(torch.ones(2, SIZE)),
            stale.settled,
        )
    return found


def test_who_reads_the_dtensor_gets_true_values(ranks):
    for found in ranks(2)(read):
        for name, (true, value, settled) in found.items():
            assert torch.equal(true, value), name
            assert settled == 1, name


def asked() -> list[Any]:
    with noted():
        _, weight, view = trained()
        stale = Stale([weight]).mark()
        form = [
            view.shape,
            view.dtype,
            view.placements,
            view.device_mesh.size(),
            view.requires_grad,
            view.is_leaf,
        ]
        return [
            *form,
            isinstance(view, DTensor),
            stale.settled,
            is_pending(weight),
            stale.settle(),
            type(view) is DTensor,
        ]


def test_who_asks_for_its_form_does_not_settle(ranks):
    for *form, is_one, settled, still, _, plainly in ranks(2)(asked):
        assert form == [torch.Size([2 * SIZE, SIZE]), torch.float32, (Shard(0),), 2, True, False]
        assert (is_one, settled, still, plainly) == (True, 0, True, True)


def refused() -> list[str]:
    def nothing() -> None: ...

    with noted():
        linear, weight, view = trained()
        reasons = []
        for hold in (
            view.detach,
            view.to_local,
            lambda: linear(torch.ones(2, SIZE, requires_grad=True)),
            lambda: 0,
        ):
            held = hold()
            reasons.append(mark_pending([weight], nothing, owners=3))
            del held
            gc.collect()
        mark_ready([weight])
        assert type(view) is DTensor
    with entrances():  # whose views nobody has noted
        _, weight, view = trained()
        reasons.append(mark_pending([weight], nothing, owners=3))
        return [*reasons, str(find_dtensor(weight))]


def test_a_view_that_others_hold_cannot_be_pending(ranks):
    shared = "other tensors share its memory"
    for detached, local, graph, none, unnoted, view in ranks(2)(refused):
        assert detached == unnoted == shared
        assert local in (shared, "a graph holds the DTensor in its place")
        assert graph == "a graph holds the DTensor in its place"
        assert (none, view) == ("", "None")


def noted_again() -> list[bool]:
    """Another DTensor is made over a parameter while the first one is pending with it."""
    with noted():
        _, weight, view = trained()
        let_go(weight)
        stale = Stale([weight]).mark()
        other = over_meshes._unflatten_tensor(weight, view._spec)
        found = [type(view) is DTensor, stale.settled == 1, find_dtensor(weight) is other]
    return found


def test_a_pending_view_is_plain_once_there_is_another(ranks):
    assert ranks(2)(noted_again) == [[True] * 3] * 2


class Broken:
    def settle(self) -> None:
        raise RuntimeError("the peer is gone")


def lost() -> list[str]:
    with noted():
        _, weight, view = trained()
        broken = Broken()
        assert not mark_pending([weight], broken.settle, owners=3)
        mark_lost([weight], broken.settle, RuntimeError("time-out"))
        found = [error_of(view.to_local), error_of(view.sum)]
        del broken
        found.append(error_of(view.to_local))
        mark_ready([weight])
        return [*found, error_of(view.to_local)]


def test_values_that_did_not_come_are_an_error_for_its_readers(ranks):
    for local, summed, gone, unmarked in ranks(2)(lost):
        assert local == summed == "the peer is gone"
        assert (
            gone
            == "ovpatch: the values of this parameter did not arrive after optimizer.step(): time-out"
        )
        assert unmarked == "no error"
