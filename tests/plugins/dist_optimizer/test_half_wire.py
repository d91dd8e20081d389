"""Gradients in bf16 and fp16 that copies between ranks send without a cast, and that ranks average in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch.overlap.comm import host_barrier
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.dist_optimizer.checks import SMALL, ddp, params
from tests.plugins.dist_optimizer.test_copy_engines import BY_COPIES, in_files
from tests.plugins.dist_optimizer.test_gpu import NCCL
from tests.plugins.dist_optimizer.test_main_params import IN_FP32, net
from tests.plugins.dist_optimizer.test_state import on_cpu
from tests.support.equality import compare

STEPS = 8
BOTH_IN_FP32 = {"grad_reduce_in_fp32": True, "grad_accumulate_in_fp32": True}

Sent = list[set[torch.dtype]]


class Branched(nn.Module):
    """Two branches, of which a step may use one, and a factor that is too small to shard."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.main = net(dtype)
        self.branch = nn.Linear(6, 9).to(device(), dtype)
        self.factor = nn.Parameter(torch.ones((), dtype=dtype, device=device()))

    def forward(self, x: Tensor, both: bool, fails: bool) -> Tensor:
        out: Tensor = self.main(x)
        if fails:
            out.register_hook(interrupt)
        return (out + self.branch(x) if both else out) * self.factor


