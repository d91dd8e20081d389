"""The attachment of the engine to schedules, on which all ranks of a pipeline agree."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ovpatch.hookspecs import cache_dir, note_failures, refuse_option
from ovpatch.overlap.comm.consensus import LATE_START_S, check_consistent
from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch.overlap.pipelining.copied_messages import (
    CopiedMessages,
    find_reason_against_copies,
    write_c10d_remark,
)
from ovpatch.overlap.pipelining.edges import close_edges
from ovpatch.overlap.pipelining.ir import (
    Kind,
    Order,
    Program,
    Schedule,
    ScheduleError,
    make_program,
)
from ovpatch.overlap.pipelining.messages import AHEAD, Messages, blocks_host, find_group_reason
from ovpatch.overlap.pipelining.order_rules import check_schedule, count_slots
from ovpatch.overlap.pipelining.order_table import TORCH_ORDERS
from ovpatch.overlap.pipelining.orders import (
    build_bidirectional_order,
    build_order,
    convert_torch_order,
)
from ovpatch_plugins.pipeline.options import AS_GIVEN, AUTO, COPIES, OPTIONS
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.pipeline_report import (
    Prediction,
    ScheduleReport,
    note_schedule,
    note_stock,
)
from ovpatch_plugins.pipeline.runtime.engine import Engine, EngineParts, Programs, StepInputs
from ovpatch_plugins.pipeline.runtime.first_step import FirstStep
from ovpatch_plugins.pipeline.runtime.pipeline_shape import PipelineShape, StageInfo, read_shape
from ovpatch_plugins.pipeline.runtime.stage import Stage, StageOptions
from ovpatch_plugins.pipeline.runtime.stage_buffers import release_all_buffers, release_buffers
from ovpatch_plugins.pipeline.runtime.step_clock import StepTimes, make_clock
from ovpatch_plugins.pipeline.runtime.torch_compat import (
    initialize_stages,
    is_initialized,
    limits_sends,
    list_stages,
)

BIDIRECTIONAL: Final = "ScheduleBidirectional"
"""The class of schedules in two directions, which torch lacks."""

# The key of a schedule's attachment.
_ATTACHED: Final = "pipeline: attached"
# Classes that bring their own order, so that schedule=auto may replace it. Other orders are the script's choice.
_REPLACEABLE: Final = (
    *TORCH_ORDERS,
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)

_WARNING_UNREDUCED: Final = (
    "torch computes the first step of stages in "
    "DistributedDataParallel(find_unused_parameters=True or static_graph=True), and its own step of "
    "this class does not reduce all gradients, so that replicas differ afterwards. Turn these "
    "options off, or wrap stages in FSDP2 or replicate()"
)

_log = logging.getLogger("ovpatch.pipeline")


class StepController(Protocol):
    """An object that acts before and after the steps of a schedule until it is done.

    Attributes:
        may_change_order: Whether it may replace the order.
    """

    may_change_order: bool

    @property
    def next_controller(self) -> StepController | None:
        """The controller of the next step: this controller, until it is done."""

    def before_step(self, inputs: StepInputs) -> bool:
        """Act before a step; return whether stock PyTorch computes it."""

    def after_step(self) -> None:
        """Act after a step that has succeeded."""


@dataclass
class AttachedSchedule:
    """The engine of a schedule, and the facts on which it rests.

    Attributes:
        facts: The objects that were examined; if they change, ranks decide again.
        engine: The engine; None if the schedule falls back to torch.
        first_step: Prepares the first step. None without an engine.
        controller: Acts around steps; None in the steady state.
    """

    facts: tuple[Any, ...]
    engine: Engine | None = None
    first_step: FirstStep | None = None
    controller: StepController | None = None


class SchedulePatches:
    """The patches of ``_step_microbatches`` for one set of options.

    Args:
        options: Resolved options of the feature.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def wrap_step(self, original: Callable[..., Any], owner: str) -> Callable[..., Any]:
        """Wrap ``_step_microbatches`` of the class ``owner``."""
        signature = inspect.signature(original)
        options = self._options

        @functools.wraps(original)
        def _step_microbatches(self: Any, *args: Any, **kwargs: Any) -> Any:
            run_stock = functools.partial(original, self, *args, **kwargs)
            # The two parts of a bidirectional schedule run in torch. The engine runs that schedule as one.
            if getattr(self, "runs_stock", False):
                return run_stock()
            # The engine runs steps with a backward alone. Torch runs evaluations.
            attached = _find_attached(self, owner, options) if self._has_backward else None
            if attached is None or attached.engine is None:
                return _run_stock(self, run_stock)
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            return _run_step(self, attached, given.arguments, run_stock)

        return _step_microbatches


