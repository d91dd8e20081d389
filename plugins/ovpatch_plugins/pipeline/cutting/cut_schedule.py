"""``cut()``: a plain model becomes the stages of a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from ovpatch.overlap.autograd import is_differentiable
from ovpatch.overlap.comm.consensus import (
    LATE_START_S,
    check_consistent,
    gather_values,
    join_messages,
    known_hosts,
    wait_limit_s,
)
from ovpatch.overlap.pipelining.ir import Placement, count_stages
from ovpatch.overlap.pipelining.orders import build_placement
from ovpatch_plugins.pipeline.cutting.block_balance import (
    BlockCosts,
    check_count,
    measure_costs,
    split_blocks,
    split_evenly,
)
from ovpatch_plugins.pipeline.cutting.block_stack import (
    BlockStack,
    Boundary,
    CutError,
    ForwardState,
    find_block_stack,
    map_leaves,
    prepared,
    save_random_states,
    trace_model,
)
from ovpatch_plugins.pipeline.cutting.cut_check import (
    BoundaryCheck,
    check_output,
    check_training,
    compare_grads,
    compare_values,
    name_args,
)
from ovpatch_plugins.pipeline.cutting.stage_tree import (
    SharedParam,
    StageTree,
    find_shared_params,
    make_plans,
    make_subclass,
    move_zeros,
    select_output,
)
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages

BIDIRECTIONAL: Final = "bidirectional"

_SCHEDULES: Final = {
    "straight": "Schedule1F1B",
    "loop": "ScheduleInterleaved1F1B",
    "vee": "ScheduleZBVZeroBubble",
}
_CHUNKS: Final = {"straight": 1, "loop": 2, "vee": 2}
_TOPIC: Final = "pipeline_cut"
_LONGEST_REASON: Final = 2000
_REMEDY: Final = "Call cut() on all ranks, with the same model, microbatch and arguments."


def cut(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    mb_args: Sequence[Any] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    n_microbatches: int,
    loss_fn: Callable[..., Tensor] | None = None,
    placement: str = "straight",
    chunks: int | None = None,
    schedule: str | type | None = None,
    blocks: str | None = None,
    balance: str = "measured",
    blocks_per_stage: Sequence[int] | None = None,
    output: Callable[[Any], Any] = select_output,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    device: torch.device | str | None = None,
    **schedule_options: Any,
) -> Any:
    """Cut a plain model into stages and return the schedule that trains it.

    Each stage runs the model's own forward, so masks, positions and rotary tables stay the model's; blocks of other
    stages are skipped. All ranks call ``schedule.step()`` with the full model's inputs. A stage's modules, parameters
    and names are the model's. The model itself stays as it is, and can be dropped.

    The stages are compared with the full model on the given microbatch: values and gradients in evaluation mode, and
    values in training mode, with the same random numbers. Models that skip blocks in training are refused.

    Args:
        model: The full model, the same on all ranks, not wrapped for data parallelism. On the meta device it is cut
            without measuring and comparing.
        mesh: The pipeline's dimension of a mesh, or its group. All ranks of the job call ``cut()``.
        mb_args: Arguments of the model for one microbatch.
        mb_kwargs: Keyword arguments of the model for one microbatch.
        n_microbatches: Microbatches in a step.
        loss_fn: Called with the output of the last stage and the microbatch's ``target``; the schedule's argument.
        placement: ``straight`` has one stage per rank. ``loop`` has stage ``s`` on rank ``s % ranks``. ``vee`` has
            stages ``r`` and ``2 * ranks - 1 - r`` on rank ``r``. ``bidirectional`` has two pipelines as in Chimera, one
            each way: rank ``r`` has stage ``r`` of one and ``ranks - 1 - r`` of the other, and losses are on the last
            rank and on rank 0.
        chunks: Stages per rank. Default: 2 for ``loop`` and ``vee``, otherwise 1.
        schedule: A class of torch's schedules, or its name. Default: 1F1B, interleaved 1F1B or ZBV. None for
            ``bidirectional``.
        blocks: Name of the list of blocks. Default: the largest list of modules of one class.
        balance: ``measured`` balances the time and memory of blocks on this microbatch, on the model's device.
            ``count`` balances the number of blocks.
        blocks_per_stage: Numbers of blocks, instead of ``balance``.
        output: Makes a tensor, or several, of the model's output. Default: the first tensor of a mapping.
        wrap: Wraps the module of each stage, for example into ``DistributedDataParallel`` or ``fully_shard``.
        device: The device on which stages compute. Default: the mesh's device.
        schedule_options: Further arguments of the schedule.

    Returns:
        An object of the schedule's class that also has ``model_parts``, ``parameters()``, ``named_parameters()``,
        ``state_dict()`` and ``load_state_dict()``, all of this rank's stages and under the model's own names, and
        ``has_first_stage`` and ``has_last_stage``.

    Raises:
        CutError: The model cannot be cut; the same on all ranks.
    """
    kwargs = dict(mb_kwargs or {})
    if not mb_args and not kwargs:
        raise CutError(
            "cut() needs a microbatch of the model's inputs. Pass it as mb_args or mb_kwargs."
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise CutError(
            f"the mesh has {mesh.ndim} dimensions. Pass the pipeline's dimension of it, as "
            "mesh['pp']."
        )
    _check_model(model)
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    chunks = _CHUNKS.get(placement, 1) if chunks is None else chunks
    placed = build_placement(placement, ranks=group.size(), chunks=chunks)
    ranks = placed[: count_stages(placed)]
    cls = _find_schedule(schedule, placement, chunks)
    # In two directions, stages with the same number are replicas of one stage of the model.
    own = sorted({stage % len(ranks) for stage, rank in enumerate(placed) if rank == group.rank()})
    if placement == BIDIRECTIONAL:
        _check_buffers(model)
    home = next(model.parameters()).device
    # Stages are compared on the model's device.
    args, kwargs = (
        map_leaves(value, lambda _, leaf: leaf.to(home) if isinstance(leaf, Tensor) else leaf)
        for value in (tuple(mb_args), kwargs)
    )

    def prepare() -> tuple[Callable[[], None], BlockStack, BlockCosts | None]:
        restore = prepared_model.enter_context(prepared(model, home))
        stack = find_block_stack(model, blocks, lambda: model(*args, **kwargs))
        check_count(len(stack.blocks), len(ranks))
        restore()
        return (
            restore,
            stack,
            measure_costs(model, stack, args, kwargs, home) if has_costs else None,
        )

    def make() -> tuple[StageTree, dict[int, nn.Module], list[list[int]]]:
        restore()
        return _make_trees(model, stack, starts, args, kwargs, output, own, restore)

    has_costs = _is_measured(balance, blocks_per_stage, home) and len(ranks) > 1
    # All code of the model runs in attempts: peers would wait for a rank on which an error left cut().
    with contextlib.ExitStack() as prepared_model:
        prepared_here, reason, cause = _attempt(prepare)
        costs, reason = _share_costs(group, has_costs, prepared_here and prepared_here[2], reason)
        if reason:
            raise CutError(reason) from cause
        restore, stack, _ = prepared_here
        starts = _choose_starts(len(stack.blocks), ranks, costs, blocks_per_stage)
        made, reason, cause = _attempt(make)
        reason = _agree(group, model, stack, starts, reason)
    if reason:
        raise CutError(reason) from cause
    builder, trees, held = made
    # The comparison has switched the stages between training and evaluation.
    builder.copy_modes()
    shared = find_shared_params(model, trees, held)
    where = _find_device(mesh, home) if device is None else torch.device(device)
    parts, stages, prefixes = [], [], []
    for stage, tree in trees.items():
        # A model on the meta device keeps its parameters there, and the script initializes them with
        # to_empty().
        part: nn.Module = tree if home.type == "meta" else tree.to(where)
        move_zeros(part, where)
        part = part if wrap is None else wrap(part)
        parts.append(part)
        prefixes.append(_find_prefix(part, tree))
        stages.append(_Stage(part, stage, len(ranks), where, group=group))
        stages[-1].tree = tree
    is_single = issubclass(cls, schedules.PipelineScheduleSingle)
    if placement == BIDIRECTIONAL and stages[0].stage_index != group.rank():
        # The stage of the pipeline that runs down is first.
        stages.reverse()
    owned = stages[0] if is_single else stages
    schedule_made = make_subclass(CutSchedule, cls)(
        owned, n_microbatches, loss_fn=loss_fn, **schedule_options
    )
    schedule_made.model_parts, schedule_made._prefixes = parts, prefixes
    schedule_made.block_ranges = _list_ranges(starts, len(stack.blocks))
    schedule_made._shared_grads = [SharedGrads(param, placed, group) for param in shared]
    if placement == BIDIRECTIONAL:
        from ovpatch_plugins.pipeline.variants.bidirectional import ReplicaGrads

        def find_shared() -> list[nn.Parameter]:
            return [param for tied in shared for param in tied.find_params()]

        schedule_made._shared_grads.append(
            ReplicaGrads(parts, schedule_made.replicas, group, find_shared)
        )
    return schedule_made


class _Stage(PipelineStage):
    """A stage without five faults of torch.

    - To connect the ranks, torch 2.11 also sends to its own rank, which gloo cannot do.
    - After an evaluation that comes first, the received tensors of stages have no gradient, so that the first step
      fails.
    - In torch 2.15 an evaluation of stages in a V fails, because they pass each other gradients that do not exist.
    - The forward in which torch infers shapes before the first step counts in running statistics and counters. It
      draws from generators of the model, and from the streams of Python and NumPy.
    - That forward also reads uninitialized memory, so that blocks fail that take indices from it.

    Attributes:
        tree: The stage's module before it was wrapped.
    """

    tree: nn.Module

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # This forward also initializes objects that wrappers have put into the modules.
        state = ForwardState(self.tree.modules(), has_objects=False)
        restore_random = save_random_states(self.device)
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            state.restore()
            restore_random()

    def _to_tensor(self, arg: Any) -> Any:
        own: Any = super()  # untyped in torch
        made = own._to_tensor(arg)
        return (
            made
            if isinstance(arg, Tensor)
            else made.detach().zero_().requires_grad_(made.requires_grad)
        )

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [
            op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank
        ]

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # Without this attribute, torch infers the buffers again.
        if hasattr(self, "_shape_inference"):
            for info in itertools.chain.from_iterable(self.args_recv_info.values()):
                buffer = getattr(info, "buffer", None)
                if isinstance(buffer, Tensor) and not buffer.requires_grad:
                    # The buffer is new, because the old one may be of an inference mode.
                    info.buffer = torch.empty_like(buffer, requires_grad=True)
        return super()._prepare_backward_infra(*args, **kwargs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        own: Any = super()  # untyped in torch
        return own.get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


# --- checks ---


def _check_dtypes(stack: BlockStack, boundaries: Mapping[int, Boundary]) -> None:
    # Stages of torch 2.11 demand a gradient for each tensor that they receive.
    if not hasattr(PipelineStage, "_shape_inference"):
        return
    for index, boundary in boundaries.items():
        for tensor in boundary.tensors:
            if not is_differentiable(tensor):
                raise CutError(
                    f"{stack.name(index - 1)} passes on a tensor of {tensor.dtype}, which torch "
                    f"{torch.__version__} cannot send to a stage. Install torch 2.12 or later."
                )


def _check_model(model: nn.Module) -> None:
    wrapped = any(
        "FSDP" in cls.__name__ or "DistributedDataParallel" in cls.__name__
        for cls in type(model).__mro__
    )
    if wrapped or hasattr(model, "_orig_mod"):
        raise CutError(
            f"the model is already a {type(model).__name__}. Cut the plain model, and wrap its "
            "stages with cut(..., wrap=...)."
        )
    if "forward" in model.__dict__:
        raise CutError(
            "the model's forward was replaced on the object, as by accelerate's prepare() or a "
            "hook of its big-model loading. Cut the model before that."
        )
    if next(model.parameters(), None) is None:
        raise CutError(
            f"{type(model).__name__} has no parameters. Cut a model that has blocks with "
            "parameters."
        )


def _check_buffers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise CutError(
                f"{name} has running statistics, and a bidirectional pipeline has two replicas of "
                "it that see half of the microbatches each. Cut with placement='straight', or use a "
                "norm without statistics."
            )


def _find_schedule(schedule: str | type | None, placement: str, chunks: int) -> type[Any]:
    if placement == BIDIRECTIONAL:
        from ovpatch_plugins.pipeline.variants.bidirectional import ScheduleBidirectional

        if schedule is not None:
            raise CutError(
                f"placement='bidirectional' has its own order, not {schedule!r}. Leave schedule out."
            )
        return ScheduleBidirectional
    name = _SCHEDULES[placement] if schedule is None else schedule
    cls = getattr(schedules, name, None) if isinstance(name, str) else name
    if not (isinstance(cls, type) and issubclass(cls, schedules._PipelineSchedule)):
        raise CutError(
            f"schedule={name!r} is no class of torch.distributed.pipelining. Give Schedule1F1B, "
            "for example."
        )
    is_single = issubclass(cls, schedules.PipelineScheduleSingle)
    is_vee = cls.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    # Each class assumes where its stages are, and does not check the placement.
    wanted = "straight" if is_single else "vee" if is_vee else "loop"
    if wanted != placement or (is_vee and chunks != 2):
        raise CutError(
            f"{cls.__name__} does not run placement={placement!r} with {chunks} stages per rank. "
            f"Use placement={wanted!r}{', chunks=2' if is_vee else ''}."
        )
    return cls


def _attempt(compute: Callable[[], Any]) -> tuple[Any, str, Exception | None]:
    """Return the result of a function, or the reason and the error for which a model cannot be cut."""
    try:
        return compute(), "", None
    except CutError as error:
        return None, str(error), None
    except Exception as error:  # noqa: BLE001 - of the user's forward, and raised once all ranks know it
        # The message names the last frame outside of torch, which is in the user's code.
        frames = traceback.extract_tb(error.__traceback__)
        last = next(
            (frame for frame in reversed(frames) if "/torch/" not in frame.filename), frames[-1]
        )
        place = f"{last.name}(), {os.path.basename(last.filename)}:{last.lineno}"
        # Some errors have no message, such as the StopIteration of next() for a module without parameters.
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        text = (
            f"a forward of the model or of one of its stages failed with {what} (in {place}). "
            "Pass a microbatch that the model accepts in evaluation and in training. If the full "
            "model accepts it, keep reads of other modules' parts out of its forward, or name "
            "another list with blocks=."
        )
        return None, text, error


def _is_measured(balance: str, blocks_per_stage: Sequence[int] | None, home: torch.device) -> bool:
    if balance not in ("measured", "count"):
        raise CutError(f"balance={balance!r} is unknown. Use 'measured' or 'count'.")
    return balance == "measured" and blocks_per_stage is None and home.type != "meta"


def _share_costs(
    group: dist.ProcessGroup, is_measured: bool, costs: BlockCosts | None, reason: str
) -> tuple[BlockCosts | None, str]:
    """Return the costs that all ranks use, and the reason for which a rank cannot cut, or "".

    All ranks use the costs of one rank, because replicas of a pipeline must have the same stages. So ranks of all
    pipelines exchange them, if they measure.
    """
    world = dist.distributed_c10d._get_default_group() if is_measured else group
    # The costs of the first rank count, because times differ by rank and all ranks need the same
    # numbers.
    own = costs.as_dict() if costs is not None and world.rank() == 0 else None
    found = gather_values(world, _TOPIC, {"reason": reason[:_LONGEST_REASON], "costs": own})
    numbers = [dist.get_global_rank(world, rank) for rank in range(world.size())]
    reason = join_messages(
        ((rank, value["reason"]) for rank, value in zip(numbers, found, strict=True)),
        known_hosts(world),
    )
    first = found[0]["costs"]
    return (None if first is None else BlockCosts(**first)), reason


def _choose_starts(
    count: int,
    ranks: Sequence[int],
    costs: BlockCosts | None,
    blocks_per_stage: Sequence[int] | None,
) -> list[int]:
    """Return the first block of each stage."""
    if blocks_per_stage is not None:
        sizes = list(blocks_per_stage)
        if len(sizes) != len(ranks) or sum(sizes) != count or min(sizes) < 1:
            raise CutError(
                f"blocks_per_stage={sizes} does not divide {count} blocks into {len(ranks)} "
                "stages. Give as many numbers, each at least 1, with that sum."
            )
        return [sum(sizes[:stage]) for stage in range(len(sizes))]
    return split_evenly(count, len(ranks)) if costs is None else split_blocks(costs, ranks)


def _make_trees(
    model: nn.Module,
    stack: BlockStack,
    starts: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Callable[[Any], Any],
    own: Sequence[int],
    restore: Callable[[], None],
) -> tuple[StageTree, dict[int, nn.Module], list[list[int]]]:
    """Return this rank's stages, compared with the full model, and the ids of each stage's parameters."""
    trace = trace_model(model, stack, starts[1:], args, kwargs)
    restore()
    _check_dtypes(stack, trace.boundaries)
    trace.output = output(trace.output)
    check_output(trace.output)
    plans = make_plans(trace, stack, starts, output)
    builder = StageTree(model, stack, trace, plans)
    trees, held = {}, []
    is_meta = next(model.parameters()).device.type == "meta"
    for plan in plans:
        tree = builder.build(plan)
        params = [id(param) for param in tree.parameters()]
        held.append(params)
        if plan.params - set(params):
            names = {id(param): name for name, param in model.named_parameters()}
            name = next(
                (names[key] for key in plan.params - set(params) if key in names),
                "an unregistered parameter",
            )
            raise CutError(
                f"stage {plan.index} reads {name}, which is in no module that it calls or reads. "
                "Read it through its own module."
            )
        if plan.index in own:
            trees[plan.index] = tree
            plan.check = BoundaryCheck(plan, tree.get_submodule(stack.path), trace)
    if not is_meta:
        for index, tree in trees.items():
            compare_grads(
                tree, plans[index], trace, compare_values(tree, plans[index], trace, args, kwargs)
            )
    # The nodes would keep the traced graph alive.
    for plan in plans:
        plan.nodes.clear()
    if not is_meta:
        del trace
        check_training(
            model,
            stack,
            [(plans[index], tree) for index, tree in trees.items()],
            args,
            kwargs,
            restore,
        )
    return builder, trees, held


def _agree(
    group: dist.ProcessGroup,
    model: nn.Module,
    stack: BlockStack,
    starts: Sequence[int],
    reason: str,
) -> str:
    # Ranks that cut different models would exchange tensors of different shapes later.
    names = repr([(name, tuple(param.shape)) for name, param in model.named_parameters()])
    terms = {
        "blocks": stack.path,
        "first blocks of stages": list(starts),
        "parameters": hashlib.sha256(names.encode()).hexdigest()[:16],
    }
    limit = wait_limit_s(group, LATE_START_S)
    return check_consistent(group, _TOPIC, terms, objection=reason, timeout_s=limit, remedy=_REMEDY)


def _find_device(mesh: DeviceMesh | dist.ProcessGroup, home: torch.device) -> torch.device:
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else home.type
    if kind in ("cpu", "meta"):
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _list_ranges(starts: Sequence[int], count: int) -> list[range]:
    return [range(low, high) for low, high in zip(starts, [*starts[1:], count], strict=True)]


# --- the schedule ---


class SharedGrads:
    """The sum of the gradients that several stages have of one parameter.

    Args:
        param: The parameter.
        placement: The rank of each stage.
        group: The pipeline's group.
    """

    def __init__(self, param: SharedParam, placement: Placement, group: dist.ProcessGroup) -> None:
        self._param = param
        # The gradients of earlier steps, while a step runs.
        self._kept: list[Tensor | None] = []
        self._pipelines = len(placement) // count_stages(placement)
        ranks = sorted(
            {
                rank
                for stage, rank in enumerate(placement)
                if stage % count_stages(placement) in param.stages
            }
        )
        # The ranks with copies; None if this rank has all of them, or none.
        self._group: dist.ProcessGroup | None = None
        if len(ranks) > 1 and group.rank() in ranks:
            names = [dist.get_global_rank(group, rank) for rank in ranks]
            self._group = group
            if len(ranks) < group.size():
                # Only the ranks with copies take part, so their peers need not call this.
                self._group = dist.new_group(names, use_local_synchronization=True)

    def start_step(self) -> None:
        """Put the gradients of earlier steps aside, because they are already sums."""
        params = self._param.find_params()
        self._kept = [param.grad for param in params]
        for param in params:
            param.grad = None

    def restore(self) -> None:
        """Restore the gradients of earlier steps, after an error."""
        for param, kept in zip(self._param.find_params(), self._kept, strict=True):
            param.grad = kept
        self._kept = []

    def finish_step(self, scale: int) -> None:
        """Make each copy's gradient the sum over all stages, and add the gradients of earlier steps.

        Args:
            scale: The divisor by which torch's schedule divides all gradients at the end of a step, earlier ones
                included.
        """
        params = self._param.find_params()
        if not params:
            return
        # A copy without a gradient adds zeros, because peers wait for its part.
        total = torch.zeros_like(params[0])
        with torch.no_grad():
            for param in params:
                if param.grad is not None:
                    total += param.grad
            if self._group is not None:
                dist.all_reduce(
                    total.to_local() if hasattr(total, "to_local") else total, group=self._group
                )
            if scale != 1 and self._pipelines > 1:
                # Each pipeline has divided its gradients by its number of microbatches alone.
                total /= self._pipelines
            for index, (param, kept) in enumerate(zip(params, self._kept, strict=True)):
                if kept is not None:
                    param.grad = kept.div_(scale).add_(total) if scale != 1 else kept.add_(total)
                else:
                    param.grad = total if index == 0 else total.clone()
        self._kept = []


class CutSchedule:
    """The additions of :func:`cut` to the class of a torch schedule.

    Attributes:
        model_parts: The modules of this rank's stages.
        block_ranges: The blocks of each stage of the pipeline.
    """

    model_parts: list[nn.Module]
    block_ranges: list[range]
    _prefixes: list[str]
    _shared_grads: list[Any]

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, *rest: Any, **options: Any
    ) -> None:
        schedule: Any = self
        count = schedule._n_microbatches
        # Torch gives positional arguments to the first stage alone, so all arguments become keywords.
        named = [
            name_args(args, kwargs)
            for args, kwargs in zip(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, strict=True)
        ]
        run = super()._step_microbatches  # type: ignore[misc]
        if not schedule._has_backward:
            # Torch would scale the gradients of the last step again.
            scale, schedule.scale_grads = schedule.scale_grads, False
            try:
                run([()] * count, named, *rest, **options)
            finally:
                schedule.scale_grads = scale
            return
        # The sums that have put gradients aside, which they must restore after an error.
        started: list[Any] = []
        try:
            for shared in self._shared_grads:
                shared.start_step()
                started.append(shared)
            run([()] * count, named, *rest, **options)
        except BaseException:
            for shared in started:
                shared.restore()
            raise
        for shared in self._shared_grads:
            shared.finish_step(count if schedule.scale_grads else 1)

    @property
    def has_first_stage(self) -> bool:
        """True if this rank has the first stage."""
        return any(stage.is_first for stage in list_stages(self))

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the last stage, and so losses and outputs."""
        return any(stage.is_last for stage in list_stages(self))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters with their names in the full model."""
        return [
            (_plain_name(name, prefix), param)
            for part, prefix in zip(self.model_parts, self._prefixes, strict=True)
            for name, param in part.named_parameters()
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, for an optimizer."""
        return [param for _, param in self.named_parameters()]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the full model's ``state_dict()``, in the form in which DCP saves it."""
        return {
            _plain_name(key, prefix): value
            for part, prefix in zip(self.model_parts, self._prefixes, strict=True)
            for key, value in part.state_dict().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a ``state_dict()``, which may be the full model's.

        Raises:
            CutError: Entries are missing, and ``strict`` is true.
        """
        missing = sorted(set(self.state_dict()) - set(state_dict))
        if missing and strict:
            raise CutError(
                f"the state dict lacks {', '.join(missing[:5])}. Load a state dict of the same model, or "
                "set strict=False."
            )
        for part, prefix in zip(self.model_parts, self._prefixes, strict=True):
            names = {key: _plain_name(key, prefix) for key in part.state_dict()}
            own = {key: state_dict[name] for key, name in names.items() if name in state_dict}
            part.load_state_dict(own, strict=strict)


def _find_prefix(part: nn.Module, tree: nn.Module) -> str:
    """Return the prefix that wrappers of a stage put before the names of its parameters."""
    return next(
        (f"{name}." for name, module in part.named_modules() if module is tree and name), ""
    )


def _plain_name(name: str, prefix: str) -> str:
    """Return a name without the parts that wrappers of the stage, and of modules in it, add."""
    name = name.removeprefix(prefix)
    for inner in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(inner, "")
    return name
