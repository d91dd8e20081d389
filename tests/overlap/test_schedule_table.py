"""The table of the schedules of tensor-parallel linears, from which options and their help are made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ovpatch.overlap.tensor_parallel.schedule_table import (
    DEFAULT_SCHEDULE,
    MEASURED_NAMES,
    SCHEDULE_NAMES,
    SCHEDULES,
    describe_schedules,
)
from ovpatch.overlap.tensor_parallel.schedules import find_schedule, parse_schedule
from ovpatch_plugins.megatron.megatron_feature import FEATURE as MEGATRON
from ovpatch_plugins.tp_linear.tp_linear_feature import FEATURE as TP_LINEAR

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "ovpatch" / "overlap" / "tensor_parallel" / "schedule_table.py"


def copied_names(tree: ast.AST) -> Iterator[str]:
    """Yield literals that list three or more schedules."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            found = {item.value for item in node.elts if isinstance(item, ast.Constant)}
        elif isinstance(node, ast.Dict):
            found = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        else:
            continue
        if len(found & set(SCHEDULE_NAMES)) >= 3:
            yield ast.unparse(node)


def test_a_new_schedule_needs_no_other_list():
    text = 'a = ("stock", "bulk", "ring")\nb = {"ring": 1, "chunk": 2, "auto": 3}\nc = ("stock", "bulk")\n'
    assert len(list(copied_names(ast.parse(text)))) == 2
    sources = [
        path
        for folder in ("ovpatch", "plugins")
        for path in (ROOT / folder).rglob("*.py")
        if path != TABLE
    ]
    found = {
        str(path.relative_to(ROOT)): list(copied_names(ast.parse(path.read_text("utf-8"))))
        for path in sources
    }
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize("feature", [TP_LINEAR, MEGATRON], ids=lambda feature: feature.name)
def test_options_have_the_schedules_of_the_table(feature):
    (option,) = [option for option in feature.options if option.name == "schedule"]
    assert (option.choices, option.default) == (SCHEDULE_NAMES, DEFAULT_SCHEDULE)


def test_the_help_of_the_option_comes_from_the_table():
    (option,) = [option for option in TP_LINEAR.options if option.name == "schedule"]
    assert option.help.endswith(describe_schedules())


@pytest.mark.parametrize("info", SCHEDULES, ids=lambda info: info.name)
def test_every_schedule_has_one_object_and_a_text_that_graphs_keep(info):
    schedule = find_schedule(info.name, 4)
    assert find_schedule(info.name, 4) is schedule
    assert parse_schedule(schedule.name) is schedule
    assert schedule.name == (f"{info.name}4" if info.takes_chunks else info.name)
    assert (find_schedule(info.name, 3) is schedule) is not info.takes_chunks


def test_auto_compares_with_stock_first():
    assert MEASURED_NAMES[0] == "stock"
    assert DEFAULT_SCHEDULE in MEASURED_NAMES
