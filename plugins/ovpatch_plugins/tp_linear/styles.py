"""Taking over modules that ``parallelize_module`` has made parallel, and giving them back.

[Note: hooks aside] Stock does its own work first: it cuts the weights, and registers hooks. Then the hooks are put
aside, with their places among the module's hooks, and the module's class changes; both are undone when the feature
goes off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ColwiseParallel, PrepareModuleInput

from ovpatch_plugins.tp_linear import agreed, dtensors, sharing, wires
from ovpatch_plugins.tp_linear.counters import COUNTERS
from ovpatch_plugins.tp_linear.linear import Linear
from ovpatch_plugins.tp_linear.parallel import Parallel, Style
from ovpatch_plugins.tp_linear.shared import SharedGather, gathers
from ovpatch_plugins.tp_linear.support import objection

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
        agreed.ensure(mesh.get_group(), torch.device(mesh.device_type))
    before = {*module._forward_pre_hooks, *module._forward_hooks}
    made = apply(style, module, mesh)
    if made is module and isinstance(module, nn.Linear):
        parallel = take_over(module, style, mesh, lambda key: key not in before)
        if parallel is not None and ours:
            parallel.has_agreed(mesh.get_group())
    return made


def take_over(linear: nn.Linear, style: Style, mesh: DeviceMesh, ours: Callable[[int], bool]) -> Parallel | None:
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
    parallel = Parallel(isinstance(style, ColwiseParallel), mesh, style)
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
    module._forward_pre_hooks[key] = SharedGather(module._forward_pre_hooks[key], style, mesh)
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
            if isinstance(hook, SharedGather):
                module._forward_pre_hooks[key] = hook.stock
    _gathers.clear()
    _left.clear()
    agreed.forget()
    dtensors.forget()
    wires.forget()
    sharing.forget()


def left_alone() -> Mapping[str, str]:
    """Return why linears were left to stock, by the name of their class."""
    return dict(_left)


def _layouts(style: PrepareModuleInput) -> Iterator[tuple[Any, Any]]:
    yield from zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
    for name, layout in style.input_kwarg_layouts.items():
        yield layout, style.desired_input_kwarg_layouts.get(name)


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
