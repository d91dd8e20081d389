"""The outputs that ``granularity=selective`` keeps: those of attention, and of operators that the user names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ovpatch_plugins.recompute.recompute_options import FULL
from ovpatch_plugins.recompute.recompute_report import note

ATTENTION: Final = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "flash_attn_3::_flash_attn_forward",
        "xformers_flash::flash_fwd",
        "flex_attention",
    }
)
"""Operators of attention, by the name in their schema: torch's, flash-attn's and xformers'."""

# The last operator of a linear without a bias for 3D rows. Its output has the memory of the GEMM's output, and another
# version counter.
_UNSAFE_VIEW: Final = torch.ops.aten._unsafe_view.default

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a block's forward and of its recomputation."""


def make_contexts(granularity: str, keep: Sequence[str]) -> Contexts:
    """Return the contexts of one call of a block.

    Args:
        granularity: ``full`` or ``selective``.
        keep: Further operators to keep, in the form of the option.
    """
    if granularity == FULL:
        return nullcontext(), nullcontext()
    kept = _Kept(tuple(keep))
    return _Keep(kept), _Reuse(kept)


def make_compiled_contexts(keep: Sequence[str]) -> Contexts:
    """Return the contexts of ``selective`` for a compiler, which knows torch's own contexts."""
    contexts: Contexts = create_selective_checkpoint_contexts(make_policy(tuple(keep)))
    return contexts


class _Operators:
    """The set of kept operators; the name of each operator is looked up once."""

    def __init__(self, keep: Sequence[str]) -> None:
        self._names = ATTENTION | {_name_of_option(name) for name in keep}
        # Whether an operator is kept, by its id, because an operator's hash is a slow function in Python.
        self.known: dict[int, bool] = {}
        # The operators of these ids; without a reference, another operator could get the id of a freed one.
        self._seen: list[Any] = []

    def find(self, operator: Any) -> bool:
        """Return whether an operator is kept."""
        key = id(operator)
        if key not in self.known:
            self._seen.append(operator)
            self.known[key] = _name(operator) in self._names
        return self.known[key]


@functools.cache
def _find_operators(keep: tuple[str, ...]) -> _Operators:
    return _Operators(keep)


class _Kept:
    """The outputs that one call of a block keeps, by operator, in the order of its calls.

    An output is None if the recomputation must repeat its call.
    """

    def __init__(self, keep: tuple[str, ...]) -> None:
        self.operators = _find_operators(keep)
        self.keeps_more = bool(keep)
        # The detached output, and its tensors with their versions.
        self.outputs: dict[Any, list[tuple[Any, list[tuple[Tensor, int]]] | None]] = {}
        # The tensors of the last kept output, with their versions.
        self._last: list[tuple[Tensor, int]] = []

    def add(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the output of a call, without its graph."""
        kept_output = None
        if not _has_to_run_again(operator, args, kwargs):
            detached = tree_map(_detach, output)
            kept_output = (
                detached,
                [
                    (leaf, leaf._version)
                    for leaf in tree_leaves(detached)
                    if isinstance(leaf, Tensor)
                ],
            )
            self._last = kept_output[1]
        self.outputs.setdefault(operator, []).append(kept_output)

    def add_view(self, source: Tensor, view: Tensor) -> None:
        """Add the version of a view to the last kept output, if it is a view of that output."""
        # Subclasses may have no memory, and all empty tensors have the address 0.
        if type(source) is Tensor and any(
            type(leaf) is Tensor and 0 != leaf.data_ptr() == source.data_ptr()
            for leaf, _ in self._last
        ):
            self._last.append((_detach(view), view._version))


class _Mode(TorchDispatchMode):
    """A mode for one call of a block; it does next to nothing for operators that are not kept.

    Attributes:
        repeats_collectives: Whether no collective is kept. Otherwise linears of tp_linear fall back to torch.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not typed in torch
        self._kept = kept
        self._find = kept.operators.find
        self._known = kept.operators.known
        self.repeats_collectives = not kept.keeps_more

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since no compiler runs inside; otherwise torch would wrap each operator to keep it out."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions are compiled and run inside."""
        return True


class _Keep(_Mode):
    """The mode of a forward, which keeps outputs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        if self._known.get(id(func), True) and self._find(func):
            self._kept.add(func, args, kwargs or {}, output)
        elif func is _UNSAFE_VIEW:
            self._kept.add_view(args[0], output)
        return output


class _Reuse(_Mode):
    """The mode of a recomputation, which returns the kept outputs."""

    def __enter__(self) -> Any:
        self._next: dict[Any, int] = {}
        return super().__enter__()  # type: ignore[no-untyped-call]  # not typed in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._known.get(id(func), True) and self._find(func):
            number = self._next.get(func, 0)
            self._next[func] = number + 1
            outputs = self._kept.outputs.get(func, [])
            # A recomputation may call an operator more often than the forward did. The surplus call is computed, and
            # the tensors that the block then saves reveal the difference.
            kept_output = outputs[number] if number < len(outputs) else None
            if kept_output is not None:
                output, versions = kept_output
                if any(leaf._version != version for leaf, version in versions):
                    raise RuntimeError(
                        f"ovpatch: the output of {_name(func)} was changed in place after the call, "
                        "and selective recomputation keeps it. Have the model make a new tensor there, "
                        "or use granularity=full."
                    )
                return tree_map(_detach, output)
        return func(*args, **kwargs) if kwargs else func(*args)


def _detach(value: Any) -> Any:
    """Return a tensor without its graph; both tensors share data and their version counter."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


@functools.cache
def make_policy(keep: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return the policy for torch's selective checkpointing, which also keeps the operators in ``keep``."""
    operators = _find_operators(keep)

    def policy(_ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operators.find(operator) and not _has_to_run_again(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _name_of_option(name: str) -> str:
    return name if "::" in name else "aten::" + name.removeprefix("aten.").split(".")[0]


def _name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return str(operator.name()) if schema is None else str(schema.name)


def _has_to_run_again(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call has effects besides its outputs that a recomputation must repeat.

    If a call moves the random generator and were not repeated, dropout after it would drop other elements
    than the forward did. If a call writes into a tensor or makes a view, the recomputation's own tensors
    would not be changed by it, or through it.
    """
    schema = getattr(operator, "_schema", None)
    is_random = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    for index, argument in enumerate(() if schema is None else schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if not is_written and argument.name != "dropout_p":
            continue
        given = (
            args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        )
        # The call changes an argument, such as a buffer of the module.
        if is_written and given is not None:
            return True
        # Operators of attention are tagged as random, but draw numbers only with dropout.
        if argument.name == "dropout_p":
            is_random = bool(given)
    if is_random:
        _note_random(_name(operator))
    return is_random or any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in (() if schema is None else schema.returns)
    )


def _note_random(name: str) -> None:
    if not torch.compiler.is_compiling():
        note(
            f"{name} draws random numbers (dropout) and is recomputed, so that later random "
            "numbers are the same"
        )
