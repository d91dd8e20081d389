"""A check of what a test changes in torch for good: patched attributes and global hooks.

A snapshot holds the objects themselves, so identity is compared and nothing in it can be garbage collected and have
its address reused. It looks only at modules that are already imported, and costs some ten microseconds.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

Snapshot = dict[str, dict[str, Any]]

# Owners that ovpatch patches or could patch by mistake; "module:Class" or "module".
_OWNERS: Final = (
    "torch.nn.parallel.distributed:DistributedDataParallel",
    "torch.nn.parallel.distributed",
    "torch.nn.parallel",
    "torch.nn.modules.module:Module",
    "torch.nn.modules.linear:Linear",
    "torch.nn.parameter:Parameter",
    "torch.optim.optimizer:Optimizer",
    "torch.amp.grad_scaler:GradScaler",
    "torch.nn.utils.clip_grad",
    "torch.nn.utils",
    "torch.distributed.distributed_c10d",
    "torch.distributed",
    "torch.distributed.tensor.parallel.style:ColwiseParallel",
    "torch.distributed.tensor.parallel.style:RowwiseParallel",
    "torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer",
    "torch.autograd.graph",
    "torch.autograd",
    "torch._tensor:Tensor",
    "torch",
)

# Dictionaries of official global hooks.
_HOOKS: Final = (
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_backward_pre_hooks"),
    ("torch.nn.modules.module", "_global_backward_hooks"),
    ("torch.nn.modules.module", "_global_buffer_registration_hooks"),
    ("torch.nn.modules.module", "_global_module_registration_hooks"),
    ("torch.nn.modules.module", "_global_parameter_registration_hooks"),
)

# Written by torch, Python or transformers (`smart_apply`) themselves while code runs.
_VOLATILE: Final = frozenset(
    {
        "_active_ddp_module",
        "smart_apply",
        "___needs_generation_tag_patch",
        "___has_generation_tag_patch",
    }
    | {"__annotations__", "__annotations_cache__", "__annotate_cache__", "__slotnames__"}
)


def snapshot() -> Snapshot:
    """Return the attributes of every owner that is imported, by its name."""
    taken: Snapshot = {}
    for name, owner in _owners():
        attributes = dict(vars(owner))
        # Modules also have caches and counters, which are no patches.
        if isinstance(owner, types.ModuleType):
            attributes = {key: value for key, value in attributes.items() if callable(value)}
        taken[name] = attributes
    for module, attribute in _HOOKS:
        hooks = getattr(sys.modules.get(module), attribute, None)
        if isinstance(hooks, Mapping):
            taken[f"{module}.{attribute}"] = {str(key): value for key, value in hooks.items()}
    return taken


def leftovers(before: Snapshot, after: Snapshot) -> list[str]:
    """Return a sentence for each attribute that was changed, added or removed between two snapshots.

    An owner that was imported in between has no earlier state, so only ovpatch's own mark counts there.
    """
    found: list[str] = []
    for owner, now in after.items():
        then = before.get(owner)
        if then is None:
            found += [
                f"{owner}.{key} is still patched" for key, value in now.items() if _is_marked(value)
            ]
            continue
        for key in sorted((set(then) | set(now)) - _VOLATILE):
            if key not in now:
                found.append(f"{owner}.{key} was removed")
            elif key not in then:
                # Importing a submodule or a name on first use adds to a module; a class or a hook table never grows.
                if not _is_module(owner) or _is_marked(now[key]):
                    found.append(f"{owner}.{key} was added: {_describe(now[key])}")
            elif then[key] is not now[key] and not (
                _is_from_dynamo(now[key]) or _is_hooked_by_torch(then[key], now[key])
            ):
                found.append(
                    f"{owner}.{key} was {_describe(then[key])} and is now {_describe(now[key])}"
                )
    return found


def _is_hooked_by_torch(then: Any, now: Any) -> bool:
    """Return whether torch has wrapped a ``step`` for its profiler, as it does at a class's first instance."""
    return bool(getattr(now, "hooked", False)) and getattr(now, "__wrapped__", None) is then


def _owners() -> Iterator[tuple[str, Any]]:
    for path in _OWNERS:
        module_name, _, class_name = path.partition(":")
        module = sys.modules.get(module_name)
        owner = getattr(module, class_name, None) if class_name else module
        if owner is not None:
            yield path.replace(":", "."), owner


def _is_module(owner: str) -> bool:
    return owner in sys.modules


def _is_marked(value: Any) -> bool:
    # Static and class methods have the mark on their function.
    function = getattr(value, "__func__", value)
    return hasattr(function, "__ovpatch__")


def _is_from_dynamo(value: Any) -> bool:
    """Return whether torch itself stored the value: the compiler's import or first use wraps functions for good."""
    function = getattr(value, "__func__", value)
    file = getattr(getattr(function, "__code__", None), "co_filename", "").replace("\\", "/")
    return ("/torch/_dynamo/" in file or file.endswith("/torch/_compile.py")) and not _is_marked(
        value
    )


def _describe(value: Any) -> str:
    function = getattr(value, "__func__", value)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(value)[:80]
