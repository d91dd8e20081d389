"""From traces to lanes: what a device or a training thread did, under which label, in which step."""

from __future__ import annotations

import pytest

from ovpatch.insight.timeline.trace import TraceError, read_trace
from ovpatch.insight.timeline.tracks import build_tracks, read_all_ranks
from tests.insight.traces import DEVICE, PEER_COPY, Synthetic


@pytest.fixture
def lanes(tmp_path):
    """Return the lanes of a synthetic trace, with times as the trace's own microseconds."""

    def lanes(trace, **more):
        return build_tracks(read_trace(trace.write(tmp_path / "rank0.json")), 0, **more)

    return lanes


def us(trace, spans):
    zero = trace.base + trace.zero * 1000
    return [tuple((time - zero) / 1000 for time in span) for span in spans]


def windows(trace, lanes):
    return {step.number: us(trace, [(step.start, step.end)])[0] for step in lanes.steps}


# --- devices ---


def test_each_kind_has_its_lane(lanes):
    trace = Synthetic().op("aten::mm", 0, 5)
    trace.gemm(10, 30).gemm(25, 40, stream=9).nccl(35, 60)
    trace.on_device(PEER_COPY, 70, 75, category="gpu_memcpy")
    trace.on_device("Memcpy HtoD (Pinned -> Device)", 80, 90, category="gpu_memcpy")
    trace.on_device("Memcpy DtoD (Device -> Device)", 90, 95, category="gpu_memcpy")
    found = lanes(trace)
    assert found.device == f"gpu {DEVICE}"
    assert us(trace, found.compute) == [(10, 40), (90, 95)], (
        "the op on the host is no work of the device"
    )
    assert us(trace, found.communication) == [(35, 60), (70, 75)]
    assert us(trace, found.exposed) == [(40, 60), (70, 75)]
    assert us(trace, found.copies) == [(80, 90)]
    assert [communication.collective for communication in found.communications] == [
        "nccl all_reduce",
        "peer copy",
    ]


LABEL = "ovpatch::ddp::all_reduce (bucket 3)"


def test_a_kernel_has_the_label_over_its_launch(lanes):
    trace = Synthetic()
    trace.note("DistributedDataParallel.forward", 0, 100).note(LABEL, 10, 20).note(
        "ovpatch::ddp::recover", 30, 60
    )
    trace.note("ovpatch::ddp::inner (x)", 40, 50)
    for launch in (5, 12, 25, 35, 45, 55, None):
        trace.nccl(1000 + 10 * (launch or 20), 1005 + 10 * (launch or 20), launch=launch)
    labels = {us(trace, [(c.start, c.end)])[0][0]: c.label for c in lanes(trace).communications}
    assert labels == {
        1050: "",
        1120: LABEL,
        1200: "",  # launched before the trace
        1250: "",
        1350: "ovpatch::ddp::recover",
        1450: "ovpatch::ddp::inner (x)",
        1550: "ovpatch::ddp::recover",
    }


def test_another_threads_label_is_not_ours(lanes):
    trace = Synthetic().note(LABEL, 0, 100, tid=99)
    trace.nccl(50, 60, launch=10)
    assert lanes(trace).communications[0].label == ""


def test_without_a_launch_the_range_on_the_stream_counts(lanes):
    trace = Synthetic()
    trace.nccl(50, 60)
    trace.add(LABEL, "gpu_user_annotation", 45, 65, pid=DEVICE, tid=20)
    trace.add("ovpatch::other", "gpu_user_annotation", 45, 65, pid=DEVICE, tid=7)
    (communication,) = lanes(trace).communications
    assert (communication.label, communication.phase) == (LABEL, "ovpatch::ddp::all_reduce")


def borders(*times):
    """Return a trace that marks the end of each step, from step 4 on."""
    trace = Synthetic()
    for number, at in enumerate(times, 4):
        trace.border(number, at)
    return trace


