"""Two ranks on GPUs, of which the second stays away in the middle of training; all that moves goes by copy engines."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ovpatch

WHERE = sys.argv[1]  # the second rank stays away before this, in step 3
TIMEOUT_S = 8


def away(point: str, step: int) -> None:
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
    layers[2].register_full_backward_hook(
        lambda *_: away("end of backward", steps[-1])
    )  # some are on their way then
    model, steps = DistributedDataParallel(layers, bucket_cap_mb=1), [0]
    opt = torch.optim.AdamW(model.parameters())
    for step in range(5):
        steps.append(step)
        away("forward", step)
        loss = model(torch.randn(8, 512, device=device)).square().mean()
        loss.backward()
        loss.item()
        away("step", step)
        opt.step()
        torch.cuda.synchronize()
        print(f"rank {dist.get_rank()} has ended step {step}", flush=True)


if __name__ == "__main__":
    main()
