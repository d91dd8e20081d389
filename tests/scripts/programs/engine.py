"""The style of DeepSpeed: no wrapper of torch's, but an engine that averages gradients by hooks of its own and has an
optimizer for its part of one flat buffer only (ZeRO stage 1); engine.backward(loss), engine.step().
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Engine(nn.Module):
    def __init__(self, module, lr, gradient_accumulation_steps, bucket_elements=100_000):
        super().__init__()
        self.module = module
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.micro_steps = 0
        self.params = [p for p in module.parameters() if p.requires_grad]
        numel = sum(p.numel() for p in self.params)
        self.partition_size = -(-numel // self.world_size)
        self.flat = torch.zeros(self.partition_size * self.world_size)
        offset = 0
        for p in self.params:
            view = self.flat[offset : offset + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            offset += p.numel()
        dist.broadcast(self.flat, src=0)
        self.master = nn.Parameter(self._partition().clone())
        self.optimizer = torch.optim.Adam([self.master], lr=lr)
        self.bucket_elements = bucket_elements
        self.bucket, self.handles = [], []
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._reduce_ready)

    def forward(self, *args):
        return self.module(*args)

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()
        if self._at_boundary():
            self._flush()
            for work, flat, params in self.handles:
                work.wait()
                for p, part in zip(
                    params,
                    flat.div_(self.world_size).split([p.numel() for p in params]),
                    strict=True,
                ):
                    p.grad.copy_(part.view_as(p))
            self.handles.clear()

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.gradient_accumulation_steps:
            return
        grads = torch.zeros_like(self.flat)
        torch.cat(
            [p.grad.flatten() for p in self.params],
            out=grads[: sum(p.numel() for p in self.params)],
        )
        self.norm = grads.norm().item()
        self.master.grad = grads.chunk(self.world_size)[self.rank].clone()
        self.optimizer.step()
        parts = [torch.empty(self.partition_size) for _ in range(self.world_size)]
        dist.all_gather(parts, self.master.detach())
        self.flat.copy_(torch.cat(parts))
        for p in self.params:
            p.grad = None

    def _partition(self):
        return self.flat[self.rank * self.partition_size : (self.rank + 1) * self.partition_size]

    def _at_boundary(self):
        return (self.micro_steps + 1) % self.gradient_accumulation_steps == 0

    def _reduce_ready(self, param):
        if self._at_boundary():
            self.bucket.append(param)
            if sum(p.numel() for p in self.bucket) >= self.bucket_elements:
                self._flush()

    def _flush(self):
        if self.bucket:
            flat = torch.cat([p.grad.flatten() for p in self.bucket])
            self.handles.append((dist.all_reduce(flat, async_op=True), flat, self.bucket))
            self.bucket = []


out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
net = nn.Sequential(
    nn.Linear(64, 400), nn.GELU(), nn.Linear(400, 400), nn.LayerNorm(400), nn.Linear(400, 8)
)
model_engine = Engine(net, lr=1e-2, gradient_accumulation_steps=2)
log = {"losses": [], "norms": []}
for _ in range(6):
    loss = nn.functional.mse_loss(model_engine(torch.randn(16, 64)), torch.randn(16, 8))
    model_engine.backward(loss)
    model_engine.step()
    log["losses"].append(loss.item())
    if model_engine.micro_steps % 2 == 0:
        log["norms"].append(model_engine.norm)
out.mkdir(exist_ok=True)
torch.save(model_engine.optimizer.state_dict(), out / f"zero_pp_rank_{rank}_optim_states.pt")
log["parameters"] = hashlib.sha256(model_engine.flat.numpy().tobytes()).hexdigest()
(out / f"rank{rank}.json").write_text(json.dumps(log))
dist.barrier()
dist.destroy_process_group()
