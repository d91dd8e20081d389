"""Uses of watched parameters, and what a function may read."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ovpatch.overlap.pending import any_unread
from ovpatch.overlap.reachable import params_within
from ovpatch.overlap.watching import is_watched, unwatch, watch
from tests.overlap.stale import entrances

GLOBAL = nn.Linear(2, 2)


@pytest.fixture
def param():
    param = nn.Parameter(torch.ones(3, 3))
    yield param
    unwatch(param)
    assert not any_unread()


def cast(param: nn.Parameter) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(torch.ones(1, 3), param)


def test_casts_are_counted_and_metadata_is_no_read(param):
    uses = watch(param, torch.bfloat16)
    for _ in range(3):
        cast(param).float().sum().backward()
    assert param.shape == param.grad.shape
    assert torch.zeros_like(param).shape == param.new_empty(3, 3).shape
    assert (uses.casts, uses.reader) == (3, "")
    assert is_watched(param)


@pytest.mark.parametrize(
    ("name", "read"),
    {
        "detach": lambda p: p.detach(),
        ".data": lambda p: p.data,
        "_foreach_norm": lambda p: torch._foreach_norm([p]),
        "linear": lambda p: F.linear(torch.ones(1, 3), p),
        "code that does not ask for its class": copy.deepcopy,
    }.items(),
)
def test_another_read_ends_the_watch_and_is_named(param, name, read):
    uses = watch(param, torch.bfloat16)
    cast(param)
    read(param)
    assert (uses.casts, uses.reader, uses.thread) == (1, name, threading.get_ident())
    assert type(param) is nn.Parameter


def test_a_function_of_the_scripts_own_is_a_reader(param):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    uses = watch(param, torch.bfloat16)
    with entrances():
        Double.apply(param)
    assert uses.reader


def test_a_watched_parameter_is_pickled_as_a_plain_one(param):
    watch(param, torch.bfloat16)
    assert type(pickle.loads(pickle.dumps(param))) is nn.Parameter


def test_a_failing_function_leaves_the_watch(param):
    uses = watch(param, torch.bfloat16)
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
        F.linear(torch.ones(1, 5), param)
    assert is_watched(param)
    assert not uses.reader


class Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def method(self, x):
        return self.model(x)


def uses_a_global(x):
    return GLOBAL(x)


def test_parameters_that_a_function_may_read():
    model = nn.Linear(2, 2)
    params, later = list(model.parameters()), None

    def inner(x):
        return model(x), later

    def outer(x):
        return [inner(y) for y in x]

    def other(x):
        return x + len(dict)

    for function in (inner, outer, Holder(model).method, lambda x: {"m": [model]}["m"][0](x)):
        assert list(params_within(function)) == params, function
    assert list(params_within(uses_a_global)) == list(GLOBAL.parameters())
    assert list(params_within(other, (1, {"a": params[0]}))) == params[:1]