def _find_attached(schedule: Any, owner: str, options: Mapping[str, Any]) -> AttachedSchedule:
    values = attached_values(schedule)
    facts = _read_facts(schedule, owner)
    attached: AttachedSchedule | None = values.get(_ATTACHED)
    # Facts are compared by identity, because a script's module may define equality.
    if attached is None or [id(fact) for fact in facts] != [id(fact) for fact in attached.facts]:
        with note_failures("pipeline", f"preparing {type(schedule).__name__}"):
            attached = values[_ATTACHED] = attach_schedule(schedule, owner, options, facts)
    return attached


def _read_facts(schedule: Any, owner: str) -> tuple[Any, ...]:
    """Return the objects on which the decision about a schedule rests."""
    stages = list_stages(schedule)
    own = None
    if owner not in TORCH_ORDERS:
        orders = (
            getattr(schedule, "pipeline_order_with_comms", None)
            or getattr(schedule, "pipeline_order", None)
            or {}
        )
        # A script may replace the order of a schedule between steps.
        own = orders.get(getattr(schedule, "rank", None))
    has_custom_functions = bool(getattr(schedule, "_comp_type_to_function_map", None))
    return (
        own,
        has_custom_functions,
        *[stage.submod for stage in stages],
        *[stage.dw_builder for stage in stages],
    )


def _run_step(
    schedule: Any,
    attached: AttachedSchedule,
    given: Mapping[str, Any],
    run_stock: Callable[[], Any],
) -> Any:
    """Run the microbatches of a step by the attached engine.

    Args:
        schedule: The schedule.
        attached: Its engine.
        given: The arguments of ``_step_microbatches``.
        run_stock: Runs them in torch.
    """
    first_step, engine, controller = attached.first_step, attached.engine, attached.controller
    assert engine is not None
    assert first_step is not None
    # The engine runs all later steps, even if the first step failed.
    is_stock = first_step.is_stock and not first_step.has_begun
    if is_stock:
        _release_buffers(schedule)
    inputs = _prepare_inputs(schedule, attached, given, is_stock=is_stock)
    first_step.has_begun = True
    if is_stock:
        return _run_stock(schedule, run_stock)
    if controller is None:
        engine.run_step(inputs)
        return None
    try:
        if controller.before_step(inputs):
            _run_stock(schedule, run_stock)
        else:
            engine.run_step(inputs)
        controller.after_step()
    finally:
        # A controller may also be done before a step that fails.
        attached.controller = controller.next_controller
    return None


def _prepare_inputs(
    schedule: Any, attached: AttachedSchedule, given: Mapping[str, Any], *, is_stock: bool
) -> StepInputs:
    """Check the inputs and initialize the stages, as torch's step does before anything else.

    Raises:
        Exception: The stages are not initialized, because this rank or a peer failed.
    """
    losses, targets, loss_kwargs = given["losses"], given["target_mbs"], given.get("loss_kwargs")
    make = functools.partial(
        StepInputs,
        targets=targets,
        losses=losses,
        return_outputs=given["return_outputs"],
        loss_kwargs=loss_kwargs,
    )
    if is_initialized(schedule):
        try:
            return make(
                *schedule._check_inputs(given["arg_mbs"], given["kwarg_mbs"], targets, losses)
            )
        except Exception as error:  # noqa: BLE001 - the engine raises it, once other ranks know
            return make([()], [{}], error=error)
    engine, first_step = attached.engine, attached.first_step
    assert engine is not None
    assert first_step is not None
    check = functools.partial(
        schedule._check_inputs, given["arg_mbs"], given["kwarg_mbs"], targets, losses
    )

    def initialize() -> None:
        args, kwargs = check()
        initialize_stages(
            schedule, args[0], kwargs[0], None if targets is None else targets[0], loss_kwargs
        )

    # The order of a later step may have Ws that this order does not have, so stages
    # prepare for both.
    may_change = attached.controller is not None and attached.controller.may_change_order
    end = functools.partial(engine.end_inference, may_change=may_change)
    first_step.infer_shapes(
        schedule, list(engine.stages.values()), check, initialize, None if is_stock else end
    )
    return make(*check())


