"""A GAN with Lightning, manual optimization: two optimizers over parts of one wrapped model, each with a backward."""

import hashlib
import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 16)
        )
        self.discriminator = nn.Sequential(nn.Linear(16, 600), nn.LeakyReLU(0.2), nn.Linear(600, 1))
        self.losses = []

    def loss(self, samples, real):
        logits = self.discriminator(samples)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, index):
        g_optimizer, d_optimizer = self.optimizers()
        (real,) = batch
        noise = torch.randn(len(real), 8)

        self.toggle_optimizer(g_optimizer)
        g_loss = self.loss(self.generator(noise), True)
        self.manual_backward(g_loss)
        self.clip_gradients(g_optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        g_optimizer.step()
        g_optimizer.zero_grad()
        self.untoggle_optimizer(g_optimizer)

        self.toggle_optimizer(d_optimizer)
        d_loss = (self.loss(real, True) + self.loss(self.generator(noise).detach(), False)) / 2
        self.manual_backward(d_loss)
        d_optimizer.step()
        d_optimizer.zero_grad()
        self.untoggle_optimizer(d_optimizer)
        self.losses.append([g_loss.item(), d_loss.item()])

    def configure_optimizers(self):
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    L.seed_everything(1, verbose=False)
    model = GAN()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_find_unused_parameters_true",
        max_epochs=2,
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(48, 16)), 8))
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    (out / f"rank{trainer.global_rank}.json").write_text(
        json.dumps({"losses": model.losses, "parameters": digest})
    )
