"""Predictions of a training step on other numbers of hosts and devices, from a step that was measured.

The model simulates one step bucket by bucket. It knows the time of the compute, the bytes of each gradient bucket and
the rates of the links. Buckets become ready over the backward, and each stage of a reduction is one stream. NCCL takes
multiprocessors and memory bandwidth from concurrent compute, so compute is slower by a time per sent byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from ovpatch.session.report_table import render_table
from ovpatch.settings.settings import SettingsError, suggest_name

STOCK: Final = "stock"
FEATURES: Final = ("ddp", "dist_optimizer")
ARMS: Final = (STOCK, *FEATURES)

# --- the model ---


@dataclass(frozen=True)
class Ring:
    """The links of a ring of ranks.

    Attributes:
        bytes_per_s: The rate of a link in one direction, as all-reduces reach it.
        hop_ms: The time of the smallest message to a neighbor.
        shard_efficiency: The part of the rate that reduce-scatters and all-gathers reach.
    """

    bytes_per_s: float
    hop_ms: float = 0.0
    shard_efficiency: float = 1.0


@dataclass(frozen=True)
class Layout:
    """Hosts with the same number of devices each, one rank per device.

    Attributes:
        hosts: Number of hosts.
        per_host: Number of devices of each.
        within: The links between devices of a host. None if unknown.
        across: The link of each host, which its devices share. None if unknown.
    """

    hosts: int
    per_host: int
    within: Ring | None = None
    across: Ring | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class StepFacts:
    """The measurements of a step in stock PyTorch, on one rank.

    Attributes:
        compute_ms: The time of a step in which nothing is communicated.
        forward_ms: The part of the first microbatch's forward.
        backward_ms: The part of the backward that reduces gradients.
        buckets: The bytes of the gradient buckets, in the order of their reductions.
        optimizer_ms: The part of the optimizer, which ``dist_optimizer`` shards.
        is_gloo: Whether gloo communicates. Then ``ddp`` reduces within hosts first. NCCL knows the hosts itself.
        slowdown_ms_per_gb: The time by which compute is longer for each GB that a rank sends.
    """

    compute_ms: float
    forward_ms: float
    backward_ms: float
    buckets: tuple[int, ...]
    optimizer_ms: float = 0.0
    is_gloo: bool = False
    slowdown_ms_per_gb: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A simulated step.

    Attributes:
        step_ms: The time of the step.
        communication_ms: The time of all communication, if nothing delays it.
        exposed_ms: The time in which the step only communicates.
    """

    step_ms: float
    communication_ms: float
    exposed_ms: float

    @property
    def hidden(self) -> float:
        """The share of communication under compute, 1 if there is no communication."""
        if not self.communication_ms:
            return 1.0
        return max(0.0, 1 - self.exposed_ms / self.communication_ms)


@dataclass(frozen=True)
class _Stage:
    """A collective: the part of a bucket that passes each link, and the number of messages in sequence."""

    within: float = 0.0
    across: float = 0.0
    hops_within: int = 0
    hops_across: int = 0
    # Whether ranks send shards, in one piece each.
    is_of_shards: bool = False

    def compute_ms(self, nbytes: int, layout: Layout) -> float:
        """Return the time of one bucket, whose parts pass all links of a ring concurrently."""
        times, latency = [0.0], 0.0
        for part, hops, ring in (
            (self.within, self.hops_within, layout.within),
            (self.across, self.hops_across, layout.across),
        ):
            if part:
                assert ring is not None, "parse_question() demands the rates that are not known"
                efficiency = ring.shard_efficiency if self.is_of_shards else 1.0
                times.append(part * nbytes / (ring.bytes_per_s * efficiency) * 1e3)
                latency += hops * ring.hop_ms
        return max(times) + latency


def _make_ring(layout: Layout, rounds: int, *, is_tree: bool) -> list[_Stage]:
    """Return a ring over all ranks: an all-reduce has two rounds, a reduce-scatter or all-gather one.

    Args:
        layout: The hosts and devices.
        rounds: The rounds.
        is_tree: Whether messages between hosts take the shortest way, as with NCCL.
    """
    world, hosts = layout.world, layout.hosts
    if world == 1:
        return []
    part = rounds * (world - 1) / world
    sends_shards = rounds == 1
    if hosts == 1:
        return [_Stage(within=part, hops_within=rounds * (world - 1), is_of_shards=sends_shards)]
    within = part if layout.per_host > 1 else 0.0
    if is_tree:
        hops = rounds * (hosts - 1).bit_length()
        return [_Stage(within, part, rounds * (layout.per_host - 1), hops, sends_shards)]
    # All ranks send in each step of a ring, and the slowest link is one between hosts.
    return [_Stage(within, part, 0, rounds * (world - 1), sends_shards)]


