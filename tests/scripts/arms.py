"""Runs a program of ``programs/`` stock and patched, and takes up what it left behind.

The stock run is the yardstick; where its launcher is torchrun, its ranks are forked instead, which computes the same.
The patched run is started the way users start it wherever the launcher matters; else its ranks are forked, too. Most of
the time of these tests was the import of torch.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ovpatch.session.session_report import IDLE
from tests.support import scripts
from tests.support.equality import compare
from tests.support.preloaded import Server

PROGRAMS = Path(__file__).with_name("programs")
EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD = 2
TIMEOUT = 240  # the hard limit of a test is 300
GLOO_AT_EXIT = "terminate called without an active exception"


@dataclass(frozen=True)
class Arm:
    """One run that succeeded: its folder, and the merged report if there is one."""

    out: Path
    result: scripts.Result
    report: dict[str, Any] | None

    @property
    def ranks(self) -> list[Any]:
        """What each rank logged: losses, the digest of its parameters and so on."""
        return [json.loads((self.out / f"rank{rank}.json").read_text()) for rank in range(WORLD)]

    @property
    def checkpoints(self) -> dict[str, Any]:
        return {
            path.stem: torch.load(path, weights_only=True) for path in sorted(self.out.glob("*.pt"))
        }


class Runner:
    """Runs programs in a folder; the environment is stock's with OVPATCH=0, or ``ovpatch run`` goes before.

    Args:
        folder: For all output.
        server: Forks ranks.
        plain: A server that has imported torch alone.
    """

    def __init__(self, folder: Path, server: Server, plain: Server) -> None:
        self.folder, self._server, self._plain = folder, server, plain

    def torchrun(self, name: str, *args: str, patched: bool, to: str, **more: Any) -> Arm:
        """Run it on two ranks; output folder, report and the like are named ``to``.

        Args:
            name: The program.
            args: Its arguments.
            patched: Whether ``ovpatch run`` goes before.
            to: Name of the output.
            more: ``env``; ``launcher`` with options of torchrun, even if none, where torchrun starts patched ranks; and
                ``fresh`` where patched ranks import ovpatch before the libraries, as users' do.
        """
        env, launcher = more.get("env") or {}, more.get("launcher")
        line = (PROGRAMS / name, str(self.folder / to), *args)

        def run() -> scripts.Result:
            if not patched:
                return self._server.torchrun(
                    WORLD, *line, env={**env, "OVPATCH": "0"}, timeout=TIMEOUT
                )
            if launcher is None:
                server, report = (
                    self._plain if more.get("fresh") else self._server,
                    self.folder / f"{to}.report",
                )
                return server.torchrun(WORLD, *line, env=env, report=report, timeout=TIMEOUT)
            how = {"launcher": launcher, "env": env, "timeout": TIMEOUT}
            return scripts.torchrun(WORLD, *line, ovpatch=self._report(to), **how)

        return self._arm(run, patched=patched, to=to)

    def alone(self, text: str, *args: str) -> scripts.Result:
        """Run the text of a program, to which the examples are modules, as one process that no launcher has started."""
        program = self.folder / "alone.py"
        program.write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{text}")
        return scripts.run([*self._server.command(), program, *args]).check()

    def both(self, name: str, *args: str, to: str = "", **more: Any) -> tuple[Arm, Arm]:
        """Run it on two ranks stock and patched, at the same time."""
        to = to or name
        stock, patched = together(
            lambda: self.torchrun(f"{name}.py", *args, patched=False, to=f"{to}-stock", **more),
            lambda: self.torchrun(f"{name}.py", *args, patched=True, to=f"{to}-patched", **more),
        )
        return stock, patched

    def python(
        self, program: Sequence[str], *, patched: bool, to: str, env: dict[str, str] | None = None
    ) -> Arm:
        """Run a program, or a launcher, that starts the ranks itself."""
        head = (
            [str(Path(sys.executable).with_name("ovpatch")), "run", *self._report(to), "--"]
            if patched
            else []
        )
        stock = {} if patched else {"OVPATCH": "0"}

        def run() -> scripts.Result:
            return scripts.run(
                [*head, sys.executable, *program], env={**stock, **(env or {})}, timeout=TIMEOUT
            )

        return self._arm(run, patched=patched, to=to)

    def _stock(self, run: Callable[[], scripts.Result], to: str) -> scripts.Result:
        """Run the stock arm, again if torch aborted it after its work was done.

        gloo's threads let go of Python objects while the interpreter goes down, on a busy machine in some of a hundred
        processes. Only stock runs are excused: a patched one has no right to it, as it waits for those threads.
        """
        done = run()
        for _ in range(2):
            if not done.rc or GLOO_AT_EXIT not in done.stderr:
                break
            shutil.rmtree(self.folder / to, ignore_errors=True)
            done = run()
        return done

    def _report(self, to: str) -> list[str]:
        return ["--report", str(self.folder / f"{to}.report")]

    def _arm(self, run: Callable[[], scripts.Result], *, patched: bool, to: str) -> Arm:
        done = run() if patched else self._stock(run, to)
        report = self.folder / f"{to}.report"
        return Arm(
            self.folder / to,
            done.check(),
            json.loads(report.read_text()) if report.exists() else None,
        )


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip without libraries of the extra ``integration``; in an environment of ``make setup`` they must be there.

    They are looked for and not imported, which would take seconds of everybody's run.
    """
    missing = ", ".join(name for name in libraries if find_spec(name) is None)
    if missing and Path(sys.prefix, ".ready").exists():
        raise ModuleNotFoundError(
            f"no {missing} in the environment of the project: run make setup again"
        )
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {missing}: pip install -e '.[integration]'"
    )


