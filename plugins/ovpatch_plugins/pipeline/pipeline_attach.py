"""Which schedules the engine runs, and how all ranks of a pipeline agree on that."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ovpatch.hookspecs import cache_dir, note_failures, refuse_option
from ovpatch.overlap.comm.consensus import LATE_START_S, check_consistent, gather_values
from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch.overlap.pipelining.copied_messages import CopiedMessages, find_reason_against_copies, write_c10d_remark
from ovpatch.overlap.pipelining.edges import close_edges
from ovpatch.overlap.pipelining.ir import Kind, Order, Placement, Program, Schedule, ScheduleError, make_program
from ovpatch.overlap.pipelining.messages import AHEAD, Messages, blocks_host, find_group_reason
from ovpatch.overlap.pipelining.order_rules import check_schedule, count_slots
from ovpatch.overlap.pipelining.orders import build_bidirectional_order, build_order, convert_torch_order
from ovpatch_plugins.pipeline.options import AS_GIVEN, AUTO, COPIES, OPTIONS
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.pipeline_report import Prediction, ScheduleReport, note_schedule, note_stock
from ovpatch_plugins.pipeline.runtime.engine import Engine, StepInputs
from ovpatch_plugins.pipeline.runtime.first_step import ShapeInference
from ovpatch_plugins.pipeline.runtime.stage import StageRun, give_all_buffers_back, give_buffers_back
from ovpatch_plugins.pipeline.runtime.step_clock import StepTimes, make_clock
from ovpatch_plugins.pipeline.runtime.torch_compat import initialize_stages, is_initialized, limits_sends, list_stages

if TYPE_CHECKING:
    from ovpatch_plugins.pipeline.auto.auto_schedule import AutoSchedule

BIDIRECTIONAL: Final = "ScheduleBidirectional"  # in place of a class of torch
_RECORD: Final = "pipeline: record"  # of a schedule
_SINGLE: Final = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
_CHOSEN_FOR: Final = (
    *_SINGLE,
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


_UNREDUCED: Final = (
    "torch computes the first step of stages in DistributedDataParallel(find_unused_parameters=True or "
    "static_graph=True), and its own step of this class does not reduce all gradients, so that replicas differ from "
    "then on. Turn these options off, or wrap stages in FSDP2 or replicate()"
)

_log = logging.getLogger("ovpatch.pipeline")


class Takeover:
    """The patches of ``_step_microbatches``, made for one set of options.

    Args:
        options: Resolved options of the feature.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def wrap_step(self, original: Callable[..., Any], owner: str) -> Callable[..., Any]:
        """Wrap ``_step_microbatches`` of the class ``owner``."""
        takeover = self
        signature = inspect.signature(original)

        @functools.wraps(original)
        def _step_microbatches(self: Any, *args: Any, **kwargs: Any) -> Any:
            run_stock = functools.partial(original, self, *args, **kwargs)
            if getattr(self, "runs_stock", False):
                return run_stock()
            return takeover.run_step(self, owner, run_stock, signature.bind(self, *args, **kwargs))

        return _step_microbatches

    def run_step(self, schedule: Any, owner: str, run_stock: Callable[[], Any], given: inspect.BoundArguments) -> Any:
        """Run the microbatches of a step, by the engine or as stock does.

        Args:
            schedule: The schedule.
            owner: Its class.
            run_stock: Runs them as stock does.
            given: The arguments of ``_step_microbatches``.
        """
        record = self._take_over(schedule, owner) if schedule._has_backward else None
        if record is None or record.engine is None:
            return _run_by_stock(schedule, run_stock)
        given.apply_defaults()
        is_stock = record.is_first_step_of_stock
        if is_stock:
            _give_all_back(schedule)
        inputs = record.prepare(schedule, given.arguments)
        record.has_begun = True
        if is_stock:
            return _run_by_stock(schedule, run_stock)
        record.run(inputs, functools.partial(_run_by_stock, schedule, run_stock))
        return None

    def _take_over(self, schedule: Any, owner: str) -> _Record:
        known = _find_record(schedule)
        facts = _facts_of(schedule, owner)
        if known is None or not known.is_for(facts):
            with note_failures("pipeline", f"preparing {type(schedule).__name__}"):
                known = attached_values(schedule)[_RECORD] = _Record(facts, *self._make_engine(schedule, owner))
        return known

    def _make_engine(
        self, schedule: Any, owner: str
    ) -> tuple[Engine | None, ShapeInference | None, AutoSchedule | None]:
        """Return the engine of a schedule, or None where some rank has a reason against it. Agrees with all ranks.

        Also what begins its steps, and, with schedule=auto, what runs them until an order is chosen.
        """
        _give_all_back(schedule)
        stages = list_stages(schedule)
        group = stages[0].group or dist.distributed_c10d._get_default_group()
        stashes = self._options["weight_stash"] != "off"
        reason = _find_reason_against(schedule, stages, group)
        name, orders = "", None
        try:
            name, orders = self._choose_order(schedule, owner, stages)
            check_schedule(orders, _placement_of(schedule, stages), stock=orders)
        except ScheduleError as error:
            reason = reason or str(error)
        if stashes:
            from ovpatch_plugins.pipeline.variants import weight_stash

            reason = reason or weight_stash.find_reason_against(schedule, stages, self._options)
        terms = {
            "class": type(schedule).__name__,
            "microbatches": schedule._n_microbatches,
            "order": "" if orders is None else hashlib.sha256(repr(_list_actions(orders)).encode()).hexdigest(),
            **self._options,
        }
        reason = _agree(group, terms, reason)
        if reason and stashes:
            weight_stash.raise_reason(schedule, reason)
        if reason or orders is None:
            note_stock(f"{type(schedule).__name__}: {reason}")
            return None, None, None
        return self._build(schedule, owner, stages, group, name, orders)

    def _choose_order(self, schedule: Any, owner: str, stages: Sequence[Any]) -> tuple[str, Schedule]:
        if owner == BIDIRECTIONAL:
            doubles = self._options["forward_doubling"]
            orders = build_bidirectional_order(
                ranks=schedule.pp_group_size, microbatches=schedule._n_microbatches, doubles=doubles
            )
            return "bidirectional, forwards doubled" if doubles else "bidirectional", orders
        if owner not in _SINGLE:
            lowered = getattr(schedule, "pipeline_order_with_comms", None)
            return "its own order", convert_torch_order(lowered or schedule.pipeline_order)
        wanted = self._options["schedule"]
        name = _SINGLE[owner] if wanted in (AS_GIVEN, AUTO) else wanted
        return name, build_order(name, ranks=stages[0].num_stages, microbatches=schedule._n_microbatches)

    def _build(
        self,
        schedule: Any,
        owner: str,
        stages: Sequence[Any],
        group: dist.ProcessGroup,
        name: str,
        orders: Schedule,
    ) -> tuple[Engine, ShapeInference, AutoSchedule | None]:
        rank, placement = dist.get_rank(group), _placement_of(schedule, stages)
        device = _device_of(stages[0])
        on_host = blocks_host(group, device)
        varies = self._options["variable_seq_lengths"]
        by_copies, remarks = self._choose_transport(group, stages)
        # Where shapes vary, a receive starts with a wait for its message's sizes. A slot needs no receive.
        lowered = _read_lowered_order(schedule, rank)
        ahead = AHEAD[on_host] if self._options["overlap_p2p_comm"] and not (varies or by_copies) else 0
        make = functools.partial(make_program, orders, placement, rank, shardings=lowered.shardings)
        program = make(ahead=ahead)
        settling = make(ahead=0) if ahead and not on_host else None
        is_auto = self._chooses(schedule) and group.size() > 1
        split = {action.stage for action in orders[rank] if action.kind is Kind.W or is_auto}
        sending = {
            step.action.stage for step in program.steps if step.action.kind is not Kind.F and step.receiver is not None
        }
        numbers = _number_stages(schedule, stages)
        runs = {
            number: self._make_run(stage, schedule, number in sending, number in split)
            for number, stage in numbers.items()
        }
        for number, run in runs.items():
            run.is_reduced = lowered.reductions is None or number in lowered.reductions
        if owner == BIDIRECTIONAL:
            for number, run in runs.items():
                run.first_input = schedule.first_input(number)
                run.data_parallel.add_replicas(schedule.replicas)
        transport: Messages
        if by_copies:
            refuse = _refuse_copies if self._options["p2p_transport"] == COPIES else None
            slots = _count_slots(orders, placement)
            transport = CopiedMessages(group, device, program.edges, slots, refuse=refuse)
        else:
            transport = Messages(group, device, program.edges)
        transport.remarks += remarks
        by_perform = owner != "PipelineScheduleMulti"
        prediction = Prediction(group, orders, placement)
        times = StepTimes()
        clock = make_clock(times, device)
        divides = owner not in _SINGLE and any(action.kind is Kind.W for action in orders[rank])
        begins_as_stock = any(run.data_parallel.first_step_is_stock(divides) for run in runs.values())
        engine = Engine(
            schedule, group, runs, program, settling, transport, times, clock, prediction, by_perform=by_perform
        )
        # All ranks or none: messages of stock and of the engine do not meet.
        engine.begins_as_stock = any(gather_values(group, "pipeline: first step", begins_as_stock))
        report = ScheduleReport(
            name=type(schedule).__name__,
            order=name,
            rank=rank,
            microbatches=engine.microbatches,
            peak_activations=program.peak_activations,
            prediction=prediction,
            stages={index: run.report for index, run in runs.items()},
            times=times,
            transport=transport.remarks,
        )
        if engine.begins_as_stock and divides:
            report.notes.append(_UNREDUCED)
            _log.warning("%s: %s", report.name, _UNREDUCED)
        if self._options["forward_doubling"] and owner != BIDIRECTIONAL:
            report.notes.append("forward_doubling has no effect: the pipeline runs in one direction")
        note_schedule(report)
        inference = ShapeInference(group, device, on_host=on_host)
        if not is_auto:
            return engine, inference, None
        from ovpatch_plugins.pipeline.auto.auto_schedule import AutoSchedule, Pipeline  # and the solver

        is_sharded = bool(lowered.shardings)
        pipeline = Pipeline(report.name, orders, placement, schedule._n_microbatches, group, device, self._options)

        def make_other_program(other: Schedule, settles: bool) -> Program | None:
            if settles and settling is None:
                return None
            shardings = _unshard_all(other[rank]) if is_sharded else ()
            if isinstance(engine.transport, CopiedMessages):
                engine.transport.reserve(_count_slots(other, placement))
            return make_program(other, placement, rank, ahead=0 if settles else ahead, shardings=shardings)

        auto = AutoSchedule(engine, pipeline, make_other_program, report, cache_dir())
        return engine, inference, auto

    def _choose_transport(self, group: dist.ProcessGroup, stages: Sequence[Any]) -> tuple[bool, list[str]]:
        """Return whether copy engines carry messages, and what the report says of that. Agrees with all ranks.

        Raises:
            ovpatch.OptionError: The user wants copy engines, and they cannot be used; on all ranks.
        """
        wanted = self._options["p2p_transport"]
        if wanted not in (AUTO, COPIES) or group.size() == 1:
            return False, []
        is_asked, varies = wanted == COPIES, self._options["variable_seq_lengths"]
        devices = [_device_of(stage) for stage in stages]
        reason = find_reason_against_copies(group, devices, varies=varies, is_asked=is_asked)
        if reason and is_asked:
            _refuse_copies(reason)
        return not reason, [write_c10d_remark(reason)] if reason else []

    def _make_run(self, stage: Any, schedule: Any, sends: bool, splits: bool) -> StageRun:
        varies = self._options["variable_seq_lengths"]
        if self._options["weight_stash"] != "off":
            from ovpatch_plugins.pipeline.variants.weight_stash import StashedStageRun

            return StashedStageRun(stage, schedule, varies=varies)
        return StageRun(
            stage,
            sends=sends,
            splits=splits,
            delay_wgrad_compute=self._options["delay_wgrad_compute"],
            fuse=self._options["gradient_accumulation_fusion"],
            varies=varies,
        )

    def _chooses(self, schedule: Any) -> bool:
        """Tell whether an order is chosen for a schedule: its class has one of its own, not one of the script's."""
        return self._options["schedule"] == AUTO and type(schedule).__name__ in _CHOSEN_FOR


