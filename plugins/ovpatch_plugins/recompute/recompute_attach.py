"""Which blocks are recomputed: finds them in models, marks them, and wraps the forward of their classes."""

from __future__ import annotations

import fnmatch
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch.overlap.comm.streams import BACKWARD_WAITS, hide_frames
from ovpatch_plugins.recompute.recomputation import (
    CHECKS,
    Recomputation,
    is_inside_block,
    launch_inside,
    make_launch_before,
)
from ovpatch_plugins.recompute.recompute_options import AUTO, FULL, GRANULARITIES, NONE, split_names
from ovpatch_plugins.recompute.recompute_report import COUNTERS, drop_remarks, note, note_left, note_model
from ovpatch_plugins.recompute.selective import make_compiled_contexts, make_contexts

_MARK: Final = "_ovpatch_recompute"
"""Attribute of a block: granularity, names of further operators to keep, and the class whose forward is wrapped for it.
Plain text, so that a pickled model loads without ovpatch. Graphs guard on it, so all blocks of a class have the same:
otherwise Dynamo would compile each block of a model by itself, and give up after eight."""

_NAME: Final = "_ovpatch_recompute_name"
"""Attribute of a block: its name in the model."""

_LAYER_FORWARD: Final = "forward_with_checkpointing"
"""Name of the forward that transformers gives to layers, in its code."""

Mark = tuple[str, tuple[str, ...], str]


class _WrappedForward:
    """The forward of a class while it is wrapped.

    Layers of transformers have a forward that checkpoints the model's own if it is told to, and only if their class has
    that very function. So the one inside of it is wrapped, in the cell from which it is read.

    Args:
        owner: The class.
    """

    def __init__(self, owner: type[nn.Module]) -> None:
        self._owner = owner
        self._stock: Callable[..., Any] = vars(owner)["forward"]
        self._cell = _find_cell(self._stock)
        if self._cell is not None:
            self._stock = self._cell.cell_contents
        self._wrapped = wrap_forward(self._stock, f"{owner.__module__}.{owner.__qualname__}")
        self._write(self._wrapped)

    def restore(self) -> None:
        """Give the class its own forward, unless ours was wrapped; without marks ours does nothing."""
        now = vars(self._owner).get("forward") if self._cell is None else self._cell.cell_contents
        if now is self._wrapped:
            self._write(self._stock)

    def _write(self, forward: Callable[..., Any]) -> None:
        if self._cell is None:
            self._owner.forward = forward
        else:
            self._cell.cell_contents = forward


def _find_cell(forward: Callable[..., Any]) -> Any:
    """Return the cell from which a layer of transformers reads the model's own forward, None for other forwards."""
    code = getattr(forward, "__code__", None)
    cells: Any = getattr(forward, "__closure__", None)
    if code is None or code.co_name != _LAYER_FORWARD or "forward" not in code.co_freevars:
        return None
    return cells[code.co_freevars.index("forward")]


_TAKEN: Final = "recompute: taken over"  # of a block
_wrapped: dict[type[nn.Module], _WrappedForward] = {}


# --- models ---