def together(*runs: Callable[[], Any]) -> list[Any]:
    """Do several runs at once, of which each spends much of its time waiting for its own start."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]


def crosswise(resume: Callable[..., Arm], stock: Arm, patched: Arm) -> list[Arm]:
    """Resume stock what the patched run saved, and patched what the stock run saved, at the same time.

    Args:
        resume: Runs the rest; takes the arm to resume, ``patched`` and ``to``.
        stock: The stock run.
        patched: The patched run.
    """
    return together(
        lambda: resume(patched, patched=False, to="resumed-stock"),
        lambda: resume(stock, patched=True, to="resumed-patched"),
    )


def saved_folders(arm: Arm, folders: str, suffix: str) -> dict[str, Any]:
    """Return what accelerate and the Trainer save: parameters, optimizer, scheduler; not what names the run.

    Args:
        arm: A run.
        folders: Pattern of the folders' names.
        suffix: Of the files of optimizer and scheduler.
    """
    from safetensors.torch import load_file

    return {
        folder.name: {
            "model": load_file(folder / "model.safetensors"),
            "optimizer": torch.load(folder / f"optimizer{suffix}", weights_only=True),
            "scheduler": torch.load(folder / f"scheduler{suffix}", weights_only=True),
        }
        for folder in sorted(arm.out.glob(folders))
    }


def assert_same(stock: Arm, patched: Arm) -> None:
    """Logs of all ranks, and all checkpoints, are bitwise equal."""
    compare(stock.ranks, patched.ranks).assert_bitwise()
    assert list(patched.checkpoints) == list(stock.checkpoints)
    if stock.checkpoints:
        compare(stock.checkpoints, patched.checkpoints).assert_bitwise()


def assert_applied(report: dict[str, Any] | None, **expected: int) -> None:
    """The feature ran in both workers, as often as ``expected``, and reduced buckets while backward computed."""
    ddp = feature(report)
    assert ddp["state"] == "applied", ddp
    workers = [process for process in ddp["processes"] if process["counters"]["models"]]
    assert len(workers) == WORLD, ddp["processes"]
    for worker in workers:
        counters = worker["counters"]
        assert counters["backwards"] > 0
        assert counters["collectives"] > 0
        # A model of one bucket reduces it after its last gradient.
        has_several_buckets = counters["collectives"] > counters["backwards"]
        assert counters["collectives_in_backward"] > 0 or not has_several_buckets
        assert counters["bytes_reduced"] > 0
        assert counters["stock_models"] == 0
        assert {name: counters[name] for name in expected} == expected, counters


def assert_stood_down(report: dict[str, Any] | None, *because: str) -> None:
    """The feature was there in both workers, did nothing, and the report says so."""
    ddp = feature(report)
    assert ddp["state"] == "applied", ddp
    assert [process["rank"] for process in ddp["processes"]] == [*range(WORLD)], ddp["processes"]
    assert not any(ddp["counters"].values()), ddp["counters"]
    assert ddp["remarks"][:-1] == [*because], ddp["remarks"]
    assert ddp["remarks"][-1] in IDLE


def feature(report: dict[str, Any] | None) -> dict[str, Any]:
    assert report is not None
    return next(one for one in report["features"] if one["name"] == "ddp")
