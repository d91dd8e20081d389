"""Products computed together with a gather: what a forward may do before, between and instead of the linears' calls."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module
from torch.utils.checkpoint import checkpoint

from ovpatch.insight.equality import compare
from tests.plugins.tp_linear.arms import Record, both, draw, mesh, whole

WIDTH = 24
Forward = Callable[["Two", Any], Any]


class Two(nn.Module):
    """Two linears that read one gathered input, and whatever a case makes of them."""

    def __init__(self, body: Forward, second: nn.Linear | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), second or nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def both_called(m: Two, x: Any) -> Any:
    return m.a(x) + m.b(x)


def halve(module: nn.Linear, args: Any) -> None:
    module.weight.data.mul_(0.5)


def inside_a_checkpoint(m: Two, x: Any) -> Any:
    return checkpoint(lambda x: m.a(x).tanh(), x, use_reentrant=False) + m.b(x)


def written_into(m: Two, x: Any) -> Any:
    x.mul_(2)
    return m.a(x) * m.b(x)


def written_into_between(m: Two, x: Any) -> Any:
    with torch.no_grad():
        first = m.a(x)
        x.mul_(2)
        return first + m.b(x)


def other_weights(m: Two, x: Any) -> Any:
    weights = {name: param * 2 for name, param in m.a.named_parameters()}
    return torch.func.functional_call(m.a, weights, (x,)) + m.b(x)


def hooked(m: Two, x: Any) -> Any:
    x.register_hook(lambda grad: grad * 0.1)
    return m.a(x) + m.b(x)


def gradient_retained(m: Two, x: Any) -> Any:
    x.retain_grad()
    m.seen = [x]
    return m.a(x) + m.b(x)


def wants_a_gradient(m: Two, x: Any) -> Any:
    m.seen = [x.requires_grad_()]
    return m.a(x) + m.b(x)


def one_is_not_called(m: Two, x: Any) -> Any:
    return m.a(x)


def saved(m: Two, x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return m.a(x) + m.b(x) * float(torch.load(file).sum())


def under_inference_mode(m: Two, x: Any) -> Any:
    with torch.inference_mode():
        return m.a(x) + m.b(x)


def other_features(m: Two, x: Any) -> Any:
    return m.a(x) + m.b(x.chunk(2, -1)[0])


def other_dtype(m: Two, x: Any) -> Any:
    return m.a(x) + m.b(x.float())


CASES: dict[str, dict[str, Any]] = {
    "inside a checkpoint": {"body": inside_a_checkpoint},
    "written into": {"body": written_into, "locals": (False,)},
    "written into between": {"body": written_into_between},
    "other weights": {"body": other_weights},
    "a hook": {"body": hooked},
    "gradient retained": {"body": gradient_retained, "locals": (True,)},
    "wants a gradient": {"body": wants_a_gradient, "needs_grad": False, "locals": (True,)},
    "one is not called": {"body": one_is_not_called, "hook": "b"},
    "a pre-hook that changes the weight": {"body": both_called, "pre_hook": True},
    "saved": {"body": saved, "locals": (True,)},
    "under inference mode": {"body": under_inference_mode},
    "other features": {"body": other_features, "second": (WIDTH // 2, torch.float64), "locals": (True,)},
    "other dtype": {"body": other_dtype, "second": (WIDTH, torch.float32), "locals": (True,)},
}


def run(
    body: Forward,
    local: bool,
    needs_grad: bool = True,
    hook: str = "",
    pre_hook: bool = False,
    second: tuple[int, torch.dtype] | None = None,
    locals: Any = None,
) -> Record:
    torch.manual_seed(0)
    model = Two(body, second and nn.Linear(second[0], WIDTH)).double()
    if second:
        model.b.to(second[1])
    plan = {
        "": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=local),
        "a": ColwiseParallel(),
        "b": ColwiseParallel(),
    }
    parallelize_module(model, mesh(), plan)
    called = []
    if hook:
        model.get_submodule(hook).weight.register_hook(lambda grad: called.append(type(grad).__name__))
    if pre_hook:
        model.a.register_forward_pre_hook(halve)
    x = draw(3, WIDTH, seed=1, dtype=torch.float64).requires_grad_(needs_grad)
    y = model(x)
    if y.requires_grad:
        y.square().sum().backward()
    grads = {name: whole(param.grad) for name, param in model.named_parameters()}
    seen = [whole(tensor.grad) for tensor in model.seen]
    return {"y": whole(y), "x": x.grad, "grads": grads, "seen": seen, "called": called}


@pytest.mark.parametrize("case", CASES)
def test_what_a_forward_may_do(ranks, case):
    for local in CASES[case].get("locals", (False, True)):
        for result in ranks(2)(both, run, local=local, **CASES[case]):
            compare(result["stock"], result["patched"], floor=1e-10).assert_equal()


def test_products_are_handed_out_in_the_plain_case(ranks):
    for local in (False, True):
        for result in ranks(2)(both, run, both_called, local):
            compare(result["stock"], result["patched"], floor=1e-10).assert_equal()
            assert result["counters"]["shared_calls"] == 2


def too_late(m: Two, x: Any) -> Any:
    y = m.a(x)
    x.register_hook(lambda grad: grad * 0.1)
    return y + m.b(x)


def error_of(body: Forward, local: bool) -> str:
    try:
        run(body, local)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("local", [False, True])
def test_who_looks_at_the_gradient_too_late_is_told(ranks, local):
    for result in ranks(2)(both, error_of, too_late, local):
        assert result["stock"] == "no error"
        assert "a hook or retain_grad() on the gathered input" in result["patched"]
        assert result["patched"].endswith("or set OVPATCH_TP_LINEAR_SHARED_GATHER=0")


def under_autocast() -> Tensor:
    torch.manual_seed(0)
    model = Two(lambda m, x: m.a(x) + m.b(x))
    plan = {"": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))}
    parallelize_module(model, mesh(), plan | {"a": ColwiseParallel(), "b": ColwiseParallel()})
    y = model(draw(3, WIDTH, seed=1))
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    return whole(model.a.weight.grad)


def test_a_backward_under_autocast(ranks):
    for result in ranks(2)(both, under_autocast):
        assert torch.allclose(result["stock"], result["patched"], rtol=0.02, atol=0.05)


def kept() -> dict[str, int]:
    """How much memory a gradient keeps, and whether a gathered tensor can go."""
    torch.manual_seed(0)
    sizes = {}
    for name, body in {"read": lambda m, x: x.square(), "both": lambda m, x: m.a(x) + m.b(x)}.items():
        model = Two(body)
        plan = {
            "": PrepareModuleInput(
                input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
        }
        parallelize_module(model, mesh(), plan | {"a": ColwiseParallel(), "b": ColwiseParallel()})
        x = draw(3, WIDTH, seed=1).requires_grad_()
        model(x).sum().backward()
        sizes[name] = x.grad.untyped_storage().nbytes()
    return sizes


def test_gradients_keep_no_more_memory_than_their_own(ranks):
    for result in ranks(2)(both, kept):
        assert result["patched"] == result["stock"]
        from ovpatch_plugins.tp_linear import shared

        assert not shared._products