def _make_stages(
    arm: str, facts: StepFacts, layout: Layout
) -> tuple[Sequence[_Stage], Sequence[_Stage]]:
    """Return the stages of a bucket's reduction, and of the gather of its parameters."""
    hosts, per_host = layout.hosts, layout.per_host
    make_ring = partial(_make_ring, layout, is_tree=not facts.is_gloo)
    if arm == STOCK:
        return make_ring(2), []
    # NCCL knows the hosts in an all-reduce, but each host keeps all shards with any backend.
    is_by_host = facts.is_gloo or arm == "dist_optimizer"
    if not (is_by_host and hosts > 1 and per_host > 1):
        if arm == "ddp":
            return make_ring(2), []
        # More than two ranks of gloo on one host reduce-scatter by an all-reduce, for the bits of stock PyTorch. Over
        # links they exchange shards of fp32 gradients, which sends half as much, all of it at once.
        if facts.is_gloo and hosts > 1:
            part = (hosts - 1) / hosts
            return [_Stage(across=part, hops_across=1, is_of_shards=True)], make_ring(1)
        return make_ring(2 if facts.is_gloo and layout.world > 2 else 1), make_ring(1)
    within = _Stage((per_host - 1) / per_host, hops_within=per_host - 1, is_of_shards=True)
    across = _Stage(across=2 * (hosts - 1) / hosts, hops_across=2 * (hosts - 1))
    if arm == "dist_optimizer":
        return [within, across], [within]
    twice = _Stage(within=2 * within.within, hops_within=2 * within.hops_within)
    return [twice, across, within], []


def predict(arm: str, facts: StepFacts, layout: Layout) -> Prediction:
    """Simulate a step.

    Args:
        arm: ``stock`` or one of :data:`FEATURES`.
        facts: The measurements.
        layout: The hosts and devices.
    """
    reduce, gather = _make_stages(arm, facts, layout)
    total = sum(facts.buckets)
    ready = [facts.backward_ms * done / total for done in accumulate(facts.buckets)]
    reduced = _run_stages(reduce, facts.buckets, ready, layout)
    exposed = max(0.0, reduced - facts.backward_ms)
    # The next forward reads the parameters in the reverse order.
    now = begun = 0.0
    for nbytes in reversed(facts.buckets):
        begun += sum(stage.compute_ms(nbytes, layout) for stage in gather)
        now = max(now, begun) + facts.forward_ms * nbytes / total
    exposed += now - facts.forward_ms
    alone = _run_stages(reduce, facts.buckets, [0.0] * len(ready), layout) + begun
    saved = 0.0
    if arm == "dist_optimizer":
        is_by_host = layout.hosts > 1 and layout.per_host > 1
        saved = facts.optimizer_ms * (1 - 1 / (layout.per_host if is_by_host else layout.world))
    compute = facts.compute_ms + _find_slowdown_ms(arm, facts, layout)
    return Prediction(compute - saved + exposed, alone, exposed)


def _find_slowdown_ms(arm: str, facts: StepFacts, layout: Layout) -> float:
    """Return the time by which communication makes compute longer."""
    reduce, gather = _make_stages(arm, facts, layout)
    # Copy engines gather within a host, and take no multiprocessors.
    stages = [*reduce, *(gather if layout.hosts > 1 else ())]
    sent = sum(max(stage.within, stage.across) for stage in stages) * sum(facts.buckets)
    return facts.slowdown_ms_per_gb * sent / 1e9


def _run_stages(
    stages: Sequence[_Stage], buckets: Sequence[int], ready: Sequence[float], layout: Layout
) -> float:
    """Return the end of the last bucket's last stage. Buckets pass each stage in order, one at a time."""
    ends = [0.0] * len(stages)
    now = 0.0
    for nbytes, now in zip(buckets, ready, strict=True):
        for index, stage in enumerate(stages):
            now = max(now, ends[index]) + stage.compute_ms(nbytes, layout)
            ends[index] = now
    return now


# --- the question ---