class _Record:
    """What is known of a schedule: the facts that were looked at, and the engine made from them.

    Attributes:
        engine: The engine, or None.
        has_begun: Whether a step has begun, by stock or by the engine.
    """

    def __init__(
        self,
        facts: tuple[Any, ...],
        engine: Engine | None,
        inference: ShapeInference | None,
        auto: AutoSchedule | None,
    ) -> None:
        self._facts = facts
        self.engine = engine
        self.has_begun = False
        self._inference, self._auto = inference, auto

    @property
    def is_first_step_of_stock(self) -> bool:
        """Whether stock computes the next step, see [Note: first step of a wrapped stage]."""
        assert self.engine is not None
        return self.engine.begins_as_stock and not self.has_begun

    def prepare(self, schedule: Any, given: Mapping[str, Any]) -> StepInputs:
        """Check the inputs and initialise the stages, as stock's step does first.

        Raises:
            Exception: The stages are not initialised: this rank failed, or another one.
        """
        assert self.engine is not None
        assert self._inference is not None
        losses, targets, loss_kwargs = given["losses"], given["target_mbs"], given.get("loss_kwargs")
        make = functools.partial(
            StepInputs,
            targets=targets,
            losses=losses,
            return_outputs=given["return_outputs"],
            loss_kwargs=loss_kwargs,
        )
        check = functools.partial(schedule._check_inputs, given["arg_mbs"], given["kwarg_mbs"], targets, losses)
        if is_initialized(schedule):
            try:
                return make(*check())
            except Exception as error:  # noqa: BLE001 - the engine raises it, once other ranks know
                return make([()], [{}], error=error)

        def initialize() -> None:
            args, kwargs = check()
            initialize_stages(schedule, args[0], kwargs[0], None if targets is None else targets[0], loss_kwargs)

        end = functools.partial(self.engine.end_inference, may_change=self._auto is not None)
        self._inference.run(
            schedule, list(self.engine.stages.values()), check, initialize, None if self.is_first_step_of_stock else end
        )
        return make(*check())

    def run(self, inputs: StepInputs, run_stock: Callable[[], object]) -> None:
        """Run a step; ``run_stock`` runs it as torch does."""
        if self._auto is None:
            assert self.engine is not None
            self.engine.run(inputs)
            return
        try:
            self._auto.run(inputs, run_stock)
        finally:
            if self._auto.is_final:
                self._auto = None

    def is_for(self, facts: tuple[Any, ...]) -> bool:
        """Tell whether nothing has changed since."""
        return len(facts) == len(self._facts) and all(a is b for a, b in zip(facts, self._facts, strict=True))


