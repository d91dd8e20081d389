"""What ``granularity=selective`` keeps: the outputs of attention, and of operators that the user names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ovpatch_plugins.recompute.options import FULL
from ovpatch_plugins.recompute.report import note

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
"""Operators of attention, by the name in their schema; flash-attn's and xformers' beside torch's."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The context of a block's forward, and that of its recomputation."""


def make_contexts(granularity: str, keep: Sequence[str]) -> Contexts:
    """Return the contexts of one call of a block.

    Args:
        granularity: ``full`` or ``selective``.
        keep: Further operators to keep, as in the option.
    """
    if granularity == FULL:
        return nullcontext(), nullcontext()
    contexts: Contexts = create_selective_checkpoint_contexts(make_policy(tuple(keep)))
    for mode in contexts:
        # Under a policy that may keep its collectives, tp_linear leaves linears to stock. This policy keeps none,
        # unless it is told to.
        mode.repeats_collectives = not keep  # type: ignore[attr-defined]  # tp_linear asks for it
    return contexts


@functools.cache
def make_policy(keep: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return the policy for torch's selective checkpointing; further operators to keep as in the option."""
    kept = ATTENTION | {_name_of_option(name) for name in keep}

    def policy(_ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _name(operator) in kept and not _draws_random_numbers(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _name_of_option(name: str) -> str:
    return name if "::" in name else "aten::" + name.removeprefix("aten.").split(".")[0]


def _name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return str(operator.name()) if schema is None else str(schema.name)


def _draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operator's call moves the random generator, which a recomputation without it would leave behind.

    Dropout behind such an operator would then drop other elements than the forward did.
    """
    schema = getattr(operator, "_schema", None)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            if given:
                _note_random(_name(operator))
            return bool(given)
    if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
        _note_random(_name(operator))
        return True
    return False


def _note_random(name: str) -> None:
    if not torch.compiler.is_compiling():
        note(f"{name} draws random numbers (dropout) and is recomputed, so that later random numbers are the same")
