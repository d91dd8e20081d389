"""The tool that runs the tests on other versions: what it plans, reads and records."""

from __future__ import annotations

import json

from tools import docs_table
from tools import test_versions as tool

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="no">E</failure></testcase>
<testcase classname="tests.a" name="two"><error message="no">E</error></testcase>
<testcase classname="tests.a" name="three"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_each_torch_runs_here_and_the_newest_on_each_other_python():
    runs = tool.plan_runs(["2.11.0", "2.9.1", "2.15.0"], ["3.10", "3.11"], "3.11")
    assert runs == [("2.11.0", "3.11"), ("2.9.1", "3.11"), ("2.15.0", "3.11"), ("2.15.0", "3.10")]
    assert tool.plan_runs(["2.13.0"], ["3.12"], "3.11") == [("2.13.0", "3.12")]


def test_results_are_recorded_once_for_each_pair_of_versions_and_shown(tmp_path):
    report, record = tmp_path / "report.xml", tmp_path / "versions.json"
    report.write_text(REPORT)
    row = tool.read_report(report, "2.15.0+cpu", "3.11", "2026-01-01")
    assert (row.passed, row.skipped, row.failed) == (1, 1, ("tests.a.two",))
    tool.add_row(
        tool.Row("2.9.0", "3.11", "2026-01-01", problem="pip could not install it"), record
    )
    tool.add_row(
        tool.Row("2.15.0", "3.11", "2025-01-01", problem="pip could not install it"), record
    )
    tool.add_row(tool.Row("2.15.0+cpu", "3.11", "2025-01-01", passed=7), record)
    tool.add_row(row, record)
    rows = json.loads(record.read_text())
    assert [one["torch"] for one in rows] == ["2.9.0", "2.15.0+cpu"]
    table = docs_table.make_versions_table(rows)
    assert "| 2.9.0 | 3.11 |  | pip could not install it |  | 2026-01-01 |" in table
    assert "| 2.15.0+cpu | 3.11 | 1 | `two` | 1 | 2026-01-01 |" in table


def test_the_interpreters_of_the_machine_are_found():
    found = tool.list_pythons()
    assert all(tuple(map(int, version.split("."))) >= tool.OLDEST_PYTHON for version in found)
    assert found
