"""Which blocks are recomputed: marks those of the models of optimizers, and wraps the forward of their classes."""

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
from ovpatch_plugins.recompute.forward_wrap import BLOCK_MARK, BLOCK_NAME, Mark, WrappedForward
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
    note_left,
    note_model,
)

_TAKEN: Final = "recompute: taken over"  # of a block
_wrapped: dict[type[nn.Module], WrappedForward] = {}


# --- models ---


def wrap_optimizer_init(
    original: Callable[..., None], options: Mapping[str, Any]
) -> Callable[..., None]:
    """Wrap ``Optimizer.__init__``: the model of an optimizer is one that is going to be trained."""

    @functools.wraps(original)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _hide_hook()
        take_over_models(self, options)

    return __init__


def attach_all(options: Mapping[str, Any]) -> None:
    """Attach to the models of the optimizers that exist, and fill the waits of other features."""
    CHECKS.when = options["check"]
    fill_backward_waits(options["ahead"])
    take_over_living_models(options)


def take_over_living_models(options: Mapping[str, Any]) -> None:
    """Take over the models of optimizers that exist already, and note the modules that will be made."""
    objects = gc.get_objects()
    # Not isinstance, which asks objects for their __class__ and so runs foreign code.
    for module in [found for found in objects if issubclass(type(found), nn.Module)]:
        if vars(module).get("_modules"):
            note_parent(module)
    _hook_handles.append(register_module_module_registration_hook(_note_registered))
    for optimizer in [found for found in objects if issubclass(type(found), Optimizer)]:
        if hasattr(optimizer, "param_groups"):
            take_over_models(optimizer, options)


# A script may make an optimizer for each parameter, so none of them may look for its
# model among all objects. Torch calls a hook for each module that gets a child, and modules that are copied or loaded
# pass ``__setstate__``. Of these parents the outermost ones with parameters of an optimizer are its models. The
# parameters of a model are looked through once, for the first of its optimizers.

# Keys of modules that have children, and of parameters whose model was found.
_PARENT: Final = "recompute: parent"
_SEEN: Final = "recompute: seen"
_hook_handles: list[RemovableHandle] = []


def note_parent(module: nn.Module) -> None:
    """Note a module that has children, and so may be a model."""
    attached_values(module)[_PARENT] = True


def _note_registered(module: nn.Module, _name: str, _child: nn.Module | None) -> None:
    # Dynamo traces this hook if a forward makes modules. Such modules have no optimizer, and a look at what is kept for
    # them would break the graph.
    if not torch.compiler.is_compiling():
        note_parent(module)


@functools.cache
def _hide_hook() -> None:
    """Have Dynamo leave the hook alone where it does not trace the caller; torch's optimizers have imported Dynamo."""
    hide_frames(_note_registered)


def wrap_setstate(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Module.__setstate__``: copied and loaded modules get their children without the hook."""

    @functools.wraps(original)
    def __setstate__(self: nn.Module, state: Any) -> None:
        original(self, state)
        if vars(self).get("_modules"):
            note_parent(self)

    return __setstate__


def take_over_models(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Take over the blocks of the models that an optimizer trains, as far as its options say."""
    if options["granularity"] == NONE:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Torch registers only Parameters with modules.
    wanted = {
        id(param)
        for param in params
        if isinstance(param, nn.Parameter) and _SEEN not in attached_values(param)
    }
    for model in _find_models(wanted) if wanted else ():
        for param in model.parameters():
            attached_values(param)[_SEEN] = True
        patterns = split_names(options["blocks"])
        found = find_blocks(model, patterns)
        if found:
            take_over(model, found, options["granularity"], split_names(options["keep"]))
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

    For scripts that choose by model; with ``ovpatch.apply("recompute")`` the models of all optimizers are.

    Args:
        model: The model.
        granularity: ``full``, ``selective``, or ``none``, which gives its blocks back.
        blocks: Which of its modules, as the option ``blocks``.
        keep: Further operators whose outputs ``selective`` keeps, as the option ``keep``.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: The granularity is unknown, or the model has no such blocks.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity={granularity!r} is none of {', '.join(GRANULARITIES)}. Give one of these."
        )
    found = find_blocks(model, split_names(blocks))
    if not found:
        what = (
            f"no module that blocks={blocks!r} names"
            if blocks
            else "no list of blocks of one class"
        )
        raise ValueError(
            f"{type(model).__name__} has {what}. Give names as model.named_modules() shows them, "
            "with * for a part "
            'between dots, or a class, as in recompute(model, blocks="model.layers.*").'
        )
    if granularity == NONE:
        for block in found:
            _give_back(block.module)
        _restore_classes({_find_owner(block) for block, _ in find_owners(_TAKEN)})
        return [block.name for block in found]
    return take_over(model, found, granularity, split_names(keep))


# --- blocks that are taken over ---


def take_over(
    model: nn.Module, blocks: Sequence[Block], granularity: str, keep: Sequence[str]
) -> list[str]:
    """Recompute blocks from their next forward on; returns the names of those that can be."""
    taken = []
    for block in blocks:
        reason = find_reason_against(block.module)
        if reason:
            if _TAKEN not in attached_values(block.module):
                note_left(reason)
            continue
        owner = _find_owner(block.module)
        if owner not in _wrapped:
            _wrapped[owner] = WrappedForward(owner)
        mark: Mark = granularity, tuple(keep), f"{owner.__module__}.{owner.__qualname__}"
        block.module.__dict__[BLOCK_MARK], block.module.__dict__[BLOCK_NAME] = mark, block.name
        COUNTERS.blocks += _TAKEN not in attached_values(block.module)
        attached_values(block.module)[_TAKEN] = True
        taken.append(block)
    if taken:
        classes = ", ".join(list_class_names(taken))
        note_model(
            f"{type(model).__name__}: {len(taken)} blocks of class {classes} are recomputed "
            f"({granularity}), "
            f"{taken[0].name} to {taken[-1].name}"
        )
    return [block.name for block in taken]


def find_reason_against(module: nn.Module) -> str:
    """Return why a block is left to stock, or ""."""
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
    """Return the class that has a module's forward."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def give_back_all() -> None:
    """Give all blocks and their classes back to stock."""
    for block, _ in find_owners(_TAKEN):
        _give_back(block)
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
    """Restore the forwards of all classes but those used."""
    for owner in set(_wrapped) - used:
        _wrapped.pop(owner).restore()


def _give_back(block: nn.Module) -> None:
    for attribute in (BLOCK_MARK, BLOCK_NAME):
        vars(block).pop(attribute, None)
    attached_values(block).pop(_TAKEN, None)


def fill_backward_waits(ahead: int) -> None:
    """Have features that communicate in backward launch recomputations before they wait."""
    if ahead:
        BACKWARD_WAITS.fill(launch_inside, make_launch_before(ahead))
