"""The Trainer of transformers, where it is installed: with its defaults, and in the ways people use it."""

from __future__ import annotations

import json
import os

import pytest

from tests.scripts.arms import assert_applied, assert_same, crosswise, needs, saved_folders
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = [pytest.mark.slow, needs("transformers", "accelerate")]

LIBRARIES = ("transformers", "accelerate")
PRELOADED = (
    "transformers.trainer",
    "accelerate",
    *(("peft",) if os.environ.get("ALL_CASES") else ()),
)


def both(runner, *args, to, **more):
    """Run the Trainer stock and patched; logs of all ranks, and all checkpoints, are the same."""
    stock, patched = runner.both("hf_trainer", *args, to=to, **more)
    assert_same(stock, patched)
    assert (
        list(saved(stock))
        == list(saved(patched))
        == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    )
    compare(saved(stock), saved(patched)).assert_bitwise()
    return stock, patched


def saved(arm):
    return saved_folders(arm, "checkpoint-*", ".pt")


def values(arm, name):
    """Return what rank 0 logged under a name, which depends on the gradients of all."""
    return [entry[name] for entry in arm.ranks[0]["log"] if name in entry]


@pytest.fixture(scope="module")
def defaults(runner):
    return both(runner, to="defaults", fresh=True)


def test_trainer_with_its_defaults(defaults, compatibility):
    stock, patched = defaults
    assert len(values(stock, "loss")) == len(values(stock, "grad_norm")) == 6
    assert len(values(stock, "eval_loss")) == 3
    assert_applied(patched.report, models=1, backwards=6)
    compatibility(
        "transformers Trainer with its defaults: fused AdamW, clipping, unused parameters "
        "searched, evaluation",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, evaluations, parameters, checkpoints",
    )


def test_a_compiled_model_that_makes_modules_in_its_forward_is_compiled_as_often(runner):
    stock, patched = both(runner, "--torch-compile", to="torch-compile")
    frames = patched.ranks[0]["frames"]
    assert frames == stock.ranks[0]["frames"]
    assert len(frames) > 1
    assert_applied(patched.report, models=1, backwards=6)


LOGGED = """
import torch, transformers
import callbacks, ovpatch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}

ovpatch.apply()
rows = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(4)]
options = dict(max_steps=2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
trainer = transformers.Trainer(
    Model(),
    transformers.TrainingArguments(sys.argv[1], **options),
    train_dataset=rows,
    callbacks=[callbacks.make_trainer_callback()],
)
trainer.train()
trainer.save_state()
"""


def test_the_callback_of_the_examples_logs_the_counters(runner, tmp_path):
    assert "| ddp " in runner.alone(LOGGED, str(tmp_path)).stdout, "the report is printed"
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert history[0]["ovpatch/ddp/collectives"] == 0.0, "one process reduces nothing"
    assert "loss" in history[0]


@RARELY
def test_trainer_resumes_the_other_ways_checkpoint(runner, defaults, compatibility):
    whole_stock, whole_patched = defaults

    def resume(whole, **options):
        return runner.torchrun("hf_trainer.py", f"--resume={whole.out}/checkpoint-2", **options)

    stock, patched = crosswise(resume, whole_stock, whole_patched)
    assert_same(stock, patched)
    for arm in (stock, patched):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert values(arm, name) == values(whole_stock, name)
        assert [rank["parameters"] for rank in arm.ranks] == [
            rank["parameters"] for rank in whole_stock.ranks
        ]
        compare(saved(whole_stock)["checkpoint-6"], saved(arm)["checkpoint-6"]).assert_bitwise()
    assert_applied(patched.report, models=1, backwards=4)
    compatibility(
        "transformers Trainer, resume_from_checkpoint: patched from stock's, stock from patched's",
        patched,
        libraries=LIBRARIES,
        compared="against the run that was not interrupted: losses, gradient norms, parameters, checkpoints",
    )


@RARELY
def test_trainer_that_accumulates_and_checkpoints_activations(runner, compatibility):
    args = ("--gradient-accumulation-steps=2", "--gradient-checkpointing")
    stock, patched = both(runner, *args, to="accumulate")
    assert len(values(stock, "loss")) == 6
    # Of 12 backward passes every other synchronizes.
    assert_applied(patched.report, models=1, backwards=6)
    compatibility(
        "transformers Trainer with gradient_accumulation_steps=2 and gradient_checkpointing",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, evaluations, parameters, checkpoints",
    )


@RARELY
def test_trainer_that_finds_its_batch_size(runner, compatibility):
    stock, patched = both(runner, "--auto-find-batch-size", to="batch-size")
    assert [rank["batch_size"] for rank in stock.ranks] == [7, 7], "8 did not fit"
    # Two wraps: 1 backward of 2 buckets, and 1 that fails and goes with its wrapper, uncounted; then 6 of 2.
    assert_applied(patched.report, models=2, backwards=7, collectives=14)
    compatibility(
        "transformers Trainer with auto_find_batch_size: out of memory in the second backward, "
        "wrapped again",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, evaluations, parameters, checkpoints",
    )


@RARELY
@needs("peft")
def test_lora(runner, compatibility):
    from safetensors.torch import load_file

    stock, patched = runner.both("lora")
    assert all(rank["loaded_again"] for rank in stock.ranks)
    assert_same(stock, patched)
    adapters = [
        load_file(arm.out / "adapter" / "adapter_model.safetensors") for arm in (stock, patched)
    ]
    compare(*adapters).assert_bitwise()
    assert all("lora" in name for name in adapters[0])
    # Gradients of the adapters are reduced, and nothing else.
    bytes_reduced = 4 * 4 * stock.ranks[0]["trainable"]
    assert_applied(patched.report, models=1, backwards=4, bytes_reduced=bytes_reduced)
    compatibility(
        "LoRA by peft in a model of transformers, Trainer, adapter saved and loaded again",
        patched,
        libraries=("transformers", "peft", "accelerate"),
        compared="losses, gradient norms, parameters, adapter",
    )


@pytest.fixture(scope="module")
def checkpointed(runner):
    """LoRA where no trained parameter is outside of a checkpoint: every gradient comes in a backward of its own."""
    return runner.both(
        "lora", "--gradient-checkpointing", "--ddp-find-unused-parameters=false", to="checkpointed"
    )


@needs("peft")
@RARELY
def test_lora_in_reentrant_checkpoints(checkpointed, compatibility):
    stock, patched = checkpointed
    assert_same(stock, patched)
    assert_applied(
        patched.report, models=1, backwards=4, bytes_reduced=4 * 4 * stock.ranks[0]["trainable"]
    )
    compatibility(
        "LoRA by peft in reentrant checkpoints, Trainer with ddp_find_unused_parameters=False",
        patched,
        libraries=("transformers", "peft", "accelerate"),
        compared="losses, gradient norms, parameters",
    )


@needs("peft")
@RARELY
def test_lora_in_reentrant_checkpoints_with_a_search_for_unused_parameters(runner, checkpointed):
    """The Trainer's default, by which stock ends with an error ("mark a variable ready only once").

    Whoever goes on must compute what the right setting computes: no gradient may stay a rank's own.
    """
    searching = runner.torchrun(
        "lora.py", "--gradient-checkpointing", patched=True, to="checkpointed-searching"
    )
    assert_same(checkpointed[0], searching)
    assert_applied(searching.report, models=1, backwards=4)
