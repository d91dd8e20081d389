"""The value of features and options: the result files give the numbers, and one rule calls values experimental."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import value as tool
from ovpatch.session.plugins import Plugins, find_plugins
from tests.support import patience
from tests.support.environment import clean

TEXT = tool.VALUE_FILE.read_text(encoding="utf-8")
VALUES, EXEMPT = tool.read_values(TEXT)


@pytest.fixture(scope="module")
def features():
    plugins = Plugins()
    return [plugins.load_feature(found) for found in find_plugins().values() if found.first_party]


def list_opt_in_names(feature):
    """Return the names of the values that a user can choose, apart from the default."""
    for option in feature.options:
        choices = (False, True) if isinstance(option.default, bool) else option.choices
        chosen = [choice for choice in choices if choice != option.default]
        yield from (f"{feature.name}.{option.name}={spell(choice)}" for choice in chosen)


def spell(choice):
    return str(int(choice)) if isinstance(choice, bool) else str(choice)


def test_numbers_and_status_are_those_of_the_result_files():
    wrong = [value.name for value in VALUES if tool.measure(value) != value]
    assert not wrong, "run python -m benchmarks.value --write"
    assert tool.write_values(TEXT, VALUES) == TEXT


def test_each_feature_and_each_value_that_a_user_can_choose_is_measured_or_exempt(features):
    names = {value.name for value in VALUES}
    assert not names & EXEMPT.keys()
    wanted = {name for feature in features for name in (feature.name, *list_opt_in_names(feature))}
    defaults = {"megatron.linears=1", "dist_optimizer.shard=auto"}
    assert wanted - names - EXEMPT.keys() == set(), "add a row to benchmarks/value.toml"
    assert (names | EXEMPT.keys()) - wanted <= defaults | {"dist_optimizer.shard=always"}, (
        "remove the row"
    )


def test_the_declarations_call_the_same_values_experimental(features):
    declared = {
        f"{feature.name}.{option.name}={spell(choice)}"
        for feature in features
        for option in feature.options
        for choice in option.experimental
    }
    assert declared == {
        value.name for value in VALUES if value.status == tool.EXPERIMENTAL and value.option
    }


def test_nothing_that_a_plain_apply_turns_on_is_experimental(features):
    proved = {value.name for value in VALUES if value.status == tool.PROVED}
    assert {feature.name for feature in features} <= proved
    for feature in features:
        if feature.default:
            assert not [
                option.name for option in feature.options if option.default in option.experimental
            ]


@pytest.mark.parametrize(
    ("time", "memory", "rounds", "has_proved"),
    [
        (3.0, 0.0, 3, True),
        (-8.0, 3.0, 3, True),
        (2.9, 2.9, 9, False),
        (9.0, 9.0, 2, False),
        (None, None, 0, False),
    ],
)
def test_the_rule(time, memory, rounds, has_proved):
    assert tool.has_proved(time, memory, rounds) is has_proved


def test_a_gain_compares_rounds_of_one_run_with_its_fastest_reference(tmp_path):
    def run(device, **arms):
        rows = [
            {"arm": arm, "median_ms": min(times), "round_medians_ms": times, "peak_gib": peak}
            for arm, (times, peak) in arms.items()
        ]
        return json.dumps({"device": device, "summary": rows})

    lines = [
        run(
            "GPU", own=([80.0, 90.0], 6.0), slow=([200.0, 200.0], 9.0), stock=([100.0, 100.0], 8.0)
        ),
        run("GPU", own=([70.0], 4.0), stock=([100.0], 8.0)),
        run("GPU", own=([1.0], 1.0)),
        run("cpu", own=([1.0], 1.0), stock=([100.0], 8.0)),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    measured = tool.measure(
        tool.Value("f", result="a.jsonl", arm="own", against=("stock", "slow")), tmp_path
    )
    assert (measured.time_percent, measured.memory_percent, measured.rounds) == (20.0, 37.5, 3)
    assert measured.status == tool.PROVED
    assert tool.measure(tool.Value("f", "o", "v")).status == tool.EXPERIMENTAL


def test_the_list_calls_a_value_experimental():
    command = [sys.executable, "-m", "ovpatch", "list", "pipeline"]
    done = subprocess.run(
        command,
        env=clean(os.environ),
        capture_output=True,
        text=True,
        timeout=patience.scale(300),
        check=True,
    )
    text = " ".join(done.stdout.replace("|", " ").split())
    assert "Experimental, without a measured gain: pipedream." in text
