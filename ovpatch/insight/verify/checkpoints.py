"""What is in a checkpoint: every tensor, and the types of all else, of the file where it can be read back.

[Note: the file counts] What a script hands over is not what is stored if something is patched into saving itself. So a
file is read again, tensor by tensor and without running any code of its own. Where that cannot be done (a buffer,
objects that ``weights_only`` refuses, tensors of several ranks, whose loading might wait for other ranks), the object
handed over is looked at, and the record says so: a file that only one of two runs can read back is a difference.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch.insight.verify.values import UNREAD, Kept, keep, text
from ovpatch.logs import logger
from ovpatch.patching import PatchManager

Save = Callable[..., Any]
Saved = Callable[[str, dict[str, Kept]], None]
Read = Callable[[str], dict[str, Kept]]

#: Key under which a record says what was looked at.
SOURCE: Final = "(what was looked at)"


def contents(saved: Any) -> dict[str, Kept]:
    """Return what stands under each key of a nested object: tensors by value, of all else the type.

    Args:
        saved: What a script saves. Of a whole module it is the state_dict.
    """
    return {name or "(itself)": kept for name, kept in _walk(saved, "", ())}


def _walk(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Kept]]:
    children = _children(value)
    if children is None or id(value) in above:
        yield name, _keep(value)
        return
    if not children:
        yield name, text(f"empty {type(value).__name__}")
    for key, child in children:
        yield from _walk(child, f"{name}.{key}" if name else str(key), (*above, id(value)))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else None


def _keep(value: Any) -> Kept:
    if not isinstance(value, Tensor):
        return text(type(value).__name__)
    kept = keep(value)
    return text(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}") if kept.form == UNREAD else kept


def _of_torch(path: str) -> dict[str, Kept]:
    mapped = zipfile.is_zipfile(path)  # torch's older format cannot be; else only what is looked at takes memory
    return contents(torch.load(path, map_location="cpu", mmap=mapped, weights_only=True))


def _of_safetensors(path: str) -> dict[str, Kept]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: _keep(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  # no mapping


#: What saves, with the name of its first argument and what reads its files.
_SAVING: Final[dict[str, tuple[str, Read | None]]] = {
    "torch.save": ("obj", _of_torch),
    "torch.distributed.checkpoint.save": ("state_dict", None),
    "safetensors.torch.save_file": ("tensors", _of_safetensors),
}


def watch(patches: PatchManager, saved: Saved) -> None:
    """Declare the patches that show what is saved.

    Args:
        patches: Where they are declared. Libraries that are not imported yet are patched when they are.
        saved: Called with the file's name and what is in it, after it was saved.
    """
    for target, (first, read) in _SAVING.items():
        wrap = partial(_wrap, first=first, read=read, saved=saved)
        patches.register_patch(target, wrap=wrap, optional=True, why="what the script saves is compared")


def _wrap(original: Save, first: str, read: Read | None, saved: Saved) -> Save:
    @torch._disable_dynamo
    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        file = _file(args, kwargs)
        saved(_shown(file), _stored(args[0] if args else kwargs[first], file, read))
        return result

    return save


def _stored(handed: Any, file: Any, read: Read | None) -> dict[str, Kept]:
    """Return what a file has, or what was handed over to be saved, see [Note: the file counts]."""
    try:
        if read is not None and isinstance(file, (str, os.PathLike)) and not _of_several_ranks(handed):
            return {SOURCE: text("the file"), **read(os.fspath(file))}
    except Exception as error:  # noqa: BLE001  # whatever it is, it must not reach the script
        logger.debug("%s is not read back: %r", file, error)
    try:
        return {SOURCE: text("what was handed over"), **contents(handed)}
    except Exception as error:  # noqa: BLE001  # as above; a class of the script's may do anything when it is read
        return {SOURCE: text(f"nothing: {type(error).__name__}")}


def _of_several_ranks(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(base.__name__ in ("DTensor", "ShardedTensor") for base in type(value).__mro__)
    children = (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, (list, tuple)) else ())
    )
    return any(_of_several_ranks(child) for _, child in children)


def _file(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    candidates = [kwargs[key] for key in ("f", "filename", "checkpoint_id") if key in kwargs] + list(args[1:2])
    return candidates[0] if candidates else None


def _shown(file: Any) -> str:
    """Return the name of the file, without the folder, which may be another in each run."""
    path = getattr(file, "name", file)
    return Path(os.fspath(path)).name if isinstance(path, (str, os.PathLike)) else f"a {type(file).__name__}"