def _run_by_stock(schedule: Any, run_stock: Callable[[], Any]) -> Any:
    COUNTERS.stock_steps += schedule._has_backward
    _give_all_back(schedule)
    return run_stock()


def _give_all_back(schedule: Any) -> None:
    for stage in list_stages(schedule):
        give_buffers_back(stage)


def _find_record(schedule: Any) -> _Record | None:
    return attached_values(schedule).get(_RECORD)


def release_all() -> None:
    """Give all stages what stock expects, and forget the engines."""
    give_all_buffers_back()
    for schedule, _ in find_owners(_RECORD):
        del attached_values(schedule)[_RECORD]
    close_edges()


def _facts_of(schedule: Any, owner: str) -> tuple[Any, ...]:
    """Return the objects on which the decision about a schedule rests, compared by identity."""
    stages = list_stages(schedule)
    orders = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None) or {}
    own = orders.get(getattr(schedule, "rank", None)) if owner not in _SINGLE else None
    return (
        own,
        bool(_custom_functions(schedule)),
        *(stage.submod for stage in stages),
        *(s.dw_builder for s in stages),
    )


def _number_stages(schedule: Any, stages: Sequence[Any]) -> dict[int, Any]:
    """Return the rank's stages by their index among those of all ranks."""
    if hasattr(schedule, "number_stages"):
        numbers: dict[int, Any] = schedule.number_stages()
        return numbers
    return {stage.stage_index: stage for stage in stages}


