"""DTensors that torch puts into modules instead of stale parameters: every way to read them returns the true values."""

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
HELD_BY_GRAPH = "a graph holds the DTensor in its place"


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Record views of parameters, like a feature."""
    patches = PatchManager()
    target = f"{over_meshes.__name__}._unflatten_tensor"
    patches.register_patch(target, wrap=wrap_unflatten, feature="views", why="tests")
    with entrances(), patches.applied("views"):
        yield


def trained() -> tuple[nn.Module, nn.Parameter, DTensor]:
    """Return a linear over a mesh after its first step, its weight, and the DTensor that replaces the weight."""
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


def without_torch_function(view: Any, x: Any) -> Any:
    # The same state holds inside of the __torch_function__ of another tensor.
    with torch._C.DisableTorchFunctionSubclass():
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
    "linear, without __torch_function__": without_torch_function,
}


def plain(value: Any) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


def await_release(weight: nn.Parameter) -> None:
    """Wait until the threads of the last collective have released its tensors."""
    deadline = time.monotonic() + 60
    while reason := mark_pending([weight], lambda: None):
        gc.collect()
        assert time.monotonic() < deadline, reason
        time.sleep(0.01)
    mark_ready([weight])


def read() -> dict[str, Any]:
    """Return the results of each reader before and after the parameter was stale, and the number of waits."""
    found = {}
    with noted():
        linear, weight, view = trained()
        x = DTensor.from_local(
            torch.randn(2, SIZE), view.device_mesh, [Replicate()], run_check=False
        )
        for name, reader in READERS.items():
            true = plain(reader(view, x))
            await_release(weight)
            stale = Stale([weight]).mark()
            assert type(view) is not DTensor
            value = plain(reader(view, x))
            assert type(view) is DTensor
            assert not is_pending(weight)
            found[name] = (true, value, stale.settled)
        await_release(weight)
        stale = Stale([weight]).mark()
        weight.sum()
        found["the parameter itself"] = (
            weight.sum().detach(),
            view.to_local().sum().detach(),
            stale.settled,
        )
        await_release(weight)
        stale = Stale([weight]).mark()
        true = linear.weight._local_tensor.clone()
        found["a module's call"] = (
            F.linear(torch.ones(2, SIZE), true),
            linear(torch.ones(2, SIZE)),
            stale.settled,
        )
    return found


def test_readers_of_the_dtensor_get_true_values(ranks):
    for found in ranks(2)(read):
        for name, (true, value, settled) in found.items():
            assert torch.equal(true, value), name
            assert settled == 1, name


def metadata() -> list[Any]:
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


def test_reads_of_metadata_do_not_wait(ranks):
    for *form, is_dtensor, settled, was_pending, _, is_plain in ranks(2)(metadata):
        assert form == [torch.Size([2 * SIZE, SIZE]), torch.float32, (Shard(0),), 2, True, False]
        assert (is_dtensor, settled, was_pending, is_plain) == (True, 0, True, True)


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
    # Here no feature has recorded the view.
    with entrances():
        _, weight, view = trained()
        reasons.append(mark_pending([weight], nothing, owners=3))
        return [*reasons, str(find_dtensor(weight))]


def test_a_view_that_other_code_holds_cannot_be_pending(ranks):
    shared = "other tensors share its memory"
    for detached, local, graph, none, unrecorded, view in ranks(2)(refused):
        assert detached == unrecorded == shared
        assert local in (shared, HELD_BY_GRAPH)
        assert graph == HELD_BY_GRAPH
        assert (none, view) == ("", "None")


def noted_again() -> list[bool]:
    """Make a second DTensor over a parameter while the first one is pending with it."""
    with noted():
        _, weight, view = trained()
        await_release(weight)
        stale = Stale([weight]).mark()
        second = over_meshes._unflatten_tensor(weight, view._spec)
        found = [type(view) is DTensor, stale.settled == 1, find_dtensor(weight) is second]
    return found


def test_a_pending_view_is_plain_once_a_second_view_is_made(ranks):
    assert ranks(2)(noted_again) == [[True] * 3] * 2


class Broken:
    def settle(self) -> None:
        raise RuntimeError("the peer has exited")


def lost() -> list[str]:
    with noted():
        _, weight, view = trained()
        broken = Broken()
        assert not mark_pending([weight], broken.settle, owners=3)
        mark_lost([weight], broken.settle, RuntimeError("timeout"))
        found = [error_of(view.to_local), error_of(view.sum)]
        del broken
        found.append(error_of(view.to_local))
        mark_ready([weight])
        return [*found, error_of(view.to_local)]


def test_values_that_did_not_arrive_are_an_error_for_readers(ranks):
    for local, summed, without_source, unmarked in ranks(2)(lost):
        assert local == summed == "the peer has exited"
        assert (
            without_source
            == "ovpatch: the values of this parameter did not arrive after optimizer.step(): timeout"
        )
        assert unmarked == "no error"
