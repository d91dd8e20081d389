"""Compute what each feature and option gains from ``benchmarks/results``, and judge it by one rule.

    $ python -m benchmarks.value            # print the gains
    $ python -m benchmarks.value --write    # renew the numbers in benchmarks/value.toml

A value has *proved* itself if at least three rounds on GPUs are on file, and it makes steps at least 3% faster or needs
at least 3% less memory. Otherwise it is experimental; ``ovpatch list`` and its page call it so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER: Final = Path(__file__).resolve().parent
VALUE_FILE: Final = FOLDER / "value.toml"

MIN_GAIN_PERCENT: Final = 3.0
MIN_ROUNDS: Final = 3

PROVED: Final = "proved"
EXPERIMENTAL: Final = "experimental"


@dataclass(frozen=True)
class Value:
    """The gain of a feature with its defaults, or of one value of an option.

    Attributes:
        feature: The feature.
        option: The option; "" for the feature.
        value: The value of the option, as in the variable; "" for the feature.
        result: The file in ``benchmarks/results``; "" if none is on file.
        arm: The arm of that file that runs with the value.
        against: The arms without it; the fastest of each run counts.
        time_percent: The gain in the time of a step: the median over rounds. None without a result.
        memory_percent: The gain in peak memory: the median over runs. None without a result.
        rounds: The number of rounds on file.
        status: "proved" or "experimental".
    """

    feature: str
    option: str = ""
    value: str = ""
    result: str = ""
    arm: str = ""
    against: tuple[str, ...] = ()
    time_percent: float | None = None
    memory_percent: float | None = None
    rounds: int = 0
    status: str = ""

    @property
    def name(self) -> str:
        """The feature, or ``feature.option=value``."""
        return f"{self.feature}.{self.option}={self.value}" if self.option else self.feature


def read_values(text: str) -> tuple[list[Value], dict[str, str]]:
    """Return the values of the file, and the reasons why other values need no gain, by name."""
    tables = tomllib.loads(text)
    values = [
        Value(**table | {"against": tuple(table.get("against", ()))}) for table in tables["value"]
    ]
    return values, {exempt["name"]: exempt["reason"] for exempt in tables["exempt"]}


def measure(value: Value, folder: Path = FOLDER / "results") -> Value:
    """Return a value with the numbers of its result file, and its status."""
    times: list[float] = []
    peaks: list[float] = []
    for arm, reference in _list_pairs(value, folder):
        rounds = zip(arm["round_medians_ms"], reference["round_medians_ms"], strict=False)
        times += [100 * (1 - own / reference_ms) for own, reference_ms in rounds]
        if arm.get("peak_gib") and reference.get("peak_gib"):
            peaks.append(100 * (1 - arm["peak_gib"] / reference["peak_gib"]))
    time = round(statistics.median(times), 1) if times else None
    memory = round(statistics.median(peaks), 1) if peaks else None
    numbers = {"time_percent": time, "memory_percent": memory, "rounds": len(times)}
    status = PROVED if has_proved(time, memory, len(times)) else EXPERIMENTAL
    return Value(**vars(value) | numbers | {"status": status})


def has_proved(time_percent: float | None, memory_percent: float | None, rounds: int) -> bool:
    """Return whether enough rounds show a gain in time or memory."""
    gains = [gain for gain in (time_percent, memory_percent) if gain is not None]
    return rounds >= MIN_ROUNDS and any(gain >= MIN_GAIN_PERCENT for gain in gains)


def _list_pairs(value: Value, folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the arm and the fastest arm without the value, of each run on GPUs that has both."""
    lines = (folder / value.result).read_text(encoding="utf-8").splitlines() if value.result else []
    for run in map(json.loads, lines):
        arms = {row["arm"]: row for row in run.get("summary", ()) if "round_medians_ms" in row}
        references = [arms[name] for name in value.against if name in arms]
        if value.arm in arms and references and run["device"] != "cpu":
            yield arms[value.arm], min(references, key=lambda row: float(row["median_ms"]))


def write_values(text: str, values: Sequence[Value]) -> str:
    """Return the file with current numbers; comments and reasons stay."""
    head, _, rest = text.partition("[[value]]")
    reasons = "[[exempt]]" + rest.partition("[[exempt]]")[2]
    tables = []
    for value in values:
        fields = {name: field for name, field in vars(value).items() if field not in ("", None, ())}
        lines = [
            f"{name} = {json.dumps(field, ensure_ascii=False)}" for name, field in fields.items()
        ]
        tables.append("\n".join(["[[value]]", *lines, ""]))
    return head + "\n".join([*tables, reasons])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the values; with ``--write``, renew the file."""
    parser = argparse.ArgumentParser(description="Compute what each feature and option gains.")
    parser.add_argument(
        "--write", action="store_true", help="renew the numbers in benchmarks/value.toml"
    )
    options = parser.parse_args(arguments)
    text = VALUE_FILE.read_text(encoding="utf-8")
    values = [measure(value) for value in read_values(text)[0]]
    for value in values:
        numbers = (
            f"time {value.time_percent}%, memory {value.memory_percent}%, {value.rounds} rounds"
        )
        print(
            f"{value.name:48} {value.status:13} {numbers if value.result else 'no result on file'}"
        )
    if options.write:
        VALUE_FILE.write_text(write_values(text, values), encoding="utf-8")


if __name__ == "__main__":
    main()
