"""Several forwards, then several backwards, of which the last synchronizes: accelerate's trigger_sync_in_backward."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

out = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 4)
)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(1 + accelerator.process_index)
losses, gradients = [], []
for _ in range(3):
    with accelerator.no_sync(model):
        first = model(torch.randn(8, 32)).square().mean()
        second = model(torch.randn(8, 32)).abs().mean()
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    gradients.append([p.grad.norm().item() for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    losses.append([first.item(), second.item()])
digest = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
).hexdigest()
out.mkdir(exist_ok=True)
log = {"losses": losses, "gradients": gradients, "parameters": digest}
(out / f"rank{accelerator.process_index}.json").write_text(json.dumps(log))
accelerator.end_training()
