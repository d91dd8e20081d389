"""The style of torchvision's and timm's training scripts, on the CPU and, with SyncBatchNorm, on GPUs."""

from __future__ import annotations

import pytest

from tests.scripts.arms import assert_applied, assert_same
from tests.support.rarely import RARELY

pytestmark = pytest.mark.slow


def assert_same_training(stock, patched, device):
    assert [rank["device"] for rank in stock.ranks] == [device, device]
    assert [len(rank["losses"]) for rank in stock.ranks] == [8, 8]
    wrapper = stock.checkpoints["model_1"]["wrapper"]
    assert list(wrapper) == [f"module.{name}" for name in stock.checkpoints["model_1"]["model"]]
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=8)


@RARELY
def test_an_image_classifier(runner, compatibility):
    stock, patched = runner.both("classifier", "--amp", env={"CUDA_VISIBLE_DEVICES": ""})
    assert_same_training(stock, patched, "cpu")
    compatibility(
        "torchvision and timm style classifier: channels_last, EMA before and after the wrapper",
        patched,
        compared="losses, norms, metrics, checkpoints",
    )


# SyncBatchNorm refuses tensors on the CPU.
@pytest.mark.gpu(2)
def test_an_image_classifier_with_synchronised_batch_norm_on_gpus(runner, compatibility):
    # What deterministic algorithms need; without them stock itself differs from run to run.
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    args = ["--sync-bn", "--amp", "--use-deterministic-algorithms"]
    stock, patched = runner.both("classifier", *args, env=env, launcher=[])
    assert_same_training(stock, patched, "cuda")
    compatibility(
        "torchvision and timm style classifier: SyncBatchNorm, channels_last, autocast, EMA",
        patched,
        compared="losses, norms, metrics, checkpoints",
        device="NVIDIA H200, NCCL",
    )
