"""The choice of blocks: it marks blocks of the models of optimizers, and wraps the forward of their classes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.backward_waits import BACKWARD_WAITS
from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch.overlap.comm.streams import hide_frames
from ovpatch.overlap.module_blocks import (
    Block,
    find_blocks,
    is_checkpoint_wrapper,
    list_class_names,
)
from ovpatch_plugins.recompute.forward_wrap import (
    BLOCK_MARK,
    BLOCK_NAME,
    Mark,
    WrappedForward,
    run_compiled,
)
from ovpatch_plugins.recompute.recomputation import (
    CHECKS,
    launch_inside,
    make_launch_before,
)
from ovpatch_plugins.recompute.recompute_options import AUTO, FULL, GRANULARITIES, NONE, split_names
from ovpatch_plugins.recompute.recompute_report import (
    COUNTERS,
    drop_remarks,
    note,
    note_fallback,
    note_model,
)

# The key of the mark of a patched block.
_PATCHED: Final = "recompute: patched"
_wrapped: dict[type[nn.Module], WrappedForward] = {}


# --- models ---


def wrap_optimizer_init(
    original: Callable[..., None], options: Mapping[str, Any]
) -> Callable[..., None]:
    """Wrap ``Optimizer.__init__``, because a script is going to train the model of an optimizer."""

    @functools.wraps(original)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _hide_from_dynamo()
        attach_models(self, options)

    return __init__


def attach_all(options: Mapping[str, Any]) -> None:
    """Attach to the models of existing optimizers, and fill the waits of other features."""
    CHECKS.when = options["check"]
    fill_backward_waits(options["ahead"])
    attach_living_models(options)


def attach_living_models(options: Mapping[str, Any]) -> None:
    """Attach to the models of existing optimizers, and note modules that have children or get some later."""
    objects = gc.get_objects()
    # isinstance would read the __class__ of objects, which runs foreign code.
    for module in [found for found in objects if issubclass(type(found), nn.Module)]:
        if vars(module).get("_modules"):
            note_parent(module)
    _hook_handles.append(register_module_module_registration_hook(_note_registered))
    for optimizer in [found for found in objects if issubclass(type(found), Optimizer)]:
        if hasattr(optimizer, "param_groups"):
            attach_models(optimizer, options)


# A script may make an optimizer for each parameter, so no optimizer may search all objects for its model. Torch calls a
# hook for each module that gets a child, and copied or loaded modules pass through ``__setstate__``. The outermost of
# these parents that have parameters of an optimizer are its models. The parameters of a model are searched once, for
# the first of its optimizers. The model remembers them by id: a weak reference would make torch.utils.swap_tensors
# refuse the parameter.

# The keys of modules that have children, and of the parameters that a model had when it was found.
_PARENT: Final = "recompute: parent"
_SEEN: Final = "recompute: seen"
_hook_handles: list[RemovableHandle] = []


def note_parent(module: nn.Module) -> None:
    """Note a module that has children and so may be a model."""
    attached_values(module)[_PARENT] = True


def _note_registered(module: nn.Module, _name: str, _child: nn.Module | None) -> None:
    # If a forward makes modules, Dynamo traces this hook. Such modules have no optimizer, and the attached values
    # would break the graph.
    if not torch.compiler.is_compiling():
        note_parent(module)


@functools.cache
def _hide_from_dynamo() -> None:
    """Hide functions from Dynamo where Dynamo does not trace the caller; torch's optimizers have imported Dynamo."""
    hide_frames(_note_registered, run_compiled)


