"""Values of the options of the feature that users may set, in the call and by environment variables."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from tests.plugins.ddp.test_reduction_options import Stack


@pytest.mark.parametrize(
    ("given", "value"), [(None, None), (50, 50.0), ("12.5", 12.5), ("none", None), (0, 0.0)]
)
def test_bucket_capacity(given, value):
    with ovpatch.applied("ddp", options={"ddp": {"bucket_cap_mb": given}}) as report:
        assert report["ddp"].options["bucket_cap_mb"].value == value


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[("bucket_cap_mb", value) for value in (-1, "many", [1], True, float("nan"))],
        *[("agreement_timeout_s", value) for value in (0, "inf", True, None)],
        *[("overlap_grad_reduce", value) for value in ("perhaps", 1, None)],
    ],
)
def test_bad_values_are_refused_by_name_before_any_patch(name, given):
    init = vars(DDP)["__init__"]
    with pytest.raises(ovpatch.SettingsError, match=rf"ddp\.{name}=.*expected"):
        ovpatch.apply("ddp", options={"ddp": {name: given}})
    assert vars(DDP)["__init__"] is init


def bucket_sizes(script: float | None, option: float | None) -> list[int]:
    kwargs = {} if script is None else {"bucket_cap_mb": script}
    with ovpatch.applied("ddp", options={"ddp": {"bucket_cap_mb": option}}):
        return list(DDP(nn.Linear(2, 2), **kwargs).reducer.grad_reducer.config.bucket_limits)


def test_a_capacity_that_the_script_sets_is_kept(ranks):
    mib = 1 << 20
    assert ranks(2)(bucket_sizes, None, None)[0] == [mib, 25 * mib]
    assert ranks(2)(bucket_sizes, None, 7)[0] == [mib, 7 * mib]
    assert ranks(2)(bucket_sizes, 3, 7)[0] == [3 * mib]


# --- environment variables ---

VARIABLES = {
    "OVERLAP_GRAD_REDUCE": ("0", False),
    "BUCKET_CAP_MB": ("12.5", 12.5),
    "BUCKET_GRANULARITY": ("layer", "layer"),
    "GRAD_REDUCE_IN_FP32": ("1", True),
    "GRAD_ACCUMULATE_IN_FP32": ("1", True),
    "AVERAGE_IN_COLLECTIVE": ("0", False),
    "HIERARCHICAL": ("off", "off"),
    "MAX_CTAS": ("8", 8),
    "AGREEMENT_TIMEOUT_S": ("3", 3.0),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_the_report_shows_every_option_of_the_environment(monkeypatch, name):
    text, value = VARIABLES[name]
    variable = f"OVPATCH_DDP_{name}"
    monkeypatch.setenv(variable, text)
    with ovpatch.applied("ddp") as report:
        option = report["ddp"].options[name.lower()]
        assert (option.value, option.source) == (value, f"environment {variable}")
        assert f"{name.lower()}={value} (environment {variable})" in " ".join(
            str(ovpatch.report()).split()
        )


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_cannot_be_read_is_named(monkeypatch, name):
    monkeypatch.setenv(f"OVPATCH_DDP_{name}", "perhaps")
    with pytest.raises(
        ovpatch.SettingsError, match=rf"OVPATCH_DDP_{name}=perhaps.*(expected|Choose one of)"
    ):
        ovpatch.apply("ddp")


def test_the_table_of_variables_has_every_option():
    from ovpatch_plugins.ddp.ddp_options import OPTIONS as known

    assert {option.name for option in known} == {name.lower() for name in VARIABLES}


def by_environment() -> list[list[int]]:
    with ovpatch.applied("ddp"):
        reducer = DDP(Stack(), find_unused_parameters=True).reducer.grad_reducer
        return [list(bucket.indices) for bucket in reducer.sync.buckets]


def test_ranks_read_their_own_environment(ranks):
    env = {"OVPATCH_DDP_BUCKET_GRANULARITY": "module"}
    assert [len(buckets) for buckets in ranks(2)(by_environment, env=env)] == [1, 1]
    env = {"OVPATCH_DDP_BUCKET_GRANULARITY": "layer"}
    assert [len(buckets) for buckets in ranks(2)(by_environment, env=env)] == [5, 5]
