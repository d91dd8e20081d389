"""The blocks of a model: found by name, by class, or as the members of its lists of modules of one class."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from torch import nn

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
    module: nn.Module,
    path: tuple[str, ...],
    patterns: Sequence[str],
    found: list[Block],
    seen: set[int],
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
                found.append(Block(".".join(inner), unwrap_module(child)))
        else:
            _walk(child, inner, patterns, found, seen)


def _list_members(module: nn.Module) -> set[str]:
    """Return the names of a list's members, if these are blocks.

    Members without parameters are none: a pipeline's stage has such in the places of other stages' blocks.
    """
    if not isinstance(module, _LISTS) or len(module) < 2:
        return set()
    children = {
        key: unwrap_module(child) for key, child in module.named_children() if _has_params(child)
    }
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
    name = type(unwrap_module(module)).__name__
    return (
        name.removeprefix("FSDP") if name.startswith("FSDP") else name
    )  # fully_shard derives FSDPBlock from Block


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile``'s and FSDP's wrappers; a checkpoint's wrapper stays."""
    inner = next(
        (module._modules.get(key) for key in _WRAPPERS[:2] if module._modules.get(key) is not None),
        None,
    )
    return module if inner is None else unwrap_module(inner)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return whether a module checkpoints the one inside of it."""
    return any(cls.__name__ == _CHECKPOINT_WRAPPER for cls in type(module).__mro__)


def list_class_names(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the names of the blocks' classes, each once."""
    yield from dict.fromkeys(_class_name(block.module) for block in blocks)
