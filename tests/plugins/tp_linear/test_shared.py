"""GEMMs computed together with a gather: forwards may act before, between and instead of the calls of the linears."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.plugins.ddp.arms import table
from tests.plugins.ddp.checks import check_all
from tests.plugins.tp_linear.arms import SCHEDULES, Record, all_both, both, copy_full, draw, mesh
from tests.support.equality import compare
from tests.support.errors import error_of
from tests.support.rarely import ALL_CASES, RARELY

WIDTH = 24
IS_TORCH_2_11 = torch.__version__ < (2, 12)
# Torch makes DTensors of local tensors in inference mode.
HAS_DTENSORS_IN_INFERENCE_MODE = torch.__version__ >= (2, 13)
Forward = Callable[["Two", Any], Any]


class Two(nn.Module):
    """Two linears that read one gathered input, and the forward that a case makes of them."""

    def __init__(self, body: Forward, second: nn.Linear | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), second or nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def parallel(
    body: Forward,
    *,
    local: bool = False,
    second: tuple[int, torch.dtype] | None = None,
    dtype: Any = torch.float32,
) -> Two:
    """Return two linears after one gather; ``second`` is the input of the second linear, if it differs."""
    torch.manual_seed(0)
    model = Two(body, second and nn.Linear(second[0], WIDTH)).to(dtype)
    if second:
        model.b.to(second[1])
    gather = PrepareModuleInput(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=local
    )
    return parallelize_module(
        model, mesh(), {"": gather, "a": ColwiseParallel(), "b": ColwiseParallel()}
    )


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


def written_into_by_data(m: Two, x: Any) -> Any:
    m.b.weight.data.mul_(0.5)
    return m.a(x) + m.b(x)


def written_into_without_gradients(m: Two, x: Any) -> Any:
    with torch.no_grad():
        m.b.weight.mul_(0.5)
    return m.a(x) + m.b(x)


def another_shape(m: Two, x: Any) -> Any:
    m.b.weight.data = m.b.weight.data.clone()
    return m.a(x) + m.b(x)


def under_inference_mode(m: Two, x: Any) -> Any:
    with torch.inference_mode():
        return m.a(x) + m.b(x)


def other_features(m: Two, x: Any) -> Any:
    return m.a(x) + m.b(x.chunk(2, -1)[0])


def other_dtype(m: Two, x: Any) -> Any:
    return m.a(x) + m.b(x.float())


def one_called_twice(m: Two, x: Any) -> Any:
    return m.a(x) + m.a(x) * 2 + m.b(x)


def with_another_input(m: Two, x: Any) -> Any:
    return m.a(x) + m.b(x * 2)


def called_without_gradients(m: Two, x: Any) -> Any:
    with torch.no_grad():
        return m.b(x) + torch.zeros_like(m.b(x))


def read_as_it_is(m: Two, x: Any) -> Any:
    mine = x.to_local() if isinstance(x, DTensor) else x
    return m.a(x) + m.b(x) + mine * 3 @ torch.ones(WIDTH, 1, dtype=mine.dtype)


# The gate is computed by operations on DTensors.
def routed(m: Two, x: Any) -> Any:
    gate = (x * 0.5).sum(-1, keepdim=True)
    return m.a(x) * (gate.to_local() if isinstance(gate, DTensor) else gate) + m.b(x)


CASES: dict[str, dict[str, Any]] = {
    "inside a checkpoint": {"body": inside_a_checkpoint},
    "written into": {"body": written_into, "locals": (False,)},
    "written into between": {"body": written_into_between},
    "other weights": {"body": other_weights},
    "a hook": {"body": hooked},
    "gradient retained": {"body": gradient_retained},
    "wants a gradient": {"body": wants_a_gradient, "needs_grad": False},
    "a weight, by its data": {"body": written_into_by_data},
    "a weight, without gradients": {"body": written_into_without_gradients},
    "a weight's memory": {"body": another_shape},
    "a parent's backward hook": {"body": both_called, "parent": "backward"},
    "a parent's later pre-hook": {"body": both_called, "parent": "pre"},
    "one is not called": {"body": one_is_not_called},
    "one is not called, and its weight has a hook": {"body": one_is_not_called, "hook": "b"},
    "a pre-hook that changes the weight": {"body": both_called, "pre_hook": True},
    "one called twice": {"body": one_called_twice},
    "with another input": {"body": with_another_input},
    "without gradients": {"body": called_without_gradients},
    "read by others": {"body": read_as_it_is},
    "routed": {"body": routed},
    "saved": {"body": saved, "locals": (True,)},
    "under inference mode": {
        "body": under_inference_mode,
        "locals": (False, True) if HAS_DTENSORS_IN_INFERENCE_MODE else (False,),
    },
    "other features": {
        "body": other_features,
        "second": (WIDTH // 2, torch.float64),
        "locals": (True,),
    },
    "other dtype": {"body": other_dtype, "second": (WIDTH, torch.float32)},
}


def run(
    body: Forward,
    local: bool,
    needs_grad: bool = True,
    hook: str = "",
    pre_hook: bool = False,
    parent: str = "",
    second: tuple[int, torch.dtype] | None = None,
    locals: Any = None,
) -> Record:
    model, called = parallel(body, local=local, second=second, dtype=torch.float64), []
    if hook:
        model.get_submodule(hook).weight.register_hook(
            lambda grad: called.append(type(grad).__name__)
        )
    if pre_hook:
        model.a.register_forward_pre_hook(halve)
    if parent == "backward":
        model.register_full_backward_hook(nothing)
    if parent == "pre":
        model.register_forward_pre_hook(lambda module, args: halve(module.b, args))
    x = draw(3, WIDTH, seed=1, dtype=torch.float64).requires_grad_(needs_grad)
    y = model(x)
    if y.requires_grad:
        y.square().sum().backward()
    grads = {name: copy_full(param.grad) for name, param in model.named_parameters()}
    seen = [copy_full(tensor.grad) for tensor in model.seen]
    return {"y": copy_full(y), "x": x.grad, "grads": grads, "seen": seen, "called": called}


# The number of GEMMs that are computed early, although the forward does not use them.
UNUSED = {"one is not called": 1, "with another input": 1, "without gradients": 2}
# A schedule with early GEMMs cannot detect a write through ``.data``, which changes no version: see README.md.
UNSEEN = ("a weight, by its data",)


def require_equal(results: list[Record]) -> None:
    for result in results:
        compare(result["stock"], result["patched"], floor=1e-10).assert_equal()


@pytest.mark.parametrize("schedule", ["bulk", "chunk"])
def test_what_a_forward_may_do(ranks, schedule):
    cases = {
        f"{name}, local: {local}": {"local": local, **case}
        for name, case in CASES.items()
        for local in case.get("locals", (False, True))
        if schedule == "bulk" or name not in UNSEEN
    }
    results = ranks(2)(all_both, run, cases, options={"schedule": schedule}, timeout=120)
    check_all(results, check=require_equal)
    for result in results:
        unused = {name: case_result["counters"]["unused"] for name, case_result in result.items()}
        assert not any(count for name, count in unused.items() if cases[name].get("parent"))
        ahead = {name: unused[f"{name}, local: False"] for name in UNUSED}
        assert ahead == (UNUSED if schedule == "chunk" else dict.fromkeys(UNUSED, 0))


@pytest.mark.parametrize("local", [False, True])
def test_early_gemms_are_used_in_the_plain_case(ranks, local):
    for result in ranks(2)(both, run, both_called, local):
        compare(result["stock"], result["patched"], floor=1e-10).assert_equal()
        assert result["counters"]["calls"] == 2
        assert (
            result["counters"]["shared_calls"]
            == result["counters"]["gathers"] * 2
            == (0 if local else 2)
        )


def too_late(m: Two, x: Any) -> Any:
    y = m.a(x)
    x.register_hook(lambda grad: grad * 0.1)
    return y + m.b(x)


def test_a_late_hook_on_the_gathered_input_is_an_error(ranks):
    for result in ranks(2)(both, error_of, run, too_late, False):
        assert result["stock"] == "no error"
        assert "a hook or retain_grad() on the gathered input" in result["patched"]
        assert result["patched"].endswith("or set OVPATCH_TP_LINEAR_SHARED_GATHER=0")


def under_autocast() -> Tensor:
    model = parallel(both_called)
    y = model(draw(3, WIDTH, seed=1))
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    return copy_full(model.a.weight.grad)


def test_a_backward_under_autocast(ranks):
    for result in ranks(2)(both, under_autocast):
        assert torch.allclose(result["stock"], result["patched"], rtol=0.02, atol=0.05)


def kept() -> dict[str, int]:
    """Return the bytes that gradients keep, with and without a freed gathered tensor."""
    sizes = {}
    for name, body in {"read": lambda m, x: x.square(), "both": both_called}.items():
        x = draw(3, WIDTH, seed=1).requires_grad_()
        parallel(body)(x).sum().backward()
        sizes[name] = x.grad.untyped_storage().nbytes()
    return sizes


def test_gradients_keep_no_more_memory_than_their_own(ranks):
    for result in ranks(2)(both, kept):
        assert result["patched"] == result["stock"]
        from ovpatch_plugins.tp_linear import precomputed

        assert not precomputed.PRECOMPUTED


def computed_before_each_call(locally: bool) -> list[Tensor]:
    """Train a weight that a hook computes, as ``torch.nn.utils.weight_norm`` does; its earlier graph was freed."""
    model = parallel(both_called)
    raw = model.a._parameters.pop("weight")

    def computed() -> DTensor:
        return (
            DTensor.from_local(raw.to_local().exp(), raw.device_mesh, raw.placements)
            if locally
            else raw.exp()
        )

    model.a.weight = computed()
    model.a.register_forward_pre_hook(lambda linear, args: setattr(linear, "weight", computed()))
    for step in range(2):
        model(draw(3, WIDTH, seed=step).requires_grad_()).sum().backward()
    return [copy_full(raw.grad), copy_full(model.b.weight.grad)]


@pytest.mark.parametrize(("schedule", "locally"), [("bulk", False), ("chunk", True)])
def test_a_weight_that_each_call_computes_again(ranks, schedule, locally):
    for result in ranks(2)(
        both, computed_before_each_call, locally, options={"schedule": schedule}
    ):
        compare(result["stock"], result["patched"], floor=1e-5).assert_equal()
        assert (result["counters"]["calls"], result["counters"]["shared_calls"]) == (4, 2)


# ---------------------------------------------------------------- one rank alone


def nothing(*args: Any) -> None:
    pass


def count_operations(m: Two, stack: contextlib.ExitStack) -> None:
    stack.enter_context(FlopCounterMode(display=False))


def hook_the_input_gradient(m: Two, stack: contextlib.ExitStack) -> None:
    m.a.register_full_backward_hook(nothing)


def hook_the_call(m: Two, stack: contextlib.ExitStack) -> None:
    m.a.register_forward_pre_hook(nothing)


def hook_all_calls(m: Two, stack: contextlib.ExitStack) -> None:
    stack.callback(nn.modules.module.register_module_forward_pre_hook(nothing).remove)


def hook_a_weight(m: Two, stack: contextlib.ExitStack) -> None:
    if m.b.weight.requires_grad:
        m.b.weight.register_hook(nothing)


def hook_the_gathered(m: Two, stack: contextlib.ExitStack) -> None:
    body = m.body

    def watched(m: Two, x: Any) -> Any:
        if x.requires_grad:
            x.register_hook(nothing)
        return body(m, x)

    m.body = watched


def retain_the_gradient(m: Two, stack: contextlib.ExitStack) -> None:
    body = m.body

    def watched(m: Two, x: Any) -> Any:
        if x.requires_grad:
            x.retain_grad()
        return body(m, x)

    m.body = watched


def read_by_others(m: Two, x: Any) -> Any:
    return (m.a(x) + m.b(x)) * (x * 0.5).sum(-1, keepdim=True).to_local()


def read_by_others_alone(m: Two, x: Any) -> Any:
    return (x * 0.5).sum(-1, keepdim=True).to_local() * m.a.weight.to_local().sum()


WATCHES = [
    count_operations,
    hook_the_input_gradient,
    hook_the_call,
    hook_all_calls,
    hook_a_weight,
    hook_the_gathered,
    retain_the_gradient,
]


# Torch 2.11 adds a partial gradient to a replicated one by an all-reduce, and if only one rank has watchers, it alone
# would start this all-reduce. The reference page lists this limit.
OTHER_READERS = [] if IS_TORCH_2_11 else [read_by_others]


def watched(watch: Any, body: Forward, frozen: str, needs_grad: bool) -> Record:
    model = parallel(body, dtype=torch.float64)
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or not name.startswith(tuple(frozen)))
    x = draw(3, WIDTH, seed=dist.get_rank(), dtype=torch.float64).requires_grad_(needs_grad)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            watch(model, stack)
        y = model(x)
        if y.requires_grad:
            y.square().sum().backward()
    grads = {name: copy_full(param.grad) for name, param in model.named_parameters()}
    return {"y": copy_full(y), "needs": y.requires_grad, "x": x.grad, "grads": grads}


@pytest.mark.parametrize(
    "schedule", ["bulk", "chunk", *(pytest.param(name, marks=RARELY) for name in ("stock", "ring"))]
)
@pytest.mark.parametrize("regather", [True, False])
def test_one_rank_alone_may_watch(ranks, schedule, regather):
    bodies = [both_called, *OTHER_READERS, read_by_others_alone]
    cases = table(
        watch=WATCHES, body=bodies, frozen=["", "a", "b"] if regather else ["ab"], needs_grad=[True]
    )
    if regather:
        cases |= table(watch=WATCHES, body=bodies, frozen=[""], needs_grad=[False])
    # Watchers are found before a schedule computes, so some cases suffice.
    if schedule != "bulk" and not ALL_CASES:
        cases = dict(list(cases.items())[::4])
    options = {"schedule": schedule, "regather": regather}
    check_all(ranks(2)(all_both, watched, cases, options=options, timeout=120), check=require_equal)


def frozen_output() -> list[bool]:
    """Return whether outputs of a frozen linear and of a trained one need gradients, if the input needs none."""
    found: list[bool] = []
    model = parallel(
        lambda m, x: found.extend((m.a(x).requires_grad, m.b(x).requires_grad, x.requires_grad))
    )
    model.a.requires_grad_(False)
    model(draw(3, WIDTH, seed=1))
    return found


def test_frozen_linears_need_no_gradient(ranks):
    for result in ranks(2)(both, frozen_output):
        assert result["stock"] == result["patched"] == [False, True, False]
        assert result["counters"]["shared_calls"] == 2


def changed_after_forward() -> str:
    """Write into an input that needs no gradient, and into a weight, between forward and backward."""
    found = []
    for change in ("x", "weight"):
        model = parallel(lambda m, x: (m.a(x) * m.b(x), x), dtype=torch.float64)
        y, x = model(draw(3, WIDTH, seed=1, dtype=torch.float64).requires_grad_(change == "weight"))
        with torch.no_grad():
            (x if change == "x" else model.b.weight).mul_(2)
        try:
            y.square().sum().backward()
        except RuntimeError as error:
            found.append(str(error))
    return " / ".join(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensors_changed_before_backward_are_an_error(ranks, schedule):
    for result in ranks(2)(both, changed_after_forward, options={"schedule": schedule}):
        for found in (result["stock"], result["patched"]):
            assert found.count("modified by an inplace operation") == 2


def held() -> list[Any]:
    """Return the outputs that the node of a shared gather keeps of GEMMs that were computed later."""
    model = parallel(both_called)
    y = model(draw(3, WIDTH).requires_grad_())
    node: Any = y.grad_fn.next_functions[0][0]
    return [] if "GatheredLinears" not in node.name() else [node.call.deferred_outputs]


def test_a_graph_does_not_hold_the_memory_of_outputs(ranks):
    for result in ranks(2)(both, held):
        assert result == {"stock": [], "patched": [[]], "counters": result["counters"]}
