"""The feature on GPUs over NCCL: the loops of the other files, and loops whose errors only streams can cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ovpatch
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from tests.overlap import test_gate
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.ddp.checks import same_bits
from tests.plugins.ddp.test_gpu import loop_memory_of_another_stream
from tests.plugins.dist_optimizer import (
    test_fused_scaler,
    test_hooks_and_failures,
    test_loop_styles,
    test_loops,
    test_main_params,
    test_models,
    test_optimizer_kinds,
    test_orders_by_rank,
    test_reads_of_gradients,
    test_reads_of_parameters,
    test_scaler,
    test_state,
    test_state_dict,
    test_whole_parameters,
    test_whole_parameters_state,
)
from tests.plugins.dist_optimizer.checks import all_cases, both, check_all, ddp, params, train_step
from tests.plugins.dist_optimizer.test_whole_parameters import check_each
from tests.support.equality import compare

pytestmark = pytest.mark.gpu(2)

CPU_ONLY = ("adagrad, fused",)
NCCL = {"backend": "nccl", "timeout": 90}


def named(
    name: str, values: Any, without: tuple[str, ...] = (), **more: Any
) -> dict[str, dict[str, Any]]:
    return {value: {name: value, **more} for value in values if value not in without}


def test_optimizers(ranks):
    kinds = named("kind", test_optimizer_kinds.KINDS, without=CPU_ONLY)
    check_all(
        ranks(2)(all_cases, test_optimizer_kinds.train, kinds, **NCCL),
        steps=test_optimizer_kinds.STEPS,
    )


def test_optimizers_in_low_precision(ranks):
    kinds = named("kind", test_optimizer_kinds.KINDS, without=CPU_ONLY, low_precision=True)
    check_all(
        ranks(2)(all_cases, test_optimizer_kinds.train, kinds, **NCCL),
        steps=test_optimizer_kinds.STEPS,
    )


@pytest.mark.parametrize("kind", test_whole_parameters.KINDS)
def test_optimizers_that_need_full_parameters(ranks, kind):
    loops = {"": {"kind": kind}, "states": {"kind": kind, "states": True}}
    for bucket_mb in (0.0, 64.0):
        options = test_whole_parameters.NAMED | {"gather_bucket_mb": bucket_mb}
        check_each(ranks(2)(all_cases, test_whole_parameters.train, loops, options=options, **NCCL))


@pytest.mark.parametrize("kind", test_whole_parameters.KINDS)
def test_state_of_full_parameters(ranks, kind):
    named = {"options": test_whole_parameters.NAMED, **NCCL}
    for reader in test_state.READERS:
        result = ranks(2)(
            both, test_whole_parameters.instead, kind, test_state.one_rank, reader, 0, **named
        )[0]
        compare(result["stock"], result["patched"]).assert_bitwise()
    for loop in (test_whole_parameters_state.resumed, test_whole_parameters_state.changed_by_hand):
        args = (False,) if loop is test_whole_parameters_state.resumed else ()
        for result in ranks(2)(both, loop, kind, *args, **named):
            compare(result["stock"], result["patched"]).assert_bitwise()
    check_each(
        ranks(2)(
            all_cases, test_whole_parameters.instead, test_whole_parameters.scaled(kind), **named
        )
    )


@pytest.mark.parametrize("dtype", test_main_params.LOW_PRECISION_DTYPES)
def test_main_params_in_fp32(ranks, dtype):
    kinds = named("kind", test_main_params.OPTIMIZERS, dtype=dtype)
    named_options = {"options": test_main_params.IN_FP32, **NCCL}
    check_all(
        ranks(2)(all_cases, test_main_params.train, kinds, **named_options),
        steps=test_main_params.STEPS,
    )
    for expected, ours in ranks(2)(test_main_params.both_in_fp32, 4, **NCCL):
        compare(expected[4:], ours[4:]).assert_bitwise()
    for kind in ("momentum", "adamw, fused"):
        for uninterrupted, continued in ranks(2)(
            test_main_params.resumed, kind, [test_main_params.STEPS, 4], True, **NCCL
        ):
            compare(uninterrupted, continued).assert_bitwise()


def test_capturable(ranks):
    """Check that such an optimizer falls back, because a script may capture its step into a CUDA graph."""
    kinds = {
        "adamw": {"cls": torch.optim.AdamW, "foreach": True},
        "adamw, fused": {"cls": torch.optim.AdamW, "fused": True},
        "adam, plain": {"cls": torch.optim.Adam, "foreach": False},
        "nadam": {"cls": torch.optim.NAdam},
    }
    check_all(ranks(2)(all_cases, capturable, kinds, **NCCL), steps=0, stock=1)


def capturable(cls: type[torch.optim.Optimizer], **kwargs: Any) -> list[Record]:
    model = ddp(test_loops.net())
    opt = cls(model.parameters(), lr=torch.tensor(0.01, device=device()), capturable=True, **kwargs)
    records = []
    for step in range(8):
        train_step(model, opt, step)
        records.append(params(model))
    return [*records, {str(k): v for k, v in opt.state_dict()["state"].items()}]


def test_styles(ranks):
    check_all(
        ranks(2)(all_cases, test_loop_styles.train, named("style", test_loop_styles.STYLES), **NCCL)
    )


def test_models_and_their_optimizers(ranks):
    check_all(
        ranks(2)(all_cases, test_models.train, test_models.CASES, **NCCL), steps=test_models.STEPS
    )
    check_all(ranks(2)(all_cases, test_models.adversaries, {"": {}}, **NCCL))
    check_all(ranks(2)(all_cases, test_models.several_models, {"": {"optimizers": 1}}, **NCCL))


def test_reads_and_writes_of_gradients(ranks):
    uses = test_reads_of_gradients.READS | test_reads_of_gradients.WRITES
    uses = named("use", uses, without=("one by numpy", "by numpy", "repr"))
    check_all(ranks(2)(all_cases, test_reads_of_gradients.train, uses, **NCCL))
    norms = named("use", test_reads_of_gradients.NORMS)
    check_all(ranks(2)(all_cases, test_reads_of_gradients.train, norms, **NCCL), bitwise=False)


def test_parameters_read(ranks):
    hows = named("how", test_reads_of_parameters.HOWS, without=test_reads_of_parameters.ON_CPU)
    check_all(ranks(2)(all_cases, test_reads_of_parameters.train, hows, **NCCL))


def test_state_read(ranks):
    for result in same_bits(ranks(2)(both, test_state.all_ranks, "adamw", **NCCL)):
        assert result["counters"]["state_reads"] > 0


@pytest.mark.parametrize("reader", test_state.READERS)
def test_one_rank_alone_reads_the_state(ranks, reader):
    results = ranks(2)(both, test_state.one_rank, reader, 0, **NCCL)
    compare(results[0]["stock"], results[0]["patched"]).assert_bitwise()
    assert [result["counters"]["state_reads"] > 0 for result in results] == [True, False]


def test_checkpoints_written_and_read(ranks):
    for full in (False, True):
        for result in ranks(2)(
            both, test_whole_parameters_state.by_dcp, "adamw", full, False, **NCCL
        ):
            compare(result["stock"], result["patched"]).assert_bitwise()
    same_bits(ranks(2)(both, test_whole_parameters_state.resumed, "adamw", False, **NCCL))


@pytest.mark.parametrize("fused", [False, True])
def test_scalers(ranks, fused):
    for result in ranks(2)(both, test_scaler.train, True, True, fused, culprit=0, **NCCL):
        compare(result["stock"], result["patched"]).assert_equal()
        scales = [[record["scale"] for record in result[arm]] for arm in ("stock", "patched")]
        assert scales[0] == scales[1]
        for step in test_scaler.SPOILT:
            assert scales[0][step] == scales[0][step - 1] / 2, (
                "no step was skipped, so the test shows nothing"
            )


def test_fused_steps_unscale_gradients_wherever_they_are(ranks):
    test_fused_scaler.check(
        ranks(2)(all_cases, test_fused_scaler.train, test_fused_scaler.CASES, **NCCL)
    )


def test_failures(ranks):
    wheres = named("where", ("pre-hook", "step", "closure"))
    check_all(ranks(2)(all_cases, test_hooks_and_failures.raising, wheres, **NCCL))
    check_all(ranks(2)(test_hooks_and_failures.failing_arms, **NCCL), steps=9)


@pytest.mark.parametrize("copy_engines", ["off", "on"])
def test_a_rank_with_local_gradients_keeps_no_host_waiting(ranks, copy_engines):
    (text, _, steps), (peer_text, took, _) = ranks(2)(test_gate.local_on, [0], copy_engines, **NCCL)
    assert "Do the same on every rank, or turn dist_optimizer off" in text
    assert steps == 3
    assert "with gradients that DistributedDataParallel had not reduced" in peer_text
    assert took < 30


@pytest.mark.parametrize(
    "case", ["LaterSteps", "LastSteps", "LastStepsOfOne", "Clips", "LastUnscales"]
)
def test_orders_that_differ_are_an_error_before_parameters_are_read(ranks, case):
    results = ranks(2)(test_orders_by_rank.run_ahead, [case], **NCCL)
    test_orders_by_rank.check_raising(case, [result[case] for result in results])


def test_hosts_whose_gradients_are_all_local_continue(ranks):
    for text, _, steps in ranks(2)(test_gate.local_on, [0, 1], **NCCL):
        assert text == ""
        assert steps == 3


@pytest.mark.parametrize("reader", ["save", "deepcopy", "cpu"])
def test_the_reader_of_a_state_dict_alone_fetches(ranks, reader):
    results = ranks(2)(both, test_state_dict.one_reader, reader, **NCCL)
    compare(results[0]["stock"], results[0]["patched"]).assert_bitwise()
    assert results[0]["counters"]["bytes_pulled"] > 0
    assert results[1]["counters"]["bytes_pulled"] == 0


def read_late(mib: int) -> tuple[int, int]:
    """Read the state between steps, late, on rank 0 while rank 1 continues and copies pageable memory.

    The streams of rank 1 run these copies after its collectives.
    """
    rank = dist.get_rank()
    raw = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device())
    model = ddp(raw, bucket_cap_mb=5)
    opt = torch.optim.AdamW(raw.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(mib * 256, 1024)
    seen = 0
    for step in range(8):
        for _ in range(2):
            opt.zero_grad()
            model(batch.to(device())).square().mean().backward()
            copied = batch.to(device())  # after the reductions
            opt.step()
            with torch.no_grad():
                copied += raw(batch.to(device())).mean()  # after the all-gathers
        if rank == 0:
            time.sleep(0.05 * step)
            states = opt.state_dict()["state"].values()
            seen += sum(state["exp_avg"].cpu().numel() for state in states)
    return seen, COUNTERS.state_reads


def read_late_patched(mib: int) -> tuple[int, int]:
    with ovpatch.applied("ddp", "dist_optimizer"):
        return read_late(mib)


def test_a_rank_that_reads_late_gets_replies_from_ranks_that_copy(ranks):
    """Check that replies come in far less than the timeout of the group. Without host barriers they do not come."""
    begin = time.monotonic()
    (seen, reads), _ = ranks(2)(read_late_patched, 16, **NCCL)
    assert seen == 8 * 4 * (1024 * 1024 + 1024)
    assert reads > 0
    assert time.monotonic() - begin < 60


class Wide(nn.Module):
    """A model whose collectives run as long as its layers compute.

    Layers run in another order than parameters are registered. One norm is used by all layers, and the first weight is
    used twice, the second time by a function that is no module.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(1024, 64)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))
        self.norm = nn.LayerNorm(1024)
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        x = nn.functional.linear(x, self.layers[0].weight) * self.scale
        return self.last(x)