#: A trace, and the steps of its device.
STEPS = {
    # The first kernel was launched before the trace and belongs to step 4; communication does not move the end.
    "a late device ends its step with the work of that step": (
        lambda: borders(10, 100, 200).gemm(0, 40).gemm(40, 180, launch=20).nccl(60, 250, launch=30)
        .gemm(180, 310, launch=110), {5: (40, 180), 6: (180, 310)}),
    "a step ends with its last work on any stream": (
        lambda: borders(10, 100).gemm(20, 180, launch=15, stream=9).gemm(30, 60, launch=20), {5: (10, 180)}),
    "a device that waits for its host ends its step with the host's": (
        lambda: borders(10, 100).gemm(20, 30, launch=15), {5: (10, 100)}),
    "without a host all of the device is one step": (lambda: Synthetic().gemm(10, 20).nccl(15, 40), {1: (10, 40)}),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_steps_of_devices(lanes, case):
    make, expected = STEPS[case]
    trace = make()
    assert windows(trace, lanes(trace)) == expected


@pytest.mark.parametrize("number", [10, None])
def test_a_launch_that_the_profiler_leaves_out_moves_no_other_border(lanes, number):
    trace = Synthetic().border(4, 0).border(5, 100).border(6, 200)
    trace.gemm(20, 130, launch=15).gemm(140, 180, launch=110)
    memset = {"device": DEVICE} if number is None else {"device": DEVICE, "correlation": number}
    # As cuMemsetD32Async leaves it in the trace.
    trace.add("Memset (Device)", "gpu_memset", 190, 210, pid=DEVICE, tid=7, **memset)
    assert windows(trace, lanes(trace)) == {5: (0, 130), 6: (130, 210)}


def test_of_several_devices_the_busiest_is_shown_and_the_others_named(lanes):
    trace = Synthetic()
    trace.gemm(0, 10).gemm(10, 50, device=1).gemm(60, 65)
    found = lanes(trace)
    assert found.device == "gpu 1"
    assert us(trace, found.compute) == [(10, 50)]
    assert any("0 not" in remark for remark in found.remarks)


# --- steps by the host ---


def test_steps_of_the_profilers_own_marks(lanes):
    trace = (
        Synthetic()
        .op("aten::mm", 0, 300)
        .note("ProfilerStep#7", 0, 90)
        .note("ProfilerStep#8", 100, 300)
    )
    found = lanes(trace)
    assert windows(trace, found) == {7: (0, 90), 8: (100, 300)}
    assert found.remarks == ()


def test_steps_without_marks_are_those_of_the_optimizer_that_steps_last(lanes):
    trace = Synthetic().op("aten::mm", 0, 300)
    for at in (10, 110, 210):
        trace.note("Optimizer.step#Adam.step", at, at + 10).note(
            "Optimizer.step#SGD.step", at + 20, at + 30
        )
    found = lanes(trace)
    assert windows(trace, found) == {1: (40, 140), 2: (140, 240)}
    assert "Optimizer.step#SGD.step" in found.remarks[0]


def test_without_any_border_all_is_one_step(lanes):
    trace = Synthetic().op("aten::mm", 5, 80).note("Optimizer.step#SGD.step", 70, 90)
    found = lanes(trace)
    assert windows(trace, found) == {1: (5, 90)}
    assert "no steps are marked" in found.remarks[0]


# --- CPU ---


def cpu():
    return Synthetic().note("Optimizer.step#SGD.step", 900, 901)


#: Events of a training thread, and the spans in which it computed.
FRAMES = (
    "autograd::engine::evaluate_function: AddmmBackward0", "torch::autograd::AccumulateGrad", "AddmmBackward0", "_Mine",
)  # fmt: skip
CALLS = ("c10d::allreduce_", "_c10d_functional::wait_tensor", "c10d::barrier")
COMPUTED = {
    "operators of the training thread": (
        lambda: cpu().op("aten::linear", 0, 50).op("aten::addmm", 10, 40).op("aten::relu", 60, 70)
        .op("aten::copy_", 200, 300, tid=77).note("anything", 80, 90), [(0, 50), (60, 70)]),
    **{f"only operators in {frame}, of autograd or the user": (
        lambda frame=frame: cpu().op(frame, 0, 100).op("aten::mm", 10, 30).op("aten::add_", 90, 95),
        [(10, 30), (90, 95)]) for frame in FRAMES},
    "an operator with a collective inside, without waiting": (
        lambda: cpu().op("mine::all_reduce_and_add", 0, 100).op("c10d::allreduce_", 10, 20).op("aten::add", 80, 90),
        [(80, 90)]),
    **{f"no call of {name}": (lambda name=name: cpu().op(name, 0, 100).op("aten::mm", 100, 110), [(100, 110)])
       for name in CALLS},
    "the busiest thread, if none steps": (
        lambda: Synthetic().op("aten::a", 0, 10).op("aten::b", 0, 20, tid=77).op("aten::b", 5, 10, tid=77),
        [(0, 20)]),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPUTED)
def test_what_computes_on_a_cpu(lanes, case):
    make, expected = COMPUTED[case]
    trace = make()
    assert us(trace, lanes(trace).compute) == expected


def test_collectives_of_gloo_have_the_labels_of_their_calls_in_order_and_by_kind(lanes):
    trace = cpu()
    trace.note("ovpatch::a::x (0)", 10, 20).op("c10d::allreduce_coalesced_", 12, 14)
    trace.note("ovpatch::a::y (1)", 20, 30).op("c10d::_allgather_base_", 22, 24)
    trace.note("ovpatch::a::x (1)", 30, 40).op("c10d::allreduce_", 32, 34)
    trace.op("c10d::allreduce_", 50, 52)
    for start, name in (
        (13, "all_reduce"),
        (36, "all_reduce"),
        (60, "all_gather"),
        (70, "all_reduce"),
    ):
        trace.note(f"gloo:{name}", start, start + 20, tid=99 + start % 2)
    found = [
        (communication.collective, communication.label)
        for communication in lanes(trace).communications
    ]
    assert found == [
        ("gloo all_reduce", "ovpatch::a::x (0)"),
        ("gloo all_reduce", "ovpatch::a::x (1)"),
        ("gloo all_gather", "ovpatch::a::y (1)"),
        ("gloo all_reduce", ""),
    ]


def test_a_collective_from_before_the_trace_takes_no_label(lanes):
    trace = cpu().note("gloo:all_reduce", 0, 30, tid=99)
    trace.note("ovpatch::a::x (0)", 10, 20).op("c10d::allreduce_", 12, 14).note(
        "gloo:all_reduce", 13, 30, tid=98
    )
    assert [communication.label for communication in lanes(trace).communications] == [
        "",
        "ovpatch::a::x (0)",
    ]


# --- runs ---


def test_ranks_are_put_in_order(tmp_path):
    paths = [
        Synthetic(rank).op("aten::mm", 0, 5).write(tmp_path / f"{name}.json")
        for rank, name in ((1, "a"), (0, "b"))
    ]
    assert [(tracks.rank, tracks.path.name) for tracks in read_all_ranks(paths)] == [
        (0, "b.json"),
        (1, "a.json"),
    ]


def test_two_traces_of_one_rank_are_refused(tmp_path):
    paths = [Synthetic(1).op("aten::mm", 0, 5).write(tmp_path / f"{name}.json") for name in "ab"]
    with pytest.raises(TraceError, match="are both of rank 1"):
        read_all_ranks(paths)


def test_a_trace_without_a_rank_is_rank_0_alone_and_refused_among_others(tmp_path):
    paths = [Synthetic(None).op("aten::mm", 0, 5).write(tmp_path / f"{name}.json") for name in "ab"]
    assert read_all_ranks(paths[:1])[0].rank == 0
    with pytest.raises(TraceError, match="does not say its rank"):
        read_all_ranks(paths)
