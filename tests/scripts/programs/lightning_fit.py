"""Training with Lightning: automatic optimization, where the optimizer runs forward and backward in its closure."""

import argparse
import hashlib
import json
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch._dynamo.utils import get_compilation_metrics
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, optional):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 600), nn.Dropout(0.1), nn.ReLU()
        )
        self.head = nn.Linear(600, 4)
        self.optional = nn.Linear(600, 4) if optional else None
        self.log_of = {"losses": [], "norms": [], "validation": []}

    def training_step(self, batch, index):
        x, y = batch
        hidden = self.body(x)
        # The second head is used in every third batch only.
        logits = (
            self.optional(hidden)
            if self.optional is not None and index % 3 == 0
            else self.head(hidden)
        )
        loss = nn.functional.cross_entropy(logits, y)
        self.log_of["losses"].append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log_of["validation"].append(
            nn.functional.cross_entropy(self.head(self.body(x)), y).item()
        )

    def on_before_optimizer_step(self, optimizer):
        self.log_of["norms"].append(
            [p.grad.norm().item() for p in self.parameters() if p.grad is not None]
        )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--compile", action="store_true", help="compile the body")
    args = parser.parse_args()

    L.seed_everything(1, verbose=False)
    model = Classifier(optional="unused" in args.strategy)
    if args.compile:
        model.body = torch.compile(model.body, backend="eager")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=args.strategy,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(args.out, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(96, 32), torch.randint(4, (96,)))
    trainer.fit(
        model, DataLoader(data, 8, shuffle=True), DataLoader(data, 16), ckpt_path=args.resume
    )
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    frames = [
        [metric.co_name, metric.recompile_reason is not None]
        for metric in get_compilation_metrics()
    ]
    log = {**model.log_of, "parameters": digest, "frames": frames}
    (args.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main()
