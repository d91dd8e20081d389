"""torch.compile inside and outside DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plugins.ddp.arms import both
from tests.plugins.ddp.test_gpu import loop_compiled
from tests.support.equality import compare


def counted(outside: bool) -> dict[str, Any]:
    result = both(loop_compiled_and_counted, outside)
    return {
        **result,
        "graphs": [arm.pop(-1)["graphs"] for arm in (result["stock"], result["patched"])],
    }


def loop_compiled_and_counted(outside: bool) -> list[dict[str, Any]]:
    torch._dynamo.utils.counters.clear()
    records = loop_compiled(outside, "aot_eager")
    return [*records, {"graphs": dict(torch._dynamo.utils.counters["stats"])}]


@pytest.mark.parametrize("outside", [True, False])
def test_compiled_training_equals_stock_and_compiles_no_more_graphs(ranks, outside):
    for result in ranks(2)(counted, outside, timeout=120):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["backwards"] == 4
        assert result["graphs"][0] == result["graphs"][1]
        assert result["graphs"][1]["unique_graphs"] > 0
