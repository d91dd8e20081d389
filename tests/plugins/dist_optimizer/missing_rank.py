"""A program for two GPUs. The second rank stops in the middle of training, and copy engines move all data."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ovpatch

# The point of step 3 before which the second rank stops.
WHERE = sys.argv[1]
TIMEOUT_S = 8  # expires


def stop_at(point: str, step: int) -> None:
    if step == 3 and point == WHERE and dist.get_rank() == 1:
        time.sleep(600)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    ovpatch.apply(
        "ddp",
        "dist_optimizer",
        options={"dist_optimizer": {"copy_engines": "on", "min_param_numel": 0}},
    )
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=TIMEOUT_S))
    layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)]).to(
        device
    )
    # When this hook runs, the reduce-scatters of later layers are in flight.
    layers[2].register_full_backward_hook(lambda *_: stop_at("end of backward", steps[-1]))
    model, steps = DistributedDataParallel(layers, bucket_cap_mb=1), [0]
    opt = torch.optim.AdamW(model.parameters())
    for step in range(5):
        steps.append(step)
        stop_at("forward", step)
        loss = model(torch.randn(8, 512, device=device)).square().mean()
        loss.backward()
        loss.item()
        stop_at("step", step)
        opt.step()
        torch.cuda.synchronize()
        print(f"rank {dist.get_rank()} has ended step {step}", flush=True)


if __name__ == "__main__":
    main()
