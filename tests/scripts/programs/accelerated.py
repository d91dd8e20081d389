"""A loop over accelerate, as its quick tour shows it."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(4, (64,))), batch_size=8)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

losses = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
accelerator.wait_for_everyone()
out.mkdir(exist_ok=True)
if accelerator.is_main_process:
    accelerator.save({"model": accelerator.unwrap_model(model).state_dict()}, out / "model.pt")
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
(out / f"rank{accelerator.process_index}.json").write_text(json.dumps({"losses": losses, "parameters": digest}))
accelerator.end_training()
