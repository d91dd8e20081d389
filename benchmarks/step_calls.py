"""The calls of a warm training step in a library's own Python: functions, and the files they are in.

    python -m benchmarks.step_calls                 # two gloo ranks, a model of 4 parameters
    python -m benchmarks.step_calls --layers 8 --functions 20

Rank 0 counts, by a profile hook, the calls of one step (forward, backward, ``optimizer.step()``, ``zero_grad()``) into
the files of ovpatch, or of FSDP2. A model of ``--layers`` linears has twice as many parameters. The second table
lists the size of the tree, and the number of its files that ``apply("ddp")`` imports.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import ovpatch
from benchmarks.host_time import make_step

ROOT = Path(__file__).resolve().parent.parent
OURS = (str(ROOT / "ovpatch"), str(ROOT / "plugins" / "ovpatch_plugins"))
FSDP2 = (str(Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard"),)
ARMS = {"ddp": OURS, "ddp + dist_optimizer": OURS, "FSDP2": FSDP2}

_APPLIED = """
import sys, ovpatch
ovpatch.apply({})
print(sum(name.partition(".")[0] in ("ovpatch", "ovpatch_plugins") for name in sys.modules))
"""


class Calls:
    """Counts calls of functions in files below some folders.

    Args:
        folders: The folders.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self.functions: collections.Counter[str] = collections.Counter()
        self.changes, self._last = 0, ""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Count a call; a profile hook of ``sys.setprofile``."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(self._folders):
            return
        # Python 3.10 has no qualified names.
        function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        self.functions[f"{Path(name).relative_to(Path(self._folders[0]).parent)}:{function}"] += 1
        self.changes += name != self._last
        self._last = name

    def result(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "files": len({name.partition(":")[0] for name in self.functions}),
            "changes of file": self.changes,
            "calls": sum(self.functions.values()),
            "functions": dict(self.functions.most_common()),
        }


def count(rank: int, arm: str, layers: int, folder: str) -> None:
    """Count the calls of one warm step on rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    if arm != "FSDP2":
        ovpatch.apply(
            *arm.split(" + "),
            options={"dist_optimizer": {"min_param_numel": 1}} if "+" in arm else {},
        )
    step, calls = make_step(arm, layers, width=64, block=1, device="cpu"), Calls(ARMS[arm])
    # Votes take effect every few steps. After these steps they have been cast and counted.
    for _ in range(40):
        step()
    dist.barrier()
    sys.setprofile(calls if rank == 0 else None)
    step()
    sys.setprofile(None)
    dist.barrier()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(calls.result()), encoding="utf-8")
    dist.destroy_process_group()


def measure(arm: str, layers: int) -> dict[str, Any]:
    """Return the result of :func:`count` in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(count, (arm, layers, folder), nprocs=2)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    return {"arm": arm, "parameters": 2 * layers, **result}


def size() -> dict[str, dict[str, int]]:
    """Return files, lines and named notes of each part of the tree."""
    found = {}
    for name in (
        "ovpatch",
        "ovpatch/patching",
        "ovpatch/overlap",
        "ovpatch/insight",
        "plugins",
        "tests",
    ):
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / name).rglob("*.py")]
        notes = {
            note
            for text in texts
            for note in re.findall(r"^\s*\[(Note: [^\]]+)\] ", text, re.MULTILINE)
        }
        found[name] = {
            "files": len(texts),
            "lines": sum(text.count("\n") for text in texts),
            "notes": len(notes),
        }
    return found


def imported(features: str) -> int:
    """Return how many of our files ``apply()`` imports in a fresh process."""
    command = [sys.executable, "-c", _APPLIED.format(features)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def main() -> None:
    """Count, print, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--functions", type=int, default=0, help="show the most called functions of each arm"
    )
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    rows = [measure(arm, args.layers) for arm in ARMS]
    console = Console()
    table = Table("step of", "parameters", "files", "changes of file", "calls")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("arm", "parameters", "files", "changes of file", "calls"))
        )
    console.print(table)
    for row in rows if args.functions else ():
        console.print(row["arm"], dict(list(row["functions"].items())[: args.functions]))
    sizes, modules = size(), {name or "defaults": imported(name) for name in ('"ddp"', "")}
    table = Table("part", "files", "lines", "notes")
    for name, counts in sizes.items():
        table.add_row(name, *map(str, counts.values()))
    console.print(
        table, {f"files imported by apply({name})": number for name, number in modules.items()}
    )
    if args.json:
        result = {"torch": torch.__version__, "steps": rows, "sizes": sizes, "imported": modules}
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
