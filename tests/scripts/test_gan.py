"""Adversarial training: two wrapped models, of which one's backward goes through the other."""

from __future__ import annotations

import pytest

from tests.scripts.arms import assert_applied, assert_same
from tests.support.rarely import RARELY

pytestmark = pytest.mark.slow


@RARELY
def test_dcgan(runner, compatibility):
    stock, patched = runner.both("dcgan")
    assert [len(rank["errG"]) for rank in stock.ranks] == [4, 4]
    assert_same(stock, patched)
    # Per step two of the discriminator alone, and one of both models.
    assert_applied(patched.report, models=2, backwards=4 * (2 + 2))
    compatibility("DCGAN", patched, compared="losses, norms, checkpoints")


@RARELY
def test_wgan_with_gradient_penalty(runner, compatibility):
    stock, patched = runner.both("wgan_gp")
    assert [len(rank["d_loss"]) for rank in stock.ranks] == [6, 6]
    assert all(penalty > 0 for rank in stock.ranks for penalty in rank["penalty"])
    assert_same(stock, patched)
    # Each step one of the discriminator, and every other step one of both models.
    assert_applied(patched.report, models=2, backwards=6 + 3 * 2)
    compatibility(
        "WGAN-GP: backward through torch.autograd.grad",
        patched,
        compared="losses, penalties, parameters",
    )
