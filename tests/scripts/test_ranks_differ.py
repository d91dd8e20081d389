"""Ranks that are not patched alike fail soon and say who and what, instead of hanging."""

from __future__ import annotations

import json

import pytest

from ovpatch_plugins.ddp.ddp_options import OPTIONS
from tests.scripts.arms import PROGRAMS, WORLD, feature, together

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures(tmp_path_factory, forks):
    """Run the plain program with a variable that rank 1 alone has, once off and once set otherwise."""
    out = tmp_path_factory.mktemp("differ")

    def start(name, setting, **env):
        lone = ["1", setting, str(PROGRAMS / "plain.py"), str(out / name)]
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
            "0"  # ovpatch is loaded by lone.py, once the variable is set
        )
        report = out / f"{name}.report"
        result = forks.torchrun(
            WORLD, PROGRAMS / "lone.py", *lone, env=env, report=report, timeout=240
        )
        return result, json.loads(report.read_text())

    return together(
        lambda: start("off", "OVPATCH=0", OVPATCH_DDP_AGREEMENT_TIMEOUT_S="1"),  # expires
        lambda: start("other", "OVPATCH_DDP_BUCKET_CAP_MB=1", OVPATCH_DDP_BUCKET_CAP_MB="2"),
    )


def failed(result):
    assert not result.timed_out, result.describe()
    assert result.rc, result.describe()
    return result.stderr


def test_a_rank_without_ovpatch_is_named_with_the_remedy(failures):
    result, report = failures[0]
    stderr = failed(result)
    assert "feature 'ddp' got no reply from rank 1 within 1 s" in stderr
    assert "Call ovpatch.apply() on every rank" in stderr
    assert "disabled (off by OVPATCH=0) on rank 1" in feature(report)["reason"], (
        "the report says so, too"
    )


def test_options_that_differ_are_named_with_their_ranks(failures):
    stderr = failed(failures[1][0])
    mib = 1024 * 1024
    assert f"is [{mib}, {2 * mib}] on rank 0 but [{mib}, {mib}] on rank 1" in stderr
    assert "Give every rank the same OVPATCH variables" in stderr
    assert "got no reply" not in stderr


def test_by_default_a_rank_that_does_not_answer_is_given_up_within_30_seconds():
    # A rank other than 0 gives rank 0 five seconds more, see agreement.py.
    assert (
        next(option.default for option in OPTIONS if option.name == "agreement_timeout_s") + 5 < 30
    )
