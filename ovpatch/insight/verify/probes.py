"""What is watched of a script: its backwards, its optimizers' steps, its loss scale and what it saves.

Nothing here changes what the script computes: gradients and parameters are read, and no random number is drawn.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ovpatch.insight import steps
from ovpatch.insight.steps import StepHooks, Steps, roots
from ovpatch.insight.verify import noise_arms
from ovpatch.insight.verify.recording import BACKWARD, CHECKPOINT, SCALE, STEP, Recorder
from ovpatch.insight.verify.values import UNREAD, Kept, keep, text
from ovpatch.logs import logger
from ovpatch.overlap.tensors.lazy_tensor import peek
from ovpatch.patching import PatchManager
from ovpatch.session.orders import Orders

# Names for parameters: those of the model that owns them, whatever it is wrapped in.

_WRAPPERS: Final = re.compile(r"^(?:module\.|_orig_mod\.|_forward_module\.)+|(?<=\.)_orig_mod\.")


class Names:
    """Finds out the names of parameters that optimizers hold, and of the buffers beside them.

    Both runs must find the same ones, so nothing here depends on addresses, or on when garbage is collected.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[ref[Tensor], str]] = {}
        self._taken: dict[str, ref[Tensor]] = {}
        self._roots: dict[int, list[ref[nn.Module]]] = {}

    def of(self, optimizer: Optimizer, index: int) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer with their names, in its own order.

        Args:
            optimizer: The optimizer.
            index: Its number; parameters that no module owns are named by it, and so are those whose name is taken.
        """
        places = list(_places(optimizer))
        if any(self._known(parameter) is None for _, parameter in places):
            self._learn(places, index)
        return [(self._known(parameter) or "", parameter) for _, parameter in places]

    def buffers(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the models whose parameters an optimizer holds."""
        return _each_once(found for root in self._models(index) for found in root.named_buffers())

    def frozen(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of these models that no optimizer so far holds."""
        every = (found for root in self._models(index) for found in root.named_parameters())
        return _each_once(found for found in every if self._known(found[1]) is None)

    def _models(self, index: int) -> list[nn.Module]:
        roots = [weak() for weak in self._roots.get(index, ())]
        return [root for root in roots if root is not None]

    def _known(self, parameter: Tensor) -> str | None:
        weak, name = self._names.get(id(parameter), (None, None))
        return name if weak is not None and weak() is parameter else None

    def _learn(self, places: list[tuple[str, Tensor]], index: int) -> None:
        owned: dict[int, str] = {}
        self._roots[index] = []
        for root in _owners({id(parameter): position for position, (_, parameter) in enumerate(places)}):
            self._roots[index].append(ref(root))
            owned = {id(parameter): strip(name) for name, parameter in root.named_parameters()} | owned
        for place, parameter in places:
            if self._known(parameter) is None:
                name = self._free(owned.get(id(parameter), f"optimizer{index}.{place}"), index)
                self._taken[name] = ref(parameter)
                self._names[id(parameter)] = ref(parameter), name

    def _free(self, name: str, index: int) -> str:
        """Return a name that no parameter ever had, however long it is gone."""
        return name if name not in self._taken else _primed(f"optimizer{index}:{name}", self._taken)


def strip(name: str) -> str:
    """Return a parameter's name without what DistributedDataParallel, torch.compile and their like add."""
    return _WRAPPERS.sub("", name)


def _each_once(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor once, under its stripped name, and no name twice."""
    seen: set[int] = set()
    names: set[str] = set()
    for name, tensor in named:
        if id(tensor) in seen:
            continue
        unique = _primed(strip(name), names)
        seen.add(id(tensor))
        names.add(unique)
        yield unique, tensor


def _places(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"param_groups[{number}].params[{position}]", parameter


def _primed(name: str, taken: Collection[str]) -> str:
    return _primed(name + "'", taken) if name in taken else name


def _owners(positions: Mapping[int, int]) -> list[nn.Module]:
    """Return the modules that are no other's child and own such parameters: the first parameter's first.

    Args:
        positions: Where parameters stand in their optimizer, by ``id``.
    """
    found = []
    for root in roots():
        owned = [positions[id(parameter)] for parameter in root.parameters() if id(parameter) in positions]
        if owned:
            found.append((min(owned), -len(owned), root))
    return [root for *_, root in sorted(found, key=lambda one: one[:2])]


# What is in a checkpoint: every tensor, and the types of all else, of the file where it can be read back.
#
# [Note: the file counts] What a script hands over is not what is stored if something is patched into saving itself.
# So a file is read again, tensor by tensor and without running any code of its own. Where that cannot be done (a
# buffer, objects that ``weights_only`` refuses, tensors of several ranks, whose loading might wait for other ranks),
# the object handed over is looked at, and the record says so: a file that only one of two runs can read back is a
# difference.

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


Values = dict[str, Kept]


class Watch:
    """Records what a script computes.

    Args:
        recorder: Takes the events.
        steps: Counts the steps; it must be told of a step after this was.
    """

    def __init__(self, recorder: Recorder, steps: Steps) -> None:
        self._recorder, self._steps = recorder, steps
        self._names = Names()
        self._order: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Optimizer, Values] = WeakKeyDictionary()
        self.patches = PatchManager()

    def begin(self) -> None:
        """Watch from now on."""
        patch = self.patches.register_patch
        patch(
            "torch.autograd.backward", wrap=self._wrap_backward, why="Tensor.backward calls it; no hook sees the loss"
        )
        patch(
            "torch.amp.grad_scaler.GradScaler.update", wrap=self._wrap_update, why="the scale tells which was skipped"
        )
        watch(self.patches, self._saved)
        before, after = self._before_step, self._after_step
        self.patches.register_hook("optimizer step", lambda: StepHooks(before=before, after=after))
        self.patches.apply()

    # ---------------------------------------------------------------- backward

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @torch._disable_dynamo
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # a reentrant checkpoint's is a part of the one around it
                self._record_backward(args[0] if args else kwargs.get("tensors"))
            original(*args, **kwargs)

        return backward

    def _record_backward(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        losses = [root for root in roots if isinstance(root, Tensor)]
        names = ["loss"] if len(losses) == 1 else [f"loss {number}" for number in range(len(losses))]
        values = {name: keep(loss) for name, loss in zip(names, losses, strict=True)}
        self._recorder.add(BACKWARD, values, step=self._steps.count + 1)

    # ---------------------------------------------------------------- step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before.pop(optimizer, None)  # of a step that raised
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None and not _capturing():
            self._before[optimizer] = self._gradients(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        if _capturing():
            return
        taken = self._taken.get(optimizer, 0)
        self._taken[optimizer] = taken + 1
        values = self._before.pop(optimizer, None) or self._gradients(optimizer)
        values |= {f"parameter {name}": keep(parameter) for name, parameter in self._named(optimizer)}
        index = self._index(optimizer)
        values |= self._state(optimizer) | {f"buffer {name}": keep(found) for name, found in self._names.buffers(index)}
        values |= {f"frozen {name}": keep(parameter) for name, parameter in self._names.frozen(index)}
        values |= noise_arms.digests()
        step = max(self._steps.count, taken + 1)  # of the turn that the most frequent optimizer began
        label = type(optimizer).__name__
        self._recorder.add(STEP, values, step=step, index=index, label=label)

    def _index(self, optimizer: Optimizer) -> int:
        return self._order.setdefault(optimizer, len(self._order))

    def _named(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        return self._names.of(optimizer, self._index(optimizer))

    def _gradients(self, optimizer: Optimizer) -> Values:
        gradients = [
            (name, None if parameter.grad is None else peek(parameter.grad))
            for name, parameter in self._named(optimizer)
        ]
        values: Values = {
            "norm of gradients": keep(_norm([gradient for _, gradient in gradients if gradient is not None]))
        }
        return values | {f"gradient {name}": keep(gradient) for name, gradient in gradients}

    def _state(self, optimizer: Optimizer) -> Values:
        values: Values = {}
        for name, parameter in self._named(optimizer):
            _collect(f"state {name}", optimizer.state.get(parameter, {}), values)
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            _collect(f"option param_groups[{number}]", options, values)
        return values

    # ---------------------------------------------------------------- scale and checkpoints

    def _wrap_update(self, original: Callable[..., None]) -> Callable[..., None]:
        @torch._disable_dynamo
        @wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self._recorder.add(SCALE, {"loss scale": keep(scaler.get_scale())}, step=max(1, self._steps.count))

        return update

    def _saved(self, file: str, contents: dict[str, Kept]) -> None:
        values = {f"saved {name}": kept for name, kept in contents.items()}
        self._recorder.add(CHECKPOINT, values, step=max(1, self._steps.count), label=file)
        self._recorder.flush()  # often the last that a script does, and some then leave by os._exit


def _norm(gradients: list[Tensor]) -> float | None:
    """Return the 2-norm of all gradients together, in float64; of DTensors that of this rank's parts."""
    parts = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    dense = [part.to_dense() if part.layout is not torch.strided else part for part in parts]
    try:
        norms = [float(torch.linalg.vector_norm(part.detach(), dtype=_wide(part)).item()) for part in dense]
    except (RuntimeError, NotImplementedError):  # a dtype or a class of tensors without norms
        return None
    return math.sqrt(sum(norm * norm for norm in norms))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _collect(name: str, value: Any, into: Values) -> None:
    """Keep what is in nested state, by name."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            _collect(f"{name}.{key}", child, into)
    elif isinstance(value, (list, tuple)):
        for number, child in enumerate(value):
            _collect(f"{name}.{number}", child, into)
    else:
        into[name] = keep(value)


def _capturing() -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be read."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# What begins in each process of a command that is verified.


def begin(orders: Orders) -> None:
    """Seed this process, record what it computes, and end it after the ordered number of steps.

    Args:
        orders: In their details, ``steps`` is that number, ``reorder`` tells which reordered arm it is, if any, and
            ``deterministic`` for deterministic algorithms, and ``strict`` for errors where there are none. ``pieces``
            says into how many the reordered arm cuts the sums of matrix products; 0 leaves them.
    """
    noise_arms.seed()
    if orders.details.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=not orders.details["strict"])
    recorder = Recorder(orders.directory)

    def at_border(number: int) -> None:
        recorder.flush()
        if number >= orders.details["steps"]:
            steps.leave(orders.directory)

    counter = steps.Steps(orders.directory, at_border)
    watch = Watch(recorder, counter)
    if orders.details.get("reorder"):
        noise_arms.reorder_reductions(watch.patches, orders.details["reorder"])
    if orders.details.get("pieces"):
        noise_arms.split_products(orders.details["pieces"])
    watch.begin()
    counter.watch()  # after ours: a step is recorded before it can be the last
    recorder.keep_to_the_end()
