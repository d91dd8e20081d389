"""Texts of the reducer's errors; each names what went wrong and ends with the remedy."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 10


def unfinished(names: Sequence[str]) -> str:
    """Say which parameters got no gradient. Begins as stock DDP's error does, which scripts look for."""
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"ovpatch: these parameters got no gradient in the last backward: {_listed(names)}. Make sure that all outputs "
        "of forward take part in the loss, or, if a forward may leave parameters out, pass find_unused_parameters=True "
        "to DistributedDataParallel."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def late(name: str) -> str:
    """Say that a parameter's gradient came after its bucket was reduced."""
    return (
        f"ovpatch: parameter '{name}' got a gradient after its bucket had been reduced: it is used only inside a "
        "reentrant checkpoint, where find_unused_parameters=True cannot see it. Use "
        "checkpoint(..., use_reentrant=False), or turn the feature off with OVPATCH_DDP=0."
    )


def late_declaration(name: str) -> str:
    """Say that contributions were declared for a parameter whose bucket was reduced without waiting for them."""
    return (
        f"ovpatch: contributions to parameter '{name}' were declared after its bucket had been reduced: it takes part "
        "in this backward for the first time, inside a module that works in chunks, where find_unused_parameters=True "
        "and static_graph=True cannot see it. Use all such modules in the first step, or set "
        "OVPATCH_DDP_OVERLAP_GRAD_REDUCE=0."
    )


def shortfall(names: Sequence[str]) -> str:
    """Say of which parameters fewer contributions were marked than were declared."""
    return (
        f"fewer contributions than declared were marked for {_listed(names)}: such gradients are reduced at the end of "
        "backward, without overlap. Have the module that declares them (expect_gradients) mark each, also those of "
        "empty chunks"
    )


def peer_lost_backward(steps: range) -> str:
    """Say that another rank's part is missing in this rank's gradients."""
    when = f"step {steps[0]}" if len(steps) == 1 else f"a step from {steps[0]} to {steps[-1]}"
    return (
        f"ovpatch: an exception ended the backward of {when} on another rank while this rank's went well, so the "
        "averaged gradients of that step lack a part. Restart from the last checkpoint, and let the script either "
        "skip a failed step on all ranks or end with the exception."
    )


LATE_ON_SOME_RANKS = (
    "A second backward through the outputs of one forward is reduced, too, and that takes all ranks in the same order. "
    "If only some are to run it, call the wrapped module itself (model.module(...)) there, or leave such gradients "
    "local on every rank, as stock DistributedDataParallel does, with OVPATCH_DDP_REDUCE_LATE_GRADIENTS=0."
)

STATIC_GRAPH_TOO_LATE = (
    "set_static_graph() should be called before training loop starts and after DistributedDataParallel is constructed."
)

STATIC_GRAPH_UNSYNCHRONISED = (
    "ovpatch: static_graph=True learns the graph from the first backward, which ran without gradient synchronisation. "
    "Leave no_sync() for the first backward, or leave static_graph=True out."
)


def inside_backward(model: str) -> str:
    """Say that the stock reducer was asked for while gradients are being reduced."""
    return (
        f"ovpatch: a backward that is still running reduces the gradients of {model}, which therefore cannot get its "
        "stock reducer back now. Call ovpatch.revert(), register_comm_hook() or join() between two steps."
    )


def needs_nccl(option: str, backend: str) -> str:
    """Say that an option cannot be had from the process group's backend."""
    return (
        f"ovpatch: option {option} of feature 'ddp' needs NCCL, and the gradients here are reduced by {backend}. Leave "
        f"OVPATCH_DDP_{option.upper()} and the argument of that name out, or set it to none."
    )
