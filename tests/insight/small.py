"""A model that is small enough for its traces to be kept."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(256, 512)
for _ in range(20):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
