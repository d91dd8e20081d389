"""What is watched of a script: its backwards, its optimizers' steps, its loss scale and what it saves.

Nothing here changes what the script computes: gradients and parameters are read, and no random number is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ovpatch.insight.step_hooks import StepHooks
from ovpatch.insight.steps import Steps
from ovpatch.insight.verify import checkpoints, seeds
from ovpatch.insight.verify.names import Names
from ovpatch.insight.verify.recording import BACKWARD, CHECKPOINT, SCALE, STEP, Recorder
from ovpatch.insight.verify.values import Kept, keep
from ovpatch.overlap.placeholders import peek
from ovpatch.patching import PatchManager

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
        checkpoints.watch(self.patches, self._saved)
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
        values |= seeds.digests()
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
