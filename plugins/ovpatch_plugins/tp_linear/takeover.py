"""Taking over modules that ``parallelize_module`` has made parallel, and giving them back.

[Note: hooks aside] Stock does its own work first: it cuts the weights, and registers hooks. Then the hooks are put
aside, with their places among the module's hooks, and the module's class changes; both are undone when the feature
goes off.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from ovpatch_plugins.tp_linear import fused_support, layout, tp_group
from ovpatch_plugins.tp_linear.module import Linear
from ovpatch_plugins.tp_linear.report import COUNTERS
from ovpatch_plugins.tp_linear.shared_all_gather import SharedAllGather, gathers
from ovpatch_plugins.tp_linear.tp_linear import Style, TPLinear, agree_on_terms

_OURS = ("_prepare_input_fn", "_prepare_output_fn", "_partition_linear_fn")


def objection(style: Any, linear: nn.Linear, dimensions: int) -> str:
    """Return why a linear that a style made parallel is left to stock, or "".

    Args:
        style: The style.
        linear: The linear.
        dimensions: Of the mesh.
    """
    from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

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


class _Aside(NamedTuple):
    """Hooks that were put aside, and the order of all hooks before."""

    hooks: Hooks
    order: list[int]


_taken: weakref.WeakKeyDictionary[nn.Module, tuple[_Aside, _Aside]] = weakref.WeakKeyDictionary()
_gathers: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
_left: dict[str, str] = {}


def apply_to_linear(apply: Callable[..., nn.Module], style: Style, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Do what ``ColwiseParallel._apply`` or ``RowwiseParallel._apply`` does, and take the module over."""
    ours = type(module) is nn.Linear and mesh.ndim == 1 and mesh.get_coordinate() is not None
    if ours:
        agree_on_terms(mesh.get_group())
    before = {*module._forward_pre_hooks, *module._forward_hooks}
    made = apply(style, module, mesh)
    if made is module and isinstance(module, nn.Linear):
        parallel = take_over(module, style, mesh, lambda key: key not in before)
        if parallel is not None and ours:
            parallel.has_agreed(mesh.get_group())
    return made


def take_over(linear: nn.Linear, style: Style, mesh: DeviceMesh, ours: Callable[[int], bool]) -> TPLinear | None:
    """Make a linear compute by our operators, unless something speaks against it; return what it knows then.

    Args:
        linear: Cut already.
        style: The style that cut it.
        mesh: Over which.
        ours: Tells which of its hooks, by key, are the style's.
    """
    if reason := objection(style, linear, mesh.ndim):
        _left[type(linear).__name__] = reason
        return None
    _taken[linear] = _put_aside(linear._forward_pre_hooks, ours), _put_aside(linear._forward_hooks, ours)
    parallel = TPLinear(isinstance(style, ColwiseParallel), mesh, style)
    object.__setattr__(linear, "_ovpatch_parallel", parallel)
    linear.__class__ = Linear
    COUNTERS.linears += 1
    return parallel


def apply_to_module(
    apply: Callable[..., nn.Module], style: PrepareModuleInput, module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """Do what ``PrepareModuleInput._apply`` does, and take the gather over."""
    before = set(module._forward_pre_hooks)
    made = apply(style, module, mesh)
    if made is module:
        for key in [key for key in module._forward_pre_hooks if key not in before]:
            take_over_gather(module, key, style, mesh)
    return made


def take_over_gather(module: nn.Module, key: int, style: PrepareModuleInput, mesh: DeviceMesh) -> None:
    """Let a module's gather compute the products of the linears that read it.

    Args:
        module: The module.
        key: Of the forward pre-hook that gathers.
        style: The style that registered it.
        mesh: Over which it gathers.
    """
    of_its_own = any(
        getattr(type(style), name) is not getattr(PrepareModuleInput, name)
        for name in ("_prepare_input_fn", "_prepare_input_kwarg_fn", "_prepare_input_arg")
    )
    # With several gathers it cannot be told which linear reads which. A gathered tensor that is no DTensor has, under
    # stock, a gradient that each linear adds up over the ranks.
    several = sum(gathers(*pair) for pair in _layouts(style)) != 1
    if of_its_own or several or mesh.ndim != 1 or style.use_local_output:
        return
    module._forward_pre_hooks[key] = SharedAllGather(module._forward_pre_hooks[key], style, mesh)
    _gathers[module] = None
    COUNTERS.gathers += 1


def give_all_back() -> None:
    """Make all modules stock's again."""
    for module, (pre, post) in list(_taken.items()):
        if type(module) is not Linear:
            continue  # FSDP2 has derived a class from it; its forward does what stock does while the feature is off
        _put_back(module._forward_pre_hooks, pre)
        _put_back(module._forward_hooks, post)
        object.__setattr__(module, "__class__", nn.Linear)
        del module.__dict__["_ovpatch_parallel"]
        del _taken[module]
    for module in _gathers:
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, SharedAllGather):
                module._forward_pre_hooks[key] = hook.stock
    _gathers.clear()
    _left.clear()
    layout.forget()
    tp_group.forget()
    fused_support.forget()


