"""What a script feeds to its model in a step: samples and tokens, where that can be told.

[Note: which input is the batch] Looked at are the modules that hold trainable parameters and are part of no other: the
DistributedDataParallel wrapper, or whatever stands outermost. Of these the one that a step calls first counts, every
time it is called with gradients on and outside of backward, so microbatches add up, evaluation and recomputation do
not, and neither do loss modules. If a step calls none of them, their children that hold parameters are looked at from
the next step on. A global hook would not do: it is not given keyword arguments, and compiled code is traced anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ovpatch.insight.bench import flops
from ovpatch.insight.models import roots

_watching: Batches | None = None


class Batches:
    """Adds up what one step after the other feeds; see [Note: which input is the batch]."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._first: int | None = None  # id of the module that this step called first
        self._now = [0, 0, 0]  # samples, tokens and calls of this step
        self._seen: list[list[int]] = []
        self._name = ""

    def begin(self) -> None:
        """Begin to look, at a border."""
        global _watching
        _watching = self
        self._look_at(outermost())

    def step(self) -> None:
        """Close a step, at its border."""
        if self._first is not None:
            self._seen.append(self._now)
        elif not flops.compiling():  # a hook inside of compiled code would be traced into it
            self._look_at([child for module in self._modules for child in module.children() if _trains(child)])
        self._first, self._now = None, [0, 0, 0]

    def end(self) -> None:
        """Stop looking."""
        global _watching
        _watching = None
        self._look_at([])

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """See one call of a module that is looked at."""
        if self._first is None:
            self._first, self._name = id(module), type(module).__name__
        if self._first != id(module):
            return
        samples, tokens = sizes(args, kwargs)
        self._now = [total + more for total, more in zip(self._now, (samples, tokens, 1), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the means over the steps seen, and the module; ``samples`` and ``tokens`` are None if unknown."""
        count = len(self._seen)
        totals = [sum(column) for column in zip(*self._seen, strict=True)] or [0, 0, 0]
        samples, tokens, calls = [total / max(count, 1) for total in totals]
        return {"samples": samples or None, "tokens": tokens or None, "calls": calls, "module": self._name}

    def _look_at(self, modules: list[nn.Module]) -> None:
        for handle in self._handles:
            handle.remove()
        self._modules = [module for module in modules if _safe(module)]
        self._handles = [module.register_forward_pre_hook(_called, with_kwargs=True) for module in self._modules]


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook; a function of this module, so that a model with it can still be copied and pickled."""
    if _watching is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        _watching.take(module, args, kwargs)


def outermost() -> list[nn.Module]:
    """Return the modules with trainable parameters that are no part of another module."""
    return [module for module in roots() if _trains(module)]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _safe(module: nn.Module) -> bool:
    """Whether a hook on it runs, and runs outside of compiled code."""
    compiled_in_place = module.__dict__.get("_compiled_call_impl") is not None
    return not compiled_in_place and not isinstance(module, torch.jit.ScriptModule)


def sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the samples and tokens of one batch, 0 where they cannot be told.

    Args:
        args: What the model was called with. The first tensor in it has one sample per row; if it holds integers and
            has two dimensions, they are tokens.
        kwargs: The same by name. A tensor named ``input_ids`` goes before all others.
    """
    first = next(_named("input_ids", (args, kwargs)), None)
    if first is None:
        first = next(_tensors((args, kwargs)), None)
    if first is None or first.dim() == 0:
        return 0, 0
    whole = not first.dtype.is_floating_point and not first.dtype.is_complex and first.dtype is not torch.bool
    return first.shape[0], first.numel() if whole and first.dim() == 2 else 0


def _tensors(thing: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif depth:
        for part in _parts(thing):
            yield from _tensors(part, depth - 1)


def _named(name: str, thing: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(thing, Mapping) and isinstance(thing.get(name), Tensor):
        yield thing[name]
    elif depth:
        for part in _parts(thing):
            yield from _named(name, part, depth - 1)


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, Mapping):
        return thing.values()
    return thing if isinstance(thing, (list, tuple)) else ()
