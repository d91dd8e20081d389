"""Differences between the stages and schedules of torch 2.11 to 2.15, recognized by attributes, not by versions.

Up to torch 2.14 the descriptors of a stage hold receive buffers for all microbatches. From 2.15 on a descriptor holds
a buffer from its receive to the computation that takes it, and a buffer at another time is an error. An output
leaves the stage after its send, and the backward starts from its edge. FSDP2 starts its reduction and waits for it
in two calls.

Before the first step a stage runs its module once to find the shapes of its outputs. From 2.12 on it also runs a
backward, to find the shapes of its input gradients. It sends the shapes to its neighbors as objects, the metadata.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

# The attributes of a schedule that are True once its stages are initialized.
_INITIALIZED: Final = tuple(
    f"_{stages}_{way}_initialized"
    for stages in ("stage", "stages")
    for way in ("forward", "backward")
)
# The attributes of a stage in which a step keeps state.
_STATES: Final = (
    "fwd_cache",
    "_forward_chunk_states",
    "bwd_cache",
    "dw_runner",
    "backward_state",
    "output_chunks",
)


# --- messages ---


def makes_buffers(stage: Any) -> bool:
    """Return whether a stage makes a receive buffer for each message, and has none between messages."""
    return hasattr(stage, "release_fwd_send_outputs")


def has_buffers(infos: Sequence[Any]) -> bool:
    """Return whether descriptors of a message hold tensors with data."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if isinstance(buffer, Tensor) and not buffer.is_meta:
            return True
    return False


def find_shapes(infos: Sequence[Any]) -> list[Tensor | None]:
    """Return meta tensors like the tensors that descriptors receive; None for a descriptor without a tensor."""
    return [_find_shape(info) for info in infos]


def _find_shape(info: Any) -> Tensor | None:
    if not hasattr(info, "take_buffer"):
        buffer = getattr(info, "buffer", None)
        return None if buffer is None else shape_of(buffer)
    return (
        None if info.is_root_arg or info.tensor_meta is None else _shape_of_meta(info.tensor_meta)
    )


def set_buffers(infos: Sequence[Any], buffers: Sequence[Tensor | None]) -> None:
    """Put buffers into descriptors. Meta tensors represent missing buffers, because torch 2.11 expects a tensor."""
    for info, buffer in zip(infos, buffers, strict=True):
        # In torch 2.11, the placeholder of an argument of the script has no buffer.
        if hasattr(info, "buffer"):
            is_none = buffer is not None and buffer.is_meta and hasattr(info, "take_buffer")
            info.buffer = None if is_none else buffer


