"""Run the console commands of README.md and of the pages in docs/, as a reader would, and report failures.

    python tools/run_commands.py                   # all of them, in some ten minutes on two cores
    python tools/run_commands.py features/ddp.md   # those of one page
    python tools/run_commands.py --list            # what would run, and what would not

Each block runs in its own folder, in which ``train.py`` is a small program with ``ovpatch.apply()`` and ``examples``
are the project's examples. If a page has eight ranks for ``train.py``, two run. Commands that install packages, need
containers, GPUs or traces, or are a target of make or a test themselves, are left out. ``make test`` runs most of the
remaining commands, with a launcher that costs less (``tests/test_docs_commands.py``).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEFT_OUT: Final = (
    "git clone",
    "pip ",
    "docker ",
    "make ",
    "pytest ",
    "python -m tests.",
    "-m benchmarks.",
    "clip_watch",
    "trace0.json",
    "stock/",
)
# The limit of a block of commands.
LIMIT_S: Final = 600

TRAIN: Final = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch

ovpatch.apply()
dist.init_process_group("gloo")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.inner(x).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 32, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(step, loss.item().hex())
dist.destroy_process_group()
"""


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of each console block, with the page that it is in."""
    for page in PAGES:
        for commands in console_blocks(page):
            yield page.relative_to(ROOT).as_posix(), commands


def console_blocks(page: Path) -> Iterator[list[str]]:
    """Yield the commands of each console block of a page."""
    for block in re.findall(
        r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        lines = re.sub(r"\\\n\s*>?", " ", block).splitlines()
        yield [line[2:] for line in lines if line.startswith("$ ")]


def is_left_out(command: str) -> bool:
    """Return whether a command is not for this tool."""
    return any(part in command.lower() for part in LEFT_OUT)


def as_here(command: str) -> str:
    """Return a command with as many ranks as this machine can run."""
    return re.sub(r"(--nproc-per-node) 8 train\.py", r"\1 2 train.py", command)


def make_folder(folder: Path, commands: list[str]) -> None:
    """Put what the commands of a page name into a folder."""
    (folder / "examples").symlink_to(ROOT / "examples")
    if any("pipeline" in command for command in commands):
        (folder / "train.py").symlink_to(ROOT / "examples" / "pipeline_hf.py")
    else:
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")


def run(command: str, folder: Path) -> tuple[str, str]:
    """Run a command; return its outcome and its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OVPATCH")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env["OVPATCH_CACHE_DIR"] = str(folder / "cache")
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        return f"did not end in {LIMIT_S} s", str(error.stdout or "")
    return "" if done.returncode == 0 else f"exit status {done.returncode}", done.stdout


def main() -> int:
    """Run the commands; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="ends of the pages' paths; all by default")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    done: dict[str, str] = {}
    for page, commands in blocks():
        if args.pages and not page.endswith(tuple(args.pages)):
            continue
        with tempfile.TemporaryDirectory() as name:
            make_folder(Path(name), commands)
            for command in map(as_here, commands):
                if is_left_out(command) or args.list:
                    print(f"{page}: {'left out: ' if is_left_out(command) else ''}{command}")
                elif command not in done:
                    begin = time.monotonic()
                    done[command], output = run(command, Path(name))
                    print(
                        f"{page}: {command}\n    {done[command] or 'ok'}, "
                        f"{time.monotonic() - begin:.0f} s",
                        flush=True,
                    )
                    if done[command]:
                        print(output)
    failed = [command for command, problem in done.items() if problem]
    print(f"{len(done)} commands ran, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
