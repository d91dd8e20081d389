"""The order in which a layer launches and awaits communication and computes, by which the two overlap."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.pipe_experts import all_to_all, experts, grouped_gemm
from ovpatch_plugins.pipe_experts.experts import run_pipelined, swiglu
from ovpatch_plugins.pipe_experts.layer import ExpertParallelFFN, expert_parallel_ffn, run_experts
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the launches, waits and computations of the feature."""
    found: list[str] = []
    watched = [
        (all_to_all.Transfer, "start_forward", "launch"),
        (all_to_all.Transfer, "wait_forward", "wait"),
        (all_to_all.Transfer, "start_backward", "launch back"),
        (all_to_all.Transfer, "wait_backward", "wait back"),
        (grouped_gemm, "grouped_linear", "gemm"),
        (grouped_gemm, "grouped_dgrad", "input gradient"),
        (grouped_gemm, "accumulate_wgrad", "weight gradient"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, label in watched:
            patch.setattr(owner, name, recording(found, label, getattr(owner, name)))
        yield found


def recording(found: list[str], label: str, function: Any) -> Any:
    def record(*args: Any, **kwargs: Any) -> Any:
        found.append(label)
        return function(*args, **kwargs)

    return record


class Shared(torch.autograd.Function):
    """Shared experts that record when they are computed."""

    @staticmethod
    def forward(ctx: Any, found: list[str], x: Tensor) -> Tensor:
        found.append("shared")
        ctx.found = found
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.found.append("shared back")
        return None, grad * 2


def made(
    config: MoEConfig, **options: Any
) -> tuple[ExpertParallelFFN, tuple[Tensor, Tensor, Tensor]]:
    """Return a layer with two experts on each rank, and its inputs."""
    experts = 2 * dist.get_world_size()
    layer = ExpertParallelFFN(4, 3, experts, config=config, **options)
    x, index = torch.randn(6, 4, requires_grad=True), torch.arange(12).view(6, 2) % experts
    return layer, (x, index, torch.rand(6, 2))


def run(config: MoEConfig) -> tuple[list[str], list[str]]:
    layer, inputs = made(config, activation="relu")
    with recorded() as found:
        layer.shared = lambda tokens: Shared.apply(found, tokens)
        out = layer(*inputs)
        forward = found.copy()
        found.clear()
        out.sum().backward()
    return forward, found


PART = ["wait", "gemm", "gemm", "launch"]
PART_BACK = ["wait back", "input gradient", "input gradient", "launch back"]
GRADS = ["weight gradient", "weight gradient"]


def test_each_part_hides_communication(ranks):
    for forward, backward in ranks(2)(run, MoEConfig("experts")):
        assert forward == ["launch", "launch", "shared", *PART, *PART, "wait", "wait"]
        assert backward == [
            "launch back",
            "launch back",
            *[*PART_BACK, *GRADS],
            *[*PART_BACK, *GRADS],
            "shared back",
            "wait back",
            "wait back",
        ]


def test_weight_gradients_at_once(ranks):
    for _, backward in ranks(2)(run, MoEConfig("tokens", 2, delay_wgrad=False)):
        at_once = ["wait back", *["input gradient", "weight gradient"] * 2, "launch back"]
        assert backward == ["launch back"] * 2 + at_once * 2 + [
            "shared back",
            "wait back",
            "wait back",
        ]


def run_backward(config: MoEConfig, trained: tuple[str, ...], for_input_alone: bool) -> list[str]:
    layer, inputs = made(config)
    for name, weight in layer.named_parameters():
        weight.requires_grad_(name in trained)
    out = layer(*inputs).sum()
    with recorded() as found:
        torch.autograd.grad(out, inputs[:1]) if for_input_alone else out.backward()
    return found


@pytest.mark.parametrize(
    ("config", "trained", "for_input_alone", "weight_grads"),
    [
        (MoEConfig("experts"), (), False, 0),
        (MoEConfig("experts"), ("down",), False, 2),
        (MoEConfig("experts", delay_wgrad=False), ("up", "down"), True, 0),
    ],
    ids=["frozen", "partly frozen", "gradient of the input alone"],
)
def test_unused_weight_gradients_cost_nothing(
    ranks, config, trained, for_input_alone, weight_grads
):
    for backward in ranks(2)(run_backward, config, trained, for_input_alone):
        assert backward.count("weight gradient") == weight_grads
        assert backward.count("input gradient") == backward.count("launch back") == 4


def run_schedule_alone(count: int) -> list[str]:
    """Run the schedule with the test's own communication; return the events."""
    found: list[str] = []

    class Transfer:
        def __init__(self, name: str, rows: Tensor) -> None:
            found.append(f"launch {name}")
            self.name, self.rows = name, rows

        def wait(self) -> Tensor:
            found.append(f"wait {self.name}")
            return self.rows

    def compute(part: int, rows: Tensor) -> Tensor:
        found.append(f"experts {part}")
        return rows * 3

    x = torch.ones(count, 2, requires_grad=True)
    outs, shared = run_pipelined(
        lambda part: Transfer(f"there {part}", x[part]),
        compute,
        lambda part, rows: Transfer(f"back {part}", rows),
        count,
        before_wait=lambda part: found.append(f"before {part}"),
        shared_experts=lambda: "shared",
    )
    assert shared == "shared"
    assert torch.equal(torch.stack(outs), x * 3)
    torch.stack(outs).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_the_schedule_alone(count):
    parts = [
        [f"before {i}", f"wait there {i}", f"experts {i}", f"launch back {i}"] for i in range(count)
    ]
    launches = [f"launch there {i}" for i in range(count)]
    waits = [f"wait back {i}" for i in range(count)]
    assert run_schedule_alone(count) == [
        *launches,
        *(step for part in parts for step in part),
        *waits,
    ]


def ways_back(multi_stream: bool) -> list[bool]:
    """Return, for each all-to-all, whether it uses the layer's own group."""
    found, own, before = [], dist.group.WORLD, dist.all_to_all_single
    layer, inputs = made(MoEConfig("experts", multi_stream=multi_stream))

    def record(*args: Any, group: Any, **kwargs: Any) -> Any:
        found.append(group is own)
        return before(*args, group=group, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dist, "all_to_all_single", record)
        layer(*inputs)
    return found


def test_rows_come_back_on_their_own_communicator(ranks):
    assert ranks(2)(ways_back, False) == [[True] * 5] * 2, "counts, there and back"
    assert ranks(2)(ways_back, True) == [[True] * 3 + [False] * 2] * 2


def list_alive(what: str) -> list[bool]:
    """Return whether computed weights, and the state of their gradients, outlive a step."""
    world = dist.get_world_size()
    source = torch.randn(2, 6, 4, requires_grad=True)
    x, index = torch.randn(6, 4, requires_grad=True), torch.arange(12).view(6, 2) % (2 * world)
    made: list[Any] = []
    before = grouped_gemm._WeightGrads.__init__

    def note(self: Any, *args: Any) -> None:
        made.append(weakref.ref(self))
        before(self, *args)

    calls: list[int] = []
    grads = grouped_gemm.accumulate_wgrad

    def failing(*args: Any) -> Any:
        calls.append(1)
        if what == "an exception" and len(calls) == 2:
            raise ValueError("on purpose")
        return grads(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm._WeightGrads, "__init__", note)
        patch.setattr(grouped_gemm, "accumulate_wgrad", failing)
        up, down = source * 2, torch.randn(2, 4, 3, requires_grad=True)
        made.append(weakref.ref(up))
        out = expert_parallel_ffn(
            x, index, torch.rand(6, 2), (up, down), swiglu, dist.group.WORLD, MoEConfig("experts")
        )
        if what == "a backward":
            out.sum().backward()
        elif what == "an exception":
            with contextlib.suppress(ValueError):
                out.sum().backward()
            # Until the next backward, the engine keeps the tasks that the exception left.
            torch.ones((), requires_grad=True).backward()
    del out, up, down
    gc.collect()
    return [reference() is not None for reference in made]


@pytest.mark.parametrize("what", ["no backward", "a backward", "an exception"])
def test_no_state_outlives_a_step(ranks, what):
    assert ranks(2)(list_alive, what) == [[False, False]] * 2


def indifferent() -> Tensor | None:
    """Run experts that ignore the arrived rows on the last rank; return the gradient of the input."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    sizes = [1] * world
    x = torch.full((2, world, 3), float(rank), requires_grad=True)
    outs, _ = run_pipelined(
        lambda part: all_to_all.start_all_to_all(x[part], sizes, sizes, group),
        lambda part, rows: rows * 2 if rank < world - 1 else torch.zeros_like(rows),
        lambda part, rows: all_to_all.start_all_to_all(rows, sizes, sizes, group),
        2,
    )
    torch.stack(outs).sum().backward()
    return x.grad


def test_ranks_whose_experts_ignore_arrived_rows_take_part_in_backward(ranks):
    for grad in ranks(2)(indifferent):
        assert grad.tolist() == [[[2.0] * 3, [0.0] * 3]] * 2


def in_place() -> list[Tensor]:
    """Train experts that compute in place in the arrived rows, and out of place."""
    found = []
    for inside in (True, False):
        torch.manual_seed(dist.get_rank())
        weight = torch.randn(4, 4, requires_grad=True)
        x = torch.randn(5, 4, requires_grad=True)

        def expert(rows: Tensor, weight: Tensor = weight, inside: bool = inside) -> Tensor:
            return (rows.mul_(2) if inside else rows * 2) @ weight

        index = torch.arange(5)[:, None] % (2 * dist.get_world_size())
        out = run_experts(
            [expert, expert], x, index, torch.ones(5, 1), dist.group.WORLD, MoEConfig("tokens", 2)
        )
        out.square().sum().backward()
        found += [x.grad, weight.grad]
    return found


def test_experts_may_compute_in_place(ranks):
    for x, weight, right_x, right_weight in ranks(2)(in_place):
        assert torch.equal(x, right_x)
        assert torch.equal(weight, right_weight)


def waited_for_twice() -> str:
    sizes = [1] * dist.get_world_size()
    arriving = all_to_all.start_all_to_all(
        torch.ones(len(sizes), 2), sizes, sizes, dist.group.WORLD
    )
    arriving.wait()
    with pytest.raises(RuntimeError, match="Keep the result of the first call") as caught:
        arriving.wait()
    return str(caught.value)


def test_rows_are_waited_for_once(ranks):
    assert all(ranks(2)(waited_for_twice))


def hooks_and_graphs() -> dict[str, Any]:
    """Return the hooks that fired, gradients of full and partial backwards, and the error of a second derivative."""
    torch.manual_seed(dist.get_rank())
    layer, inputs = made(MoEConfig("tokens", 3))
    x, fired = inputs[0], list[str]()
    layer.up.register_hook(lambda grad: fired.append("hook"))
    layer.up.register_post_accumulate_grad_hook(lambda param: fired.append("accumulated"))
    layer(*inputs).square().sum().backward()
    full = {"x": x.grad, "up": layer.up.grad, "down": layer.down.grad}
    out = layer(*inputs).square().sum()
    (x_grad,) = torch.autograd.grad(out, [x], retain_graph=True)
    (up_grad,) = torch.autograd.grad(out, [layer.up])
    try:
        (first,) = torch.autograd.grad(layer(*inputs).square().sum(), [x], create_graph=True)
        first.sum().backward()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"fired": fired, "full": full, "x": x_grad, "up": up_grad, "refused": refused}


def test_hooks_fire_once_and_single_gradients_can_be_computed(ranks):
    for found in ranks(2)(hooks_and_graphs):
        assert found["fired"] == ["hook", "accumulated", "hook"]
        assert torch.equal(found["x"], found["full"]["x"])
        assert torch.equal(found["up"], found["full"]["up"])
        assert "once_differentiable" in found["refused"]


def interrupted() -> list[bool]:
    """Raise in the second part's backward on all ranks, and then run a clean step."""
    torch.manual_seed(dist.get_rank())
    layer, inputs = made(MoEConfig("tokens", 3))
    leaves = [inputs[0], layer.up, layer.down]

    def gradients(out: Tensor) -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out.backward()
        return [leaf.grad.clone() for leaf in leaves]

    right = gradients(layer(*inputs).square().sum())
    before, calls = grouped_gemm.accumulate_wgrad, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("on purpose")
        return before(*args)

    out = layer(*inputs).square().sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm, "accumulate_wgrad", failing)
        with pytest.raises(ValueError, match="on purpose"):
            out.backward(retain_graph=True)
    # The second backward runs through the remaining graph, the third one through a new graph.
    runs = (gradients(out), gradients(layer(*inputs).square().sum()))
    return [torch.equal(a, b) for found in runs for a, b in zip(right, found, strict=True)]


def test_a_backward_that_raises(ranks):
    for found in ranks(2)(interrupted):
        assert all(found)


def test_transposed():
    sizes = [[1, 0, 2], [3, 1, 0]]
    rows = torch.arange(7).view(7, 1)
    there = experts.transpose_blocks(rows, sizes)
    assert there.flatten().tolist() == [0, 3, 4, 5, 6, 1, 2]
    assert torch.equal(
        experts.transpose_blocks(there, [list(s) for s in zip(*sizes, strict=True)]), rows
    )