class Twice(Branched):
    """A model with a linear that the backward reaches twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.same = nn.Linear(6, 6).to(device(), dtype)

    def forward(self, x: Tensor, both: bool, fails: bool) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.same, x.requires_grad_(), use_reentrant=True)
        return super().forward(x, both, fails)


class Interrupted(RuntimeError):
    pass


def interrupt(_grad: Tensor) -> None:
    raise Interrupted


def microbatches(style: str, number: int) -> int:
    if style == "accumulated":
        return 3
    more = style == "accumulated on one rank" and number in (5, 7) and dist.get_rank() == 1
    return 2 if more else 1


def train(style: str, dtype: torch.dtype, sent: Sent) -> list[Record]:
    """Return the parameters after each step, and the final state; append a set to ``sent`` for the dtypes of a step."""
    made = Twice if style == "reached twice" else Branched
    # With many buckets, ranks communicate while the backward still computes.
    more = {"static_graph": True, "bucket_cap_mb": 1e-4} if made is Twice else {}
    model = ddp(made(dtype), find_unused_parameters=style == "unused", **more)
    # Without an optimizer, the gradient of this parameter is never cleared.
    left = [model.module.factor] if style == "one gradient kept" else []
    opt = torch.optim.AdamW(
        [param for param in model.parameters() if not any(param is kept for kept in left)], 1e-2
    )
    records: list[Record] = []
    if style == "hooked":
        model.module.branch.weight.register_hook(lambda grad: grad * 2)
    for number in range(STEPS):
        sent.append(set())
        if style != "kept" or number != 6:
            opt.zero_grad(set_to_none=style != "zeroed")
        micros, interrupted = microbatches(style, number), style == "interrupted" and number == 6
        for micro in range(micros):
            with contextlib.nullcontext() if micro == micros - 1 else model.no_sync():
                both, fails = (
                    style != "unused" or number % 2 == 0,
                    interrupted and dist.get_rank() == 0,
                )
                out = model(data(number, 5, 6, micro=micro).to(dtype), both, fails)
                # The interrupted rank raises its own error, and its peer raises the error that it receives.
                with pytest.raises(RuntimeError) if interrupted else contextlib.nullcontext():
                    out.square().mean().backward()
        if interrupted:
            continue
        opt.step()
        records.append(params(model))
    return [*records, on_cpu(opt.state_dict())["state"]]


@contextlib.contextmanager
def watched(sent: Sent) -> Iterator[None]:
    """Add the dtypes that are sent to the last set of ``sent``; hosts use the host barrier, as on GPUs."""
    real = Engine.scatter

    def scatter(self: Engine, outputs: Any, inputs: Any, *, average: bool) -> Any:
        assert {output.dtype for output in outputs} == {torch.float32}
        sent[-1].update(tensor.dtype for tensor in inputs)
        return real(self, outputs, inputs, average=average)

    with (
        mock.patch.object(Engine, "scatter", scatter),
        mock.patch.object(host_barrier, "is_needed", return_value=True),
    ):
        yield


def arms(
    style: str, dtype: torch.dtype, ddp_options: dict[str, Any]
) -> dict[str, tuple[list[Record], Sent]]:
    """Train twice: cast gradients before they are sent, then send them without a cast."""
    options = {"ddp": ddp_options, "dist_optimizer": SMALL | IN_FP32 | BY_COPIES}
    found = {}
    for name in ("cast", "as they are"):
        sent: Sent = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(watched(sent))
            if name == "cast":
                stack.enter_context(
                    mock.patch.object(ShardedGrads, "before_first_collective", autospec=True)
                )
            if dist.get_backend() == "gloo":
                stack.enter_context(in_files())
            stack.enter_context(ovpatch.applied("ddp", "dist_optimizer", options=options))
            torch.manual_seed(0)
            found[name] = train(style, dtype, sent), sent
    return found


def check(
    results: list[dict[str, tuple[list[Record], Sent]]], dtype: torch.dtype, cast: set[int]
) -> None:
    """Demand the bits of the run with casts, and that otherwise only the steps in ``cast`` have cast gradients."""
    wide = {torch.float32}
    for result in results:
        expected, sent_cast = result["cast"]
        ours, sent = result["as they are"]
        compare(expected, ours).assert_bitwise() if len(results) == 2 else compare(
            expected, ours
        ).assert_equal()
        by_parts = [number for number, dtypes in enumerate(sent_cast) if dtypes]
        assert len(by_parts) >= STEPS // 2, "gradients are hardly ever scattered"
        assert [sent_cast[number] for number in by_parts] == [wide] * len(by_parts)
        for number, dtypes in enumerate(sent):
            here = wide if number in cast else {dtype}
            assert dtypes == (here if number in by_parts else set()), (number, sent)


@pytest.mark.parametrize(
    ("dtype", "world"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.bfloat16, 3)]
)
def test_one_microbatch_is_sent_as_it_is(ranks, world, dtype):
    check(ranks(world)(arms, "plain", dtype, BOTH_IN_FP32), dtype, set())


EVERY = set(range(STEPS))
STYLES = {
    "accumulated": EVERY,
    "accumulated on one rank": {5, 7},
    "hooked": EVERY,
    "interrupted": set(),
    "kept": {6},
    "one gradient kept": set(),
    "reached twice": EVERY,
    "unused": set(),
    "zeroed": EVERY,
}


@pytest.mark.parametrize("style", STYLES)
def test_styles_in_which_gradients_are_cast(ranks, style):
    check(ranks(2)(arms, style, torch.bfloat16, BOTH_IN_FP32), torch.bfloat16, STYLES[style])


def arms_of_two_devices(*args: Any) -> dict[str, tuple[list[Record], Sent]]:
    HostBarrier.for_group(dist.group.WORLD, torch.device("meta"))
    return arms(*args)


def test_with_several_devices_gradients_are_cast(ranks):
    check(
        ranks(2)(arms_of_two_devices, "plain", torch.bfloat16, BOTH_IN_FP32), torch.bfloat16, EVERY
    )


@pytest.mark.parametrize("style", ["accumulated", "kept"])
def test_sums_that_are_rounded_anyway_are_sent_as_they_are(ranks, style):
    options = {"grad_reduce_in_fp32": True}
    check(ranks(2)(arms, style, torch.bfloat16, options), torch.bfloat16, set())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("style", ["plain", *(style for style in STYLES if style != "interrupted")])
def test_on_gpus(ranks, style):
    results = ranks(2)(arms, style, torch.bfloat16, BOTH_IN_FP32, **NCCL)
    check(results, torch.bfloat16, STYLES.get(style, set()))
