"""Train the Llama of ``train_tp.py`` over a mesh: tensor and sequence parallelism inside of DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/train_2d.py                                  # 2 copies, each over 2 ranks
    OVPATCH=+dist_optimizer torchrun --nproc-per-node 4 examples/train_2d.py        # and the optimizer's state divided

It is written as people write such scripts: stock ``parallelize_module`` over one dimension of the mesh, stock
``DistributedDataParallel(device_mesh=)`` over the other. The line of ovpatch after the imports is all that it adds.
With it linears overlap their collectives by ``tp_linear``, and gradients are reduced by ``ddp`` and, if you turn that
on, scattered by ``dist_optimizer``.

The wrapper makes local tensors of DTensors, for itself and for the optimizer. From the first forward on, stock as well
as patched, it leaves DTensors of them in the module that are no parameters, so that its ``state_dict()`` is empty: who
wants checkpoints here takes FSDP2, as ``train_tp.py`` does.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import ovpatch; ovpatch.apply()  # fmt: skip

from train_tp import Llama, batch, cut  # noqa: E402  # the model and its plan, of the example next to this one


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama over a mesh of data and tensor parallelism."
    )
    add = parser.add_argument
    add("--steps", type=int, default=100)
    add(
        "--batch-size",
        type=int,
        default=6,
        help="sequences per microbatch and group of ranks that share a model",
    )
    add("--accumulate", type=int, default=1, help="microbatches per step")
    add(
        "--context",
        type=int,
        default=128,
        help="bytes per sequence; divides by the ranks that share a model",
    )
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--width", type=int, default=384)
    add("--tp", type=int, default=2, help="ranks that share a model")
    add("--lr", type=float, default=1e-3)
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of parameters and activations",
    )
    add(
        "--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each process"
    )
    add("--seed", type=int, default=1337)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda = args.device == "cuda" or (
        args.device is None and torch.cuda.device_count() >= local_size
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(args.seed)
    model = Llama(args.layers, args.heads, args.width).to(device, getattr(torch, args.dtype))
    cut(model, mesh["tp"])
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(
        wrapped.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )

    text = torch.frombuffer(
        bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8
    ).long()
    for step in range(args.steps):
        start = time.perf_counter()
        for micro in range(args.accumulate):
            seed = ((args.seed * 1_000_003 + step) * args.accumulate + micro) * mesh["dp"].size()
            tokens = batch(text, args.batch_size, args.context, seed + mesh["dp"].get_local_rank())
            x, y = (part.to(device) for part in tokens)
            wrapped.require_backward_grad_sync = micro == args.accumulate - 1
            with loss_parallel():
                loss = F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten()) / args.accumulate
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor().item() * args.accumulate
        if rank == 0:
            print(
                f"step {step:4d}  loss {value:.4f}  {(time.perf_counter() - start) * 1e3:.1f} ms",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
