"""torch.compile inside and outside DistributedDataParallel, with parameters that arrive under the next forward."""

from __future__ import annotations

from typing import Any

import pytest

from ovpatch.insight.equality import compare
from tests.plugins.ddp.test_compile import loop_compiled_and_counted
from tests.plugins.dist_optimizer.arms import both


def counted(outside: bool, overlap: bool) -> dict[str, Any]:
    result = both(loop_compiled_and_counted, outside, options={"overlap_param_gather": overlap})
    return {**result, "graphs": [arm.pop(-1)["graphs"] for arm in (result["stock"], result["patched"])]}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_compiled_training_equals_stock_and_compiles_no_more_graphs(ranks, outside, overlap):
    for result in ranks(2)(counted, outside, overlap, timeout=120):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["steps"] == 4
        assert result["counters"]["gathers_overlapped"] == (result["counters"]["gathers"] if overlap else 0)
        assert result["graphs"][0] == result["graphs"][1]
        assert result["graphs"][1]["unique_graphs"] > 0
