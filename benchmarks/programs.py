"""Compares programs as users write them, stock and with ovpatch: step times and memory, as a table and as JSON.

    python -m benchmarks.programs                         # all programs, on all GPUs.
    python -m benchmarks.programs --quick --out FILE      # the most wanted ones, in nine minutes on two GPUs.
    python -m benchmarks.programs --only nano-124m --rounds 5
    python -m benchmarks.programs --cpu-time              # without GPUs: the CPU time of a step, and its ratio.
    python -m benchmarks.programs --table FILE            # the table of the results in a file of --out.

The programs are the scripts in ``benchmarks/programs/``. None of them imports ovpatch: ``ovpatch run`` patches them. A
row of the table is one program. Rounds alternate between its variants, and a variant is compared with the stock run of
the same round. If the models of all variants fit on a GPU, the processes of a row start once and train in turn.
Otherwise each round starts them again.

The result of a row is appended to ``--out`` when the row is done. A program whose package is missing is skipped, and
after ``--budget-s`` seconds the remaining rows are dropped. The exit status is 1 if a variant failed, or if CPU time
exceeds its goal.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.program_runs import Program, ProgramError
from benchmarks.runs import CUDA, described
from ovpatch.overlap.comm.step_flags import PERIOD_STEPS

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPTS: Final = Path(__file__).resolve().with_suffix("")
CPU_TIME_GOAL: Final = 1.03
_QUICK_BUDGET_S: Final = 510.0
_EXIT_GRACE_S: Final = 10.0


@dataclass(frozen=True)
class Variant:
    """A way to run a program.

    Attributes:
        title: The column of the table.
        arguments: Arguments of the script.
        features: The features of ``ovpatch run``, or "" for its defaults. None runs stock PyTorch.
    """

    title: str
    arguments: tuple[str, ...] = ()
    features: str | None = None


VARIANTS: Final = {
    "stock": Variant("stock"),
    "best": Variant("stock, best settings", ("--best",)),
    "ovpatch": Variant("ovpatch", features=""),
    "ddp": Variant("ovpatch, `ddp` alone", features="ddp"),
    "dist_optimizer": Variant("ovpatch, `dist_optimizer`", features="+dist_optimizer"),
    "fsdp2": Variant("FSDP2", ("--fsdp2",)),
}


@dataclass(frozen=True)
class Row:
    """A program with its arguments.

    Attributes:
        title: The row of the table.
        script: The file.
        arguments: Arguments of the script.
        steps: Timed steps of a round.
        packages: Each entry has the names of packages of which the program needs one.
        is_compiled: Whether the program gets a backend of ``torch.compile``.
        has_fsdp2: Whether the program has a switch for FSDP2.
        max_together: The number of variants whose models fit on a GPU of 80 GB together.
        variants: The variants to run. Default: all.
    """

    title: str
    script: str
    arguments: str
    steps: int = 20
    packages: tuple[tuple[str, ...], ...] = ()
    is_compiled: bool = False
    has_fsdp2: bool = False
    max_together: int = len(VARIANTS)
    variants: tuple[str, ...] = tuple(VARIANTS)

    def missing_package(self) -> str:
        """Return the name of a package that the program needs and that is not installed, or ""."""
        return next(
            (names[0] for names in self.packages if not any(map(importlib.util.find_spec, names))),
            "",
        )


_TRAINER: Final = (("transformers",), ("accelerate",))
_LIGHTNING: Final = (("lightning", "pytorch_lightning"),)
_LLAMA_B4: Final = Row(
    "HF Trainer, Llama 1.2B, batch 4",
    "trainer_llama.py",
    "--size=1.2b --batch=4 --length=1024 --accumulate=1",
    steps=10,
    packages=_TRAINER,
    has_fsdp2=True,
    max_together=4,
)
_FULL: Final = {
    "nano-124m-compiled": Row("nanoGPT 124M, compiled", "nano_gpt.py", "--size=124m", is_compiled=True),
    "nano-124m": Row("nanoGPT 124M", "nano_gpt.py", "--size=124m"),
    "nano-774m": Row("nanoGPT 774M, batch 4", "nano_gpt.py", "--size=774m --batch=4", max_together=3),
    "resnet50-b32": Row("ResNet-50, batch 32", "vision.py", "--model=resnet50 --batch=32 --amp"),
    "resnet50-b256": Row("ResNet-50, batch 256", "vision.py", "--model=resnet50 --batch=256 --amp", steps=10),
    "vit-l-16": Row("ViT-L/16, batch 64", "vision.py", "--model=vit_l_16 --batch=64 --amp", steps=10),
    "trainer-llama-1.2b": Row(
        "HF Trainer, Llama 1.2B, compiled, 4 microbatches", "trainer_llama.py", "--size=1.2b",
        steps=8, packages=_TRAINER, is_compiled=True, has_fsdp2=True, max_together=3,
    ),
    "trainer-llama-1.2b-b4": _LLAMA_B4,
    "trainer-llama-1.2b-b4-compiled": replace(
        _LLAMA_B4, title="HF Trainer, Llama 1.2B, batch 4, compiled", is_compiled=True
    ),
    "trainer-llama-1.2b-b4x4": replace(
        _LLAMA_B4, title="HF Trainer, Llama 1.2B, 4 microbatches of 4",
        arguments="--size=1.2b --batch=4 --length=1024 --accumulate=4", steps=5,
    ),
    "trainer-llama-3.2b": Row(
        "HF Trainer, Llama 3.2B in bf16, compiled, 4 microbatches", "trainer_llama.py",
        "--size=3.2b --weights=bfloat16",
        steps=6, packages=_TRAINER, is_compiled=True, has_fsdp2=True, max_together=1,
    ),
    "trainer-llama-3.2b-b2": replace(
        _LLAMA_B4, title="HF Trainer, Llama 3.2B, batch 2",
        arguments="--size=3.2b --batch=2 --length=1024 --accumulate=1", max_together=1,
    ),
    "lightning-124m": Row("Lightning, GPT 124M", "lightning_gpt.py", "--size=124m", packages=_LIGHTNING),
}  # fmt: skip
_TINY: Final = {
    "nano": Row("nanoGPT, tiny", "nano_gpt.py", "--size=tiny --batch=2"),
    "resnet": Row("ResNet, tiny", "vision.py", "--model=tiny --batch=4 --image=32"),
    "trainer": Row(
        "HF Trainer, tiny",
        "trainer_llama.py",
        "--size=tiny --length=32",
        packages=_TRAINER,
        has_fsdp2=CUDA,
    ),
    "lightning": Row(
        "Lightning, tiny", "lightning_gpt.py", "--size=tiny --batch=2", packages=_LIGHTNING
    ),
}
_CPU_NANO: Final = Row("nanoGPT, 11M", "nano_gpt.py", "--size=cpu --batch=4", steps=10)
_CPU_RESNET: Final = Row(
    "ResNet-50, batch 4 of 64 x 64", "vision.py", "--model=resnet50 --batch=4 --image=64", steps=10
)
_CPU_TIME: Final = {
    "nano": _CPU_NANO,
    "nano-compiled": replace(_CPU_NANO, title="nanoGPT, 11M, compiled", is_compiled=True),
    "resnet50": _CPU_RESNET,
    "resnet50-compiled": replace(
        _CPU_RESNET, title="ResNet-50, batch 4 of 64 x 64, compiled", is_compiled=True
    ),
}
SIZES: Final = {"full": _FULL, "tiny": _TINY, "cpu": _CPU_TIME}
# The rows of --quick in their order, with the variants whose models fit on a GPU together.
QUICK: Final[dict[str, tuple[str, ...]]] = {
    "nano-124m-compiled": ("stock", "best", "ovpatch", "dist_optimizer"),
    "trainer-llama-1.2b": ("stock", "ovpatch", "fsdp2"),
    "nano-774m": ("stock", "ovpatch", "dist_optimizer"),
    "resnet50-b32": ("stock", "best", "ovpatch", "dist_optimizer"),
    "resnet50-b256": ("stock", "ovpatch"),
    "lightning-124m": ("stock", "ovpatch"),
}


class Measurement:
    """The rounds of one row.

    Args:
        name: The name of the row.
        row: The program.
        args: The command line.
        end: The time of ``time.monotonic`` at which the budget is spent.
    """

    def __init__(self, name: str, row: Row, args: argparse.Namespace, end: float) -> None:
        self._name, self._row, self._args, self._end = name, row, args, end
        self._folder = args.logs / f"{name}-{os.getpid()}"
        self._steps = args.steps or row.steps
        self._device = "cpu"
        # The reason for which no variant ran, or "".
        self._skipped = ""
        self._rounds: list[dict[str, Any]] = []
        # The reasons of failed variants.
        self._failed: dict[str, str] = {}
        # The counters of each variant's features that did work.
        self._worked: dict[str, dict[str, Any]] = {}

    def result(self) -> dict[str, Any]:
        """Return the rounds so far, with their description and summary."""
        row, args = self._row, self._args
        settings = {
            name: getattr(args, name) for name in ("size", "rounds", "warmup", "fresh", "backend")
        }
        settings |= {"steps": self._steps, "arguments": row.arguments, "packages": _versions()}
        return {
            **described("programs", settings, world=args.ranks, device=self._device),
            "program": self._name,
            "title": row.title
            + (f" ({args.backend})" if row.is_compiled and args.backend != "inductor" else ""),
            "is_cpu_time": args.cpu_time,
            "skipped": self._skipped,
            "failed": self._failed,
            "worked": self._worked,
            "summary": summarize(self._rounds),
            "rounds": self._rounds,
        }

    def run(self) -> None:
        """Run the rounds of all variants alternately, unless a package is missing or the budget is spent."""
        if missing := self._row.missing_package():
            self._skipped = f"skipped: there is no package {missing}"
        elif time.monotonic() >= self._end:
            self._skipped = f"dropped: the budget of {self._args.budget_s:.0f} s is spent"
        print(f"{self._row.title}{', ' + self._skipped if self._skipped else ''}", flush=True)
        if self._skipped:
            return
        together = not self._args.fresh and (
            not CUDA or len(self._row.variants) <= self._row.max_together
        )
        if together:
            self._run_together()
            return
        for number in range(self._args.rounds):
            for variant in self._order(number):
                with ExitStack() as stack:
                    self._attempt(
                        variant, lambda v=variant, s=stack, n=number: self._run_alone(v, s, n)
                    )

    def _run_together(self) -> None:
        """Start all variants, then let one train at a time."""
        with ExitStack() as stack:
            # They import their packages at the same time. Only what uses the device runs alone.
            programs = {
                v: self._start(v, stack, self._folder / v, has_turns=True)
                for v in self._row.variants
            }

            def warm_up(variant: str) -> None:
                programs[variant].give_turn("start")
                self._wait_until_ready(programs[variant])

            def run_round(variant: str, number: int) -> None:
                programs[variant].give_turn(f"round-{number}")
                self._take_round(programs[variant], variant, number, number)

            for variant in self._row.variants:
                self._attempt(variant, lambda v=variant: warm_up(v))
            for number in range(self._args.rounds):
                for variant in self._order(number):
                    self._attempt(variant, lambda v=variant, n=number: run_round(v, n))
            for variant in self._order(0):
                self._attempt(variant, lambda v=variant: self._finish(programs[v], v))

    def _run_alone(self, variant: str, stack: ExitStack, number: int) -> None:
        program = self._start(variant, stack, self._folder / f"{variant}-{number}", has_turns=False)
        self._wait_until_ready(program)
        self._take_round(program, variant, number, 0)
        self._finish(program, variant)

    def _order(self, number: int) -> list[str]:
        """Return the variants of a round that have not failed. Every other round is reversed, against drift."""
        left = [variant for variant in self._row.variants if variant not in self._failed]
        return left[::-1] if number % 2 else left

    def _attempt(self, variant: str, part: Any) -> None:
        try:
            part()
        except ProgramError as error:
            is_budget_spent = time.monotonic() >= self._end
            self._failed[variant] = (
                f"cut off at {self._args.budget_s:.0f} s" if is_budget_spent else str(error)
            )
            print(f"  {variant}: {self._failed[variant]}", flush=True)

    def _start(self, variant: str, stack: ExitStack, folder: Path, *, has_turns: bool) -> Program:
        row, args, chosen = self._row, self._args, VARIANTS[variant]
        script = [str(SCRIPTS / row.script), *shlex.split(row.arguments), *chosen.arguments]
        script += [f"--compile={args.backend}"] if row.is_compiled else []
        script += [f"--warmup={args.warmup}", f"--steps={self._steps}"]
        script += [f"--rounds={args.rounds}"] if has_turns else []
        program = Program(script, chosen.features, args.ranks, folder, has_turns=has_turns)
        stack.callback(program.end)
        return program

    def _wait_until_ready(self, program: Program) -> None:
        deadline = min(self._end, time.monotonic() + self._args.start_timeout_s)
        self._device = program.wait_for("ready", deadline)[0]["device"]

    def _take_round(
        self, program: Program, variant: str, number: int, number_of_program: int
    ) -> None:
        deadline = min(self._end, time.monotonic() + self._args.round_timeout_s)
        ranks = program.wait_for("round", deadline, number=number_of_program)
        found = {
            "variant": variant,
            "round": number,
            # The slowest rank counts.
            "ms": [max(times) for times in zip(*(rank["ms"] for rank in ranks), strict=True)],
            "cpu_ms": round(sum(rank["cpu_ms"] for rank in ranks), 3),
            "peak_gib": max(rank["peak_gib"] for rank in ranks),
        }
        self._rounds.append(found)
        shown = f"{statistics.median(found['ms']):9.1f} ms, CPU {found['cpu_ms']:9.1f} ms, {found['peak_gib']:6.2f} GiB"
        print(f"  round {number}: {variant:16}{shown}", flush=True)

    def _finish(self, program: Program, variant: str) -> None:
        # All rounds are measured, so the end of the budget only shortens the wait.
        deadline = max(self._end, time.monotonic() + _EXIT_GRACE_S)
        self._worked[variant] = program.finish(deadline)


def summarize(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians over rounds of each variant, and its ratios to the stock runs of the same rounds."""
    stock_cpu_ms = [found["cpu_ms"] for found in rounds if found["variant"] == "stock"]
    summary = []
    for variant in [name for name in VARIANTS if any(found["variant"] == name for found in rounds)]:
        mine = [found for found in rounds if found["variant"] == variant]
        medians = [statistics.median(found["ms"]) for found in mine]
        ratio = find_ratio(rounds, variant, "stock")
        least_cpu_ms = min(found["cpu_ms"] for found in mine)
        summary.append({
            "variant": variant,
            "median_ms": round(statistics.median(medians), 2),
            "round_medians_ms": [round(ms, 2) for ms in medians],
            "ratio": None if ratio is None else round(ratio, 3),
            "least_cpu_ms": least_cpu_ms,
            "cpu_ratio": round(least_cpu_ms / min(stock_cpu_ms), 3) if stock_cpu_ms else None,
            "peak_gib": max(found["peak_gib"] for found in mine),
        })  # fmt: skip
    return summary


