"""Train a model of transformers over the ranks of a pipeline, with a plain loop or with accelerate.

    torchrun --nproc-per-node 2 examples/pipeline_hf.py
    torchrun --nproc-per-node 2 examples/pipeline_hf.py --placement vee --layers 8
    torchrun --nproc-per-node 4 examples/pipeline_hf.py --pipeline 2          # two replicas, each over two ranks
    torchrun --nproc-per-node 2 examples/pipeline_hf.py --loop accelerate
    python examples/pipeline_hf.py --loop whole                               # the same model, on one process
    OVPATCH=0 torchrun --nproc-per-node 2 examples/pipeline_hf.py             # cut(), and torch's own runtime

``cut()`` makes stages of the model that ``transformers`` builds, which is not edited, and returns a schedule of
``torch.distributed.pipelining``. So the loop is torch's: ``schedule.step()`` runs all microbatches, forward and
backward, and an optimizer of this rank's parameters steps. With accelerate only the optimizer and the scheduler are
prepared: ``prepare(model)`` would replicate the stage, and ``accelerator.backward()`` has no loss to call. The Trainer
cannot drive a pipeline: it computes a loss and calls backward itself. The loop below is what takes its place.

The text is ``pydoc_data.topics``, which every Python brings along, and the model starts from random weights: nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ovpatch
from ovpatch_plugins.pipeline import cut

ovpatch.apply("pipeline", "ddp")

VOCABULARY = 256  # a token is a byte


def text() -> Tensor:
    """Return the bytes of all topics."""
    return torch.frombuffer(
        bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8
    ).long()


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return the whole model, the same on all ranks."""
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.width,
            intermediate_size=2 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=args.context,
            use_cache=False,
        )
    )


def batch(args: argparse.Namespace, data: Tensor, step: int, replica: int) -> Tensor:
    """Return the tokens of a replica's step: all microbatches in order, ``[batch, context + 1]``."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    rows = args.microbatches * args.batch_size
    places = torch.randint(len(data) - args.context - 1, (rows,), generator=generator)
    return torch.stack([data[place : place + args.context + 1] for place in places.tolist()])


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train_pipeline(args: argparse.Namespace, device: torch.device) -> None:
    """Train the stages of this rank."""
    mesh = init_device_mesh(
        device.type,
        (dist.get_world_size() // args.pipeline, args.pipeline),
        mesh_dim_names=("dp", "pp"),
    )
    replica, replicas = mesh.get_local_rank("dp"), mesh["dp"].size()
    data = text()
    example = batch(args, data, 0, 0)[: args.batch_size, :-1]
    wrap: Callable[[Any], Any] | None = None
    if replicas > 1:
        wrap = lambda stage: DistributedDataParallel(stage, process_group=mesh["dp"].get_group())  # noqa: E731
    schedule = cut(
        build(args),
        mesh["pp"],
        (example,),
        n_microbatches=args.microbatches,
        loss_fn=next_token_loss,
        placement=args.placement,
        wrap=wrap,
    )
    optimizer: Any = torch.optim.AdamW(schedule.parameters(), lr=args.lr)
    rates: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    if args.loop == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu", step_scheduler_with_optimizer=False)
        # The stages are already on their devices.
        optimizer, rates = accelerator.prepare(optimizer, rates)
    for step in range(args.steps):
        tokens = batch(args, data, step, replica).to(device)
        losses: list[Tensor] = []
        schedule.step(tokens[:, :-1], target=tokens[:, 1:], losses=losses)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if schedule.has_last_stage and replica == 0:
            log(step, losses)


def train_whole(args: argparse.Namespace, device: torch.device) -> None:
    """Train the whole model on one process, microbatch by microbatch."""
    data, model = text(), build(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for step in range(args.steps):
        losses = []
        for tokens in batch(args, data, step, 0).to(device).split(args.batch_size):
            loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
            (loss / args.microbatches).backward()
            losses.append(loss)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        log(step, losses)


def log(step: int, losses: list[Tensor]) -> None:
    """Print the mean loss of a step, with all its digits."""
    print(f"step {step:3}  loss {torch.stack(losses).mean().item()!r}", flush=True)


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loop", choices=("plain", "accelerate", "whole"), default="plain")
    parser.add_argument("--placement", choices=("straight", "loop", "vee"), default="straight")
    parser.add_argument(
        "--pipeline", type=int, default=0, help="ranks of a pipeline; all by default"
    )
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences in a microbatch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    use_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if use_gpus
        else torch.device("cpu")
    )
    if args.loop == "whole":
        train_whole(args, device)
        return
    if use_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpus else "gloo")
    args.pipeline = args.pipeline or dist.get_world_size()
    train_pipeline(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
