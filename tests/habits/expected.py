"""The declared exceptions of the matrix. An exception that no cell needs fails the tests.

Unless an entry says otherwise, a cell must show the bits of stock PyTorch, on three ranks within its noise. Stock
PyTorch must not raise, and each feature must work.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Expected:
    """A declared exception.

    Attributes:
        habits: The habits that need it, each of them.
        why: The reason.
        allow: The absolute difference that is allowed.
        idle: The features that do nothing.
        raises: Whether stock PyTorch raises.
        is_rare: Whether only some runs or some combinations of habits need it.
        ranks: The smallest number of ranks that needs it.
        together_with: Habits of which the cell must have one; empty if it needs none.
    """

    habits: tuple[str, ...]
    why: str
    allow: float = 0.0
    idle: tuple[str, ...] = ()
    raises: bool = False
    is_rare: bool = False
    ranks: int = 1
    together_with: tuple[str, ...] = ()


_REDUCER: Final = ("ddp", "dist_optimizer")
_SHARDING: Final = ("dist_optimizer",)
_NORMS: Final = ("clip_norm", "clip_one_by_one", "total_norm", "clips_in_any_order")

EXPECTED: Final = (
    # - Values: dist_optimizer-reference.md, "Contract"
    Expected(_NORMS, "a norm is summed over shards, in another order", allow=1e-4),
    Expected(
        ("adafactor",),
        "a norm's rounding errors become larger, as the root of a mean may be close to zero",
        allow=1e-2,
        is_rare=True,
        together_with=_NORMS,
    ),
    Expected(
        ("adafactor",),
        "the kernel of a mean adds a gradient of another layout in another order",
        allow=1e-6,
        is_rare=True,
        together_with=("gradient_of_another_layout",),
    ),
    Expected(
        ("expanded_gradient",),
        "kernels for contiguous gradients round differently",
        allow=1e-6,
        is_rare=True,
    ),
    Expected(
        ("fused",),
        "fused kernels round the last elements of a tensor differently, and a shard has others",
        allow=1e-4,
    ),
    Expected(
        ("bfloat16_layer",),
        "shards are updated in another chunking of bfloat16 kernels",
        allow=0.15,
    ),
    Expected(
        ("rmsprop",),
        "centered divides by the root of a difference, which may be close to zero",
        allow=1e-4,
        is_rare=True,
    ),
    Expected(
        ("batch_norm",),
        "sums in another order round differently, and each step divides by deviations of a small batch",
        allow=1e-4,
        is_rare=True,
        ranks=3,
    ),
    # - Nothing to reduce
    Expected(("all_local",), "no gradient is reduced", idle=_REDUCER),
    Expected(
        ("comm_hook", "own_comm_hook"), "a hook reduces buckets of the C++ reducer", idle=_REDUCER
    ),
    Expected(("join",), "join() shadows the collectives of the C++ reducer", idle=_REDUCER),
    # - Nothing to shard
    Expected(("ddp_alone", "default_options"), "the feature is off", idle=_SHARDING),
    Expected(("default_size",), "one variant shards no parameter of this size", idle=_SHARDING),
    Expected(
        ("update_by_hand", "update_by_foreach", "step_in_hooks"),
        "no optimizer steps all",
        idle=_SHARDING,
    ),
    Expected(
        ("main_parameters_by_hand",),
        "the optimizer has parameters without a wrapper",
        idle=_SHARDING,
    ),
    Expected(
        ("lbfgs", "zero_redundancy", "own_optimizer", "lamb"),
        "updates need full parameters",
        idle=_SHARDING,
    ),
    Expected(
        ("twice_backward", "two_forwards_and_backwards", "save_and_restore_gradients"),
        "another backward adds to gradients that are already reduced",
        idle=_SHARDING,
    ),
    Expected(
        ("steps_in_any_order", "unscales_in_any_order", "new_optimizers_in_any_order"),
        "ranks step in different orders from the start",
        idle=_SHARDING,
    ),
    # - What stock PyTorch refuses
    Expected(
        ("unused_without_a_word", "freeze_later"),
        "a gradient is missing and not searched for",
        raises=True,
    ),
    Expected(("swap_tensors",), "the reducer holds the parameter", raises=True),
)


def find_expected(habits: Collection[str], ranks: int) -> list[Expected]:
    """Return the declarations of some habits on some ranks, with the smallest differences first."""
    return sorted(
        (
            declaration
            for declaration in EXPECTED
            if set(declaration.habits) & set(habits)
            and ranks >= declaration.ranks
            and (not declaration.together_with or set(declaration.together_with) & set(habits))
        ),
        key=lambda declaration: declaration.allow,
    )