@dataclass(frozen=True)
class Question:
    """The cluster of ``--what-if``.

    Attributes:
        hosts: Number of hosts.
        per_host: Devices of each. None for those of the measured run.
        link_bytes_per_s: The rate of a host's link. None for the measured one.
        local_bytes_per_s: The rate between devices of a host. None for the measured one.
    """

    hosts: int
    per_host: int | None = None
    link_bytes_per_s: float | None = None
    local_bytes_per_s: float | None = None


_WORDS: Final = ("hosts", "gpus", "link", "local")
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(bit|bytes?|B)(?:/s)?", re.IGNORECASE)
_SCALES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# The share of a link's rate that carries data. Packets of 1,500 bytes have 66 bytes of headers.
_PAYLOAD: Final = 0.95
# Time of a message between hosts if only the rate of the link is given. Default of an RDMA network.
_HOP_MS: Final = 0.01
_MAX_RANKS: Final = 100_000


def parse_question(text: str) -> Question:
    """Parse ``hosts=16,gpus=8,link=200Gbit,local=300GB``.

    Raises:
        SettingsError: A word or its value cannot be parsed.
    """
    words: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _WORDS:
            raise SettingsError(
                f"--what-if: {name!r} is unknown{suggest_name(name, _WORDS)}. Write words of "
                f"{', '.join(_WORDS)}."
            )
        if name in words:
            raise SettingsError(f"--what-if: {name} is given twice. Write it once.")
        words[name] = value
    if "hosts" not in words:
        raise SettingsError(
            f"--what-if {text}: the number of hosts is missing. Write for example "
            "hosts=16,gpus=8,link=200Gbit."
        )
    hosts = _parse_count("hosts", words["hosts"])
    per_host = _parse_count("gpus", words["gpus"]) if "gpus" in words else None
    if hosts * (per_host or 1) > _MAX_RANKS:
        raise SettingsError(
            f"--what-if: {hosts * (per_host or 1)} ranks are more than {_MAX_RANKS}. Give fewer hosts."
        )
    link, local = (
        _parse_rate(name, words[name]) if name in words else None for name in ("link", "local")
    )
    return Question(hosts, per_host, link, local)


def _parse_count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise SettingsError(
            f"--what-if: {name}={text} is no integer above 0. Write for example {name}=8."
        )
    return int(text)


def _parse_rate(name: str, text: str) -> float:
    """Return a rate in bytes per second."""
    found = _RATE.fullmatch(text)
    # A lone b may mean bits or bytes.
    if found is None or found[3] == "b" or not float(found[1]):
        raise SettingsError(
            f"--what-if: {name}={text} is no rate. Write a number above 0 and its unit, such as "
            f"{name}=200Gbit or {name}=25GB."
        )
    bits = 8 if found[3].lower() == "bit" else 1
    return float(found[1]) * _SCALES[found[2].lower()] / bits


def resolve(question: Question, measured: Layout) -> Layout:
    """Return the layout of a question, with the rates of the measured one where it gives none.

    Raises:
        SettingsError: A rate that the prediction needs is neither given nor measured.
    """
    per_host = question.per_host or measured.per_host
    within, across = measured.within, measured.across
    if question.local_bytes_per_s is not None:
        within = replace(within or Ring(0.0), bytes_per_s=question.local_bytes_per_s)
    if question.link_bytes_per_s is not None:
        rate = question.link_bytes_per_s * _PAYLOAD
        across = replace(across or Ring(0.0, _HOP_MS), bytes_per_s=rate)
    if question.hosts > 1 and across is None:
        raise SettingsError(
            f"--what-if: the measured run had one host, so the rate of a link between {question.hosts} hosts is "
            "not known. Add for example link=200Gbit."
        )
    if per_host > 1 and within is None:
        raise SettingsError(
            f"--what-if: the measured run had one rank per host, so the rate between {per_host} devices of a host "
            "is not known. Add for example local=300GB."
        )
    return Layout(question.hosts, per_host, within, across)


def list_layouts(target: Layout) -> list[Layout]:
    """Return the layouts up to the target, with one device first and twice as many each time."""
    layouts = []
    for most, fixed in ((target.per_host, "hosts"), (target.hosts, "per_host")):
        count = 1
        while count < most:
            layouts.append(
                replace(target, hosts=1, per_host=count)
                if fixed == "hosts"
                else replace(target, hosts=count)
            )
            count *= 2
    layouts.append(target)
    return list(dict.fromkeys(layouts))


# --- the facts of a run ---