def find_ratio(rounds: Sequence[dict[str, Any]], variant: str, base: str) -> float | None:
    """Return the median, over rounds, of a variant's ratio to another one in the same round; None without any."""
    bases = {found["round"]: found for found in rounds if found["variant"] == base}
    ratios = [
        statistics.median(found["ms"]) / statistics.median(bases[found["round"]]["ms"])
        for found in rounds
        if found["variant"] == variant and found["round"] in bases
    ]
    return statistics.median(ratios) if ratios else None


def make_table(results: Iterable[dict[str, Any]]) -> str:
    """Return results as a table in Markdown, with a line for each program or variant that has no number."""
    results = list(results)
    shown = [
        v
        for v in VARIANTS
        if any(s["variant"] == v for result in results for s in result["summary"])
    ]
    header = ["program", "where", *(VARIANTS[variant].title for variant in shown)]
    lines, notes = [_row(header), _row(["---"] * len(header))], []
    for result in results:
        summary = {s["variant"]: s for s in result["summary"]}
        cells = [_cell(summary[variant], result) if variant in summary else "" for variant in shown]
        if summary:
            lines.append(_row([result["title"], _where(result), *cells]))
        notes += [f"- {result['title']}: {result['skipped']}"] if result["skipped"] else []
        notes += [
            # The file has the full messages, which name other processes and logs.
            f"- {result['title']}, {VARIANTS[v].title}"
            f"{', in its last round' if v in summary else ''}: {why.partition('. ')[0]}"
            for v, why in result["failed"].items()
        ]
        note = result.get("settings", {}).get("note")
        notes += [f"- {result['title']}, the same run: {note}."] if note else []
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(found: dict[str, Any], result: dict[str, Any]) -> str:
    if result["is_cpu_time"]:
        return f"{found['least_cpu_ms']:.1f} ms{_ratio(found, 'cpu_ratio', 3)}"
    cell = f"{found['median_ms']:.1f} ms{_ratio(found, 'ratio', 2)}, {found['peak_gib']:.1f} GiB"
    return cell + _describe_work(found["variant"], result["worked"])


