"""Lightning, where it is installed: Trainer and Fabric, over torchrun and over Lightning's own launcher."""

from __future__ import annotations

import pytest
import torch

from tests.scripts.arms import PROGRAMS, assert_applied, assert_same, crosswise, needs, together
from tests.support.environment import free_port
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = [pytest.mark.slow, needs("lightning")]

LIBRARIES = ("lightning",)
PRELOADED = LIBRARIES


def launched(runner, name, *args, to):
    """Run it stock and patched; Lightning's launcher starts the second rank of the patched run."""

    def start(to):
        port = {
            "MASTER_PORT": str(free_port())
        }  # else its launcher takes one of outgoing connections
        return runner.python(
            [str(PROGRAMS / name), str(runner.folder / to), *args], patched=True, to=to, env=port
        )

    return together(
        lambda: runner.torchrun(name, *args, patched=False, to=f"{to}-stock"),
        lambda: start(f"{to}-patched"),
    )


def saved(arm):
    """Return what ModelCheckpoint saved: parameters, optimizers, schedulers; not what names the folder."""
    files = {
        path.stem: torch.load(path, weights_only=True) for path in sorted(arm.out.glob("*.ckpt"))
    }
    parts = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    return {name: {part: file[part] for part in parts} for name, file in files.items()}


@pytest.fixture(scope="module")
def fitted(runner):
    return launched(runner, "lightning_fit.py", to="fit")


def test_automatic_optimization(fitted, compatibility):
    stock, patched = fitted
    assert [len(stock.ranks[0][name]) for name in ("losses", "norms")] == [12, 6]
    assert_same(stock, patched)
    assert list(saved(stock)) == list(saved(patched)) == ["epoch=0", "epoch=1"]
    compare(saved(stock), saved(patched)).assert_bitwise()
    # Of 12 backward passes every other synchronizes.
    assert_applied(patched.report, models=1, backwards=6)
    compatibility(
        "Lightning Trainer, strategy ddp: step with closure, clipping, accumulate_grad_batches=2, "
        "ModelCheckpoint",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, validation, parameters, checkpoints",
    )


@RARELY
def test_a_compiled_module(runner):
    stock, patched = launched(runner, "lightning_fit.py", "--compile", to="compiled")
    assert all(rank["frames"] for rank in stock.ranks)
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=6)


LOGGED = """
import lightning, torch
from lightning.pytorch.loggers import CSVLogger
import callbacks, ovpatch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

ovpatch.apply()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, logger=CSVLogger(sys.argv[1]), callbacks=[callbacks.make_lightning_callback()],
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4, 2)))
"""


def test_the_callback_of_the_examples_logs_the_counters(runner, tmp_path):
    assert "| ddp " in runner.alone(LOGGED, str(tmp_path)).stdout, "the report is printed"
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "ovpatch/ddp/collectives" in metrics.read_text()


@RARELY
def test_resumes_the_other_ways_checkpoint_under_torchrun(runner, fitted, compatibility):
    whole_stock, whole_patched = fitted

    def resume(whole, **options):
        return runner.torchrun(
            "lightning_fit.py", f"--resume={whole.out}/epoch=0.ckpt", launcher=[], **options
        )

    stock, patched = crosswise(resume, whole_stock, whole_patched)
    assert len(stock.ranks[0]["losses"]) == 6, "the second epoch"
    assert_same(stock, patched)
    compare(saved(stock), saved(patched)).assert_bitwise()
    assert_applied(patched.report, models=1, backwards=3)
    compatibility(
        "Lightning Trainer under torchrun, ckpt_path: patched from stock's, stock from patched's",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, validation, parameters, checkpoints",
    )


@RARELY
def test_unused_parameters(runner, compatibility):
    stock, patched = launched(
        runner, "lightning_fit.py", "--strategy=ddp_find_unused_parameters_true", to="unused"
    )
    assert_same(stock, patched)
    compare(saved(stock), saved(patched)).assert_bitwise()
    assert_applied(patched.report, models=1, backwards=6)
    compatibility(
        "Lightning Trainer, strategy ddp_find_unused_parameters_true: a head that some batches do "
        "not use",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, validation, parameters, checkpoints",
    )


@RARELY
def test_manual_optimization_with_two_optimizers(runner, compatibility):
    stock, patched = launched(runner, "lightning_gan.py", to="gan")
    assert len(stock.ranks[0]["losses"]) == 6
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=12)
    compatibility(
        "Lightning manual optimization: GAN with two optimizers, toggle_optimizer, two backward "
        "passes a step",
        patched,
        libraries=LIBRARIES,
        compared="losses, parameters",
    )


@RARELY
def test_fabric(runner, compatibility):
    stock, patched = launched(runner, "fabric.py", to="fabric")
    assert [len(stock.ranks[0][name]) for name in ("losses", "norms")] == [8, 4]
    assert_same(stock, patched)
    assert list(stock.checkpoints) == ["epoch1", "epoch2"]
    assert_applied(patched.report, models=1, backwards=4)
    compatibility(
        "Lightning Fabric: setup, no_backward_sync, clip_gradients, save",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, parameters, checkpoints",
    )
