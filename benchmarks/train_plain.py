"""A GPT trained as people do, on random data, with no line of ovpatch: something to verify, to bench and to look into.

    ovpatch verify -- torchrun --nproc-per-node 8 benchmarks/train_plain.py --size 1b
    ovpatch bench -- torchrun --nproc-per-node 8 benchmarks/train_plain.py --size 3.8b
    ovpatch timeline --compare -- torchrun --nproc-per-node 8 benchmarks/train_plain.py --size 3.8b

Model, dtype and optimizer come from ``ddp_step.py``; on CPU it runs on gloo (``--size tiny``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.models import GPT, SIZES


def train(args: argparse.Namespace) -> None:
    """Train for ``args.steps`` optimizer steps of ``args.accumulate`` microbatches."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(0)
    with device:
        model = DistributedDataParallel(
            GPT(**SIZES[args.size]), device_ids=[device.index] if cuda else None
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    torch.manual_seed(1 + dist.get_rank())
    shape, vocabulary = (args.batch, SIZES[args.size]["context"]), SIZES[args.size]["vocabulary"]
    for step in range(args.steps):
        for micro in range(args.accumulate):
            tokens, targets = (torch.randint(vocabulary, shape, device=device) for _ in range(2))
            with model.no_sync() if micro < args.accumulate - 1 else contextlib.nullcontext():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not args.fp32):
                    loss = model(tokens, targets)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and microbatch")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
    parser.add_argument("--fp32", action="store_true", help="no autocast to bfloat16")
    train(parser.parse_args())
