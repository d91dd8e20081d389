"""A program that saves each step, fails once on one rank, and resumes after the restart."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(200, 300))
optimizer = torch.optim.AdamW(model.parameters())
first = 0
if (folder / "saved").exists():
    saved = torch.load(folder / "saved")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"] + 1
    print(f"resumed at step {first}", flush=True)
for step in range(first, 5):
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
