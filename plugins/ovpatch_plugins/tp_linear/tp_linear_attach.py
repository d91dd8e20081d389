"""Takes over modules that ``parallelize_module`` has cut, and gives them back."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from ovpatch.hookspecs import note_failures
from ovpatch.overlap.comm.lifetimes import attached_values, find_owners
from ovpatch.overlap.tensor_parallel import layout, tp_group
from ovpatch.overlap.tensor_parallel.schedules import fused
from ovpatch_plugins.tp_linear.linear_plan import Style
from ovpatch_plugins.tp_linear.parallel_linear import STATE, Linear, TPLinear, agree_on_terms
from ovpatch_plugins.tp_linear.shared_all_gather import SharedAllGather, is_gather
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

_OURS = ("_prepare_input_fn", "_prepare_output_fn", "_partition_linear_fn")


def find_unsupported_reason(style: Any, linear: nn.Linear, dimensions: int) -> str:
    """Return why stock computes a linear that a style has cut over a mesh of some dimensions, or ""."""
    stock = ColwiseParallel if isinstance(style, ColwiseParallel) else RowwiseParallel
    if type(linear) is not nn.Linear:
        return "a class of its own may have a forward of its own"
    if "forward" in vars(linear):
        return "its forward was replaced by another function"
    if any(getattr(type(style), name) is not getattr(stock, name) for name in _OURS):
        return f"{type(style).__name__} does not do what {stock.__name__} does"
    if dimensions != 1:
        return f"the mesh has {dimensions} dimensions"
    return ""


Hooks = dict[int, Any]

_RemovedHooks = tuple[Hooks, list[int]]
"""Hooks that were removed from a module, and the order of all its hooks before."""


# What is kept for the modules that the feature has taken over. Stock works first: it cuts the weights, and registers
# hooks. Then these hooks are removed, and their places among the module's hooks are kept; the module's class changes.
# Both are undone when the feature goes off.
_REMOVED: Final = "tp_linear: removed hooks"  # of a linear: its forward pre-hooks and forward hooks
_GATHERS: Final = "tp_linear: gathers"  # of a module with a SharedAllGather hook

LEFT: Final[dict[str, str]] = {}  # why stock computes a linear, by the name of its class


def apply_to_linear(
    apply: Callable[..., nn.Module], style: Style, module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """Call ``ColwiseParallel._apply`` or ``RowwiseParallel._apply``, and take the module over."""
    ours = type(module) is nn.Linear and mesh.ndim == 1 and mesh.get_coordinate() is not None
    if ours:
        with note_failures("tp_linear", f"cutting a linear by {type(style).__name__}"):
            agree_on_terms(mesh)
    before = {*module._forward_pre_hooks, *module._forward_hooks}
    made = apply(style, module, mesh)
    if made is module and isinstance(module, nn.Linear):
        parallel = take_over(module, style, mesh, lambda key: key not in before)
        if parallel is not None and ours:
            parallel.set_group(mesh.get_group())
    return made


def take_over(
    linear: nn.Linear, style: Style, mesh: DeviceMesh, ours: Callable[[int], bool]
) -> TPLinear | None:
    """Let the feature's operators compute a linear that a style has cut, unless it is unsupported.

    ``ours`` tells by key which of the linear's hooks are the style's. Returns how the linear is cut; None if stock
    computes it.
    """
    if reason := find_unsupported_reason(style, linear, mesh.ndim):
        LEFT[type(linear).__name__] = reason
        return None
    removed = (
        _remove_hooks(linear._forward_pre_hooks, ours),
        _remove_hooks(linear._forward_hooks, ours),
    )
    attached_values(linear)[_REMOVED] = removed
    parallel = TPLinear(isinstance(style, ColwiseParallel), mesh, style)
    object.__setattr__(linear, "_ovpatch_parallel", parallel)
    linear.__class__ = Linear
    COUNTERS.linears += 1
    return parallel


def apply_to_module(
    apply: Callable[..., nn.Module], style: PrepareModuleInput, module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """Call ``PrepareModuleInput._apply``, and take the gather over."""
    before = set(module._forward_pre_hooks)
    made = apply(style, module, mesh)
    if made is module:
        for key in [key for key in module._forward_pre_hooks if key not in before]:
            take_over_gather(module, key, style, mesh)
    return made


def take_over_gather(
    module: nn.Module, key: int, style: PrepareModuleInput, mesh: DeviceMesh
) -> None:
    """Let a module's gather, the style's forward pre-hook ``key``, compute the products of the linears that read it."""
    overridden = any(
        getattr(type(style), name) is not getattr(PrepareModuleInput, name)
        for name in ("_prepare_input_fn", "_prepare_input_kwarg_fn", "_prepare_input_arg")
    )
    # With several gathers, nothing tells which linear reads which. The gradient of a gathered tensor that is no DTensor
    # is, under stock, summed over the ranks by each linear.
    several = sum(is_gather(*pair) for pair in _layouts(style)) != 1
    if overridden or several or mesh.ndim != 1 or style.use_local_output:
        return
    module._forward_pre_hooks[key] = SharedAllGather(module._forward_pre_hooks[key], style, mesh)
    attached_values(module)[_GATHERS] = True
    COUNTERS.gathers += 1


def give_back_modules() -> None:
    """Turn off, and give all modules back to stock."""
    STATE.on = False
    for module, (pre, post) in find_owners(_REMOVED):
        if type(module) is not Linear:
            continue  # FSDP2 has derived a class from it; while the feature is off, its forward is stock's
        _restore_hooks(module._forward_pre_hooks, pre)
        _restore_hooks(module._forward_hooks, post)
        object.__setattr__(module, "__class__", nn.Linear)
        del module.__dict__["_ovpatch_parallel"]
        del attached_values(module)[_REMOVED]
    for module, _ in find_owners(_GATHERS):
        del attached_values(module)[_GATHERS]
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, SharedAllGather):
                module._forward_pre_hooks[key] = hook.stock
    LEFT.clear()
    layout.SPECS.clear()
    tp_group.drop_tp_groups()
    fused.drop_fused_support()


def _layouts(style: PrepareModuleInput) -> Iterator[tuple[Any, Any]]:
    yield from zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
    for name, given in style.input_kwarg_layouts.items():
        yield given, style.desired_input_kwarg_layouts.get(name)


def _remove_hooks(hooks: Hooks, ours: Callable[[int], bool]) -> _RemovedHooks:
    order = list(hooks)
    return {key: hooks.pop(key) for key in order if ours(key)}, order


def _restore_hooks(hooks: Hooks, removed: _RemovedHooks) -> None:
    """Restore hooks to their places; hooks that were registered meanwhile stay behind them, or in front of all."""
    back, before = removed
    now, later = {**hooks, **back}, list(hooks)
    first = next((i for i, key in enumerate(later) if key in before), 0)
    known = [key for key in before if key in now]
    order = [*later[:first], *known, *(key for key in later[first:] if key not in before)]
    hooks.clear()
    hooks.update({key: now[key] for key in order})


# Modules that were cut before ``ovpatch.apply()``: torch registers local functions as hooks, whose closures still hold
# the style and the mesh.


def recover_modules() -> list[str]:
    """Take over the modules that are cut already; return remarks on those that could not be."""
    remarks = []
    # Not isinstance, which asks objects for their __class__ and so runs foreign code.
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    for module in modules:
        state = vars(module)
        if (
            type(module) is nn.Linear
            and state.get("_distribute_module_applied")
            and not _recover_linear(module)
        ):
            remarks.append(
                "an nn.Linear was made parallel before ovpatch.apply(), in a way that cannot be "
                "recovered, and stays "
                "stock: move the line ovpatch.apply() above parallelize_module"
            )
        elif _is_cut_and_changed(module):
            remarks.append(
                "an nn.Linear was made parallel before ovpatch.apply() and is a "
                f"{type(module).__name__} now; it stays "
                "stock: move the line ovpatch.apply() above parallelize_module"
            )
        for key, hook in list(state.get("_forward_pre_hooks", {}).items()):
            style, mesh = (found := _closure(hook)).get("self"), found.get("device_mesh")
            if isinstance(style, PrepareModuleInput) and mesh is not None:
                take_over_gather(module, key, style, mesh)
    return list(dict.fromkeys(remarks))


def _is_cut_and_changed(module: nn.Module) -> bool:
    """Return whether a cut linear has got a class derived from nn.Linear since, as ``fully_shard`` makes one."""
    kind = type(module)
    return (
        kind is not Linear
        and nn.Linear in kind.__bases__
        and bool(vars(module).get("_distribute_module_applied"))
    )


def _recover_linear(linear: nn.Linear) -> bool:
    pre = {
        key: found
        for key, hook in linear._forward_pre_hooks.items()
        if "input_fn" in (found := _closure(hook))
    }
    post = {
        key: found
        for key, hook in linear._forward_hooks.items()
        if "output_fn" in (found := _closure(hook))
    }
    if len(pre) != 1 or len(post) != 1:
        return False
    (prepare,), (finish,) = pre.values(), post.values()
    style = _style(prepare["input_fn"], finish["output_fn"])
    if style is None:
        return False
    keys = {*pre, *post}
    take_over(linear, style, prepare["device_mesh"], lambda key: key in keys)
    return True


def _style(prepare: Any, finish: Any) -> Style | None:
    if not isinstance(prepare, functools.partial) or not isinstance(finish, functools.partial):
        return None
    for style in (ColwiseParallel, RowwiseParallel):
        if prepare.func is style._prepare_input_fn and finish.func is style._prepare_output_fn:
            (given, _), (handed_out, local) = prepare.args, finish.args
            return style(
                input_layouts=given[0], output_layouts=handed_out[0], use_local_output=local
            )
    return None


def _closure(hook: Any) -> dict[str, Any]:
    """Return the closure of a hook that torch's styles have registered, by name; empty for other hooks."""
    if not inspect.isfunction(hook) or not (hook.__module__ or "").startswith(
        "torch.distributed.tensor"
    ):
        return {}
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}