def _run_stock(schedule: Any, run_stock: Callable[[], Any]) -> Any:
    COUNTERS.stock_steps += schedule._has_backward
    _release_buffers(schedule)
    return run_stock()


def _release_buffers(schedule: Any) -> None:
    for stage in list_stages(schedule):
        release_buffers(stage)


def release_all() -> None:
    """Return to all stages the buffers that torch expects, and drop the engines."""
    release_all_buffers()
    for schedule, _ in find_owners(_ATTACHED):
        del attached_values(schedule)[_ATTACHED]
    close_edges()


# --- attaching ---


def attach_schedule(
    schedule: Any, owner: str, options: Mapping[str, Any], facts: tuple[Any, ...]
) -> AttachedSchedule:
    """Decide with all ranks whether the engine runs a schedule, and make the engine.

    Args:
        schedule: The schedule.
        owner: Its class.
        options: Resolved options of the feature.
        facts: The objects on which the decision rests.
    """
    _release_buffers(schedule)
    shape = read_shape(schedule)
    group = shape.stages[0].stage.group or dist.distributed_c10d._get_default_group()
    name, orders = _agree_on_order(schedule, owner, shape, group, options)
    if orders is None:
        return AttachedSchedule(facts)

    rank, device = dist.get_rank(group), shape.devices[0]
    is_auto = (
        options["schedule"] == AUTO and type(schedule).__name__ in _REPLACEABLE and group.size() > 1
    )
    lowered = _read_lowered_order(schedule, rank)
    choice = choose_messages(group, shape, options)
    programs = plan_programs(orders, shape, rank, choice.ahead, lowered.shardings)
    is_split = owner not in TORCH_ORDERS and any(action.kind is Kind.W for action in orders[rank])
    stages = make_stages(
        shape, programs, options, schedule=schedule, lowered=lowered, splits_all=is_auto
    )
    messages = choice.make(programs.steady, orders)
    times = StepTimes()
    prediction = Prediction(group, orders, shape.placement, times)
    clock = make_clock(times, device)
    by_perform = owner != "PipelineScheduleMulti"
    engine = Engine(
        EngineParts(schedule, group, stages, programs, messages, times, clock, by_perform)
    )
    begins_as_stock = any(
        stage.data_parallel.should_start_stock(is_split) for stage in stages.values()
    )
    first_step = FirstStep(
        group, device, begins_as_stock=begins_as_stock, on_host=blocks_host(group, device)
    )

    report = ScheduleReport(
        name=type(schedule).__name__,
        order=name,
        rank=rank,
        microbatches=engine.microbatches,
        peak_activations=programs.steady.peak_activations,
        prediction=prediction,
        stages={index: stage.report for index, stage in stages.items()},
        times=times,
        transport=messages.remarks,
    )
    if first_step.is_stock and is_split:
        report.notes.append(_WARNING_UNREDUCED)
        _log.warning("%s: %s", report.name, _WARNING_UNREDUCED)
    report.notes += _list_unused_options(owner, options, is_auto=is_auto, ranks=group.size())
    note_schedule(report)
    attached = AttachedSchedule(facts, engine, first_step, prediction)
    if is_auto:
        from ovpatch_plugins.pipeline.auto.auto_schedule import AutoSchedule, Pipeline

        pipeline = Pipeline(
            report.name, orders, shape.placement, schedule._n_microbatches, group, device, options
        )
        plan = functools.partial(
            _plan_other_order,
            engine,
            shape,
            rank,
            programs,
            choice.ahead,
            is_sharded=bool(lowered.shardings),
        )
        attached.controller = AutoSchedule(engine, pipeline, plan, report, cache_dir())
    return attached


