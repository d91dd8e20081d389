"""Trains the GPT of nano_model.py with Lightning's Trainer: strategy ddp, bf16-mixed, clipping.

torchrun --nproc-per-node 2 benchmarks/programs/lightning_gpt.py --size tiny
"""

from __future__ import annotations

import argparse
import os

import torch
from nano_model import CONFIGS, GPT
from step_times import StepTimes, add_options
from torch.utils.data import DataLoader, Dataset

try:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as L
    from pytorch_lightning.strategies import DDPStrategy


class Tokens(Dataset):
    """Random sequences."""

    def __init__(self, count: int, length: int, vocabulary: int):
        self.tokens = torch.randint(
            vocabulary, (count, length + 1), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Model(L.LightningModule):
    """The GPT and its optimizer."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.gpt = GPT(CONFIGS[args.size])

    def training_step(self, batch, _index) -> torch.Tensor:
        """Return the loss."""
        _, loss = self.gpt(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, which must not be fused, because Lightning refuses to clip for fused optimizers."""
        return torch.optim.AdamW(self.gpt.param_groups(0.1), lr=6e-4)


class Clock(L.Callback):
    """Calls ``end_step()`` after each optimizer step."""

    def __init__(self, times: StepTimes):
        self.times = times

    def on_train_batch_end(self, *_args, **_kwargs) -> None:
        """Note the end of a step."""
        self.times.end_step()


def main(args: argparse.Namespace) -> None:
    """Train."""
    times = StepTimes(args)
    cuda, config = torch.cuda.is_available(), CONFIGS[args.size]
    L.seed_everything(0, verbose=False)
    strategy = DDPStrategy(gradient_as_bucket_view=True, static_graph=True) if args.best else "ddp"
    trainer = L.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        precision="bf16-mixed" if cuda else "32-true",
        max_steps=times.total_steps,
        gradient_clip_val=1.0,
        callbacks=[Clock(times)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(64 * args.batch * trainer.world_size, config.block_size, config.vocab_size)
    trainer.fit(Model(args), DataLoader(data, args.batch, shuffle=True, pin_memory=cuda))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=CONFIGS, default="124m")
    parser.add_argument("--batch", type=int, default=12, help="sequences on a rank")
    add_options(parser)
    main(parser.parse_args())
