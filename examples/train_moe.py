"""Train a small Qwen3-MoE on Python's own documentation, byte by byte, each rank with its own experts.

    torchrun --nproc-per-node 2 examples/train_moe.py
    torchrun --nproc-per-node 4 examples/train_moe.py --ep 2                  # two copies of each expert
    OVPATCH=0 torchrun --nproc-per-node 2 examples/train_moe.py               # stock

It is written as people write such scripts with transformers, which cuts the model: experts over ``ep`` ranks, the rest
by FSDP2. The import of ovpatch and the call of ``apply()`` below it are all that ovpatch adds.

The text is ``pydoc_data.topics``, which every Python brings along, and the model starts from random weights: nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import ovpatch

ovpatch.apply("pipe_experts")

VOCABULARY = 256  # a token is a byte


def text() -> Tensor:
    """Return the bytes of all topics."""
    return torch.frombuffer(
        bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8
    ).long()


def load(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model, cut over the ranks; rank 0 draws its weights and saves them, as a pretrained model would be."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        moe_intermediate_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=args.width // 4,
        num_experts=args.experts,
        num_experts_per_tok=2,
        max_position_embeddings=args.context,
    )
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(args.seed)
        Qwen3MoeForCausalLM(config).save_pretrained(folder[0])
    dist.barrier()
    world = dist.get_world_size()
    return AutoModelForCausalLM.from_pretrained(
        Path(folder[0]),
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=args.ep or world),
        dtype=getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32")),
    )


def main() -> None:
    """Train, and log the loss of every tenth step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--ep", type=int, help="ranks that share the experts; all by default")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of the model; bfloat16 on GPUs by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group()
    device = (
        torch.device("cuda", dist.get_node_local_rank())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model, data = load(args, device), text()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, foreach=False)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    begin = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.context, (args.batch_size,), generator=generator)
        tokens = torch.stack([data[start : start + args.context] for start in starts.tolist()]).to(
            device
        )
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step + 1 == args.steps:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:4}  loss {float(mean):.4f}  {time.perf_counter() - begin:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
