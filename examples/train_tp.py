"""Train a small Llama on Python's own documentation, byte by byte, with tensor and sequence parallelism.

    torchrun --nproc-per-node 2 examples/train_tp.py
    torchrun --nproc-per-node 4 examples/train_tp.py --tp 2                    # FSDP2 over the other dimension
    torchrun --nproc-per-node 2 examples/train_tp.py --checkpoint tp --steps 50 && \\
        torchrun --nproc-per-node 2 examples/train_tp.py --checkpoint tp       # continues from step 50

It is written as people write such scripts: stock ``parallelize_module`` with a plan of its styles, DTensors, loss
parallel, distributed checkpoints. The line of ovpatch after the imports is all that it adds.
``OVPATCH=-tp_linear`` turns its feature ``tp_linear`` off.

The text is ``pydoc_data.topics``, which every Python brings along: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import ovpatch; ovpatch.apply()  # fmt: skip

VOCABULARY = 256  # a token is a byte


class Attention(nn.Module):
    """Causal self-attention over [batch, time, width], with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        q, k, v = (
            w(x).view(batch, time_, -1, self.head_width).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True
        )
        return self.wo(y.transpose(1, 2).reshape(batch, time_, -1))


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and a gated MLP, each on a normalised copy of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.ffn_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width, 3 * width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, time, 256]."""
        rotation = angles(tokens.shape[1], self.head_width, tokens.device)
        h = self.tokens(tokens)
        for block in self.blocks:
            h = block(h, rotation)
        return self.output(self.norm(h))


def angles(time_: int, head_width: int, device: torch.device) -> Tensor:
    """Return cosines and sines of the rotary positions, [2, time, head_width / 2]."""
    frequencies = 10000.0 ** -(torch.arange(0, head_width, 2, device=device) / head_width)
    turned = torch.outer(torch.arange(time_, device=device), frequencies)
    return torch.stack([turned.cos(), turned.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn queries or keys [batch, heads, time, head_width] by their positions."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def cut(model: Llama, mesh: DeviceMesh) -> None:
    """Cut heads, features and words over the ranks, and between them the sequence."""
    sequence, whole = Shard(1), Replicate()
    model_plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    block_plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(sequence, None), desired_input_layouts=(whole, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(sequence,), desired_input_layouts=(whole,)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "feed_forward.w3": ColwiseParallel(),
    }
    parallelize_module(model, mesh, model_plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)


def batch(text: Tensor, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next bytes, both [size, context]; the same seed gives the same batch."""
    starts = torch.randint(
        len(text) - context - 1, (size,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    taken = torch.stack([text[i : i + context + 1] for i in starts])
    return taken[:, :-1], taken[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama on Python's own documentation."
    )
    add = parser.add_argument
    add(
        "--steps",
        type=int,
        default=100,
        help="optimizer steps in total, those before a resume included",
    )
    add(
        "--batch-size",
        type=int,
        default=6,
        help="sequences per step and group of ranks that share a model",
    )
    add(
        "--context",
        type=int,
        default=128,
        help="bytes per sequence; divides by the ranks that share a model",
    )
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--width", type=int, default=384)
    add("--tp", type=int, help="ranks that share a model; default: all")
    add("--lr", type=float, default=1e-3)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of parameters and activations",
    )
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
    add(
        "--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each process"
    )
    add("--seed", type=int, default=1337)
    add(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="written at the end; read at the start if it is there",
    )
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
    tp = args.tp or world
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(args.seed)
    model = Llama(args.layers, args.heads, args.width).to(device, getattr(torch, args.dtype))
    cut(model, mesh["tp"])
    if world > tp:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    first_step = 0
    if args.checkpoint and args.checkpoint.exists():
        first_step = load(model, optimizer, args.checkpoint)
    called = torch.compile(model, backend=args.compile) if args.compile else model

    text = torch.frombuffer(
        bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8
    ).long()
    for step in range(first_step, args.steps):
        start = time.perf_counter()
        seed = (args.seed * 1_000_003 + step) * (world // tp) + mesh["dp"].get_local_rank()
        x, y = (part.to(device) for part in batch(text, args.batch_size, args.context, seed))
        with loss_parallel():
            loss = F.cross_entropy(called(x).flatten(0, 1), y.flatten())
            loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        # All ranks take part, because both are reduced over the ranks.
        norm, value = norm.full_tensor().item(), loss.full_tensor().item()
        if rank == 0:
            ms = (time.perf_counter() - start) * 1e3
            print(f"step {step:4d}  loss {value:.4f}  norm {norm:.4f}  {ms:.1f} ms", flush=True)
    if args.checkpoint:
        save(model, optimizer, args.checkpoint, args.steps)
    dist.destroy_process_group()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    """Write a checkpoint, each rank its parts."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=folder
    )


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Read a checkpoint, whoever wrote it over however many ranks, and return its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(state["step"])


if __name__ == "__main__":
    main()