def _describe_work(variant: str, worked: dict[str, dict[str, Any]]) -> str:
    """Return a remark on the features of a variant, or "" if they worked as their column says."""
    features = VARIANTS[variant].features
    if features is None or variant not in worked:
        return ""
    if not worked[variant]:
        return ", left to stock PyTorch"
    # Plain ovpatch shards only models whose steps do not become longer.
    return ", sharded" if not features and "dist_optimizer" in worked[variant] else ""


def _ratio(found: dict[str, Any], key: str, digits: int) -> str:
    return (
        "" if found["variant"] == "stock" or found[key] is None else f" ({found[key]:.{digits}f}x)"
    )


def _where(result: dict[str, Any]) -> str:
    _, is_nvidia, model = result["device"].rpartition("NVIDIA ")
    count = len({found["round"] for found in result["rounds"]})
    where = f"{result['world']} {model.split()[0] if is_nvidia else 'CPU ranks'}, {result['date']}"
    return f"{where}, {count} round{'s' * (count > 1)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def choose_backend() -> str:
    """Return inductor, or eager on machines where inductor has no C++ compiler or no headers of Python."""
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return "inductor" if has_compiler and has_headers else "eager"


def choose_rows(args: argparse.Namespace) -> dict[str, Row]:
    """Return the rows to run, each with the variants to run."""
    rows = dict(SIZES[args.size])
    if args.quick:
        rows = {name: replace(rows[name], variants=variants) for name, variants in QUICK.items()}
    if args.only:
        rows = {name: row for name, row in rows.items() if name in args.only}
    wanted = set(args.variants or VARIANTS)

    def keeps(row: Row, variant: str) -> bool:
        return variant in wanted and (variant != "fsdp2" or (row.has_fsdp2 and args.ranks > 1))

    kept = {name: tuple(v for v in row.variants if keeps(row, v)) for name, row in rows.items()}
    return {
        name: replace(rows[name], variants=variants) for name, variants in kept.items() if variants
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in ("transformers", "accelerate", "lightning", "pytorch-lightning", "torchvision"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and complete it by defaults that depend on each other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the most wanted programs, in nine minutes on two GPUs"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="compare CPU time, the least of the rounds, on gloo"
    )
    parser.add_argument(
        "--size", choices=SIZES, help="tiny: for tests; cpu: that of --cpu-time (full)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these programs")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="only these variants"
    )
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--ranks", type=int, default=gpus or 2, help="processes of a program, one on each GPU"
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of each variant (3; --quick 2, --cpu-time 5)"
    )
    parser.add_argument(
        "--warmup", type=int, default=PERIOD_STEPS + 4, help="steps of a program that are not timed"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="timed steps of a round; each program has its own default",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start the processes of each round again"
    )
    parser.add_argument(
        "--budget-s", type=float, help="drop the remaining rows after this (no limit; --quick 510)"
    )
    parser.add_argument(
        "--start-timeout-s", type=float, default=300.0, help="limit of a program's start"
    )
    parser.add_argument("--round-timeout-s", type=float, default=300.0, help="limit of a round")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="append the result of each row to this file, as JSON",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=ROOT / ".programs",
        help="folder of the programs' logs (.programs)",
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="only print the table of the results in this file",
    )
    parser.add_argument(
        "--list", action="store_true", help="only print the names of programs and variants"
    )
    args = parser.parse_args(arguments)
    if args.quick and (args.cpu_time or args.size not in (None, "full")):
        parser.error(
            "--quick has its own programs. Leave --cpu-time and --size out, or choose programs by "
            "--only."
        )
    if args.cpu_time and args.size not in (None, "cpu"):
        parser.error(
            f"--cpu-time has its own programs, and none of size {args.size}. Leave --size out."
        )
    args.size = "cpu" if args.cpu_time else args.size or "full"
    names = QUICK if args.quick else SIZES[args.size]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"there is no program {min(unknown)!r} here. Choose from: {', '.join(names)}.")
    if args.ranks < 1 or (gpus and args.ranks > gpus):
        parser.error(
            f"--ranks is {args.ranks}, but it must be at least 1 and at most the number of GPUs "
            f"({gpus})."
        )
    args.rounds = args.rounds or (2 if args.quick else 5 if args.cpu_time else 3)
    if args.cpu_time:
        args.variants = args.variants or ["stock", "ovpatch"]
    if args.budget_s is None:
        args.budget_s = _QUICK_BUDGET_S if args.quick else float("inf")
    args.backend = "eager" if args.size == "tiny" else choose_backend()
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, print the table, and return the exit status."""
    args = parse(arguments)
    if args.table:
        print(
            make_table(
                json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()
            )
        )
        return 0
    rows = choose_rows(args)
    if args.list:
        width = max(22, *(len(name) + 1 for name in rows))
        print(
            "\n".join(
                f"{name:{width}}{row.title}: {', '.join(row.variants)}"
                for name, row in rows.items()
            )
        )
        return 0
    end = time.monotonic() + args.budget_s
    results: list[dict[str, Any]] = []
    try:
        for name, row in rows.items():
            measurement = Measurement(name, row, args, end)
            try:
                measurement.run()
            finally:
                results.append(measurement.result())
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(results[-1]) + "\n")
    finally:
        print(f"\n{make_table(results)}", flush=True)
    if args.cpu_time:
        print(
            f"\nCPU time of a step on all ranks, the least of {args.rounds} rounds; backend "
            f"{args.backend}"
        )
    return int(any(result["failed"] for result in results) or not keep_goal(results))


def keep_goal(results: Iterable[dict[str, Any]]) -> bool:
    """Return whether no CPU time of a plain ovpatch run exceeds its goal, and print those that do."""
    has_kept = True
    for result in results:
        for found in result["summary"] if result["is_cpu_time"] else ():
            if found["variant"] == "ovpatch" and (found["cpu_ratio"] or 0.0) > CPU_TIME_GOAL:
                print(
                    f"OVER THE GOAL of {CPU_TIME_GOAL}: {result['title']}, {found['cpu_ratio']:.3f}"
                )
                has_kept = False
    return has_kept


if __name__ == "__main__":
    # A run that is cut off still ends its programs and prints what it has measured.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
