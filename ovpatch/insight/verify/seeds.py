"""The same start for the random number generators of every arm, and digests of where they are."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import Any, Final

import torch
import wrapt

from ovpatch.insight.verify.values import Kept, text

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