def _list_unused_options(
    owner: str, options: Mapping[str, Any], *, is_auto: bool, ranks: int
) -> list[str]:
    """Return remarks on options that the user has set and that do nothing for a schedule.

    These are no errors, because another schedule of the script may use them.

    Args:
        owner: The class of the schedule.
        options: Resolved options of the feature.
        is_auto: Whether the order is solved.
        ranks: The number of ranks of the pipeline.
    """
    reasons: dict[str, str] = {}
    wanted = options["schedule"]
    if not is_auto:
        keeps = "the pipeline has one rank" if ranks == 1 else "the schedule keeps its order"
        if wanted == AUTO or owner not in TORCH_ORDERS:
            reasons["schedule"] = keeps
        for name in ("memory_limit", "plan_file"):
            reasons[name] = keeps if wanted == AUTO else "only schedule=auto solves an order"
    if owner != BIDIRECTIONAL:
        reasons["forward_doubling"] = "the pipeline runs in one direction"
    defaults = {option.name: option.default for option in OPTIONS}
    return [
        f"{name}={options[name]} has no effect: {reason}"
        for name, reason in reasons.items()
        if options[name] != defaults[name]
    ]


def _agree_on_order(
    schedule: Any,
    owner: str,
    shape: PipelineShape,
    group: dist.ProcessGroup,
    options: Mapping[str, Any],
) -> tuple[str, Schedule | None]:
    """Return the name and the order of a schedule; no order if some rank has a reason against the engine."""
    stashes = options["weight_stash"] != "off"
    reason = _find_reason_against(schedule, shape, group)
    # A rank with an error must still compare its settings with its peers, or they would wait for it.
    name, orders = "", None
    try:
        name, orders = _choose_order(schedule, owner, shape, options)
        check_schedule(orders, shape.placement, stock=orders)
    except ScheduleError as error:
        reason = reason or str(error)
    if stashes:
        from ovpatch_plugins.pipeline.variants import weight_stash

        stages = [info.stage for info in shape.stages]
        reason = reason or weight_stash.find_reason_against(schedule, stages, options)
    # Ranks compare a digest of the order, because the order itself may be long.
    actions = None if orders is None else [[str(action) for action in order] for order in orders]
    terms = {
        "class": type(schedule).__name__,
        "microbatches": schedule._n_microbatches,
        "order": "" if orders is None else hashlib.sha256(repr(actions).encode()).hexdigest(),
        **options,
    }
    reason = check_consistent(group, "pipeline", terms, objection=reason, timeout_s=LATE_START_S)
    if reason and stashes:
        weight_stash.raise_reason(schedule, reason)
    if reason:
        note_stock(f"{type(schedule).__name__}: {reason}")
        return name, None
    return name, orders


def _choose_order(
    schedule: Any, owner: str, shape: PipelineShape, options: Mapping[str, Any]
) -> tuple[str, Schedule]:
    if owner == BIDIRECTIONAL:
        doubles = options["forward_doubling"]
        orders = build_bidirectional_order(
            ranks=schedule.pp_group_size, microbatches=schedule._n_microbatches, doubles=doubles
        )
        return "bidirectional, forwards doubled" if doubles else "bidirectional", orders
    if owner not in TORCH_ORDERS:
        lowered = getattr(schedule, "pipeline_order_with_comms", None)
        return "its own order", convert_torch_order(lowered or schedule.pipeline_order)
    wanted = options["schedule"]
    name = TORCH_ORDERS[owner] if wanted in (AS_GIVEN, AUTO) else wanted
    ranks = shape.stages[0].stage.num_stages
    return name, build_order(name, ranks=ranks, microbatches=schedule._n_microbatches)


