"""Checkpoints by torch.distributed.checkpoint's functions, and by one rank while the others have finished."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp

import ovpatch
from tests.plugins.dist_optimizer.arms import SMALL, both
from tests.plugins.dist_optimizer.test_state import build, step, trained
from tests.support.equality import compare


def into_several() -> list[dict[str, Any]]:
    """Load into optimizers that have never stepped, of models that have never run; torch lets them step for that."""
    model, opt = trained(4)
    found = copy.deepcopy(dcp.get_optimizer_state_dict(model, opt))
    others = [build() for _ in range(2)]
    for other, opt2 in others:
        dcp.set_optimizer_state_dict(other, opt2, copy.deepcopy(found))
    records = []
    for other, opt2 in others:
        step(other, opt2, 5)
        state = copy.deepcopy(dcp.get_optimizer_state_dict(other, opt2))
        records.append({"state": state, "after": {n: p.detach().clone() for n, p in other.named_parameters()}})
    return records


def test_dcp_functions_load_into_several_new_models(ranks):
    for result in ranks(2)(both, into_several):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["optimizers"] == 3


def saved_last() -> Any:
    """Rank 1 destroys its group while rank 0 is still to save."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        _model, opt = trained(4)
        found = None
        if dist.get_rank() == 0:
            time.sleep(0.5)
            found = copy.deepcopy(opt.state_dict())
        dist.destroy_process_group()
    return found


def saved_by_stock() -> Any:
    _model, opt = trained(4)
    return copy.deepcopy(opt.state_dict())
