"""The class of parameters whose values have not arrived yet."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ovpatch.overlap.tensors import pending_param
from ovpatch.overlap.tensors.pending_param import (
    PENDING,
    PendingParameter,
    is_pending,
    mark_pending,
    mark_ready,
    wait_for_all,
    wait_for_param,
)
from ovpatch.overlap.tensors.read_hooks import wait_for_module
from tests.overlap.stale import GARBAGE, Stale, entrances, find_reason_against, stale


@pytest.fixture(autouse=True)
def _nothing_stays_pending():
    yield
    assert not PENDING


@pytest.fixture
def param():
    param = nn.Parameter(torch.arange(12.0).view(3, 4))
    param.grad = torch.ones(3, 4)
    return param


METADATA = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0), len(p), p.dim(), p.ndim, p.numel(), p.nelement()),
    "stride": lambda p: (p.stride(), p.storage_offset(), p.is_contiguous()),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), torch.is_floating_point(p), p.is_complex()),
    "device": lambda p: (p.device, p.is_cuda, p.is_cpu, p.is_meta, p.get_device()),
    "bytes": lambda p: (p.element_size(), p.itemsize, p.nbytes),
    "layout": lambda p: (p.layout, p.is_sparse, p.is_quantized, p.is_nested),
    "autograd": lambda p: (
        p.requires_grad,
        p.is_leaf,
        p.grad_fn,
        p.grad,
        p._version,
        p.retains_grad,
        p.output_nr,
    ),
    "requires_grad set": lambda p: (setattr(p, "requires_grad", True), p.requires_grad_(True) is p),
    "grad set": lambda p: setattr(p, "grad", torch.zeros(3, 4)),
    "grad deleted": lambda p: delattr(p, "grad"),
    "hooks": lambda p: (
        p.register_hook(print).remove(),
        p.register_post_accumulate_grad_hook(print).remove(),
    ),
    "hash": lambda p: (hash(p) == id(p), p in {p: 1}, p in {p}),
    "type": lambda p: (
        isinstance(p, nn.Parameter),
        isinstance(p, torch.Tensor),
        issubclass(type(p), nn.Parameter),
    ),
    "attribute": lambda p: (setattr(p, "sequence_parallel", True), p.sequence_parallel),
    "weakref": lambda p: weakref.ref(p)() is p,
    "registered": lambda p: nn.ParameterList([p])[0] is p,
    "zero_grad": lambda p: (nn.ParameterList([p]).zero_grad(), p.grad),
    "optimizer": lambda p: torch.optim.SGD([p], lr=1).param_groups[0]["params"][0] is p,
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_does_not_wait(param, name):
    holder = Stale([param]).mark()
    METADATA[name](param)
    assert is_pending(param)
    assert holder.settled == 0
    wait_for_param(param)


@pytest.mark.parametrize(
    "name", ["shape", "size", "stride", "dtype", "device", "bytes", "layout", "hash", "type"]
)
def test_metadata_does_not_change(param, name):
    before = METADATA[name](param)
    holder = Stale([param]).mark()
    assert METADATA[name](param) == before
    holder.settle()


def test_a_parameter_keeps_its_identity(param):
    model = nn.Module()
    model.weight = param
    param.note = "kept"
    address, grad, version = param.data_ptr(), param.grad, param._version
    Stale([param]).mark()
    assert type(param) is PendingParameter
    assert model.weight is param
    assert dict(model.named_parameters())["weight"] is param
    wait_for_param(param)
    assert type(param) is nn.Parameter
    assert (param.data_ptr(), param.note) == (address, "kept")
    assert param.grad is grad
    assert param._version == version


def test_all_of_a_bucket_become_plain_together():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    holder = stale(model)
    model[0].weight.sum()
    assert not any(is_pending(p) for p in model.parameters())
    assert holder.settled == 1


def test_waits_for_all_parameters_and_for_a_parameter_that_is_not_pending(param):
    holders = [Stale([nn.Parameter(torch.zeros(2))]).mark() for _ in range(3)]
    wait_for_all()
    wait_for_all()
    assert [holder.settled for holder in holders] == [1, 1, 1]
    wait_for_param(param)
    mark_ready([param])
    assert type(param) is nn.Parameter


def test_a_pending_parameter_lives_until_it_is_settled():
    param = nn.Parameter(torch.zeros(2))
    holder = Stale([param]).mark()
    param_ref = weakref.ref(param)
    holder.params.clear()
    holder.nodes.clear()
    del param
    gc.collect()
    assert param_ref() is not None
    mark_ready([param_ref()])
    gc.collect()
    assert param_ref() is None


# --- parameters that cannot be pending ---


class Own(nn.Parameter):
    pass


def test_foreign_types_are_refused():
    buffer = nn.Buffer(torch.zeros(2))
    for tensor in (Own(torch.zeros(2)), torch.zeros(2), nn.UninitializedParameter(), buffer):
        assert mark_pending([tensor], wait_for_all).startswith("it is a ")


def test_a_pending_parameter_is_refused(param):
    holder = Stale([param]).mark()
    assert mark_pending([param], wait_for_all)
    holder.settle()


def test_all_of_a_bucket_are_pending_or_none(param):
    pending = Stale([nn.Parameter(torch.zeros(2))]).mark()
    free, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    alias = shared.detach()
    assert mark_pending([free, shared, param], wait_for_all) == "other tensors share its memory"
    assert [type(found) for found in (free, shared, param)] == [nn.Parameter] * 3
    del alias
    mixed = [free, pending.params[0], param]
    assert mark_pending(mixed, wait_for_all)
    assert [is_pending(found) for found in mixed] == [False, True, False]
    pending.settle()


def test_an_interrupt_leaves_none_pending(param, monkeypatch):
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pending_param, "count_sole_references", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mark_pending([param], wait_for_all)
    assert type(param) is nn.Parameter
    assert not pending_param.PENDING


ALIASES = {
    "detach": lambda p: p.detach(),
    "state_dict": lambda p: nn.ParameterList([p]).state_dict(),
    "numpy": lambda p: p.detach().numpy(),
    "dlpack": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
    "storage": lambda p: p.untyped_storage(),
    "view": lambda p: p[0],
    "Parameter": lambda p: nn.Parameter(p),
}


@pytest.mark.parametrize("name", ALIASES)
def test_shared_memory_is_refused_while_it_is_shared(param, name):
    alias = ALIASES[name](param)
    assert mark_pending([param], wait_for_all) == "other tensors share its memory"
    assert type(param) is nn.Parameter
    del alias
    assert find_reason_against(param) == ""


SHARING = {
    "share_memory_": lambda p: p.share_memory_(),
    "Module.share_memory": lambda p: nn.ParameterList([p]).share_memory(),
    "storage": lambda p: p.untyped_storage().share_memory_(),
}


@pytest.mark.parametrize("name", SHARING)
def test_memory_that_other_processes_share_is_refused(param, name):
    SHARING[name](param)
    assert mark_pending([param], wait_for_all) == "other processes share its memory"
    param.data = param.data.clone()
    assert find_reason_against(param) == ""


def test_the_aliases_of_the_caller_do_not_count(param):
    alias = param.data
    assert not mark_pending([param], wait_for_all, aliases=1)
    mark_ready([param])
    del alias
    assert mark_pending([param], wait_for_all, aliases=1)


def test_a_graph_that_can_still_be_run_backward_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.ones(2, 3, requires_grad=True)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    loss = model(x).sum() + (model[0].bias * x).sum()
    assert find_reason_against(model[1].weight) != ""
    assert find_reason_against(model[0].bias) != ""
    loss.backward()
    assert [find_reason_against(param) for param in model.parameters()] == [""] * 4
    del nodes


# --- readers ---


def test_an_error_reaches_every_reader_and_no_value_is_returned(param):
    def fails() -> None:
        raise RuntimeError("the peer has exited")

    mark_pending([param], fails)
    for read in (lambda: param.sum(), lambda: param.tolist(), lambda: str(param), wait_for_all):
        with pytest.raises(RuntimeError, match="the peer has exited"):
            read()
    assert is_pending(param)
    mark_ready([param])


class Sub(torch.Tensor):
    pass


class Careless(torch.Tensor):
    """A subclass that calls each function without a check of the types, as many do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return torch._tensor._convert(
            func(*[torch.Tensor(a) if type(a) is cls else a for a in args]), cls
        )


