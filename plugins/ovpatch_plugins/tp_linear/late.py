"""Modules that were made parallel before ``ovpatch.apply()``.

Their hooks still know the styles: torch registers local functions, whose closures hold them.
"""

from __future__ import annotations

import functools
import gc
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel.style import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from ovpatch_plugins.tp_linear.linear import Linear
from ovpatch_plugins.tp_linear.parallel import Style
from ovpatch_plugins.tp_linear.styles import take_over, take_over_gather

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
