"""The first use of experts over ranks inside of a mode of the script changes no later step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from ovpatch_plugins.pipe_experts.routing import get_positions_on
from tests.plugins.ddp.arms import named
from tests.plugins.pipe_experts.models import KINDS, Case, Record, expected, train
from tests.support.equality import compare
from tests.support.modes import FORWARD_ONLY, LEVELS, MODES

CASES = {kind: Case(module=kind, steps=3) for kind in ("stacked", *KINDS)}
CASES |= {
    f"by {cut}": Case(steps=3, config=MoEConfig(cut=cut, parts=2)) for cut in ("experts", "tokens")
}


def train_in_mode(case: Case, mode: str) -> list[Record]:
    """Train three steps; the first forward runs inside of the mode, or follows a forward in it."""
    calls = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 1 and mode in ("fake", *LEVELS):
            # Numbers of rows depend on data, which fake tensors do not have, and exchanges of rows have no derivative
            # that a level knows.
            with pytest.raises(RuntimeError), MODES[mode]():
                model(x)
        elif len(calls) == 1:
            with MODES[mode]():
                out = model(x)
            if mode not in FORWARD_ONLY:
                return out
        return model(x)

    return train(case, forward=forward)


def train_all_in_mode(mode: str) -> dict[str, list[Record]]:
    found = {}
    for name, case in CASES.items():
        # The worker has run other modes, but each mode must be the first use.
        get_positions_on.cache_clear()
        with named(f"{name} in {mode}"):
            found[name] = train_in_mode(case, mode)
    return found


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "autocast"])
def test_the_first_use_inside_of_a_mode(ranks: Any, mode: str) -> None:
    found = ranks(2)(train_all_in_mode, mode)
    for name, case in CASES.items():
        right = expected(replace(case, config=MoEConfig()), 2)
        for rank in range(2):
            compare(right[rank], found[rank][name], floor=1e-10).assert_equal()
