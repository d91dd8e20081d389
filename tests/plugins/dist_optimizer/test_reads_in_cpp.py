"""Gradients that the script passes to C++ code, which ignores the class of a lazy gradient."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.read_hooks import wrap_to_fetch_args
from tests.overlap.reading import Scale, scripted
from tests.overlap.test_placeholders import OnesSource
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, apply, check_all, ddp, on, params
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net


def like(grad: Tensor) -> list[Tensor]:
    """Return a tensor like the gradient for each rank."""
    return [torch.zeros(grad.shape) for _ in range(dist.get_world_size())]


def repeat(grad: Tensor) -> list[Tensor]:
    """Return the gradient once per rank."""
    return [grad] * dist.get_world_size()


def broadcast(grad: Tensor) -> Tensor:
    # Other values on rank 0 show whether the broadcast wrote.
    if dist.get_rank() == 0:
        grad.mul_(2.0)
    dist.broadcast(grad, 0)
    return grad


def reduce(grad: Tensor) -> Tensor | None:
    dist.reduce(grad, 0)
    # The values of other ranks are undefined.
    dist.broadcast(grad, 0)
    return grad


def gather(grad: Tensor) -> list[Tensor] | None:
    gathered = like(grad) if dist.get_rank() == 0 else None
    dist.gather(grad, gathered, dst=0)
    return gathered


def scatter(grad: Tensor) -> Tensor:
    out = torch.zeros(grad.shape)
    dist.scatter(out, repeat(grad) if dist.get_rank() == 0 else None, src=0)
    return out


def scatter_into(grad: Tensor) -> Tensor:
    dist.scatter(grad, [part + 2 for part in like(grad)] if dist.get_rank() == 0 else None, src=0)
    return grad


def all_gather(grad: Tensor) -> list[Tensor]:
    gathered = like(grad)
    dist.all_gather(gathered, grad)
    return gathered


def all_gather_flat(grad: Tensor) -> Tensor:
    gathered = torch.zeros(dist.get_world_size() * grad.shape[0], *grad.shape[1:])
    dist.all_gather_into_tensor(gathered, grad)
    return gathered


def reduce_scatter(grad: Tensor) -> Tensor:
    out = torch.zeros(grad.shape)
    dist.reduce_scatter(out, repeat(grad))
    return out


def reduce_scatter_flat(grad: Tensor) -> Tensor:
    out = torch.zeros(grad.shape)
    dist.reduce_scatter_tensor(out, torch.cat(repeat(grad)))
    return out


def reduce_scatter_into(grad: Tensor) -> Tensor:
    dist.reduce_scatter(grad, [part + 2 for part in like(grad)])
    return grad


def all_to_all(grad: Tensor) -> Tensor:
    received = torch.zeros(grad.shape)
    sizes = [0] * (dist.get_world_size() - 1)
    dist.all_to_all_single(
        received if dist.get_rank() == 0 else received[:0],
        grad if dist.get_rank() == 0 else grad[:0],
        [grad.shape[0], *sizes] if dist.get_rank() == 0 else [0, *sizes],
        [grad.shape[0], *sizes] if dist.get_rank() == 0 else [0, *sizes],
    )
    return received


def send(grad: Tensor) -> Tensor | None:
    if dist.get_rank() == 0:
        dist.send(grad, 1)
    elif dist.get_rank() == 1:
        received = torch.zeros(grad.shape)
        dist.recv(received, 0)
        return received
    return None


def receive(grad: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        for rank in range(1, dist.get_world_size()):
            dist.isend(grad.fill_(3.0), rank).wait()
    else:
        dist.irecv(grad, 0).wait()
    return grad


def exchange(grad: Tensor) -> Tensor:
    received = torch.zeros(grad.shape)
    rank, world = dist.get_rank(), dist.get_world_size()
    operations = [
        dist.P2POp(dist.isend, grad, (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def coalesced(grad: Tensor) -> Tensor:
    dist.all_reduce_coalesced([grad])
    return grad


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "scatter into it": scatter_into,
    "all_gather": all_gather,
    "all_gather, flat": all_gather_flat,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter, flat": reduce_scatter_flat,
    "reduce_scatter into it": reduce_scatter_into,
    "all_to_all": all_to_all,
    "send": send,
    "receive": receive,
    "exchange": exchange,
    "coalesced": coalesced,
    "broadcast with a graph": lambda g: differentiable.broadcast(g, 0),
    "functional": lambda g: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(g, "sum", dist.group.WORLD.group_name)
    ),
}


def square(x: Tensor) -> Tensor:
    return x.square().sum()


def grad_of_output(grad: Tensor) -> Tensor:
    x = torch.ones(grad.shape, requires_grad=True)
    (2 * x).backward(grad)
    return x.grad


def grads_of_outputs(grad: Tensor) -> Tensor:
    x = torch.ones(grad.shape, requires_grad=True)
    torch.autograd.backward([3 * x], grad_tensors=[grad])
    return x.grad


def asked_grads(grad: Tensor) -> Any:
    x = torch.ones(grad.shape, requires_grad=True)
    return torch.autograd.grad([3 * x], [x], grad_outputs=[grad])


def forward_ad(grad: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(grad.shape), grad)
        return torch.autograd.forward_ad.unpack_dual(dual * 2).tangent.clone()


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return square(x)


def hooked(grad: Tensor) -> Tensor:
    x = torch.ones(grad.shape, requires_grad=True)
    x.register_hook(lambda _: grad)
    x.sum().backward()
    return x.grad


def set_data(grad: Tensor) -> Tensor:
    x = torch.ones(grad.shape)
    x.data = grad
    return x.clone()


def assign(grad: Tensor) -> Tensor:
    x = torch.ones(grad.shape)
    x[:] = grad
    x[0] = grad[1]
    return x


def load(grad: Tensor) -> Tensor:
    module = nn.Linear(grad.shape[1], grad.shape[0], bias=False)
    module.load_state_dict({"weight": grad})
    return module.weight.detach()


def load_module(grad: Tensor) -> Any:
    module = nn.Linear(grad.shape[1], grad.shape[0], bias=False)
    x = torch.ones(2, grad.shape[1])
    return torch.func.functional_call(module, {"weight": grad}, (x,))


def batched(grad: Tensor) -> Any:
    x = torch.ones(grad.shape[1], requires_grad=True)
    return torch.autograd.grad(2 * x, x, grad_outputs=grad, is_grads_batched=True)


def read_memory(grad: Tensor) -> Tensor:
    memory = (ctypes.c_float * grad.numel()).from_address(grad.data_ptr())
    return torch.frombuffer(memory, dtype=torch.float32).clone()


def check(grad: Tensor) -> str:
    # From torch 2.13 on, collectives see the class before this function does.
    dist.distributed_c10d._check_single_tensor(grad, "tensor")
    return type(grad).__name__


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda g: torch.vmap(square)(g),
    "vmap over a list": lambda g: torch.vmap(lambda pair: square(pair[0]) + pair[1])(
        [g, torch.ones(g.shape[0])]
    ),
    "func.grad": lambda g: torch.func.grad(square)(g),
    "func.vjp": lambda g: torch.func.vjp(torch.sin, torch.ones(g.shape))[1](g),
    "func.jvp": lambda g: torch.func.jvp(torch.sin, (torch.ones(g.shape),), (g,)),
    "func.jvp at it": lambda g: torch.func.jvp(torch.sin, (g,), (torch.ones(g.shape),)),
    "func.jacrev": lambda g: torch.func.jacrev(square)(g),
    "func.hessian": lambda g: torch.func.hessian(square)(g[0]),
    "func.functionalize": lambda g: torch.func.functionalize(square)(g),
    "functional.vjp": lambda g: torch.autograd.functional.vjp(torch.sin, torch.ones(g.shape), v=g),
    "gradient of an output": grad_of_output,
    "gradients of outputs": grads_of_outputs,
    "asked gradients": asked_grads,
    "forward mode": forward_ad,
    "compiled": lambda g: torch.compile(square, backend="eager")(g),
    "compiled for autograd": lambda g: torch.compile(square, backend="aot_eager")(g),
    "exported": lambda g: torch.export.export(Square(), (torch.ones(g.shape),)).module()(g),
    "checkpoint": lambda g: torch.utils.checkpoint.checkpoint(square, g, use_reentrant=False),
    "as nested": lambda g: torch.nested.as_nested_tensor([g, g]).to_padded_tensor(0.0),
    "storage": lambda g: torch.empty(0).set_(g.untyped_storage(), 0, g.shape).clone(),
    "as a parameter": lambda g: nn.Parameter(g).detach().clone(),
    "as a buffer": lambda g: nn.Buffer(g).detach().clone(),
    "index": lambda g: torch.zeros(g.shape).index_put_((torch.arange(g.shape[0]),), g),
    "assigned by index": assign,
    "rows as a tensor": lambda g: torch.tensor([float(x) for x in g[0]]),
    "as a tensor": lambda g: torch.as_tensor(g).clone(),
    "as_strided": lambda g: torch.as_strided(g, (2,), (1,)).clone(),
    "loaded": load,
    "copied into a module": load_module,
    "data_ptr": read_memory,
    "check of collectives": check,
    "batched gradients": batched,
}

# No function of Python sees these calls, and no patch.
UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "scripted": lambda g: scripted(g, torch.ones(g.shape)),
    "traced": lambda g: torch.jit.trace(square, torch.ones(g.shape))(g),
    "Function": lambda g: Scale.apply(g, torch.ones(g.shape)),
    "hook of a tensor": hooked,
    "set": lambda g: torch.empty(0).set_(g).clone(),
    "as data": set_data,
    "nested": lambda g: torch.nested.nested_tensor([g, g]).to_padded_tensor(0.0),
    "in a sparse tensor": lambda g: torch.sparse_coo_tensor(
        torch.arange(g.shape[0])[None], g, g.shape
    ).to_dense(),
    "new tensor": lambda g: torch.tensor(g),
}


STEPS = 5


def train(use: str) -> list[Record]:
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    records = []
    for step in range(STEPS):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        # In the last step the gradient is lazy, as no step before has read it.
        found = None
        if step == STEPS - 1:
            found = (COLLECTIVES | FUNCTIONS | UNSEEN)[use](next(model.parameters()).grad)
        opt.step()
        records.append({"found": found, "param": params(model)})
    return records


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_get_the_content(ranks, world):
    cases = {use: {"use": use} for use in COLLECTIVES}
    check_all(ranks(world)(all_cases, train, on(world, cases)))


def test_functions_get_the_content(ranks):
    cases = {use: {"use": use} for use in FUNCTIONS}
    check_all(ranks(2)(all_cases, train, on(2, cases)))


def read_unseen() -> dict[str, bool]:
    """Return by function whether any value of its result is finite."""
    with apply():
        return {use: bool(train(use)[-1]["found"].isfinite().any()) for use in UNSEEN}


def test_other_functions_do_not_compute_something_else_unnoticed(ranks):
    for found in ranks(2)(read_unseen):
        assert found == dict.fromkeys(UNSEEN, False)


def test_a_collective_waits_for_no_thread_that_reads_a_lazy_tensor():
    """The thread may wait for a peer, which waits for the collective."""
    begins, ends = threading.Event(), threading.Event()

    class Slow(OnesSource):
        def fetch(self, tensors: Any, *, counts_as_read: bool) -> list[Tensor]:
            begins.set()
            assert ends.wait(60)
            return super().fetch(tensors, counts_as_read=counts_as_read)

    lazy = lazy_tensor.make_lazy(torch.empty(3), Slow(), 0)
    reader = threading.Thread(target=lambda: lazy.sum())
    reader.start()
    assert begins.wait(60)
    fetch = wrap_to_fetch_args(lambda *args: args)
    assert fetch([torch.ones(2)], "tensors")[1] == "tensors"
    lazy_tensor.materialize([torch.ones(2)])
    ends.set()
    reader.join()
    assert lazy.tolist() == [1.0] * 3


def compiled_around_a_break() -> dict[str, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def function(x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_()
        (3 * leaf).backward(x)
        dist.all_reduce(leaf.grad)
        return leaf.grad

    compiled = torch.compile(function, backend="eager")
    for length in range(2, 6):
        compiled(torch.ones(length, 2))
    return {
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def stock_and_patched() -> list[dict[str, int]]:
    stock = compiled_around_a_break()
    with apply():
        return [stock, compiled_around_a_break()]


def test_dynamo_compiles_no_hook(ranks):
    for stock, patched in ranks(2)(stock_and_patched):
        assert patched == stock
