"""Memory and time of a training step whose blocks are computed again: feature ``recompute`` against torch's checkpoint.

    python -m benchmarks.recompute_step --size 1b --rounds 3 --json benchmarks/results/recompute_step.jsonl

Arms alternate; each is built again and warmed up. ``kept`` keeps all activations. ``checkpoint`` is
``torch.utils.checkpoint`` around each block, ``checkpoint, attention kept`` the same with a selective policy that saves
attention. Memory is what a step holds beyond parameters, gradients and optimizer state at its peak: of the allocator on
CUDA; on a CPU of the tensors that operators make, which a dispatch mode watches in a step that is not timed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ovpatch
from benchmarks.models import GPT, SIZES
from benchmarks.runs import CUDA, add_timing, alternate, clocked, device, running, start

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
ARMS = ("kept", "checkpoint", "full", "checkpoint, attention kept", "selective")


def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Save attention."""
    return (
        CheckpointPolicy.MUST_SAVE if operator in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
    )


def checkpoint_blocks(model: GPT, *, selective: bool) -> None:
    """Checkpoint each block as scripts do."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)


class Watch(TorchDispatchMode):
    """Follows the memory of tensors that operators make.

    Attributes:
        peak: Most bytes at one time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not typed in torch
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what an operator makes."""
        given = {tensor.untyped_storage().data_ptr() for tensor in _list_tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _list_tensors(out):
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if size and key not in given and key not in self._seen:
                self._seen[key] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, key)
        return out

    def _drop(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)


def _list_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return [tensor for item in items for tensor in _list_tensors(item)]


def build(args: argparse.Namespace, arm: str) -> Callable[[], None]:
    """Return the training step of an arm."""
    torch.manual_seed(0)
    sizes = {
        **SIZES[args.size],
        **{name: value for name in ("layers", "context") if (value := getattr(args, name))},
    }
    with torch.device(device()):
        model = GPT(**sizes)
    if arm.startswith("checkpoint"):
        checkpoint_blocks(model, selective="attention" in arm)
    trained: nn.Module = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    shape = (args.batch, sizes["context"])
    tokens = torch.randint(sizes["vocabulary"], shape, device=device())

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16, enabled=CUDA):
            loss = trained(tokens, tokens.roll(-1, 1))
        loss.backward()
        del loss
        optimizer.step()
        # Gradients stay, so that the peak comes from activations.
        optimizer.zero_grad(set_to_none=False)

    return step


def measure(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Build an arm, and return its times and its peak of memory."""
    gc.collect()
    apply = arm in ("full", "selective")
    if apply:
        ovpatch.apply("recompute", options={"recompute": {"granularity": arm}})
    step = build(args, arm)
    # The first step creates gradients and optimizer state, which the arm's memory must not include.
    step()
    base_bytes = torch.cuda.memory_allocated() if CUDA else 0
    found = {"arm": arm, **clocked(step, args, running, base_bytes=base_bytes)}
    if not CUDA:
        with Watch() as watch:
            step()
        found["peak_gib"] = watch.peak / 2**30
    if apply:
        ovpatch.revert()
    return found


def main() -> None:
    """Run all arms in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--layers", type=int, default=0, help="instead of the size's")
    parser.add_argument("--context", type=int, default=0, help="instead of the size's")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    add_timing(parser, rounds=3)
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    start()
    alternate("recompute_step", args.arms, functools.partial(measure, args), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
