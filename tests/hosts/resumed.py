"""A program that saves each step and resumes after a restart.

Rank 1 fails once after a step, or the test takes its host from it there, if LOST_AT has the step.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
folder = Path(sys.argv[1])
lost_at = int(os.environ.get("LOST_AT", "-1"))
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TIMEOUT_S", "60"))))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(200, 300))
optimizer = torch.optim.AdamW(model.parameters())
first = 0
if (folder / "saved").exists():
    saved = torch.load(folder / "saved")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"] + 1
    print(f"resumed at step {first} of {STEPS}, {dist.get_world_size()} ranks", flush=True)
for step in range(first, STEPS):
    if step == lost_at and first == 0:
        (folder / f"waits {dist.get_rank()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.ones(2, 200) * (dist.get_rank() + 1)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            folder / "new",
        )
        (folder / "new").replace(folder / "saved")
    dist.barrier()
    if step == 2 and first == 0 and dist.get_rank() == 1:
        os._exit(3)
dist.destroy_process_group()