@contextmanager
def on_a_side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def bits(model: nn.Module) -> dict[str, Tensor]:
    """Return a digest of each parameter's bits, which is less to send than the parameters."""
    return {
        name: p.detach().view(torch.int32).sum(dtype=torch.int64)
        for name, p in model.named_parameters()
    }


def wide(
    steps: int = 12,
    autocast: bool = True,
    clip: float = 0.0,
    compiled: str = "",
    side: str = "",
    read_every: int = 100,
    opt_kwargs: dict[str, Any] | None = None,
    **wrap: Any,
) -> list[Record]:
    raw = Wide().to(device())
    model: Any = ddp(torch.compile(raw) if compiled == "model" else raw, bucket_cap_mb=5, **wrap)
    trained = torch.compile(model) if compiled == "wrapper" else model
    # Adam would make a large difference of the last bit of a norm.
    opt: torch.optim.Optimizer = torch.optim.SGD(raw.parameters(), lr=1e-3)
    if not clip:
        opt = torch.optim.AdamW(raw.parameters(), lr=1e-3, **(opt_kwargs or {"fused": True}))
    records = []
    where: dict[str, Callable[[], Any]] = {side: on_a_side_stream} if side else {}
    for step in range(steps):
        with where.get("all", nullcontext)():
            with (
                where.get("forward", nullcontext)(),
                torch.autocast("cuda", torch.bfloat16, enabled=autocast),
            ):
                loss = trained(data(step, 2048, 1024)).float().square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(raw.parameters(), clip) if clip else None
            with where.get("step", nullcontext)():
                opt.step()
            opt.zero_grad()
            records.append({"loss": loss.detach(), "norm": norm})
            if step % read_every == read_every - 1:
                records.append(bits(raw))
    records.append(params(raw) if clip else bits(raw))
    if compiled:
        torch._dynamo.reset()
    return records


