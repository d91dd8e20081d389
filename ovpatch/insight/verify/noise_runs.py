"""Noise runs: stock with its random generators seeded, and its reductions or matrix products in another order."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

import torch
import torch.distributed as dist
import wrapt
from torch import Tensor, nn

from ovpatch.insight.verify.recording import KeptValue, keep_text
from ovpatch.patching import PatchManager

#: Seed of every variant's generators. A script's own seeds come later and win.
SEED: Final = 20_240

#: Variables of every variant; the hashes of strings decide the order of sets.
VARIABLES: Final = {"PYTHONHASHSEED": "0"}

#: Variables of every deterministic variant; cuBLAS needs them.
DETERMINISTIC: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def seed_generators() -> None:
    """Seed Python's, torch's and CUDA's generators now, and numpy's after its import; ranks differ."""
    number = SEED + int(os.environ.get("RANK", "0") or 0)
    random.seed(number)
    # Python reseeds its generator in a forked child.
    os.register_at_fork(after_in_child=lambda: random.seed(number))
    # This also seeds CUDA's generator when CUDA is initialised.
    torch.manual_seed(number)
    wrapt.register_post_import_hook(lambda module: module.seed(number), "numpy.random")


def digest_generators() -> dict[str, KeptValue]:
    """Return a digest of the state of each generator of this process."""
    numpy = _numpy()
    torch_state = torch.get_rng_state()
    states: dict[str, bytes] = {
        "random.python": repr(random.getstate()).encode(),
        "random.torch": torch_state.numpy().tobytes() if numpy else bytes(torch_state.tolist()),
    }
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"]
        states["random.numpy"] = state["key"].tobytes() + str(state["pos"]).encode()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random.cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    return {
        name: keep_text(hashlib.blake2b(state, digest_size=16).hexdigest())
        for name, state in states.items()
    }


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return module if hasattr(module, "get_state") else None


_DEFAULT: Final = 25.0  # MiB
_MIB: Final = 1 << 20
# The number of pieces of the total norm is this plus the number of the turn.
_PIECES: Final = 2


def reorder_reductions(patches: PatchManager, turn: int = 1) -> None:
    """Declare the patches that give every DistributedDataParallel model other buckets, and norms other pieces.

    A ring reduces an element in an order that depends on its position in the bucket, so another bucket size is another
    order, and the only change of the program. In stock PyTorch, the first backward has one bucket whatever the size.
    Here it has several, because otherwise the first step would have no noise run. The total norm, which clips all
    gradients, is summed from pieces. Each turn, from 1, has its own order, with smaller buckets and more pieces.
    """
    why = "bucket_cap_mb is the one argument that reorders sums and changes nothing else"
    init = "torch.nn.parallel.DistributedDataParallel.__init__"
    patches.register_patch(init, wrap=partial(_wrap_init, turn=turn), why=why)
    patches.register_patch(
        "torch.nn.utils.clip_grad._get_total_norm",
        wrap=partial(_wrap_norm, pieces=_PIECES + turn),
        why="both clip_grad_norm_ and get_total_norm call it",
    )


def compute_cap_mb(module: nn.Module, given: float | None, turn: int) -> float:
    """Return a bucket size, in MiB, for other buckets than the script's ``bucket_cap_mb`` gives."""
    total = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return min(_DEFAULT if given is None else given, max(total, 1) / _MIB) / (_PIECES + turn)


def _wrap_init(original: Callable[..., None], turn: int) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        ddp, module = bound.arguments["self"], bound.arguments["module"]
        # In torch 2.13 it takes precedence over bucket_cap_mb.
        several = bound.arguments.pop("bucket_cap_mb_list", None)
        given = max(several) if several else bound.arguments.get("bucket_cap_mb")
        bound.arguments["bucket_cap_mb"] = cap = compute_cap_mb(module, given, turn)
        # The constructor requests one first bucket of any size. Without a PatchManager: the patch lasts for one
        # constructor, and depends on its cap.
        assign = dist._compute_bucket_assignment_by_size

        # The stub of torch defines the names; the constructor passes positions.
        def assign_small(tensors: Any, bucket_size_limits: Any, *args: Any, **kwargs: Any) -> Any:
            return assign(
                tensors,
                [min(limit, int(cap * _MIB)) for limit in bucket_size_limits],
                *args,
                **kwargs,
            )

        dist._compute_bucket_assignment_by_size = assign_small
        try:
            original(*bound.args, **bound.kwargs)
        finally:
            dist._compute_bucket_assignment_by_size = assign
        # Dynamo splits the graph at the wrapper's buckets and refuses buckets below 1 MiB: it sees the script's.
        ddp.bucket_bytes_cap = int((_DEFAULT if given is None else given) * _MIB)

    return init


def _wrap_norm(original: Callable[..., Tensor], pieces: int) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        split: list[Tensor] = []
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            split += (
                tensor.flatten().chunk(pieces) if plain and tensor.numel() >= pieces else [tensor]
            )
        return original(split, *args, **kwargs)

    return get_total_norm


# The library object keeps the kernels registered.
_library: torch.library.Library | None = None


def split_products(pieces: int) -> None:
    """Sum every GEMM of this process in chunks: the noise run for features that split or join GEMMs.

    A kernel's summation order depends on shapes, which such features change. The kernels below DTensor, autograd and
    torch.compile are replaced for the rest of the process, forward and backward.
    """
    global _library
    _library = torch.library.Library("aten", "IMPL")

    def product(a: Tensor, b: Tensor) -> Tensor:
        # Not at halves, where kernels split, too.
        cuts = [a.shape[1] * (4 * i - 1) // (4 * pieces) for i in range(1, pieces)]
        parts = zip(a.tensor_split(cuts, dim=1), b.tensor_split(cuts, dim=0), strict=True)
        # This operator has the kernel of stock PyTorch.
        first, *summands = [
            torch.bmm(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0) for left, right in parts
        ]
        for summand in summands:
            first += summand
        return first

    def with_bias(
        bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        result = product(a, b)
        result = result if alpha == 1 else result * alpha
        return result if beta == 0 else result.add_(bias, alpha=beta)

    # torch warns of kernels that were registered before.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in ("CPU", "CUDA"):
            for name, kernel in (("mm", product), ("addmm", with_bias)):
                _library.impl(name, kernel, key)
                _library.impl(f"{name}.out", _make_out_variant(kernel), key)


def _make_out_variant(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = kernel(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return run
