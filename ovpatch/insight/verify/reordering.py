"""Stock with its reductions in another order: the yardstick of what a difference may be.

A ring adds the parts of a bucket in an order that depends on where in the bucket they lie. So another size of buckets
is another order, and nothing else about the program changes. Stock's first backward has all gradients in one bucket,
whatever their size is set to; here it has not, or the first step would have no yardstick.

torch.compile cuts a model's graph where the wrapper's buckets end, and refuses buckets below 1 MiB. So the wrapper says
afterwards that it has the script's buckets: only its reducer has others, and the compiled code is stock's.

The norm of all gradients is a sum as well, by which every one of them is clipped. Here it is that of their pieces.

Where stock is reordered several times, buckets are smaller and pieces more in each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ovpatch.patching import PatchManager

_DEFAULT: Final = 25.0  # MiB
_MIB: Final = 1 << 20
_PIECES: Final = 2  # and one more each time


def reorder(patches: PatchManager, turn: int = 1) -> None:
    """Declare the patches that give every DistributedDataParallel model other buckets, and norms other pieces.

    Args:
        patches: Where they are declared.
        turn: From 1: each has an order of its own.
    """
    why = "bucket_cap_mb is the one argument that reorders sums and changes nothing else"
    init = "torch.nn.parallel.DistributedDataParallel.__init__"
    patches.register_patch(init, wrap=partial(_wrap_init, turn=turn), why=why)
    patches.register_patch(
        "torch.nn.utils.clip_grad._get_total_norm",
        wrap=partial(_wrap_norm, pieces=_PIECES + turn),
        why="both clip_grad_norm_ and get_total_norm call it",
    )


def cap_mb(module: nn.Module, given: float | None, turn: int) -> float:
    """Return a bucket size that cuts the gradients of a module otherwise than the given one does, in MiB.

    Args:
        module: What is wrapped.
        given: The script's ``bucket_cap_mb``.
        turn: Which of the other orders.
    """
    total = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return min(_DEFAULT if given is None else given, max(total, 1) / _MIB) / (_PIECES + turn)


def _wrap_init(original: Callable[..., None], turn: int) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        ddp, module = bound.arguments["self"], bound.arguments["module"]
        several = bound.arguments.pop("bucket_cap_mb_list", None)  # torch 2.13; it would win over the one size
        given = max(several) if several else bound.arguments.get("bucket_cap_mb")
        bound.arguments["bucket_cap_mb"] = cap = cap_mb(module, given, turn)
        with _buckets_from_the_start(int(cap * _MIB)):
            original(*bound.args, **bound.kwargs)
        ddp.bucket_bytes_cap = int((_DEFAULT if given is None else given) * _MIB)  # DDPOptimizer in Dynamo reads it

    return init


def _wrap_norm(original: Callable[..., Tensor], pieces: int) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return original([piece for tensor in given for piece in _cut(tensor, pieces)], *args, **kwargs)

    return get_total_norm


def _cut(tensor: Tensor, pieces: int) -> Sequence[Tensor]:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return tensor.flatten().chunk(pieces) if plain and tensor.numel() >= pieces else [tensor]


@contextmanager
def _buckets_from_the_start(cap: int) -> Iterator[None]:
    """Let the buckets of a first backward have at most ``cap`` bytes; the constructor asks for one of any size."""
    # By hand and not by a PatchManager: it lasts for one constructor, and what it does depends on that one's cap.
    assign = dist._compute_bucket_assignment_by_size

    # The names are those of torch's stub; the constructor goes by position.
    def assign_small(tensors: Any, bucket_size_limits: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(tensors, [min(limit, cap) for limit in bucket_size_limits], *args, **kwargs)

    dist._compute_bucket_assignment_by_size = assign_small
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign
