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

import hashlib
import inspect
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final

import torch
import torch.distributed as dist
import wrapt
from torch import Tensor, nn

from ovpatch.insight.verify.values import Kept, text
from ovpatch.patching import PatchManager

# The same start for the random number generators of every arm, and digests of where they are.

#: What the generators start from. A script's own seeds come later and win.
SEED: Final = 20_240

#: Variables of every arm; hashes of texts decide the order of sets.
VARIABLES: Final = {"PYTHONHASHSEED": "0"}

#: Variables of every arm whose algorithms shall be deterministic; without it cuBLAS may not be.
DETERMINISTIC: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def seed() -> None:
    """Seed Python's, torch's and CUDA's generators now, and numpy's as soon as there is one; ranks differ."""
    number = SEED + int(os.environ.get("RANK", "0") or 0)
    random.seed(number)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: random.seed(number))  # Python itself seeds it anew there
    torch.manual_seed(number)  # CUDA's as well, when it is initialised
    wrapt.register_post_import_hook(lambda module: module.seed(number), "numpy.random")


def digests() -> dict[str, Kept]:
    """Return a digest of the state of each generator of this process."""
    states: dict[str, bytes] = {
        "random.python": repr(random.getstate()).encode(),
        "random.torch": torch.get_rng_state().numpy().tobytes() if _numpy() else bytes(torch.get_rng_state().tolist()),
    }
    numpy = _numpy()
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"]
        states["random.numpy"] = state["key"].tobytes() + str(state["pos"]).encode()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random.cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    return {name: text(hashlib.blake2b(state, digest_size=16).hexdigest()) for name, state in states.items()}


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return module if hasattr(module, "get_state") else None


_DEFAULT: Final = 25.0  # MiB
_MIB: Final = 1 << 20
_PIECES: Final = 2  # and one more each time


def reorder_reductions(patches: PatchManager, turn: int = 1) -> None:
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


# Stock with its matrix products in pieces: the yardstick for features that compute products otherwise.
#
# A product's elements are sums, which kernels add up in an order of their own; it depends on shapes, and a feature
# that cuts products, or adds one to another, changes them. Here each sum is cut into pieces, for every product of the
# script, forward and backward: the kernels below DTensor, autograd and torch.compile are replaced for the rest of the
# process.

_library: torch.library.Library | None = None  # its kernels are gone when it is


def split_products(pieces: int) -> None:
    """Let all matrix products of this process add up their sums in so many pieces."""
    global _library
    _library = torch.library.Library("aten", "IMPL")

    def product(a: Tensor, b: Tensor) -> Tensor:
        cuts = [a.shape[1] * (4 * i - 1) // (4 * pieces) for i in range(1, pieces)]  # kernels, too, cut in halves
        parts = zip(a.tensor_split(cuts, dim=1), b.tensor_split(cuts, dim=0), strict=True)
        first, *others = [_product(*part) for part in parts]
        for other in others:
            first += other
        return first

    def with_bias(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        result = product(a, b)
        result = result if alpha == 1 else result * alpha
        return result if beta == 0 else result.add_(bias, alpha=beta)

    with warnings.catch_warnings():  # that they were registered before, which is the point
        warnings.simplefilter("ignore")
        for key in ("CPU", "CUDA"):
            for name, kernel in (("mm", product), ("addmm", with_bias)):
                _library.impl(name, kernel, key)
                _library.impl(f"{name}.out", _into(kernel), key)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices by an operator that is not replaced."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = kernel(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return run
