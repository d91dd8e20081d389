"""Trains a GPT in the style of nanoGPT's train.py: torch.compile inside the wrapper, autocast to bfloat16, clipping.

torchrun --nproc-per-node 2 benchmarks/programs/nano_gpt.py --size tiny
"""

from __future__ import annotations

import argparse
import os

import torch
from nano_model import CONFIGS, GPT
from step_times import StepTimes, add_options
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--size", choices=CONFIGS, default="124m")
parser.add_argument("--batch", type=int, default=12, help="sequences of a microbatch on a rank")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
parser.add_argument("--compile", metavar="BACKEND", default="", help="a backend of torch.compile")
add_options(parser)
args = parser.parse_args()
times = StepTimes(args)

cuda = torch.cuda.is_available()
init_process_group("nccl" if cuda else "gloo")
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = f"cuda:{local_rank}" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(device)
torch.manual_seed(1337 + rank)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
config = CONFIGS[args.size]
data = torch.randint(config.vocab_size, (1 << 20,), dtype=torch.int32)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random sequences and the tokens after them."""
    starts = torch.randint(len(data) - config.block_size - 1, (args.batch,)).tolist()
    x, y = (
        torch.stack([data[i + k : i + k + config.block_size].long() for i in starts])
        for k in (0, 1)
    )
    if cuda:
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(
            device, non_blocking=True
        )
    return x, y


model = GPT(config).to(device)
optimizer = torch.optim.AdamW(
    model.param_groups(0.1), lr=6e-4, betas=(0.9, 0.95), fused=cuda or args.best
)
if args.compile:
    model = torch.compile(model, backend=args.compile)
fastest = (
    {"gradient_as_bucket_view": True, "static_graph": args.accumulate == 1} if args.best else {}
)
model = DDP(model, device_ids=[local_rank] if cuda else None, **fastest)

x, y = get_batch()
for step in times.steps():
    for micro in range(args.accumulate):
        model.require_backward_grad_sync = micro == args.accumulate - 1
        with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=cuda):
            logits, loss = model(x, y)
            loss = loss / args.accumulate
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0 and rank == 0:
        print(f"iter {step}: loss {loss.item() * args.accumulate:.4f}\n", end="", flush=True)
destroy_process_group()
