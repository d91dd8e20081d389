"""Starts ranks as torchrun does, at half of the cost: it imports torch once and forks them.

    python forking_launcher.py 2 train.py --its=arguments
    PRELOAD=lightning,peft python forking_launcher.py 2 train.py    # these are imported once, too

In a rank ovpatch is loaded where torch's import would have loaded it, after torch and before the program, and the
program ends with the interpreter. Not torchrun's are restarts, and processes that begin without torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys

SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def fork(count: int) -> int:
    """Return the rank, in each of the ranks; the launcher itself ends here, with them."""
    ranks = set()
    for rank in range(count):
        pid = os.fork()
        if not pid:
            return rank
        ranks.add(pid)
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not code:
            code = 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    os._exit(code)


def import_torch() -> None:
    """Import it, and what else each rank would import, without what it loads by itself."""
    wanted = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    gc.disable()  # there is nothing to find yet, and looking is a fifth of these imports' time
    # The first optimizer imports dynamo.
    for module in ("torch", "torch._dynamo", *filter(None, os.environ.pop("PRELOAD", "").split(","))):
        importlib.import_module(module)
    gc.enable()

    if wanted is None:
        del os.environ[SWITCH]
    else:
        os.environ[SWITCH] = wanted


def become_rank(world: str, program: list[str]) -> None:
    """Fork the ranks; return in each of them, with torchrun's variables."""
    rank = str(fork(int(world)))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    sys.orig_argv = [sys.executable, "-u", *program]


def run(program: list[str]) -> None:
    """Run a program as Python would, with what torch loads by itself."""
    import torch

    sys.argv = program
    sys.path[0] = os.path.dirname(program[0])
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    import_torch()
    world, *program = sys.argv[1:]
    become_rank(world, program)
    run(program)