WIDE: dict[str, dict[str, Any]] = {
    "autocast": {},
    "fp32": {"autocast": False},
    "foreach": {"opt_kwargs": {"foreach": True}},
    "read in between": {"read_every": 2},
    "static graph": {"static_graph": True},
    "everything on a side stream": {"side": "all"},
    "step on a side stream": {"side": "step"},
    "forward on a side stream": {"side": "forward"},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("granularity", ["size", "layer", "module"])
def test_streams(ranks, overlap, granularity):
    options = {
        "overlap_param_gather": overlap,
        "gather_granularity": granularity,
        "gather_bucket_mb": 3.0,
    }
    cases = WIDE if granularity == "size" else {"autocast": {}}
    check_all(ranks(2)(all_cases, wide, cases, options=options, **NCCL), steps=12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("granularity", ["size", "layer", "module"])
def test_clipped(ranks, gpus, overlap, granularity):
    options = {
        "overlap_param_gather": overlap,
        "gather_granularity": granularity,
        "gather_bucket_mb": 3.0,
    }
    results = ranks(gpus)(all_cases, wide, {"": {"clip": 0.01}}, options=options, **NCCL)
    check_all(results, steps=12, bitwise=False)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("in_flight", [1.0, 1024.0])
@pytest.mark.parametrize("copy_engines", ["off", "on"])
def test_memory_is_not_released_before_it_was_read(ranks, hooks, in_flight, copy_engines):
    options = {"grads_in_flight_mb": in_flight, "copy_engines": copy_engines}
    cases = {"": {"hooks": hooks, "wrap": ddp}}
    check_all(
        ranks(2)(all_cases, loop_memory_of_another_stream, cases, options=options, **NCCL), steps=8
    )


@pytest.mark.parametrize("around", ["model", "wrapper"])
@pytest.mark.parametrize("overlap", [False, True])
def test_torch_compile(ranks, around, overlap):
    options = {"overlap_param_gather": overlap}
    check_all(
        ranks(2)(all_cases, wide, {"": {"compiled": around}}, options=options, **NCCL), steps=12
    )
