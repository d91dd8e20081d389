"""The style of the DistributedDataParallel tutorial: mp.spawn, and the process group is made inside the child.

Three process groups are made and destroyed in each child, one per learning rate. Each has a port of its own: stock
torch itself may hang when a port is used again while the other rank still holds the old store.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 600)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(600, 600)
        self.net3 = nn.Linear(600, 5)

    def forward(self, x):
        return self.net3(self.relu(self.net2(self.relu(self.net1(x)))))


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def train(rank, world_size, port, lr):
    setup(rank, world_size, port)
    torch.manual_seed(rank)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        loss = loss_fn(outputs, torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    del (
        ddp_model
    )  # stock's reducer can lock up the interpreter when it holds the last reference to the group
    cleanup()
    return {"losses": losses, "parameters": digest}


def child(rank, world_size, ports, out):
    rounds = [
        train(rank, world_size, port, lr) for port, lr in zip(ports, (0.1, 0.05, 0.01), strict=True)
    ]
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(rounds))


if __name__ == "__main__":
    out, ports, world_size = sys.argv[1], sys.argv[2:5], 2
    Path(out).mkdir(exist_ok=True)
    mp.spawn(child, args=(world_size, ports, out), nprocs=world_size, join=True)
