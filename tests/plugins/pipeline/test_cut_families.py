"""Families of transformers are cut and train as the full model does, or are refused, as docs/cut-families.md lists."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.pipeline import cut_families
from tests.support.rarely import RARELY

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'ovpatch[integration]'", allow_module_level=True)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cut-families.md"
TASKS = ("causal language model", "sequence to sequence", "sequence classification")
PICTURES, BOTH = "image classification", "image and text to text"
SOME = (
    (TASKS[0], "gpt2"),
    (TASKS[0], "mamba"),
    (TASKS[0], "mixtral"),
    (TASKS[0], "rwkv"),
    (TASKS[0], "xlnet"),
    (TASKS[1], "m2m_100"),
    (TASKS[1], "t5"),
    (TASKS[2], "bert"),
    (PICTURES, "resnet"),
    (PICTURES, "swin"),
    (PICTURES, "vit"),
    (BOTH, "llava"),
)
# Families in one job of the ranks.
JOB = 10


def _check(ranks: Any, families: Sequence[tuple[str, str]]) -> None:
    expected = cut_families.read_table(PAGE.read_text(encoding="utf-8"))
    wrong = {}
    for low in range(0, len(families), JOB):
        part = families[low : low + JOB]
        found = cut_families.join_outcomes(ranks(2)(cut_families.try_all, part, timeout=300))
        wrong |= {
            family: f"{outcome}, on the page: {expected.get(family)}"
            for family, outcome in zip(part, found, strict=True)
            if outcome != expected.get(family)
        }
    assert not wrong, (
        "python -m tests.plugins.pipeline.cut_families docs/cut-families.md renews the page"
    )


def test_some_families_of_each_task(ranks: Any) -> None:
    _check(ranks, SOME)


@RARELY
def test_all_families(ranks: Any) -> None:
    import transformers

    if f"transformers {transformers.__version__}" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page is of another version of transformers")
    _check(ranks, list(cut_families.list_families()))


def test_the_page_names_no_difference() -> None:
    outcomes = cut_families.read_table(PAGE.read_text(encoding="utf-8"))
    assert len(outcomes) > 450
    assert all(
        outcome.startswith(("cut", "refused: ", "not tried: ")) for outcome in outcomes.values()
    )
    assert cut_families.make_table(outcomes) in PAGE.read_text(encoding="utf-8")