def shape_of(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the layout of another tensor."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def find_output_shapes(stage: Any) -> list[Tensor]:
    """Return meta tensors like the outputs of a stage."""
    metas = getattr(getattr(stage, "_stage_meta", None), "outputs", None)
    return [_shape_of_meta(meta) for meta in (stage.get_outputs_meta() if metas is None else metas)]


def find_input_grad_shapes(stage: Any, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return meta tensors like the gradients that a stage sends; None for an input without a gradient.

    Args:
        stage: The stage.
        inputs: Meta tensors like the received tensors; torch 2.11 sends a gradient for each.
    """
    find_meta = getattr(stage, "_get_grad_send_meta", None)
    if find_meta is None:
        return list(inputs)
    metas = [None if shape is None else find_meta(place) for place, shape in enumerate(inputs)]
    return [None if meta is None else _shape_of_meta(meta) for meta in metas]


def _shape_of_meta(meta: Any) -> Tensor:
    # In torch 2.11 the metadata are tensors.
    stride = meta.stride() if callable(meta.stride) else meta.stride
    return torch.empty_strided(tuple(meta.shape), tuple(stride), dtype=meta.dtype, device="meta")


def release_outputs(stage: Any, microbatch: int) -> None:
    """Drop a stage's references to outputs that a message holds."""
    if makes_buffers(stage):
        stage.release_fwd_send_outputs(microbatch)


def find_output_nodes(stage: Any, microbatch: int) -> list[Any]:
    """Return the nodes of autograd from which a microbatch's backward starts."""
    if hasattr(stage, "fwd_cache"):
        outputs, _ = stage.fwd_cache[microbatch]
    else:
        outputs = stage._forward_chunk_states[microbatch].stage_output_for_backward()
    nodes = [
        output.grad_fn if isinstance(output, Tensor) else getattr(output, "node", None)
        for output in outputs
    ]
    return [node for node in nodes if node is not None]


def clear_states(stage: Any) -> None:
    """Drop the state that an interrupted step left in a stage."""
    for name in _STATES:
        getattr(stage, name, {}).clear()


def reset_fsdp(root: Any, modules: Sequence[Any]) -> None:
    """Reset modules in FSDP2 after an exception, with sharded parameters on all replicas.

    Args:
        root: The stage's module.
        modules: The module and all modules inside of it, if they are in FSDP2.
    """
    # Before the first forward there is nothing to reset.
    if root._get_fsdp_state()._is_root is None:
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # Torch 2.11 has no function for this.
    for module in modules:
        state = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        group = state._fsdp_param_group
        for part in (state, *([] if group is None else [group])):
            part._training_state = type(part._training_state).IDLE
        if group is not None:
            group._post_forward_indices.clear()
        module.reshard()
    state = root._get_fsdp_state()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()


# --- metadata ---

Send = Callable[[Any, int], None]
"""A function that sends metadata to the stage of an index."""

Receive = Callable[[int], Any]
"""A function that returns the metadata that the stage of an index has sent."""


@contextlib.contextmanager
def exchanging_metadata(stage: Any, send: Send, receive: Receive) -> Iterator[None]:
    """Let a stage exchange metadata by two functions inside the ``with`` block, instead of by torch's messages."""
    if hasattr(stage, "_recv_meta"):
        changed: dict[str, Any] = {"_send_meta": send, "_recv_meta": receive}
    # Torch 2.11
    elif hasattr(stage, "_shape_inference"):
        changed = {
            "_shape_inference": functools.partial(
                _infer_shapes, stage, stage._shape_inference, send, receive
            )
        }
    # A traced stage knows its shapes.
    else:
        changed = {}
    with setting_attributes(stage, changed):
        yield


@contextlib.contextmanager
def setting_attributes(stage: Any, changed: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of an object inside the ``with`` block; the script's values return afterwards."""
    own = vars(stage)
    before = {name: own[name] for name in changed if name in own}
    own.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del own[name]
        own.update(before)


def _infer_shapes(
    stage: Any,
    infer: Callable[..., Any],
    send: Send,
    receive: Receive,
    args: Any,
    kwargs: Any = None,
) -> Any:
    """Infer shapes as ``_shape_inference`` of torch 2.11 does, in which inference and messages are one function.

    Between stages of one rank, that function takes its input as an argument and returns its output. So all stages
    seem to be on this rank while it runs.
    """
    index, ranks = stage.stage_index, stage.stage_index_to_group_rank
    receives = not stage.is_first and ranks[index - 1] != stage.group_rank
    if receives and (args is None or len(args)):
        # Torch raises an error that explains the wrong arguments.
        return infer(args, kwargs)
    if receives:
        args = receive(index - 1)
    stage.stage_index_to_group_rank = dict.fromkeys(ranks, stage.group_rank)
    try:
        outputs = infer(args, kwargs)
    finally:
        stage.stage_index_to_group_rank = ranks
    if stage.is_last or ranks[index + 1] == stage.group_rank:
        return outputs
    send(outputs, index + 1)
    return ()


def connects_by_metadata(stage: Any) -> bool:
    """Return whether torch's messages with metadata connect the ranks of an NCCL group, as in 2.12 to 2.14."""
    return hasattr(stage, "_warmup_forward_vote")


def keep_metadata(stage: Any) -> Callable[[], None]:
    """Return a function that restores the metadata that a stage has now.

    Torch 2.11 infers only missing metadata. The function also drops the remains of a failed inference in torch 2.13.
    """
    own = vars(stage)
    known = {name: own[name] for name in ("inputs_meta", "_outputs_meta") if name in own}

    def restore() -> None:
        clean = getattr(stage, "_post_metadata_inference_cleanup", None)
        if clean is not None:
            clean()
        own.update(known)

    return restore


# --- schedules ---


def list_stages(schedule: Any) -> list[Any]:
    """Return this rank's stages of one of torch's schedules, in its order."""
    stages = getattr(schedule, "_stages", None)
    return [schedule._stage] if stages is None else list(stages)


def is_initialized(schedule: Any) -> bool:
    """Return whether torch has initialized the stages of a schedule for steps with a backward."""
    for way in getattr(schedule, "ways", (schedule,)):
        for name in _INITIALIZED:
            if not getattr(way, name, True):
                return False
    return True


def forget_initialization(schedule: Any) -> None:
    """Make torch initialize the stages of a schedule again."""
    for way in getattr(schedule, "ways", (schedule,)):
        vars(way).update((name, False) for name in _INITIALIZED if hasattr(way, name))


def initialize_stages(schedule: Any, args: Any, kwargs: Any, target: Any, loss_kwargs: Any) -> None:
    """Initialize the stages of a schedule with the first microbatch, as its own step does first."""
    has_many = hasattr(schedule, "_initialize_stages")
    initialize = schedule._initialize_stages if has_many else schedule._initialize_stage
    # Torch 2.11 takes no target.
    taken = len(inspect.signature(initialize).parameters)
    initialize(*(args, kwargs, target, loss_kwargs)[:taken])


def finalizes_gradients(schedule: Any) -> bool:
    """Return whether a call of ``schedule.step()`` reduces gradients of FSDP2, or leaves that to a later call."""
    return bool(getattr(schedule, "_finalize_gradients", True))


def defers_wait(schedule: Any) -> bool:
    """Return whether a schedule waits for a stage's reduction only before it starts the next one, or at its end."""
    return bool(getattr(schedule, "_defer_reduce_grad_wait", False))


def limits_sends(schedule: Any) -> bool:
    """Return whether the script limits the number of sends in flight."""
    return getattr(schedule, "_max_outstanding_sends", None) is not None
