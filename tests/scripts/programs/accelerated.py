"""A loop over accelerate, as its quick tour and its page on gradient accumulation show it.

The state is saved after each epoch. Whether the model is compiled is decided by the launcher.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch._dynamo.utils import get_compilation_metrics
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--resume", help="a folder of save_state, written after the first epoch")
parser.add_argument("--comm-hook", action="store_true", help="gradients cross the wire in float16")
args = parser.parse_args()

hook = DDPCommunicationHookType.FP16 if args.comm_hook else DDPCommunicationHookType.NO
kwargs = DistributedDataParallelKwargs(comm_hook=hook)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[kwargs])
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 600),
    nn.ReLU(),
    nn.Linear(600, 600),
    nn.Dropout(0.1),
    nn.ReLU(),
    nn.Linear(600, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(4, (64,))), batch_size=8)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
first_epoch = 0
if args.resume:
    accelerator.load_state(args.resume)
    first_epoch = 1

losses, norms = [], []
for epoch in range(first_epoch, 2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(args.out / f"state{epoch + 1}")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.save({"model": accelerator.unwrap_model(model).state_dict()}, args.out / "model.pt")
digest = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
).hexdigest()
frames = [
    [metric.co_name, metric.recompile_reason is not None] for metric in get_compilation_metrics()
]
log = {
    "losses": losses,
    "norms": norms,
    "parameters": digest,
    "class": type(model).__name__,
    "frames": frames,
}
(args.out / f"rank{accelerator.process_index}.json").write_text(json.dumps(log))
accelerator.end_training()
