"""The comparison of both forwards: when it is made, and which samples of devices count as equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ovpatch.insight.verify.verification import Request
from ovpatch_plugins.recompute import recomputation


def test_verify_compares_values_in_every_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    request = Request(["true"], tmp_path)
    assert request.make_variant("patched", None).variables["OVPATCH_RECOMPUTE_CHECK"] == "always"
    assert "OVPATCH_RECOMPUTE_CHECK" not in request.make_variant("stock").variables
    monkeypatch.setenv("OVPATCH_RECOMPUTE_CHECK", "never")
    assert "OVPATCH_RECOMPUTE_CHECK" not in request.make_variant("patched", None).variables


@pytest.mark.parametrize(
    ("dtype", "change", "is_other"),
    [
        (torch.float32, lambda x: x, False),
        (torch.float32, lambda x: x * (1 + 1e-6), False),
        (torch.float32, lambda x: x * 1.01, True),
        # Rounding errors may change a route.
        (torch.float32, lambda x: x * (torch.arange(len(x)) != 3), False),
        (torch.float32, lambda x: x * (torch.arange(len(x)) % 8 != 3), True),
        (torch.float32, lambda x: torch.where(torch.arange(len(x)) % 8 != 3, x, torch.nan), True),
        (torch.bfloat16, lambda x: x * (1 + 2**-7), False),
        (torch.bfloat16, lambda x: x * 1.2, True),
        (torch.complex64, lambda x: x * 1j, True),
        (torch.int64, lambda x: x, False),
        (torch.int64, lambda x: x.flip(0), True),
        (torch.bool, lambda x: ~x, True),
    ],
)
def test_samples_allow_for_other_orders_of_sums(
    dtype: torch.dtype, change: Any, is_other: bool
) -> None:
    x = (torch.arange(4000) - 1000).to(dtype)
    changed = change(x).to(dtype)
    assert bool(recomputation._differ(*map(recomputation._take_sample, (x, changed)))) is is_other
