"""A plugin for each fault that a feature could have, and the script in which they show.

The script forks its two ranks, so a run costs one import of torch.
"""

from __future__ import annotations

from tests.support.fake_plugins import Site

SCRIPT = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 40), nn.Dropout(0.5), nn.Linear(40, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for turn in range(4):
        for part in range(2):
            x = torch.randn(6, 8)
            if turn == 1:
                x[0] = float("inf")  # skipped on both ranks
            scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if turn == 2 and rank == 0:
            torch.save({"model": model.state_dict(), "turn": turn}, os.path.join(folder, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (folder,), nprocs=2, start_method="fork")
"""

# Turns 0, 2 and 3 make a step, so the faults of turn 2 are in step 2.
PLUGIN = """
import functools
import torch
import torch.distributed as dist
from ovpatch import Feature, hookimpl

COUNT = {{"backwards": 0}}
MODELS = []

@hookimpl
def ovpatch_feature():
    return Feature(name={name!r}, summary="A fault.", default=False)

@hookimpl
def ovpatch_counters():
    return COUNT

@hookimpl
def ovpatch_register(patches, options):
    patches.register_patch("torch.nn.parallel.DistributedDataParallel.__init__", wrap=remember)
    patches.register_patch("torch.autograd.backward", wrap=count)
    for target, wrap in {patches}.items():
        patches.register_patch(target, wrap=wrap)

def remember(original):
    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        MODELS.append(self.module)
    return init

def count(original):
    @functools.wraps(original)
    def backward(*args, **kwargs):
        original(*args, **kwargs)
        COUNT["backwards"] += 1
        after_backward(MODELS[0])
    return backward

def after_backward(model):
    pass

def turn():
    return (COUNT["backwards"] - 1) // 2

{fault}
"""

DIVIDED_TWICE = """
def after_backward(model):
    if COUNT["backwards"] in (5, 6):
        for p in model.parameters():
            p.grad /= 2
"""
STALE_PARAMETER = """
def stale(original):
    @functools.wraps(original)
    def step(self, *args, **kwargs):
        last = self.param_groups[0]["params"][2]
        before = last.detach().clone()
        original(self, *args, **kwargs)
        if turn() == 2 and dist.get_rank() == 1:
            last.data.copy_(before)
    return step
"""
WRONG_SKIP = """
def skip(original):
    @functools.wraps(original)
    def step(self, optimizer, *args, **kwargs):
        if turn() == 2 and dist.get_rank() == 1:
            self.unscale_(optimizer)
            return None
        return original(self, optimizer, *args, **kwargs)
    return step
"""
DISTURBED = """
def draw(original):
    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if turn() == 3:
            torch.rand(1)
        return original(self, *args, **kwargs)
    return forward
"""
WRONG_DTYPE = """
def halve(original):
    @functools.wraps(original)
    def state_dict(self, *args, **kwargs):
        return {key: value.half() for key, value in original(self, *args, **kwargs).items()}
    return state_dict
"""
HARMLESS = ""

#: Name, what it is patched into besides, source.
FAULTS = {
    "harmless": ("{}", HARMLESS),
    "divided_twice": ("{}", DIVIDED_TWICE),
    "stale": ("{'torch.optim.SGD.step': stale}", STALE_PARAMETER),
    "wrong_skip": ("{'torch.amp.grad_scaler.GradScaler.step': skip}", WRONG_SKIP),
    "disturbed": ("{'torch.nn.parallel.DistributedDataParallel.forward': draw}", DISTURBED),
    "wrong_dtype": ("{'torch.nn.Module.state_dict': halve}", WRONG_DTYPE),
}


def install(site: Site) -> None:
    """Install a feature for each fault; all are off by default."""
    for name, (patches, fault) in FAULTS.items():
        site.raw(name, PLUGIN.format(name=name, patches=patches, fault=fault))