@dataclass(frozen=True)
class MessagesChoice:
    """The transport of a pipeline's messages.

    Attributes:
        make: Makes the messages for a program and the orders of all ranks. All ranks call this.
        ahead: The receives to post early.
    """

    make: Callable[[Program, Schedule], Messages]
    ahead: int


def choose_messages(
    group: dist.ProcessGroup, shape: PipelineShape, options: Mapping[str, Any]
) -> MessagesChoice:
    """Choose the transport of a pipeline's messages, together with all ranks.

    Raises:
        ovpatch.OptionError: The user wants copy engines, and they cannot be used; on all ranks.
    """
    device = shape.devices[0]
    varies, wanted = options["variable_seq_lengths"], options["p2p_transport"]
    is_asked, reason = wanted == COPIES, ""
    can_copy = wanted in (AUTO, COPIES) and group.size() > 1
    if can_copy:
        reason = find_reason_against_copies(group, shape.devices, varies=varies, is_asked=is_asked)
        if reason and is_asked:
            _refuse_copies(reason)
    is_copied = can_copy and not reason

    def make(program: Program, orders: Schedule) -> Messages:
        if is_copied:
            slots = _count_slots(orders, shape.placement)
            refuse = _refuse_copies if is_asked else None
            return CopiedMessages(group, device, program.edges, slots, refuse=refuse)
        messages = Messages(group, device, program.edges)
        if reason:
            messages.remarks.append(write_c10d_remark(reason))
        return messages

    # If shapes vary, a receive starts with a wait for its message's sizes. A slot needs no receive.
    is_early = options["overlap_p2p_comm"] and not (varies or is_copied)
    return MessagesChoice(make, AHEAD[blocks_host(group, device)] if is_early else 0)


def _refuse_copies(reason: str) -> None:
    """Raise OptionError, because the user wants copy engines and they cannot carry messages."""
    refuse_option("pipeline", OPTIONS, "p2p_transport", COPIES, reason)


def _count_slots(orders: Schedule, placement: Sequence[int]) -> int:
    """Return the number of slots of an edge; with two, the next message arrives while the receiver reads one."""
    return max(2, count_slots(orders, placement))


def plan_programs(
    orders: Schedule,
    shape: PipelineShape,
    rank: int,
    ahead: int,
    shardings: Sequence[tuple[int, str, int]] = (),
) -> Programs:
    """Return the programs of a rank.

    Args:
        orders: The orders of all ranks.
        shape: The pipeline.
        rank: The rank.
        ahead: The receives to post early.
        shardings: See :func:`~ovpatch.overlap.pipelining.ir.make_program`.
    """
    make = functools.partial(make_program, orders, shape.placement, rank, shardings=shardings)
    stage = shape.stages[0].stage
    group = stage.group or dist.distributed_c10d._get_default_group()
    # On the host no receive blocks a kernel, so the first step may post early.
    settles = ahead and not blocks_host(group, shape.devices[0])
    return Programs(make(ahead=ahead), make(ahead=0) if settles else None)


def _plan_other_order(
    engine: Engine,
    shape: PipelineShape,
    rank: int,
    given: Programs,
    ahead: int,
    orders: Schedule,
    *,
    is_sharded: bool,
) -> Programs:
    """Return the programs of an order of ``schedule=auto``, with room for its messages. All ranks call this."""
    if isinstance(engine.messages, CopiedMessages):
        engine.messages.reserve(_count_slots(orders, shape.placement))
    # The script's UNSHARDs belong to the given order; another order needs its own.
    shardings = _unshard_all(orders[rank]) if is_sharded else ()
    make = functools.partial(make_program, orders, shape.placement, rank, shardings=shardings)
    return Programs(make(ahead=ahead), None if given.settling is None else make(ahead=0))


