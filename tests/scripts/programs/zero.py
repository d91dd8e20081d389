"""DistributedDataParallel with ZeroRedundancyOptimizer, as its tutorial shows it: the states are gathered on rank 0 and
saved there, and training goes on. Once with parameters of their own and once with views of the optimizer's buckets.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, out, parameters_as_bucket_view):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    )
    ddp_model = DDP(model)
    optimizer = ZeroRedundancyOptimizer(
        ddp_model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=parameters_as_bucket_view,
        lr=1e-2,
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(rank + 1)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp_model(torch.randn(20, 64)), torch.randn(20, 8))
        loss.backward()
        nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step == 3:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, out / f"view{int(parameters_as_bucket_view)}.pt")
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    return {"losses": losses, "parameters": digest}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    log = {f"view {view}": train(rank, out, view) for view in (False, True)}
    (out / f"rank{rank}.json").write_text(json.dumps(log))
    dist.destroy_process_group()
