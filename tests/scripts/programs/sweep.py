"""Three trials in one process, each in a process group of its own; a batch whose backward fails is skipped.

The failure is the same on all ranks and comes before the first gradient, which stock DistributedDataParallel survives.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Fragile(torch.autograd.Function):
    """The identity, which runs out of memory in backward if it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise RuntimeError("out of memory")
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 8)
        )

    def forward(self, x, fails):
        return Fragile.apply(self.layers(x), fails)


def trial(number, bad_batch, port):
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(10 * number + rank)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (number + 1), momentum=0.9)
    losses, skipped = [], []
    for step in range(4):
        loss = model(torch.randn(16, 32), step == bad_batch).square().mean()
        optimizer.zero_grad()
        try:
            loss.backward()
        except RuntimeError as error:
            skipped.append(f"{step}: {error}")
            continue
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    del (
        model
    )  # stock's reducer can lock up the interpreter when it holds the last reference to the group
    dist.destroy_process_group()
    return {"losses": losses, "skipped": skipped, "parameters": digest}


if __name__ == "__main__":
    out, ports = Path(sys.argv[1]), sys.argv[2:5]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store of our own on each port
    trials = [
        trial(number, bad, port)
        for number, (bad, port) in enumerate(zip([None, 1, 3], ports, strict=True))
    ]
    out.mkdir(exist_ok=True)
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(trials))
