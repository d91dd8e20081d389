"""Probes in the script's processes: they record backwards, optimizer steps, loss scales and checkpoints.

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
from ovpatch.insight.steps import StepCounter, StepHooks, find_root_modules, list_children
from ovpatch.insight.verify import noise_runs, recording
from ovpatch.insight.verify.recording import EventRecorder, KeptValue, keep_text, keep_value
from ovpatch.logs import logger
from ovpatch.overlap.tensors.lazy_tensor import peek
from ovpatch.patching import PatchManager
from ovpatch.session import worker_exit
from ovpatch.session.worker_orders import Orders

_WRAPPERS: Final = re.compile(r"^(?:module\.|_orig_mod\.|_forward_module\.)+|(?<=\.)_orig_mod\.")


class ParameterNames:
    """Names of the parameters in optimizers, and of the models' buffers: the names in the unwrapped model.

    Stock and patched must get the same names, so nothing depends on addresses or on garbage collection.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[ref[Tensor], str]] = {}
        self._taken: dict[str, ref[Tensor]] = {}
        self._roots: dict[int, list[ref[nn.Module]]] = {}

    def name_parameters(self, optimizer: Optimizer, index: int) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer with names; its number is in those without an owner, or if taken."""
        places = list(_places(optimizer))
        if any(self._known(parameter) is None for _, parameter in places):
            self._learn(places, index)
        return [(self._known(parameter) or "", parameter) for _, parameter in places]

    def list_buffers(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the models whose parameters an optimizer holds."""
        return _each_once(found for root in self._models(index) for found in root.named_buffers())

    def list_frozen(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of these models that no optimizer holds so far."""
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
        for root in _owners(
            {id(parameter): position for position, (_, parameter) in enumerate(places)}
        ):
            self._roots[index].append(ref(root))
            owned = {
                id(parameter): strip_wrappers(name) for name, parameter in root.named_parameters()
            } | owned
        for place, parameter in places:
            if self._known(parameter) is None:
                name = owned.get(id(parameter), f"optimizer{index}.{place}")
                # The parameter that took the name may have been freed.
                if name in self._taken:
                    name = _primed(f"optimizer{index}:{name}", self._taken)
                self._taken[name] = ref(parameter)
                self._names[id(parameter)] = ref(parameter), name


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without the prefixes of DistributedDataParallel, torch.compile and other wrappers."""
    return _WRAPPERS.sub("", name)


def _each_once(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor once, under its stripped name, and no name twice."""
    seen: set[int] = set()
    names: set[str] = set()
    for name, tensor in named:
        if id(tensor) in seen:
            continue
        unique = _primed(strip_wrappers(name), names)
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
    """Return the root modules that own parameters, given by ``id`` and position, in the order of their first."""
    found = []
    for root in find_root_modules():
        owned = [
            positions[id(parameter)]
            for parameter in root.parameters()
            if id(parameter) in positions
        ]
        if owned:
            found.append((min(owned), -len(owned), root))
    return [root for *_, root in sorted(found, key=lambda item: item[:2])]


Values = dict[str, KeptValue]
Save = Callable[..., Any]
Saved = Callable[[str, Values], None]
Read = Callable[[str], Values]

#: Key of the source of a checkpoint's values.
SOURCE: Final = "(the object that was read)"


def list_contents(saved: Any) -> Values:
    """Return the record of each key of a nested object or a module's state_dict: tensors by value, others by type."""
    return {name or "(itself)": kept for name, kept in _walk(saved, "", ())}


def _walk(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, KeptValue]]:
    children = list_children(value.state_dict() if isinstance(value, nn.Module) else value)
    if children is None or id(value) in above:
        yield name, _keep(value)
        return
    if not children:
        yield name, keep_text(f"empty {type(value).__name__}")
    for key, child in children:
        yield from _walk(child, f"{name}.{key}" if name else str(key), (*above, id(value)))


def _keep(value: Any) -> KeptValue:
    if not isinstance(value, Tensor):
        return keep_text(type(value).__name__)
    kept = keep_value(value)
    return keep_text(recording.describe_form(value)) if kept.form == recording.UNREAD else kept


def _read_torch_file(path: str) -> Values:
    # The older format of torch, which is no zip file, cannot be mapped into memory.
    mapped = zipfile.is_zipfile(path)
    return list_contents(torch.load(path, map_location="cpu", mmap=mapped, weights_only=True))


def _read_safetensors(path: str) -> Values:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: _keep(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  # no mapping


#: Functions that save, with the name of their first argument and the reader of their files.
_SAVING: Final[dict[str, tuple[str, Read | None]]] = {
    "torch.save": ("obj", _read_torch_file),
    "torch.distributed.checkpoint.save": ("state_dict", None),
    "safetensors.torch.save_file": ("tensors", _read_safetensors),
}


def patch_saving(patches: PatchManager, saved: Saved) -> None:
    """Declare the patches that call ``saved`` with a checkpoint's file name and contents, after it was saved."""
    for target, (first, read) in _SAVING.items():
        wrap = partial(_wrap, first=first, read=read, saved=saved)
        patches.register_patch(target, wrap=wrap, optional=True, why="checkpoints are compared")


def _wrap(original: Save, first: str, read: Read | None, saved: Saved) -> Save:
    @torch._disable_dynamo
    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        file = _file(args, kwargs)
        saved(_shown(file), _stored(args[0] if args else kwargs[first], file, read))
        return result

    return save


def _stored(handed: Any, file: Any, read: Read | None) -> Values:
    """Return the contents of a saved file, or of the saved object if the file cannot be read back.

    A patch inside the saving function can make the file differ from the object, so the file counts. It is read without
    running its code. A buffer and objects that ``weights_only`` refuses are not read back. Neither are sharded tensors,
    whose loading may wait for other ranks. The source is recorded, so that it makes a difference between runs.
    """
    try:
        if read is not None and isinstance(file, (str, os.PathLike)) and not _is_sharded(handed):
            return {SOURCE: keep_text("the file"), **read(os.fspath(file))}
    except Exception as error:  # noqa: BLE001  # no error may reach the script
        logger.debug("%s is not read back: %r", file, error)
    try:
        return {SOURCE: keep_text("what was handed over"), **list_contents(handed)}
    except Exception as error:  # noqa: BLE001  # as above: a class of the script may do anything when it is read
        return {SOURCE: keep_text(f"nothing: {type(error).__name__}")}


def _is_sharded(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(base.__name__ in ("DTensor", "ShardedTensor") for base in type(value).__mro__)
    children = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return any(map(_is_sharded, children))


def _file(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    candidates = [
        kwargs[key] for key in ("f", "filename", "checkpoint_id") if key in kwargs
    ] + list(args[1:2])
    return candidates[0] if candidates else None


def _shown(file: Any) -> str:
    """Return the name of the file without its folder, which may differ between runs."""
    path = getattr(file, "name", file)
    return (
        Path(os.fspath(path)).name
        if isinstance(path, (str, os.PathLike))
        else f"a {type(file).__name__}"
    )


class ScriptRecorder:
    """Records the values that a script computes; the hooks of the step counter must run after those of this object."""

    def __init__(self, recorder: EventRecorder, steps: StepCounter) -> None:
        self._recorder, self._steps = recorder, steps
        self._names = ParameterNames()
        self._order: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Optimizer, Values] = WeakKeyDictionary()
        self.patches = PatchManager()

    def start_recording(self) -> None:
        """Install the patches and hooks."""
        patch = self.patches.register_patch
        why = "Tensor.backward calls it; no hook sees the loss"
        patch("torch.autograd.backward", wrap=self._wrap_backward, why=why)
        why = "the scale shows the steps that were skipped"
        patch("torch.amp.grad_scaler.GradScaler.update", wrap=self._wrap_update, why=why)
        patch_saving(self.patches, self._saved)
        before, after = self._before_step, self._after_step
        self.patches.register_hook("optimizer step", lambda: StepHooks(before=before, after=after))
        self.patches.apply()

    # ---------------------------------------------------------------- backward

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @torch._disable_dynamo
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            # The backward of a reentrant checkpoint is a part of the outer backward.
            if torch._C._current_graph_task_id() == -1:
                self._record_backward(args[0] if args else kwargs.get("tensors"))
            original(*args, **kwargs)

        return backward

    def _record_backward(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        losses = [root for root in roots if isinstance(root, Tensor)]
        names = (
            ["loss"] if len(losses) == 1 else [f"loss {number}" for number in range(len(losses))]
        )
        values = {name: keep_value(loss) for name, loss in zip(names, losses, strict=True)}
        self._recorder.record_event(recording.BACKWARD, values, step=self._steps.count + 1)

    # ---------------------------------------------------------------- step

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # A step that raised may have left a value.
        self._before.pop(optimizer, None)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None and not _capturing():
            self._before[optimizer] = self._gradients(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        if _capturing():
            return
        taken = self._taken.get(optimizer, 0)
        self._taken[optimizer] = taken + 1
        values = self._before.pop(optimizer, None) or self._gradients(optimizer)
        values |= {
            f"parameter {name}": keep_value(parameter) for name, parameter in self._named(optimizer)
        }
        index = self._index(optimizer)
        values |= self._state(optimizer)
        values |= {
            f"buffer {name}": keep_value(found) for name, found in self._names.list_buffers(index)
        }
        values |= {
            f"frozen {name}": keep_value(parameter)
            for name, parameter in self._names.list_frozen(index)
        }
        values |= noise_runs.digest_generators()
        # The step is the turn that the most frequent optimizer started.
        step = max(self._steps.count, taken + 1)
        label = type(optimizer).__name__
        self._recorder.record_event(recording.STEP, values, step=step, index=index, label=label)

    def _index(self, optimizer: Optimizer) -> int:
        return self._order.setdefault(optimizer, len(self._order))

    def _named(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        return self._names.name_parameters(optimizer, self._index(optimizer))

    def _gradients(self, optimizer: Optimizer) -> Values:
        grads = [
            (name, p.grad if p.grad is None else peek(p.grad)) for name, p in self._named(optimizer)
        ]
        norm = keep_value(_norm([grad for _, grad in grads if grad is not None]))
        return {"norm of gradients": norm} | {
            f"gradient {name}": keep_value(grad) for name, grad in grads
        }

    def _state(self, optimizer: Optimizer) -> Values:
        values: Values = {}
        for name, parameter in self._named(optimizer):
            _collect(f"state {name}", optimizer.state.get(parameter, {}), values)
        for number, group in enumerate(optimizer.param_groups):
            options = {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            }
            _collect(f"option param_groups[{number}]", options, values)
        return values

    # ---------------------------------------------------------------- scale and checkpoints

    def _wrap_update(self, original: Callable[..., None]) -> Callable[..., None]:
        @torch._disable_dynamo
        @wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                values = {"loss scale": keep_value(scaler.get_scale())}
                self._recorder.record_event(recording.SCALE, values, step=max(1, self._steps.count))

        return update

    def _saved(self, file: str, contents: Values) -> None:
        values = {f"saved {name}": kept for name, kept in contents.items()}
        self._recorder.record_event(
            recording.CHECKPOINT, values, step=max(1, self._steps.count), label=file
        )
        # Some scripts call os._exit after their last checkpoint.
        self._recorder.flush_events()


def _norm(gradients: list[Tensor]) -> float | None:
    """Return the 2-norm of all gradients together, in float64; of DTensors, that of the local tensors."""
    parts = [
        gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients
    ]
    dense = [part.to_dense() if part.layout is not torch.strided else part for part in parts]
    try:
        wide = [torch.complex128 if part.is_complex() else torch.float64 for part in dense]
        pairs = zip(dense, wide, strict=True)
        norms = [
            float(torch.linalg.vector_norm(part.detach(), dtype=dtype)) for part, dtype in pairs
        ]
    # Some dtypes and tensor classes have no norms.
    except (RuntimeError, NotImplementedError):
        return None
    return math.sqrt(sum(norm * norm for norm in norms))


def _collect(name: str, value: Any, into: Values) -> None:
    """Record nested state, by name."""
    children = list_children(value)
    if children is None:
        into[name] = keep_value(value)
    for key, child in children or ():
        _collect(f"{name}.{key}", child, into)


def _capturing() -> bool:
    """Return whether a CUDA graph is being captured, during which nothing can be read."""
    return (
        torch.cuda.is_available()
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )


def start_worker(orders: Orders) -> None:
    """Seed this process, record its values, and end it after the ordered number of steps.

    The orders have these details: ``steps``. ``reorder``, the number of the reordered variant, if any. ``pieces``, the
    number of partial sums of matrix products in that variant, 0 for the sums of stock PyTorch. ``deterministic``, for
    deterministic algorithms. ``strict``, to raise if an operator has none.
    """
    noise_runs.seed_generators()
    if orders.details.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=not orders.details["strict"])
    recorder = EventRecorder(orders.directory)

    def at_border(number: int) -> None:
        recorder.flush_events()
        # A rank may be killed in the next step, and its counters must then show the work that it did before.
        worker_exit.write_report_now(is_last=False)
        if number >= orders.details["steps"]:
            steps.exit_with_peers(orders.directory)

    counter = steps.StepCounter(orders.directory, at_border)
    watch = ScriptRecorder(recorder, counter)
    if orders.details.get("reorder"):
        noise_runs.reorder_reductions(watch.patches, orders.details["reorder"])
    if orders.details.get("pieces"):
        noise_runs.split_products(orders.details["pieces"])
    watch.start_recording()
    # The counter comes after the recorder, which must record a step before it ends the process.
    counter.start_counting()
    recorder.flush_at_exit()
