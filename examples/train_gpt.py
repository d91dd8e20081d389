"""Train a small GPT on Python's own documentation, byte by byte, with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint gpt.pt && \\
        torchrun --nproc-per-node 2 examples/train_gpt.py --resume gpt.pt --steps 200
    python examples/train_gpt.py --accumulate 2

It is written as people write such scripts: plain torch, nothing prepared for ovpatch. The line of ovpatch
after the imports is all that it adds; without the line, or with OVPATCH=0, this is the same program.
The text is ``pydoc_data.topics``, which every Python brings along: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch; ovpatch.apply()  # fmt: skip

VOCABULARY = 256  # a token is a byte


class Attention(nn.Module):
    """Causal self-attention over [batch, time, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, time_, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time_, width))


class Block(nn.Module):
    """Attention and a four times wider MLP, each on a normalised copy of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer whose output layer shares the weight of the token embedding."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith(
                ("proj.weight", "mlp.2.weight")
            ):  # these write into the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [batch, time, 256] and the mean cross entropy in nats per byte."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizer(self, lr: float, weight_decay: float, fused: bool) -> torch.optim.AdamW:
        """AdamW; matrices decay, biases and norms do not."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


class Corpus:
    """The documentation as one tensor of bytes; the last twentieth is held out for evaluation."""

    def __init__(self, context: int, device: torch.device) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        cut = len(data) * 19 // 20
        self.splits = {"train": data[:cut], "valid": data[cut:]}
        self.context, self.device = context, device

    def batch(self, split: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next bytes, both [size, context]; the same seed gives the same batch."""
        data = self.splits[split]
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - self.context - 1, (size,), generator=generator).tolist()
        x = torch.stack([data[i : i + self.context] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + self.context] for i in starts])
        return x.to(self.device), y.to(self.device)


def lr_factor(step: int, warmup: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, args: argparse.Namespace) -> float:
    model.eval()
    losses = [
        model(*corpus.batch("valid", args.batch_size, seed))[1].item()
        for seed in range(args.eval_batches)
    ]
    model.train()
    return sum(losses) / len(losses)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own documentation.")
    add = parser.add_argument
    add(
        "--steps",
        type=int,
        default=100,
        help="optimizer steps in total, those before a resume included",
    )
    add("--batch-size", type=int, default=6, help="sequences per process and micro-batch")
    add("--context", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=6)
    add("--heads", type=int, default=6)
    add("--width", type=int, default=384)
    add("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=10, help="steps")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: do not clip")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="autocast to this type",
    )
    add("--bucket-cap-mb", type=int, help="bucket size of DistributedDataParallel")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
    add(
        "--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each process"
    )
    add(
        "--deterministic",
        action="store_true",
        help="deterministic CUDA kernels (on CPU they always are)",
    )
    add("--seed", type=int, default=1337)
    add("--eval-every", type=int, default=50, help="steps; rank 0 evaluates alone; 0: never")
    add("--eval-batches", type=int, default=4)
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="written by rank 0 at each evaluation and at the end",
    )
    add("--resume", type=Path, metavar="FILE", help="continue from this checkpoint")
    add("--log-file", type=Path, metavar="FILE", help="append one JSON object per step")
    return parser.parse_args()


def set_up(args: argparse.Namespace) -> tuple[int, int, torch.device]:
    """Join the process group if torchrun started us; return rank, world size and device."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = (
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    cuda = args.device == "cuda" or (
        args.device is None and torch.cuda.device_count() >= local_size
    )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(args.seed)
    return rank, world_size, device


def main() -> None:
    args = parse_args()
    rank, world_size, device = set_up(args)
    corpus = Corpus(args.context, device)

    raw_model = GPT(args.layers, args.heads, args.width, args.context).to(device)
    optimizer = raw_model.configure_optimizer(
        args.lr, args.weight_decay, fused=device.type == "cuda"
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, args.warmup, args.steps)
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    first_step = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        raw_model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        first_step = state["step"]

    model: nn.Module = raw_model
    if args.compile:
        model = torch.compile(model, backend=args.compile)
    if dist.is_initialized():
        caps = {} if args.bucket_cap_mb is None else {"bucket_cap_mb": args.bucket_cap_mb}
        model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, **caps)
    if rank == 0:
        millions = sum(p.numel() for p in raw_model.parameters()) / 1e6
        print(
            f"{millions:.1f}M parameters, {world_size} processes on {device.type}, from step "
            f"{first_step}"
        )

    autocast = torch.autocast(
        device.type, getattr(torch, args.dtype), enabled=args.dtype != "float32"
    )

    def save(step: int) -> None:
        if rank == 0 and args.checkpoint:
            parts = {
                "model": raw_model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "scaler": scaler,
            }
            torch.save(
                {"step": step, **{name: part.state_dict() for name, part in parts.items()}},
                args.checkpoint,
            )

    for step in range(first_step, args.steps):
        if rank == 0 and args.eval_every and step % args.eval_every == 0:
            with autocast:
                print(f"step {step:4d}  valid loss {evaluate(model, corpus, args):.4f}", flush=True)
            if step > first_step:
                save(step)

        start = time.perf_counter()
        total_loss = torch.zeros((), device=device)
        for micro in range(args.accumulate):
            seed = ((args.seed * 1_000_003 + step) * args.accumulate + micro) * world_size + rank
            x, y = corpus.batch("train", args.batch_size, seed)
            last = micro == args.accumulate - 1
            with model.no_sync() if isinstance(model, DDP) and not last else nullcontext():
                with autocast:
                    _, loss = model(x, y)
                scaler.scale(loss / args.accumulate).backward()
            total_loss += loss.detach() / args.accumulate
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()

        if rank == 0:
            record = {"step": step, "loss": total_loss.item(), "grad_norm": grad_norm.item()}
            record["ms"] = (time.perf_counter() - start) * 1e3
            print(f"step {step:4d}  loss {record['loss']:.4f}  {record['ms']:.1f} ms", flush=True)
            if args.log_file:
                with args.log_file.open("a") as file:
                    print(json.dumps(record), file=file)
    save(args.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
