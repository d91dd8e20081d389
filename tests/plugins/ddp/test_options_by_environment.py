"""Options given by environment variables."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from tests.plugins.ddp.test_reduction_options import Stack

VARIABLES = {
    "OVERLAP_GRAD_REDUCE": ("0", False),
    "BUCKET_CAP_MB": ("12.5", 12.5),
    "BUCKET_GRANULARITY": ("layer", "layer"),
    "GRAD_REDUCE_IN_FP32": ("1", True),
    "GRAD_ACCUMULATE_IN_FP32": ("1", True),
    "AVERAGE_IN_COLLECTIVE": ("0", False),
    "MAX_CTAS": ("8", 8),
    "REDUCE_LATE_GRADIENTS": ("0", False),
    "AGREEMENT_TIMEOUT_S": ("3", 3.0),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_every_option_can_come_from_the_environment_and_shows_in_the_report(monkeypatch, name):
    text, value = VARIABLES[name]
    variable = f"OVPATCH_DDP_{name}"
    monkeypatch.setenv(variable, text)
    with ovpatch.applied("ddp") as report:
        option = report["ddp"].options[name.lower()]
        assert (option.value, option.source) == (value, f"environment {variable}")
        assert f"{name.lower()}={value} (environment {variable})" in " ".join(str(ovpatch.report()).split())


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_cannot_be_read_is_named(monkeypatch, name):
    monkeypatch.setenv(f"OVPATCH_DDP_{name}", "perhaps")
    with pytest.raises(ovpatch.SettingsError, match=rf"OVPATCH_DDP_{name}=perhaps.*(expected|Choose one of)"):
        ovpatch.apply("ddp")


def test_every_option_is_tried_from_the_environment():
    from ovpatch_plugins.ddp.options import OPTIONS as known

    assert {option.name for option in known} == {name.lower() for name in VARIABLES}


def by_environment() -> list[list[int]]:
    with ovpatch.applied("ddp"):
        return [list(bucket.indices) for bucket in DDP(Stack(), find_unused_parameters=True).reducer.buckets]


def test_the_environment_of_the_ranks_counts(ranks):
    env = {"OVPATCH_DDP_BUCKET_GRANULARITY": "module"}
    assert [len(buckets) for buckets in ranks(2)(by_environment, env=env)] == [1, 1]
    env = {"OVPATCH_DDP_BUCKET_GRANULARITY": "layer"}
    assert [len(buckets) for buckets in ranks(2)(by_environment, env=env)] == [5, 5]
