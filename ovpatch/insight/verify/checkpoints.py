"""What is in a checkpoint: keys, shapes and dtypes of whatever a script hands over to be saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch.insight.verify.values import Kept, text
from ovpatch.patching import PatchManager

Save = Callable[..., Any]


def contents(saved: Any) -> dict[str, Kept]:
    """Return what stands under each key of a nested object, for example ``{"model.weight": "float32 [3, 4]"}``.

    Args:
        saved: What a script saves. Of a whole module it is the state_dict.
    """
    return {name or "(itself)": text(kind) for name, kind in _walk(saved, "", ())}


def _walk(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    children = _children(value)
    if children is None or id(value) in above:
        yield name, _kind(value)
        return
    if not children:
        yield name, f"empty {type(value).__name__}"
    for key, child in children:
        yield from _walk(child, f"{name}.{key}" if name else str(key), (*above, id(value)))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else None


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


#: What saves, with the name of its first argument.
_SAVING: Final = {
    "torch.save": "obj",
    "torch.distributed.checkpoint.save": "state_dict",
    "safetensors.torch.save_file": "tensors",
}


def watch(patches: PatchManager, saved: Callable[[str, dict[str, Kept]], None]) -> None:
    """Declare the patches that show what is saved.

    Args:
        patches: Where they are declared. Libraries that are not imported yet are patched when they are.
        saved: Called with the file's name and what is in it, after it was saved.
    """
    for target, first in _SAVING.items():
        wrap = partial(_wrap, first=first, saved=saved)
        patches.register_patch(target, wrap=wrap, optional=True, why="what the script saves is compared")


def _wrap(original: Save, first: str, saved: Callable[[str, dict[str, Kept]], None]) -> Save:
    @torch._disable_dynamo
    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        saved(_file(args, kwargs), contents(args[0] if args else kwargs[first]))
        return result

    return save


def _file(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the file, without the folder, which may be another in each run."""
    candidates = [kwargs[key] for key in ("f", "filename", "checkpoint_id") if key in kwargs] + list(args[1:2])
    file = candidates[0] if candidates else None
    path = getattr(file, "name", file)
    return Path(os.fspath(path)).name if isinstance(path, (str, os.PathLike)) else f"a {type(file).__name__}"
