"""Attaches the feature to modules that ``parallelize_module`` has changed, and detaches it.

Stock PyTorch works first: it shards the weights, and registers hooks. Then the feature removes these hooks, remembers
their places among the module's hooks, and changes the module's class. It undoes both when it is turned off.
"""

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
from ovpatch.overlap.tensor_parallel.schedules import drop_schedule_support
from ovpatch_plugins.tp_linear.linear_plan import Style
from ovpatch_plugins.tp_linear.parallel_linear import STATE, Linear, TPLinear, agree_on_terms
from ovpatch_plugins.tp_linear.shared_all_gather import SharedAllGather, is_gather
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

_STYLE_FUNCTIONS = ("_prepare_input_fn", "_prepare_output_fn", "_partition_linear_fn")


def find_unsupported_reason(style: Any, linear: nn.Linear, mesh_dims: int) -> str:
    """Return the reason for which stock PyTorch must compute a sharded linear; "" if there is none."""
    stock = ColwiseParallel if isinstance(style, ColwiseParallel) else RowwiseParallel
    if type(linear) is not nn.Linear:
        return "its class may override forward"
    if "forward" in vars(linear):
        return "its forward was replaced by another function"
    if any(getattr(type(style), name) is not getattr(stock, name) for name in _STYLE_FUNCTIONS):
        return f"{type(style).__name__} does not do what {stock.__name__} does"
    if mesh_dims != 1:
        return f"the mesh has {mesh_dims} dimensions"
    return ""


Hooks = dict[int, Any]

_RemovedHooks = tuple[Hooks, list[int]]
"""Hooks that were removed from a module, and the former order of all its hooks."""


# The value of a linear: its removed forward pre-hooks and forward hooks.
_REMOVED_HOOKS: Final = "tp_linear: removed hooks"
# The value of a module with a SharedAllGather hook.
_GATHERS: Final = "tp_linear: gathers"

# The reasons for which stock PyTorch computes linears, by the name of their class.
STOCK_REASONS: Final[dict[str, str]] = {}