@pytest.mark.parametrize("kind", [Sub, Careless])
def test_functions_take_a_pending_parameter_and_a_tensor_of_another_subclass(param, kind):
    x = torch.ones(2, 4).as_subclass(kind)
    expected = F.linear(x, param)
    Stale([param]).mark()
    result = F.linear(x, param)
    assert type(result) is kind
    assert torch.equal(torch.Tensor(result), torch.Tensor(expected))


def test_a_module_waits_for_its_own_parameters_and_not_for_those_of_its_children():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stale(model[0])
    holder = stale(model[1])
    wait_for_module(model)
    assert is_pending(model[0].weight)
    wait_for_module(model[0])
    assert not is_pending(model[0].weight)
    assert holder.settled == 0
    # A replaced forward, as CUDA graphs of callables install it, no longer calls the children.
    model.forward = model.forward
    wait_for_module(model)
    assert holder.settled == 1


def test_an_optimizer_adds_to_the_new_values(param):
    """Check a step on a pending parameter, which waits first."""
    optimizer = torch.optim.SGD([param], lr=1.0)
    Stale([param]).mark()
    optimizer.step()
    assert torch.equal(param, torch.arange(12.0).view(3, 4) - 1)


def test_a_reader_waits_while_another_reader_fetches(param):
    entered, may_continue = threading.Event(), threading.Event()
    holder = Stale([param])
    bring = holder.settle

    def slowly() -> None:
        entered.set()
        assert may_continue.wait(60)
        bring()

    holder.settle = slowly
    holder.mark()
    found = []
    threads = [threading.Thread(target=lambda: found.append(param.sum().item())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    assert found == []
    may_continue.set()
    for thread in threads:
        thread.join(60)
    assert found == [66.0] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_fork_waits_for_pending_parameters_first(param):
    holder = Stale([param]).mark()
    child = os.fork()
    if not child:
        os._exit(0 if type(param) is nn.Parameter and param.data.sum() == 66 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert holder.settled == 1


def test_a_read_without_a_wait_would_return_garbage(param):
    """Check the assumption of the tests of readers."""
    holder = Stale([param]).mark()
    mark_ready([param])
    assert (param == GARBAGE).all()
    assert holder.settled == 0


def test_read_hooks_do_not_change_calls_with_other_tensors():
    with entrances():
        x = torch.ones(2, 2)
        assert torch.equal(torch.vmap(torch.sum)(x), torch.full((2,), 2.0))
        assert torch.equal(torch.func.grad(torch.sum)(x), x)
        assert type(nn.Parameter(x)) is nn.Parameter
        assert type(Own(x)) is Own
        assert nn.Identity()(x) is x