def _placement_of(schedule: Any, stages: Sequence[Any]) -> Placement:
    if hasattr(schedule, "placement"):
        placement: Placement = schedule.placement
        return placement
    ranks = stages[0].stage_index_to_group_rank
    return [ranks[stage] for stage in range(schedule._num_stages)]


def _device_of(stage: Any) -> torch.device:
    """Return a stage's device, with its index."""
    device = torch.device(stage.device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _custom_functions(schedule: Any) -> Mapping[Any, Any]:
    functions: Mapping[Any, Any] = getattr(schedule, "_comp_type_to_function_map", {})
    return functions


def _list_actions(orders: Schedule) -> list[list[str]]:
    return [[str(action) for action in order] for order in orders]


def _count_slots(orders: Schedule, placement: Sequence[int]) -> int:
    """Return the slots of an edge: with two, the next message is there when one has been read."""
    return max(2, count_slots(orders, placement))


def _refuse_copies(reason: str) -> None:
    """Raise OptionError: the user asks for copy engines, and they cannot carry messages."""
    refuse_option("pipeline", OPTIONS, "p2p_transport", COPIES, reason)


def _unshard_all(order: Order) -> list[tuple[int, str, int]]:
    """Return that each stage is unsharded before its first computation, and resharded at the end of the step."""
    stages = dict.fromkeys(action.stage for action in order)
    first = {stage: next(i for i, action in enumerate(order) if action.stage == stage) for stage in stages}
    ends = [(len(order), "RESHARD", stage) for stage in stages]
    return [*((index, "UNSHARD", stage) for stage, index in first.items()), *ends]


class _LoweredOrder(NamedTuple):
    """The actions of a rank's lowered order that neither compute nor send.

    Attributes:
        shardings: UNSHARD and RESHARD, with the index of the next computation.
        reductions: For each stage, the number of computations before each of its REDUCE_GRADs; None if the order is
            not lowered, so that torch reduces after the last backward.
        ends: For each stage, the number of computations up to its last weight gradients.
    """

    shardings: Sequence[tuple[int, str, int]]
    reductions: Mapping[int, Sequence[int]] | None
    ends: Mapping[int, int]

    def find_objection(self) -> str:
        """Return the reason for which the engine cannot reduce gradients as ordered, or ""."""
        for stage, places in (self.reductions or {}).items():
            if len(places) > 1:
                return f"the order has {len(places)} REDUCE_GRADs of stage {stage}"
            if places[0] < self.ends.get(stage, 0):
                return f"the order has REDUCE_GRAD of stage {stage} before the stage's last backward"
        return ""


def _read_lowered_order(schedule: Any, rank: int) -> _LoweredOrder:
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    shardings, reductions, ends, index = [], defaultdict[int, list[int]](list), dict[int, int](), 0
    for action in (orders or {}).get(rank, ()):
        name = action.computation_type.value
        if name in ("UNSHARD", "RESHARD"):
            shardings.append((index, name, action.stage_index))
        elif name == "REDUCE_GRAD":
            reductions[action.stage_index].append(index)
        for part in action.sub_actions or (action,):
            kind = part.computation_type.value
            index += kind in ("F", "I", "W", "B")
            if kind in ("W", "B"):
                ends[part.stage_index] = index
    return _LoweredOrder(shardings, None if orders is None else reductions, ends)


def _find_reason_against(schedule: Any, stages: Sequence[Any], group: dist.ProcessGroup) -> str:
    """Return why this rank cannot run the schedule, or ""."""
    if reason := find_group_reason(group, torch.device(stages[0].device)):
        return reason
    if objection := _read_lowered_order(schedule, dist.get_rank(group)).find_objection():
        return objection
    if _custom_functions(schedule):
        return "register_custom_function() replaces computations"
    if not getattr(schedule, "_backward_requires_autograd", True):
        return "backward_requires_autograd=False leaves the backward to the script"
    if any(stage.dw_builder is not None for stage in stages):
        return "a stage has a dw_builder, which computes weight gradients its own way"
    if limits_sends(schedule):
        return "max_outstanding_sends limits the sends under way, which are counted otherwise here"
    traced = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStage", ())
    if any(isinstance(stage, traced) and _has_skip_connections(stage) for stage in stages):
        return "a traced stage has skip connections"
    if len(stages) == 1 and hasattr(schedule, "_stage"):
        stage = stages[0]
        if stage.num_stages != group.size() or stage.stage_index != stage.group_rank:
            return "stages are not numbered like the ranks"
    return ""


def _has_skip_connections(stage: Any) -> bool:
    """Return whether a traced stage sends to a stage other than the next one.

    The rank that sends over a skip connection objects for all ranks.
    """
    users = list(stage.node.users)
    # An output of several tensors reaches its readers through the nodes that pick one tensor.
    readers = [user for user in users if user.target is not operator.getitem]
    readers += [reader for user in users if user.target is operator.getitem for reader in user.users]
    return bool({stage.find_dst_rank(reader) for reader in readers} - {stage.stage_index + 1, None})


def _agree(group: dist.ProcessGroup, terms: Mapping[str, Any], reason: str) -> str:
    return check_consistent(group, "pipeline", terms, objection=reason, timeout_s=LATE_START_S)