def left_alone() -> Mapping[str, str]:
    """Return why linears were left to stock, by the name of their class."""
    return dict(_left)


def _layouts(style: PrepareModuleInput) -> Iterator[tuple[Any, Any]]:
    yield from zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
    for name, given in style.input_kwarg_layouts.items():
        yield given, style.desired_input_kwarg_layouts.get(name)


def _put_aside(hooks: Hooks, ours: Callable[[int], bool]) -> _Aside:
    order = list(hooks)
    return _Aside({key: hooks.pop(key) for key in order if ours(key)}, order)


def _put_back(hooks: Hooks, aside: _Aside) -> None:
    """Put hooks back where they were; what was registered meanwhile comes behind, or in front if it was put there."""
    now = {**hooks, **aside.hooks}
    later = list(hooks)
    first = next((i for i, key in enumerate(later) if key in aside.order), 0)
    known = [key for key in aside.order if key in now]
    order = [*later[:first], *known, *(key for key in later[first:] if key not in aside.order)]
    hooks.clear()
    hooks.update({key: now[key] for key in order})


# Modules that were made parallel before ``ovpatch.apply()``.
#
# Their hooks still know the styles: torch registers local functions, whose closures hold them.

_STYLES: tuple[type[Style], ...] = (ColwiseParallel, RowwiseParallel)


def recover() -> list[str]:
    """Take over what is parallel already; return remarks on what could not be."""
    if not dist.is_initialized():
        return []  # nothing can have been made parallel; spares walking all objects
    remarks = []
    # Not isinstance, which asks objects for their __class__ and so runs foreign code.
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    for module in modules:
        state = vars(module)
        if type(module) is nn.Linear and state.get("_distribute_module_applied") and not _recover_linear(module):
            remarks.append(
                "an nn.Linear was made parallel before ovpatch.apply(), in a way that cannot be recovered, and stays "
                "stock: move the line ovpatch.apply() above parallelize_module"
            )
        elif _is_cut_and_changed(module):
            remarks.append(
                f"an nn.Linear was made parallel before ovpatch.apply() and is a {type(module).__name__} now; it stays "
                "stock: move the line ovpatch.apply() above parallelize_module"
            )
        for key, hook in list(state.get("_forward_pre_hooks", {}).items()):
            style, mesh = (found := _closure(hook)).get("self"), found.get("device_mesh")
            if isinstance(style, PrepareModuleInput) and mesh is not None:
                take_over_gather(module, key, style, mesh)
    return list(dict.fromkeys(remarks))


def _is_cut_and_changed(module: nn.Module) -> bool:
    """Whether it is of a class that was made of nn.Linear after parallelize_module, as by fully_shard."""
    kind = type(module)
    return kind is not Linear and nn.Linear in kind.__bases__ and bool(vars(module).get("_distribute_module_applied"))


def _recover_linear(linear: nn.Linear) -> bool:
    pre = {key: found for key, hook in linear._forward_pre_hooks.items() if "input_fn" in (found := _closure(hook))}
    post = {key: found for key, hook in linear._forward_hooks.items() if "output_fn" in (found := _closure(hook))}
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
    for style in _STYLES:
        if prepare.func is style._prepare_input_fn and finish.func is style._prepare_output_fn:
            (given, _), (handed_out, local) = prepare.args, finish.args
            return style(input_layouts=given[0], output_layouts=handed_out[0], use_local_output=local)
    return None


def _closure(hook: Any) -> dict[str, Any]:
    """Return what a function of torch's styles has closed over."""
    if not inspect.isfunction(hook) or not (hook.__module__ or "").startswith("torch.distributed.tensor"):
        return {}
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}