def apply_to_linear(
    apply: Callable[..., nn.Module], style: Style, module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """Call ``ColwiseParallel._apply`` or ``RowwiseParallel._apply``, and attach to the module."""
    # A rank outside of the mesh has no part in its groups.
    can_agree = type(module) is nn.Linear and mesh.ndim == 1 and mesh.get_coordinate() is not None
    if can_agree:
        with note_failures("tp_linear", f"sharding a linear by {type(style).__name__}"):
            agree_on_terms(mesh)
    old_keys = {*module._forward_pre_hooks, *module._forward_hooks}
    parallelized = apply(style, module, mesh)
    if parallelized is module and isinstance(module, nn.Linear):
        parallel = attach_to_linear(module, style, mesh, lambda key: key not in old_keys)
        if parallel is not None and can_agree:
            parallel.set_group(mesh.get_group())
    return parallelized


def attach_to_linear(
    linear: nn.Linear, style: Style, mesh: DeviceMesh, is_style_hook: Callable[[int], bool]
) -> TPLinear | None:
    """Make the feature's operators compute a linear that a style has sharded, unless it is unsupported.

    Args:
        linear: The linear.
        style: The style.
        mesh: The mesh.
        is_style_hook: Returns whether the style registered the linear's hook of a key.

    Returns:
        The computation of the linear; None if stock PyTorch computes it.
    """
    if reason := find_unsupported_reason(style, linear, mesh.ndim):
        STOCK_REASONS[type(linear).__name__] = reason
        return None
    removed = (
        _remove_hooks(linear._forward_pre_hooks, is_style_hook),
        _remove_hooks(linear._forward_hooks, is_style_hook),
    )
    attached_values(linear)[_REMOVED_HOOKS] = removed
    parallel = TPLinear(isinstance(style, ColwiseParallel), mesh, style)
    object.__setattr__(linear, "_ovpatch_parallel", parallel)
    linear.__class__ = Linear
    COUNTERS.linears += 1
    return parallel


def apply_to_module(
    apply: Callable[..., nn.Module], style: PrepareModuleInput, module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """Call ``PrepareModuleInput._apply``, and attach to its gather."""
    old_keys = set(module._forward_pre_hooks)
    parallelized = apply(style, module, mesh)
    if parallelized is module:
        for key in [key for key in module._forward_pre_hooks if key not in old_keys]:
            attach_to_gather(module, key, style, mesh)
    return parallelized


def attach_to_gather(
    module: nn.Module, key: int, style: PrepareModuleInput, mesh: DeviceMesh
) -> None:
    """Make a module's gather, the style's forward pre-hook ``key``, compute the GEMMs of the linears that read it."""
    overridden = any(
        getattr(type(style), name) is not getattr(PrepareModuleInput, name)
        for name in ("_prepare_input_fn", "_prepare_input_kwarg_fn", "_prepare_input_arg")
    )
    # With several gathers, the gather that a linear reads is unknown. If the gathered tensor is no DTensor, each linear
    # of stock PyTorch sums its input's gradient over the ranks itself, and one shared sum would differ.
    has_one_gather = sum(is_gather(*pair) for pair in _list_layouts(style)) == 1
    if overridden or not has_one_gather or mesh.ndim != 1 or style.use_local_output:
        return
    module._forward_pre_hooks[key] = SharedAllGather(module._forward_pre_hooks[key], style, mesh)
    attached_values(module)[_GATHERS] = True
    COUNTERS.gathers += 1


def detach_all() -> None:
    """Turn the feature off, and detach from all modules."""
    STATE.is_on = False
    for module, (pre, post) in find_owners(_REMOVED_HOOKS):
        # FSDP2 has derived a class from ours. While the feature is off, its forward computes as stock PyTorch.
        if type(module) is not Linear:
            continue
        _restore_hooks(module._forward_pre_hooks, pre)
        _restore_hooks(module._forward_hooks, post)
        object.__setattr__(module, "__class__", nn.Linear)
        del module.__dict__["_ovpatch_parallel"]
        del attached_values(module)[_REMOVED_HOOKS]
    for module, _ in find_owners(_GATHERS):
        del attached_values(module)[_GATHERS]
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, SharedAllGather):
                module._forward_pre_hooks[key] = hook.stock_hook
    STOCK_REASONS.clear()
    layout.SPECS.clear()
    tp_group.drop_tp_groups()
    drop_schedule_support()


def _list_layouts(style: PrepareModuleInput) -> Iterator[tuple[Any, Any]]:
    yield from zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
    for name, given in style.input_kwarg_layouts.items():
        yield given, style.desired_input_kwarg_layouts.get(name)


def _remove_hooks(hooks: Hooks, is_style_hook: Callable[[int], bool]) -> _RemovedHooks:
    order = list(hooks)
    return {key: hooks.pop(key) for key in order if is_style_hook(key)}, order


def _restore_hooks(hooks: Hooks, removed: _RemovedHooks) -> None:
    """Restore hooks to their places; newer hooks stay after them, or before all hooks."""
    removed_hooks, old_order = removed
    all_hooks, current_order = {**hooks, **removed_hooks}, list(hooks)
    first = next((i for i, key in enumerate(current_order) if key in old_order), 0)
    known = [key for key in old_order if key in all_hooks]
    order = [
        *current_order[:first],
        *known,
        *(key for key in current_order[first:] if key not in old_order),
    ]
    hooks.clear()
    hooks.update({key: all_hooks[key] for key in order})


# - Modules that were parallelized before `ovpatch.apply()`
#
# torch registers local functions as hooks. Their closures still have the style and the mesh.


def recover_modules() -> list[str]:
    """Attach to the modules that were parallelized before; return remarks on modules that could not be attached."""
    remarks = []
    # isinstance() would read the __class__ of objects, and so run foreign code.
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    for module in modules:
        state = vars(module)
        if (
            type(module) is nn.Linear
            and state.get("_distribute_module_applied")
            and not _recover_linear(module)
        ):
            remarks.append(
                "stock PyTorch computes an nn.Linear that was parallelized before ovpatch.apply() in a way that cannot "
                "be recovered: move the line ovpatch.apply() above parallelize_module"
            )
        elif _is_parallel_subclass(module):
            remarks.append(
                "stock PyTorch computes an nn.Linear that was parallelized before ovpatch.apply() and is now a "
                f"{type(module).__name__}: move the line ovpatch.apply() above parallelize_module"
            )
        for key, hook in list(state.get("_forward_pre_hooks", {}).items()):
            style, mesh = (found := _read_closure(hook)).get("self"), found.get("device_mesh")
            if isinstance(style, PrepareModuleInput) and mesh is not None:
                attach_to_gather(module, key, style, mesh)
    return list(dict.fromkeys(remarks))


def _is_parallel_subclass(module: nn.Module) -> bool:
    """Return whether a parallel linear now has a class derived from nn.Linear, as ``fully_shard`` makes one."""
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
        if "input_fn" in (found := _read_closure(hook))
    }
    post = {
        key: found
        for key, hook in linear._forward_hooks.items()
        if "output_fn" in (found := _read_closure(hook))
    }
    # With other numbers of hooks, the script has parallelized the linear twice, or not by a style.
    if len(pre) != 1 or len(post) != 1:
        return False
    (prepare,), (finish,) = pre.values(), post.values()
    style = _rebuild_style(prepare["input_fn"], finish["output_fn"])
    if style is None:
        return False
    keys = {*pre, *post}
    attach_to_linear(linear, style, prepare["device_mesh"], lambda key: key in keys)
    return True


def _rebuild_style(prepare: Any, finish: Any) -> Style | None:
    if not isinstance(prepare, functools.partial) or not isinstance(finish, functools.partial):
        return None
    for style in (ColwiseParallel, RowwiseParallel):
        if prepare.func is style._prepare_input_fn and finish.func is style._prepare_output_fn:
            (given, _), (returned, local) = prepare.args, finish.args
            return style(input_layouts=given[0], output_layouts=returned[0], use_local_output=local)
    return None


def _read_closure(hook: Any) -> dict[str, Any]:
    """Return the closure of a hook that torch's styles have registered, by name; empty for any other hook."""
    if not inspect.isfunction(hook) or not (hook.__module__ or "").startswith(
        "torch.distributed.tensor"
    ):
        return {}
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}
