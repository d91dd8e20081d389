"""Ranks whose patches differ."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ovpatch
from ovpatch.overlap.comm import consensus
from tests.plugins.tp_linear.arms import mesh
from tests.plugins.tp_linear.models import MLP


def differing(how: str) -> str:
    group = mesh()
    first = dist.get_rank() == 0
    if how == "one is stock" and first:
        # This rank would continue with a collective that no peer joins.
        return ""
    schedule = "ring" if how == "schedules" and first else "bulk"
    # Where both ranks come, the wait must not end before a rank that is late on a busy machine.
    timeout_s = consensus.LATE_START_S if how == "schedules" else 1.0
    with (
        mock.patch.object(consensus, "LATE_START_S", timeout_s),
        ovpatch.applied("tp_linear", options={"tp_linear": {"schedule": schedule}}),
    ):
        model = MLP()
        try:
            parallelize_module(model, group, {"up": ColwiseParallel()})
        except RuntimeError as error:
            assert type(model.up.weight).__name__ == "Parameter", "nothing is half-applied"
            return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["schedules", "one is stock"])
def test_differences_are_named(ranks, how):
    errors = ranks(2)(differing, how)
    if how == "schedules":
        assert errors[0] == errors[1]
        assert 'schedule is "ring" on rank 0 but "bulk" on rank 1' in errors[0]
    else:
        assert "feature 'tp_linear' got no reply from rank 0 within 1 s" in errors[1]
        assert errors[1].endswith(
            "set OVPATCH_TP_LINEAR=0 on all ranks to have stock PyTorch compute linears."
        )
