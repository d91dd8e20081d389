"""Values of the feature's options, as its users may give them."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch


@pytest.mark.parametrize(("given", "value"), [(None, None), (50, 50.0), ("12.5", 12.5), ("none", None), (0, 0.0)])
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
def test_other_values_are_refused_by_name_before_anything_is_patched(name, given):
    init = vars(DDP)["__init__"]
    with pytest.raises(ovpatch.SettingsError, match=rf"ddp\.{name}=.*expected"):
        ovpatch.apply("ddp", options={"ddp": {name: given}})
    assert vars(DDP)["__init__"] is init


def bucket_sizes(script: float | None, option: float | None) -> list[int]:
    kwargs = {} if script is None else {"bucket_cap_mb": script}
    with ovpatch.applied("ddp", options={"ddp": {"bucket_cap_mb": option}}):
        return list(DDP(nn.Linear(2, 2), **kwargs).reducer.config.bucket_limits)


def test_a_capacity_that_the_script_sets_is_kept(ranks):
    mib = 1 << 20
    assert ranks(2)(bucket_sizes, None, None)[0] == [mib, 25 * mib]
    assert ranks(2)(bucket_sizes, None, 7)[0] == [mib, 7 * mib]
    assert ranks(2)(bucket_sizes, 3, 7)[0] == [3 * mib]
