"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option, make_count_parser

FULL: Final = "full"
SELECTIVE: Final = "selective"
NONE: Final = "none"

AUTO: Final = "auto"
ALWAYS: Final = "always"
NEVER: Final = "never"

GRANULARITIES: Final = (NONE, FULL, SELECTIVE)
"""The part of a block that is recomputed: nothing, all of it, all but attention."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the parts of a list that is separated by commas."""
    return tuple(part for part in (piece.strip() for piece in text.split(",")) if part)


def _parse_blocks(text: str) -> str:
    return ",".join(split_names(text))


def _parse_operators(text: str) -> str:
    names = split_names(text)
    for name in names:
        if "::" not in name and not name.startswith("aten."):
            raise ValueError(
                "expected names of operators, as aten.mm or mylib::op, separated by commas"
            )
    return ",".join(names)


OPTIONS: Final = (
    Option(
        "granularity",
        FULL,
        "What of a block is computed again in backward instead of being kept. full: all of it, so "
        "only its input is kept. selective: all but attention, which is expensive to compute and has "
        "small outputs. none: nothing.",
        choices=GRANULARITIES,
        aliases=("mode",),
    ),
    Option(
        "blocks",
        "",
        "Which modules are blocks, separated by commas: names, with a * for a part between dots, "
        "as in model.layers.*, or names of classes. Empty: the members of each outermost list of "
        "modules of one class.",
        parse=_parse_blocks,
        values="names or classes, separated by commas",
    ),
    Option(
        "keep",
        "",
        "Further operators whose outputs selective keeps, separated by commas: aten.mm,mylib::op.",
        parse=_parse_operators,
        values="operators, separated by commas",
    ),
    Option(
        "ahead",
        1,
        "How many blocks of a pipeline's stage are recomputed before the gradient of the stage's "
        "output has come. Each takes the memory of its activations. 0: none; under tensor "
        "parallelism, recomputation then starts only after the wait for the gradient, too.",
        parse=make_count_parser("a number of blocks, 0 for none"),
        values="a number of blocks",
    ),
    Option(
        "check",
        AUTO,
        "When the values that a recomputation saves are compared with those that the forward "
        "saved. auto: in calls 0, 1, 2, 4, 8, ... of a block. always: in every call, as under "
        "ovpatch verify. never: in none; for blocks whose operators compute other bits each time.",
        choices=(AUTO, ALWAYS, NEVER),
        verified=ALWAYS,
    ),
)
