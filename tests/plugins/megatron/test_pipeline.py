"""The engine of ``pipeline`` runs Megatron's pipeline with delayed weight gradients and the bits of Megatron."""

from __future__ import annotations

import contextlib
import gc
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

import ovpatch
from ovpatch.overlap.comm.lifetimes import find_owners
from ovpatch_plugins.megatron import megatron_pipeline as pipeline
from ovpatch_plugins.megatron import megatron_report
from ovpatch_plugins.megatron.megatron_pipeline import PipelinePatches
from ovpatch_plugins.megatron.megatron_report import COUNTERS
from ovpatch_plugins.megatron.weight_grads import Linear, WeightGradQueue, multiply
from tests.plugins.megatron.models import RECOMPUTED, SEQUENCE
from tests.plugins.megatron.stages import Case, run_both, train
from tests.scripts.arms import needs

pytestmark = needs("megatron")

# The linears of a layer; each stage has one layer.
LINEARS = 4
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
CASES = {
    "plain": Case(ddp=None),
    "fewer microbatches than stages": Case(microbatches=1),
    "reduced in the backward": Case(steps=3),
    "grad_sync_func, tied": Case(
        grad_sync=True, model={"share_embeddings_and_output_weights": True}
    ),
    "bf16, main_grad in float32, batch_p2p_comm": Case(
        dtype=torch.bfloat16,
        ddp={"overlap_grad_reduce": True, "grad_reduce_in_fp32": True},
        config={"deallocate_pipeline_outputs": True, "batch_p2p_comm": True},
    ),
    "variable_seq_lengths": Case(config=VARIABLE, lengths=(SEQUENCE, SEQUENCE // 2)),
    "recomputed, per token, forward_only": Case(config=RECOMPUTED, per_token=True, evaluates=True),
    "fused": Case(config=FUSED),
    "fused, defer_embedding_wgrad_compute": Case(
        config=FUSED | {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2},
        prepare="defer_output_layer",
    ),
    "more microbatches in each step, a step inside": Case(steps=3, growth=1, nests=True),
    "after a failed step": Case(steps=3, fails=True),
    # This case is the last one, because its remark stays.
    "read elsewhere": Case(prepare="read_elsewhere"),
}
# The number of linears of the last stage that stay in the backward.
NOT_DELAYED = {
    "fused, defer_embedding_wgrad_compute": 1,
    "read elsewhere": 1,
}


def expected_receives(case: Case, stage: int) -> int:
    """Return the number of receives that start one computation before their readers, which is all but a first F's."""
    if case.config.get("variable_seq_lengths"):
        return 0
    steps = range(case.fails, case.steps)
    microbatches = sum(map(case.count_microbatches, steps))
    return microbatches * ((stage > 0) + (stage < case.pp - 1)) - len(steps) * (stage > 0)


@pytest.mark.parametrize(
    ("schedule", "names"),
    [("zb-h1", list(CASES)), ("1f1b", list(CASES)[2:5])],
    ids=["zb-h1", "1f1b"],
)
def test_all_bits_are_the_bits_of_megatron(ranks, schedule, names):
    cases = {name: CASES[name] for name in names}
    for rank, found in enumerate(ranks(2)(run_both, cases, (schedule,))):
        for name, (differing, counters, remarks) in found.items():
            assert not differing, (rank, name)
            key = name.rpartition(", ")[0]
            case, delayed = CASES[key], rank * (LINEARS + 1 - NOT_DELAYED.get(key, 0))
            microbatches = list(map(case.count_microbatches, range(1 + case.fails, case.steps)))
            assert counters["weight_grads"] == delayed * sum(microbatches), name
            assert counters["pipeline_steps"] == case.steps - case.fails, name
            # The weight gradients of the first microbatch follow the second send.
            later = schedule == "zb-h1" and case.microbatches > 1
            assert counters["early_sends"] == rank * (
                sum(microbatches) - later * len(microbatches)
            ), name
            assert counters["early_receives"] == expected_receives(case, rank), name
            assert any("read more than once" in text for text in remarks) == (
                key == "read elsewhere" and rank == 1
            )


LATER = {
    "reduced in the backward": Case(steps=4, prepare="read_elsewhere_later"),
    "fused": Case(steps=4, prepare="read_elsewhere_later", config=FUSED),
    # Each of the engine's two tasks adds a gradient.
    "recomputed": Case(steps=4, ddp=None, prepare="read_elsewhere_later", config=RECOMPUTED),
}


def test_weights_that_are_read_elsewhere_from_a_later_step_on_stay_in_the_backward(ranks):
    for rank, found in enumerate(ranks(2)(run_both, LATER, ("zb-h1", "1f1b"))):
        for name, (differing, counters, remarks) in found.items():
            assert not differing, (rank, name)
            # The two gradients of this weight are due in two microbatches.
            twice = name.startswith("recomputed") * 2
            assert counters["weight_grads"] == rank * (3 * (LINEARS + 1 + 2) + twice), name
            assert any("read more than once" in text for text in remarks) == (rank == 1)


FOUR = {
    "four stages": Case(
        pp=4, microbatches=6, steps=3, config={"deallocate_pipeline_outputs": True}
    ),
    "four stages, two microbatches": Case(
        pp=4, microbatches=2, grad_sync=True, config={"batch_p2p_comm": True}
    ),
    "two replicas, sharded": Case(sharded=True),
    "tensor parallel": Case(tp=2),
}


def test_all_bits_are_the_bits_of_megatron_on_four_ranks(ranks):
    for rank, found in enumerate(ranks(4)(run_both, FOUR, ("zb-h1",))):
        for name, (differing, counters, _) in found.items():
            assert not differing, (rank, name)
            case = FOUR[name.rpartition(", ")[0]]
            stage = rank // (4 // case.pp)
            assert counters["early_receives"] == expected_receives(case, stage), name
            delayed = (stage > 0) * LINEARS + (stage == case.pp - 1)
            assert counters["weight_grads"] == delayed * case.microbatches * (case.steps - 1), name


def test_auto_leaves_weight_gradients_of_tensor_parallel_stages_to_megatron_and_reports_it(ranks):
    for found in ranks(4)(run_both, {"tensor parallel": Case(tp=2, microbatches=1)}, ("auto",)):
        ((differing, counters, remarks),) = found.values()
        assert not differing
        assert counters["weight_grads"] == 0
        assert counters["pipeline_steps"] == 2, "the engine sends the messages"
        assert counters["calls"], "the linears are still patched"
        assert any("auto keeps collectives" in text for text in remarks)


def only_the_engine_sends() -> tuple[Any, Any]:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    case = {"plain": Case()}
    with mock.patch.object(
        P2PCommunicator, "_communicate", autospec=True, side_effect=P2PCommunicator._communicate
    ) as communicate:
        stock = len([train(case["plain"]), *communicate.mock_calls]) - 1
        communicate.reset_mock()
        with ovpatch.applied("megatron"):
            train(case["plain"])
        return stock, len(communicate.mock_calls)


def test_megatron_sends_no_message(ranks):
    for stock, patched in ranks(2)(only_the_engine_sends):
        assert stock > 0
        assert patched == 0


def one_rank_objects() -> Any:
    from ovpatch_plugins.megatron import megatron_pipeline as pipeline

    reason = "a setting of one rank is on" if dist.get_rank() else ""
    with mock.patch.object(pipeline, "_find_setting", return_value=reason):
        return run_both({"plain": Case()}, ("1f1b",))


def test_all_ranks_leave_the_schedule_to_megatron_if_one_does(ranks):
    for found in ranks(2)(one_rank_objects):
        ((differing, counters, remarks),) = found.values()
        assert not differing
        assert counters["pipeline_steps"] == 0
        assert any("a setting of one rank is on (rank 1)" in text for text in remarks)


def drop_a_model() -> tuple[int, int]:
    """Return the number of steps that the engine of a model ran, and the number of engines once the model was freed."""
    before = COUNTERS.pipeline_steps
    with ovpatch.applied("megatron"):
        train(Case(steps=1))
        gc.collect()
        return COUNTERS.pipeline_steps - before, len(find_owners(pipeline._ENGINE_KEY))


def test_a_model_is_freed_with_its_engine(ranks):
    assert ranks(2)(drop_a_model) == [(1, 0)] * 2


class Timers:
    """Replacements of Megatron's timers, which need CUDA; ``seen`` has the names of timers that have run."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.seen: set[str] = set()

    def __call__(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(
            start=lambda **_: self.running.append(name), stop=lambda: self._stop(name)
        )

    def _stop(self, name: str) -> None:
        assert self.running.pop() == name
        self.seen.add(name)


def timed_messages() -> list[set[str]]:
    found = []
    for features in ((), ("megatron",)):
        timers = Timers()
        with ovpatch.applied(*features) if features else contextlib.nullcontext():
            train(Case(config={"timers": timers, "barrier_with_L1_time": False}, ddp=None))
        assert not timers.running
        found.append({name for name in timers.seen if "send" in name or "recv" in name})
    return found


def test_megatrons_timers_run_as_before(ranks):
    for stock, patched in ranks(2)(timed_messages):
        assert stock
        assert patched == stock


class Replicated(torch.nn.Module):
    """A stage in a wrapper with the module name of torch's DistributedDataParallel."""

    __module__ = "torch.nn.parallel.distributed"


class Elsewhere:
    """A communicator of another kind, or groups of several modules."""

    pp_group = None


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({"cpu_offloading": True}, {}, "cpu_offloading is on"),
        ({"cuda_graph_impl": "local"}, {}, "cuda_graph_impl is on"),
        ({}, {"p2p_communicator": Elsewhere()}, "messages are sent by Elsewhere"),
        ({}, {"pg_collection": Elsewhere()}, "its groups are given as Elsewhere"),
        ({}, {"model": torch.nn.Sequential(Replicated())}, "the model is in Replicated"),
        ({}, {"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn is given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_settings_are_left_to_megatron_and_reported(monkeypatch, changes, given, reason):
    given = dict(given)
    monkeypatch.setattr(megatron_report, "_FALLBACKS", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config = SimpleNamespace(tensor_model_parallel_size=1, **changes)
    group = SimpleNamespace(size=lambda: 1)
    state = SimpleNamespace(get_pipeline_model_parallel_group=lambda: group)
    schedules = SimpleNamespace(
        get_model_config=lambda _model: config,
        P2PCommunicator=SimpleNamespace,
        parallel_state=state,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel.schedules", schedules)
    monkeypatch.setattr(pipeline, "wait_limit_s", lambda *_: 1.0)
    patches = PipelinePatches({"pipeline_schedule": "1f1b"})
    run = patches.wrap_schedule(lambda **given: patches._step)
    assert run(model=given.pop("model", torch.nn.Linear(1, 1)), num_microbatches=1, **given) is None
    assert megatron_report.list_fallbacks() == [f"the pipeline's schedule: {reason}"]


def test_a_step_inside_of_another_one_is_left_to_megatron(monkeypatch):
    monkeypatch.setattr(megatron_report, "_FALLBACKS", {})
    patches = PipelinePatches({"pipeline_schedule": "1f1b"})
    run = patches.wrap_schedule(lambda **_: (patches._step, patches.queue.is_active))
    patches._step = outer = mock.Mock()
    with patches.queue.running():
        assert run(model=[]) == (None, False)
        assert (patches._step, patches.queue.is_active) == (outer, True)
    assert "inside of another step" in megatron_report.list_fallbacks()[0]


def test_interleaving_is_left_to_megatron_and_reported(monkeypatch):
    monkeypatch.setattr(megatron_report, "_FALLBACKS", {})
    patches = PipelinePatches({"pipeline_schedule": "1f1b"})
    assert patches.wrap_interleaving(lambda **given: given)(model=[]) == {"model": []}
    assert "the pipeline's schedule with interleaving" in megatron_report.list_fallbacks()[0]


def another_loop() -> str:
    from megatron.core.pipeline_parallel import schedules

    def loop(*, model: Any, **_: Any) -> None:
        config = schedules.get_model_config(model[0])
        schedules.P2PCommunicator(
            schedules.parallel_state.get_pipeline_model_parallel_group(), config
        ).recv_backward([(1,)], dist.get_rank() == 1)

    with (
        mock.patch.object(schedules, "forward_backward_pipelining_without_interleaving", loop),
        ovpatch.applied("megatron"),
        pytest.raises(RuntimeError) as caught,
    ):
        train(Case(steps=1))
    return str(caught.value)


def test_a_loop_of_another_order_is_an_error(ranks):
    for text in ranks(2)(another_loop):
        assert "runs B where its order has" in text
        assert "PIPELINE_SCHEDULE=stock" in text


def plain_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
) -> torch.Tensor:
    return input @ weight.t()


def test_a_linear_that_another_library_has_wrapped_is_called_and_reported(monkeypatch):
    monkeypatch.setattr(megatron_report, "_FALLBACKS", {})
    patches, x = (
        PipelinePatches({"pipeline_schedule": "1f1b"}),
        torch.randn(2, 4, requires_grad=True),
    )
    called = []

    def wrapper(*args: Any) -> torch.Tensor:
        called.append(args)
        return plain_linear(*args)

    weight = torch.nn.Parameter(torch.randn(3, 4))
    with patches.queue.running():
        patches.wrap_linear(wrapper)(x, weight, None, False, False, False)
    assert len(called) == 1
    assert any(
        "another library has replaced" in text and "wrapper" in text
        for text in megatron_report.list_fallbacks()
    )


def test_a_compiled_linear_is_left_to_megatron_and_compiled_once():
    patches, counter = PipelinePatches({"pipeline_schedule": "1f1b"}), CompileCounter()
    compiled = torch.compile(patches.wrap_linear(plain_linear), backend=counter, fullgraph=True)
    x, weight = torch.randn(2, 4, requires_grad=True), torch.nn.Parameter(torch.randn(3, 4))
    for _ in range(3):
        with patches.queue.running():
            assert compiled(x, weight, None, False, False, False).equal(x @ weight.t())
    assert counter.frame_count == 1


class Delayed(torch.nn.Module):
    """A linear whose weight gradient a queue delays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4))
        self.queue = WeightGradQueue()
        # The address of the last weight gradient.
        self.result_address = 0
        self.input = torch.randn(2, 4, requires_grad=True)

    def multiply(self, weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = multiply(weight, grad, x)
        self.result_address = found.data_ptr()
        return found

    def forward(self) -> torch.Tensor:
        weight, compute = self.queue.enter(self.weight, self.multiply)
        return Linear.apply(self.input, weight, None, compute, None, lambda grad, x: (grad, x))

    def step(self, *, fails: bool = False, is_complete: bool = True, recorded: bool = True) -> None:
        self.weight.grad = None
        with self.queue.running():
            out = self().sum()
            if not recorded:
                torch.autograd.grad(out, self.input)
            with self.queue.recording():
                out.backward()
                if fails:
                    raise ZeroDivisionError
            if is_complete:
                self.queue.compute(1)


@pytest.fixture
def linear() -> Delayed:
    """Return a linear that has run its first step."""
    made = Delayed()
    made.step()
    return made


def is_right(linear: Delayed) -> bool:
    return linear.weight.grad.equal(torch.ones(3, 2) @ linear.input)


def test_a_weight_takes_the_result_of_the_gemm_itself(linear):
    linear.step()
    assert linear.weight.grad.data_ptr() == linear.result_address
    assert is_right(linear)
    assert not linear.weight._backward_hooks


def test_a_step_after_one_that_failed_is_clean(linear):
    with pytest.raises(ZeroDivisionError):
        linear.step(fails=True)
    assert linear.weight.grad is None
    linear.step()
    assert is_right(linear)


def test_a_failed_first_step_leaves_the_weights_without_observations():
    linear = Delayed()
    with pytest.raises(ZeroDivisionError):
        linear.step(fails=True)
    linear.step(is_complete=False)
    assert is_right(linear)


def test_weight_gradients_that_were_not_computed_are_an_error(linear):
    with pytest.raises(RuntimeError, match="PIPELINE_SCHEDULE=stock"):
        linear.step(is_complete=False)


def test_gradients_taken_in_a_forward_are_an_error(linear):
    with pytest.raises(RuntimeError, match="inside its forward"):
        linear.step(recorded=False)


def test_a_weight_whose_gradient_a_forward_takes_stays_in_the_graph():
    linear = Delayed()
    for _ in range(2):
        linear.weight.grad = None
        with linear.queue.running():
            out = linear().sum()
            (taken,) = torch.autograd.grad(out, linear.weight, retain_graph=True)
            with linear.queue.recording():
                out.backward()
            linear.queue.compute(1)
        assert is_right(linear)
        assert taken.equal(linear.weight.grad)


class Nothing(torch.autograd.Function):
    """A function that reads a tensor and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> None:
        return None


READS = {
    "dense": lambda weight: weight[1],
    "sparse": lambda weight: torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True),
    "none": Nothing.apply,
}


def read_twice(linear: Delayed, kind: str, *, before: bool, changed: bool = False) -> None:
    """Run a step that also reads the weight elsewhere; ``changed``: with a hook that is registered inside the step."""
    linear.weight.grad = None
    with linear.queue.running():
        reads = [linear, lambda: READS[kind](linear.weight)]
        total = sum(read().sum() for read in (reversed(reads) if before else reads))
        if changed:
            linear.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.add_(1))
        with linear.queue.recording():
            total.backward()
        linear.queue.compute(1)


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_weight_gets_the_sum_of_its_reads(linear, kind, before):
    node = linear.weight.expand_as(linear.weight).grad_fn.next_functions[0][0]
    # Megatron marks weights in this way; its hook requires a gradient.
    linear.weight.grad_added_to_main_grad = False
    found = []
    node.register_hook(lambda *_: found.append(linear.weight.grad is not None))
    read_twice(linear, kind, before=before)
    expected = torch.ones(3, 2) @ linear.input
    if kind != "none":
        expected[1] += 1
    assert linear.weight.grad.to_dense().equal(expected)
    assert found == [True, True]
    assert linear.queue.enter(linear.weight, multiply)[1] is multiply, "from the next step on"


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_stays_in_the_backward_as_long_as_it_has_hooks(monkeypatch, linear, register):
    monkeypatch.setattr(megatron_report, "_FALLBACKS", {})
    called = []
    handle = getattr(linear.weight, register)(lambda _: called.append(1))
    read_twice(linear, "dense", before=False)
    assert called == [1]
    assert linear.weight.grad[1].equal(torch.ones(3, 2)[1] @ linear.input + 1)
    assert any("weights that have hooks" in text for text in megatron_report.list_fallbacks())
    handle.remove()
    with linear.queue.running():
        assert linear.queue.enter(linear.weight, multiply)[0] is not linear.weight


def test_a_hook_registered_inside_a_step_that_would_be_called_twice_is_an_error(linear):
    with pytest.raises(
        RuntimeError, match=r"shape \(3, 4\) .* a hook in the step.*PIPELINE_SCHEDULE=stock"
    ):
        read_twice(linear, "dense", before=False, changed=True)


def test_a_weight_that_a_backward_in_a_forward_reads_stays_in_the_backward(linear):
    with linear.queue.running():
        linear()
        linear.weight.grad = None
        linear.weight.sum().backward()
        assert linear.weight.grad.equal(torch.ones(3, 4)), "immediately, as in stock Megatron"
    with linear.queue.running():
        assert linear.queue.enter(linear.weight, multiply)[1] is multiply