#: The milliseconds by which NCCL makes compute longer for each GB that a GPU sends. In a profiled step of 8 GPUs,
#: 27 GB took 49 ms of their compute (benchmarks/results/ddp_profile.json).
NCCL_SLOWDOWN_MS_PER_GB: Final = 1.8


@dataclass(frozen=True)
class MeasuredRun:
    """The measured layout and the facts of the step.

    Attributes:
        facts: The facts of the step in stock PyTorch.
        layout: The hosts and devices, with the rates that were measured.
        steps_ms: The measured step of each arm.
        remarks: Assumptions that replace missing measurements, as sentences.
    """

    facts: StepFacts
    layout: Layout
    steps_ms: Mapping[str, float]
    remarks: tuple[str, ...] = ()


def merge_layout(ranks: Sequence[Mapping[str, Any]]) -> Layout:
    """Return the hosts and devices of a run, with the rates that its ranks measured."""
    hosts = len({rank["host"] for rank in ranks})
    rings = (_make_measured_ring(ranks, name) for name in ("within", "across"))
    return Layout(hosts, -(-len(ranks) // hosts), *rings)


def merge_facts(ranks: Sequence[Mapping[str, Any]], steps_ms: Mapping[str, float]) -> MeasuredRun:
    """Merge what the ranks of a run recorded, see ``BucketFacts`` in ``bench_worker.py``.

    Args:
        ranks: The records by rank.
        steps_ms: The measured step of each arm; stock is one of them.
    """
    step_ms = steps_ms[STOCK]
    remarks = []
    first = ranks[0]
    # The slowest rank counts, as in the step.
    exposed, forward, backward, optimizer = (
        max((rank[name] or 0.0) for rank in ranks)
        for name in ("exposed_ms", "forward_ms", "backward_ms", "optimizer_ms")
    )
    if not backward:
        forward, backward = step_ms / 3, step_ms * 2 / 3
        remarks.append(
            "no DistributedDataParallel was found: the forward counts as a third of the step, buckets "
            "are of 25 MiB"
        )
    compute = max(step_ms - exposed, step_ms / 100)
    # Forward, backward and optimizer together are no longer than the step.
    scale = min(1.0, compute / (forward + backward + optimizer))
    facts = StepFacts(
        compute,
        forward * scale,
        backward * scale,
        tuple(first["buckets"]),
        optimizer * scale,
        first["backend"] == "gloo",
        NCCL_SLOWDOWN_MS_PER_GB if first["backend"] == "nccl" else 0.0,
    )
    layout = merge_layout(ranks)
    return MeasuredRun(isolate_compute(facts, layout), layout, steps_ms, tuple(remarks))


def isolate_compute(facts: StepFacts, layout: Layout) -> StepFacts:
    """Return the facts of a step without communication that runs concurrently.

    Args:
        facts: The facts, whose ``compute_ms`` was measured in stock PyTorch while ranks communicated.
        layout: The layout of that step.
    """
    # A GPU of another kind may lose less, and compute takes time in any case.
    slowed = min(_find_slowdown_ms(STOCK, facts, layout), facts.backward_ms / 2)
    return replace(facts, compute_ms=facts.compute_ms - slowed)


def _make_measured_ring(ranks: Sequence[Mapping[str, Any]], name: str) -> Ring | None:
    """Return the slowest ring that ranks measured by ``time_rings`` of ``bench_worker.py``."""
    rings = [rank["rings"][name] for rank in ranks if name in rank["rings"]]
    if not rings:
        return None
    slowest = max(rings, key=lambda ring: ring["large_ms"])
    size, nbytes = slowest["size"], slowest["bytes"]
    sent = 2 * (size - 1) / size * nbytes
    # The small all-reduce needs as many messages, so its time is in that of the large one.
    spent_ms = max(slowest["large_ms"] - slowest["small_ms"], slowest["large_ms"] / 10)
    shard_ms = max(slowest["shard_ms"] - slowest["small_ms"], spent_ms)
    return Ring(sent / spent_ms * 1e3, slowest["small_ms"] / (2 * (size - 1)), spent_ms / shard_ms)


# --- the predictions ---


@dataclass(frozen=True)
class ScalingRow:
    """The predictions for one layout, by arm."""

    layout: Layout
    arms: Mapping[str, Prediction]


@dataclass(frozen=True)
class ScalingAnswer:
    """The predictions of a question.

    Attributes:
        rows: A row for each number of devices, ascending.
        errors: By arm, the predicted and the measured step of the layout that was measured, in ms.
        measured: The measurements.
    """

    rows: Sequence[ScalingRow]
    errors: Mapping[str, tuple[float, float]]
    measured: MeasuredRun


def answer_question(
    question: Question, measured: MeasuredRun, arms: Sequence[str] = ARMS
) -> ScalingAnswer:
    """Predict the step for each number of devices up to the question's, and for the layout that was measured.

    Raises:
        SettingsError: A rate that the prediction needs is neither given nor measured.
    """
    target = resolve(question, measured.layout)
    rows = [
        ScalingRow(layout, {arm: predict(arm, measured.facts, layout) for arm in arms})
        for layout in list_layouts(target)
    ]
    errors = {
        arm: (predict(arm, measured.facts, measured.layout).step_ms, step_ms)
        for arm, step_ms in measured.steps_ms.items()
    }
    return ScalingAnswer(rows, errors, measured)


def format_answer(answer: ScalingAnswer, *, colour: bool = False, width: int | None = None) -> str:
    """Return the table, the error of the model, and its assumptions."""
    arms = list(answer.rows[0].arms)
    heads = ["GPUs", "hosts"]
    heads += [f"{arm} ms" for arm in arms]
    heads += [f"{arm} hidden" for arm in arms]
    table = [
        (
            str(row.layout.world),
            str(row.layout.hosts),
            *(_format_ms(found.step_ms) for found in row.arms.values()),
            *(f"{found.hidden:.0%}" for found in row.arms.values()),
        )
        for row in answer.rows
    ]
    lines = [f"- {_describe_error(arm, *pair)}" for arm, pair in answer.errors.items()]
    lines += [f"- {remark}" for remark in answer.measured.remarks]
    lines.append(
        "- hidden: the share of communication under compute; each device has the same batch in all rows"
    )
    title = "Predicted step by number of GPUs"
    return "\n\n".join(
        [
            render_table(title, heads, table, colour=colour, width=width, right=heads),
            "\n".join(lines),
        ]
    )


def _describe_error(arm: str, predicted: float, measured: float) -> str:
    error = predicted / measured - 1
    return (
        f"error of the model where it was measured, {arm}: predicted {_format_ms(predicted)} ms, measured "
        f"{_format_ms(measured)} ms, {error:+.1%}"
    )


def _format_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def answer_to_json(answer: ScalingAnswer) -> dict[str, Any]:
    """Return the predictions as plain data."""
    return {
        "rows": [
            {
                "hosts": row.layout.hosts,
                "gpus": row.layout.per_host,
                "arms": {
                    arm: {"step_ms": found.step_ms, "hidden": found.hidden}
                    for arm, found in row.arms.items()
                },
            }
            for row in answer.rows
        ],
        "errors": {
            arm: {"predicted_ms": pair[0], "measured_ms": pair[1]}
            for arm, pair in answer.errors.items()
        },
        "remarks": list(answer.measured.remarks),
    }


def check_figure(path: Path) -> None:
    """Raise SettingsError if a picture cannot be drawn, before anything runs."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise SettingsError(
            f"--figure {path}: the name ends with none of .png, .svg, .pdf. Give it such an ending."
        )
    if find_spec("matplotlib") is None:
        raise SettingsError(
            "the picture needs matplotlib, which is not installed. "
            "Install it with: pip install 'ovpatch[plot]' — or leave out --figure."
        )


_COLOURS: Final = {STOCK: "#8a8f98", "ddp": "#00897b", "dist_optimizer": "#c9822b"}


def draw_answer(answer: ScalingAnswer, path: Path) -> None:
    """Draw step time over the number of devices to a PNG, SVG or PDF file; circles are what was measured."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    counts = [row.layout.world for row in answer.rows]
    for arm in answer.rows[0].arms:
        times = [row.arms[arm].step_ms for row in answer.rows]
        axes.plot(counts, times, "-", color=_COLOURS[arm], label=f"{arm}, predicted")
    world = answer.measured.layout.world
    for arm, (predicted, measured) in answer.errors.items():
        error = f"{predicted / measured - 1:+.1%}"
        axes.plot(
            [world],
            [measured],
            "o",
            color=_COLOURS[arm],
            label=f"{arm}, measured (the model is off by {error})",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="GPUs", ylabel="ms per step", ylim=(0, None))
    axes.set_title("Predicted step time, the same batch on each GPU")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # No date and no random names: the same data make the same SVG file.
    with rc_context({"svg.hashsalt": "ovpatch", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
