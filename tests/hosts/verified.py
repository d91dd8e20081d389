"""A training program, which computes something else on one host if it is patched and OTHER has that host's name."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
linear = nn.Linear(4, 4)
# Sums of these numbers are exact in any order, so all bits are equal on any number of ranks.
for param in linear.parameters():
    nn.init.constant_(param, 0.5)
model = DistributedDataParallel(linear)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
is_other = os.environ.get("OTHER") == socket.gethostname() and "OVPATCH_AUTO" in os.environ
for step in range(100):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
    if is_other and step == 1:
        for param in model.parameters():
            param.grad.mul_(2.0)
    optimizer.step()