def wrap_optimizer_init(original: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
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
    wanted = {id(param) for param in params if isinstance(param, nn.Parameter) and _SEEN not in attached_values(param)}
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


def recompute(model: nn.Module, granularity: str = FULL, blocks: str = "", keep: str = "") -> list[str]:
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
        raise ValueError(f"granularity={granularity!r} is none of {', '.join(GRANULARITIES)}. Give one of these.")
    found = find_blocks(model, split_names(blocks))
    if not found:
        what = f"no module that blocks={blocks!r} names" if blocks else "no list of blocks of one class"
        raise ValueError(
            f"{type(model).__name__} has {what}. Give names as model.named_modules() shows them, with * for a part "
            'between dots, or a class, as in recompute(model, blocks="model.layers.*").'
        )
    if granularity == NONE:
        for block in found:
            _give_back(block.module)
        _restore_classes({_find_owner(block) for block, _ in find_owners(_TAKEN)})
        return [block.name for block in found]
    return take_over(model, found, granularity, split_names(keep))


# --- the blocks of a model: found by name, by class, or as the members of its lists of modules of one class ---

_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_LISTS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CHECKPOINT_WRAPPER: Final = "CheckpointWrapper"


class Block(NamedTuple):
    """A block and its name in the model, without wrappers."""

    name: str
    module: nn.Module


def find_blocks(model: nn.Module, patterns: Sequence[str]) -> list[Block]:
    """Return a model's blocks; of blocks inside of blocks, the outer ones.

    Args:
        model: The model.
        patterns: Names, with ``*`` for what is between two dots, or names of classes. None: the members of each list
            whose members are of one class and have modules of their own.
    """
    found: list[Block] = []
    _walk(model, (), patterns, found, set())
    return found


def _walk(
    module: nn.Module, path: tuple[str, ...], patterns: Sequence[str], found: list[Block], seen: set[int]
) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    members = set() if patterns else _list_members(module)
    for key, child in module.named_children():
        inner = path if key in _WRAPPERS or (key == "module" and not path) else (*path, key)
        if key in members or _matches(child, inner, patterns):
            if id(child) not in seen:
                seen.add(id(child))
                found.append(Block(".".join(inner), unwrap(child)))
        else:
            _walk(child, inner, patterns, found, seen)


def _list_members(module: nn.Module) -> set[str]:
    """Return the names of a list's members, if these are blocks.

    Members without parameters are none: a pipeline's stage has such in the places of other stages' blocks.
    """
    if not isinstance(module, _LISTS) or len(module) < 2:
        return set()
    children = {key: unwrap(child) for key, child in module.named_children() if _has_params(child)}
    is_one_class = len({type(child) for child in children.values()}) == 1
    return set(children) if is_one_class and _has_parts(next(iter(children.values()))) else set()


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_parts(module: nn.Module) -> bool:
    """Return whether a module is more than one layer: to recompute one layer saves nothing, for it keeps its input."""
    return next(module.children(), None) is not None and not isinstance(module, _LISTS)


def _matches(module: nn.Module, path: tuple[str, ...], patterns: Sequence[str]) -> bool:
    return _has_params(module) and any(
        _matches_name(path, pattern) or _class_name(module) == pattern for pattern in patterns
    )


def _matches_name(path: tuple[str, ...], pattern: str) -> bool:
    parts = pattern.split(".")
    return len(parts) == len(path) and all(map(fnmatch.fnmatchcase, path, parts))


def _class_name(module: nn.Module) -> str:
    name = type(unwrap(module)).__name__
    return name.removeprefix("FSDP") if name.startswith("FSDP") else name  # fully_shard derives FSDPBlock from Block


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile``'s and FSDP's wrappers; a checkpoint's wrapper stays."""
    inner = next((module._modules.get(key) for key in _WRAPPERS[:2] if module._modules.get(key) is not None), None)
    return module if inner is None else unwrap(inner)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return whether a module checkpoints the one inside of it."""
    return any(cls.__name__ == _CHECKPOINT_WRAPPER for cls in type(module).__mro__)


def list_class_names(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the names of the blocks' classes, each once."""
    yield from dict.fromkeys(_class_name(block.module) for block in blocks)


# --- blocks that are taken over ---


def take_over(model: nn.Module, blocks: Sequence[Block], granularity: str, keep: Sequence[str]) -> list[str]:
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
            _wrapped[owner] = _WrappedForward(owner)
        mark: Mark = granularity, tuple(keep), f"{owner.__module__}.{owner.__qualname__}"
        block.module.__dict__[_MARK], block.module.__dict__[_NAME] = mark, block.name
        COUNTERS.blocks += _TAKEN not in attached_values(block.module)
        attached_values(block.module)[_TAKEN] = True
        taken.append(block)
    if taken:
        classes = ", ".join(list_class_names(taken))
        note_model(
            f"{type(model).__name__}: {len(taken)} blocks of class {classes} are recomputed ({granularity}), "
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
    BACKWARD_WAITS.launch_inside = BACKWARD_WAITS.launch_before = None


def _restore_classes(used: set[type[nn.Module]]) -> None:
    """Restore the forwards of all classes but those used."""
    for owner in set(_wrapped) - used:
        _wrapped.pop(owner).restore()


def _give_back(block: nn.Module) -> None:
    for attribute in (_MARK, _NAME):
        vars(block).pop(attribute, None)
    attached_values(block).pop(_TAKEN, None)


def fill_backward_waits(ahead: int) -> None:
    """Have features that communicate in backward launch recomputations before they wait."""
    if ahead:
        BACKWARD_WAITS.launch_inside = launch_inside
        BACKWARD_WAITS.launch_before = make_launch_before(ahead)


# --- a forward ---


def wrap_forward(stock: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """Wrap the forward of a class whose name is ``owner``: for its marked instances, activations are not kept."""

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mark: Mark | None = self.__dict__.get(_MARK)
        if mark is None or mark[2] != owner or not torch.is_grad_enabled():
            return stock(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return _run_compiled(stock, self, mark, args, kwargs)
        if is_inside_block() or not _may_save():
            return stock(self, *args, **kwargs)
        if _is_checkpointed():
            COUNTERS.stock_calls += 1
            return stock(self, *args, **kwargs)
        modules = list(self.modules())
        if hooked := _find_hook(self, modules):
            COUNTERS.stock_calls += 1
            note(hooked)
            return stock(self, *args, **kwargs)
        call = Recomputation(self, self.__dict__[_NAME], modules, stock, args, kwargs, make_contexts(mark[0], mark[1]))
        return call.run(args, kwargs)

    forward.__ovpatch__ = True  # type: ignore[attr-defined]  # a mark of ours
    return forward


def _run_compiled(stock: Callable[..., Any], block: Any, mark: Mark, args: Any, kwargs: Any) -> Any:
    """Have the compiler recompute: it knows ``torch.utils.checkpoint``, and saves and orders in its own graph."""
    if getattr(block, "gradient_checkpointing", False) and block.training:  # transformers' own, around this forward
        return stock(block, *args, **kwargs)
    _count_compiled()
    more: dict[str, Any] = {}
    if mark[0] != FULL:
        more["context_fn"] = functools.partial(make_compiled_contexts, mark[1])
    return checkpoint(stock.__get__(block), *args, use_reentrant=False, **more, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # not typed in torch
def _count_compiled() -> int:
    COUNTERS.compiled_calls += 1
    return 0


def _find_hook(block: nn.Module, modules: Sequence[nn.Module]) -> str:
    """Return a remark on a hook inside of a block that a second forward would call twice, or "".

    Hooks of torch and of ovpatch belong to the computation: they gather parameters, and make weights or inputs.
    """
    own = [module for module in modules if module is not block and (module._forward_hooks or module._forward_pre_hooks)]
    for module in [torch.nn.modules.module, *own] if own or _has_global_hooks() else ():
        prefix = "" if isinstance(module, nn.Module) else "_global"
        for hooks in (getattr(module, f"{prefix}_forward_hooks"), getattr(module, f"{prefix}_forward_pre_hooks")):
            for hook in hooks.values():
                while isinstance(hook, functools.partial):
                    hook = hook.func
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if not home.startswith(("torch.", "ovpatch")):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    where = type(module).__name__ if prefix == "" else "all modules"
                    return (
                        f"blocks of class {type(block).__name__} keep their activations, because forward hook {name} "
                        f"of {where} would be called again: remove the hook before training to have them recomputed"
                    )
    return ""


def _has_global_hooks() -> bool:
    module: Any = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def _may_save() -> bool:
    """Return whether tensors for backward may be left out: not under torch.func and tracers, which refuse hooks."""
    autograd: Any = torch._C._autograd
    return (
        not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
        and bool(autograd._saved_tensors_hooks_is_enabled())
    )


def _is_checkpointed() -> bool:
    """Return whether the script checkpoints this call itself: torch's hooks are on top, or a backward recomputes."""
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__
