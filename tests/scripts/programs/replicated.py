"""The composable replicate(), which keeps a DistributedDataParallel to itself and builds it in the first forward, over
a mesh whose other dimension is for tensor parallelism; gradient accumulation by its own switch.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(tensor_parallel):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    )
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = replicate(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank + 1)
    losses, norms = [], []
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss = nn.functional.mse_loss(model(torch.randn(20, 64)), torch.randn(20, 8))
        loss.backward()
        losses.append(loss.item())
        if step % 2 == 1:
            norms.append(
                sum(local(p.grad).double().square().sum().item() for p in model.parameters())
            )
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256(
        b"".join(local(p).detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    return {"losses": losses, "norms": norms, "parameters": digest}


log = [train(tensor_parallel) for tensor_parallel in (False, True)]
out.mkdir(exist_ok=True)
(out / f"rank{rank}.json").write_text(json.dumps(log))
dist.barrier()
dist.destroy_process_group()