def make_stages(
    shape: PipelineShape,
    programs: Programs,
    options: Mapping[str, Any],
    *,
    schedule: Any,
    lowered: LoweredOrder,
    splits_all: bool,
) -> dict[int, Stage]:
    """Return the engine's stages by their index in the placement. All replicas of a stage make it together.

    Args:
        shape: The pipeline.
        programs: The programs of this rank.
        options: Resolved options of the feature.
        schedule: The schedule.
        lowered: Its lowered order.
        splits_all: Whether all stages defer weight gradients as an order with Ws does.
    """
    steps = programs.steady.steps
    # Stages with Ws in the order, and stages whose input gradient goes to another rank.
    split = {step.action.stage for step in steps if step.action.kind is Kind.W or splits_all}
    sending = {
        step.action.stage
        for step in steps
        if step.action.kind is not Kind.F and step.receiver is not None
    }

    def choose_options(info: StageInfo) -> StageOptions:
        return StageOptions(
            delay_wgrad_compute=options["delay_wgrad_compute"],
            is_fused=options["gradient_accumulation_fusion"],
            varies=options["variable_seq_lengths"],
            sends=info.number in sending,
            splits=info.number in split,
            is_reduced=lowered.reductions is None or info.number in lowered.reductions,
        )

    make: Callable[[StageInfo, StageOptions], Stage] = Stage
    if options["weight_stash"] != "off":
        from ovpatch_plugins.pipeline.variants.weight_stash import StashedStage

        make = functools.partial(StashedStage, schedule=schedule)
    return {info.number: make(info, choose_options(info)) for info in shape.stages}


# --- torch's orders ---


def _unshard_all(order: Order) -> list[tuple[int, str, int]]:
    """Return the places at which each stage is unsharded, before its first computation, and resharded, at the end."""
    stages = dict.fromkeys(action.stage for action in order)
    # The index of the first computation of each stage.
    first = {
        stage: next(i for i, action in enumerate(order) if action.stage == stage)
        for stage in stages
    }
    ends = [(len(order), "RESHARD", stage) for stage in stages]
    return [*((index, "UNSHARD", stage) for stage, index in first.items()), *ends]


class LoweredOrder(NamedTuple):
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
                return (
                    f"the order has REDUCE_GRAD of stage {stage} before the stage's last backward"
                )
        return ""


def _read_lowered_order(schedule: Any, rank: int) -> LoweredOrder:
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    shardings, reductions, ends, index = [], defaultdict[int, list[int]](list), dict[int, int](), 0
    for action in (orders or {}).get(rank, ()):
        name = action.computation_type.value
        if name in ("UNSHARD", "RESHARD"):
            shardings.append((index, name, action.stage_index))
        elif name == "REDUCE_GRAD":
            reductions[action.stage_index].append(index)
        # Only computations count, because programs index shardings by them.
        for part in action.sub_actions or (action,):
            kind = part.computation_type.value
            index += kind in ("F", "I", "W", "B")
            if kind in ("W", "B"):
                ends[part.stage_index] = index
    return LoweredOrder(shardings, None if orders is None else reductions, ends)


# --- reasons ---


def _find_reason_against(schedule: Any, shape: PipelineShape, group: dist.ProcessGroup) -> str:
    """Return the reason for which this rank cannot run the schedule, or ""."""
    stages = [info.stage for info in shape.stages]
    if reason := find_group_reason(group, torch.device(stages[0].device)):
        return reason
    if objection := _read_lowered_order(schedule, dist.get_rank(group)).find_objection():
        return objection
    if getattr(schedule, "_comp_type_to_function_map", None):
        return "register_custom_function() replaces computations"
    if not getattr(schedule, "_backward_requires_autograd", True):
        return "backward_requires_autograd=False leaves the backward to the script"
    if any(stage.dw_builder is not None for stage in stages):
        return "a stage computes weight gradients by its own dw_builder"
    if limits_sends(schedule):
        return "the script limits sends in flight by max_outstanding_sends, and feature pipeline has no such limit"
    traced = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStage", ())
    if any(isinstance(stage, traced) and _has_skip_connections(stage) for stage in stages):
        return "a traced stage has skip connections"
    if len(stages) == 1 and hasattr(schedule, "_stage"):
        stage = stages[0]
        # The fixed orders and the classes with one stage assume stage r on rank r.
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
    readers += [
        reader for user in users if user.target is operator.getitem for reader in user.users
    ]
    return bool({stage.find_dst_rank(reader) for reader in readers} - {stage.stage_index + 1, None})