def wrap_setstate(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Module.__setstate__``, by which copied and loaded modules get their children without the hook."""

    @functools.wraps(original)
    def __setstate__(self: nn.Module, state: Any) -> None:
        original(self, state)
        if vars(self).get("_modules"):
            note_parent(self)

    return __setstate__


def attach_models(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Attach to the blocks of the models that an optimizer trains, by the options."""
    if options["granularity"] == NONE:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    seen = {
        id(param)
        for model, ids in find_owners(_SEEN)
        for param in model.parameters()
        if id(param) in ids
    }
    # Torch registers only Parameters with modules.
    wanted = {id(param) for param in params if isinstance(param, nn.Parameter)} - seen
    for model in _find_models(wanted) if wanted else ():
        attached_values(model)[_SEEN] = frozenset(map(id, model.parameters()))
        patterns = split_names(options["blocks"])
        found = find_blocks(model, patterns)
        if found:
            attach_blocks(model, found, options["granularity"], split_names(options["keep"]))
        elif patterns:
            note(f"{type(model).__name__} has no module that blocks={options['blocks']} names")
        else:
            note(
                f"{type(model).__name__} has no list of blocks of one class: name its blocks with "
                "OVPATCH_RECOMPUTE_BLOCKS, as model.layers.* or DecoderLayer"
            )


def _find_models(params: set[int]) -> list[nn.Module]:
    """Return the outermost modules with some of these parameters, by id."""
    modules = [module for module, _ in find_owners(_PARENT)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    outer = [module for module in modules if id(module) not in inner]
    return [module for module in outer if any(id(param) in params for param in module.parameters())]


def recompute(
    model: nn.Module, granularity: str = FULL, blocks: str = "", keep: str = ""
) -> list[str]:
    """Compute the blocks of a model again in backward instead of keeping what their forwards save.

    Call it in scripts that choose by model. With ``ovpatch.apply("recompute")`` the models of all optimizers
    are recomputed.

    Args:
        model: The model.
        granularity: ``full``, ``selective``, or ``none``, which detaches from the blocks.
        blocks: Names or classes of its modules, as in the option ``blocks``.
        keep: Further operators whose outputs ``selective`` keeps, as the option ``keep``.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: The granularity is unknown, or the model has no such blocks.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"ovpatch: granularity={granularity!r} is unknown. Give one of {', '.join(GRANULARITIES)}."
        )
    found = find_blocks(model, split_names(blocks))
    if not found:
        what = (
            f"no module that blocks={blocks!r} names"
            if blocks
            else "no list of blocks of one class"
        )
        raise ValueError(
            f"ovpatch: {type(model).__name__} has {what}. Give names as model.named_modules() shows "
            "them, with * for a part between dots, or a class, as in recompute(model, "
            'blocks="model.layers.*").'
        )
    if granularity == NONE:
        for block in found:
            _detach(block.module)
        _restore_classes({_find_owner(block) for block, _ in find_owners(_PATCHED)})
        return [block.name for block in found]
    return attach_blocks(model, found, granularity, split_names(keep))


# --- patched blocks ---


def attach_blocks(
    model: nn.Module, blocks: Sequence[Block], granularity: str, keep: Sequence[str]
) -> list[str]:
    """Recompute blocks from their next forward on; return the names of the blocks that can be recomputed."""
    _hide_from_dynamo()
    attached = []
    for block in blocks:
        reason = find_fallback_reason(block.module)
        if reason:
            if _PATCHED not in attached_values(block.module):
                note_fallback(reason)
            continue
        owner = _find_owner(block.module)
        if owner not in _wrapped:
            _wrapped[owner] = WrappedForward(owner)
        mark: Mark = granularity, tuple(keep), f"{owner.__module__}.{owner.__qualname__}"
        block.module.__dict__[BLOCK_MARK] = mark
        block.module.__dict__[BLOCK_NAME] = block.name
        COUNTERS.blocks += _PATCHED not in attached_values(block.module)
        attached_values(block.module)[_PATCHED] = True
        attached.append(block)
    if attached:
        classes = ", ".join(list_class_names(attached))
        note_model(
            f"{type(model).__name__}: {len(attached)} blocks of class {classes} are recomputed "
            f"({granularity}), {attached[0].name} to {attached[-1].name}"
        )
        if keep and granularity == FULL:
            note(f"keep={','.join(keep)} has no effect: granularity=full keeps no outputs")
    return [block.name for block in attached]


def find_fallback_reason(module: nn.Module) -> str:
    """Return the reason for which torch runs a block, or "" if the block can be recomputed."""
    if is_checkpoint_wrapper(module):
        return "the script checkpoints them"
    if isinstance(module, torch.jit.ScriptModule):
        return "they are ScriptModules"
    if "forward" in vars(module):
        return "their forward was replaced by another function"
    if _find_owner(module) is nn.Module:
        return f"{type(module).__name__} has no forward"
    return ""


def _find_owner(module: nn.Module) -> type[nn.Module]:
    """Return the class that defines a module's forward."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def detach_all() -> None:
    """Detach from all blocks, and restore their classes."""
    for block, _ in find_owners(_PATCHED):
        _detach(block)
    _restore_classes(set())
    while _hook_handles:
        _hook_handles.pop().remove()
    for name in (_PARENT, _SEEN):
        for owner, _ in find_owners(name):
            attached_values(owner).pop(name, None)
    CHECKS.when = AUTO
    drop_remarks()
    BACKWARD_WAITS.clear()


def _restore_classes(used: set[type[nn.Module]]) -> None:
    """Restore the forwards of all classes except the used ones."""
    for owner in set(_wrapped) - used:
        _wrapped.pop(owner).restore()


def _detach(block: nn.Module) -> None:
    for attribute in (BLOCK_MARK, BLOCK_NAME):
        vars(block).pop(attribute, None)
    attached_values(block).pop(_PATCHED, None)


def fill_backward_waits(ahead: int) -> None:
    """Let features that communicate in backward launch recomputations before they wait."""
    if ahead:
        BACKWARD_WAITS.fill(launch_inside, make_launch_before(ahead))
