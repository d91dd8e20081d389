"""A loop of one's own over Lightning's Fabric: setup, no_backward_sync, clipping, save."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out = Path(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1, verbose=False)
model = nn.Sequential(
    nn.Linear(32, 600),
    nn.ReLU(),
    nn.Linear(600, 600),
    nn.Dropout(0.1),
    nn.ReLU(),
    nn.Linear(600, 4),
)
loader = DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(4, (64,))), batch_size=8)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(loader)

losses, norms = [], []
for epoch in range(2):
    for index, (x, y) in enumerate(loader):
        accumulating = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        if not accumulating:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    fabric.save(
        out / f"epoch{epoch + 1}.pt", {"model": model, "optimizer": optimizer, "epoch": epoch}
    )
digest = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
).hexdigest()
log = {"losses": losses, "norms": norms, "parameters": digest}
(out / f"rank{fabric.global_rank}.json").write_text(json.dumps(log))
