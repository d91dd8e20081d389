"""Runs a training program on several ranks, follows what it prints, and ends it with all that it started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ovpatch.insight.launch import end_processes
from ovpatch.session.session_report import did_work

# Programs import nothing of this package, so programs/step_times.py repeats these two.
_PREFIX: Final = "step_times: "
_CONTROLLER: Final = "controller"
# An entry of the environment of a run, which all of its processes inherit.
_MARK: Final = "BENCHMARK_PROGRAM_RUN"
_POLL_S: Final = 0.05
_EXIT_TIMEOUT_S: Final = 60.0
_ERROR: Final = re.compile(
    r"^(?:\[?rank\d+\]?: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)$", re.MULTILINE
)


class ProgramError(Exception):
    """A program failed, or did not reach its next report in time."""


def make_launcher(ranks: int) -> list[str]:
    """Return the words of a command before the name of the script."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]


class Program:
    """The processes of a program.

    Args:
        script: The script and its arguments.
        features: The features of ``ovpatch run``, or "" for its defaults. None runs stock PyTorch.
        ranks: The number of processes.
        folder: A folder for the log, the report and the turns. It must not exist.
        has_turns: Whether the program waits for turns.
    """

    def __init__(
        self,
        script: Sequence[str],
        features: str | None,
        ranks: int,
        folder: Path,
        *,
        has_turns: bool,
    ) -> None:
        folder.mkdir(parents=True)
        self._turns, self._log_file, self._report_file = (
            folder,
            folder / "log",
            folder / "report.json",
        )
        self._ranks = ranks
        self._read_chars = 0
        self._events: list[dict[str, Any]] = []
        (folder / _CONTROLLER).write_text(str(os.getpid()))
        command = [*make_launcher(ranks), *script, *([f"--turns={folder}"] if has_turns else [])]
        if features is not None:
            listed = [f"--features={features}"] if features else []
            command = [
                sys.executable,
                "-m",
                "ovpatch",
                "run",
                f"--report={self._report_file}",
                *listed,
                "--",
                *command,
            ]
        self._mark_entry = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark_entry.partition("=")
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env={**_user_environment(), name: value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def give_turn(self, name: str) -> None:
        """Let the ranks run until their next report."""
        (self._turns / name).touch()

    def wait_for(
        self, event: str, deadline: float, *, number: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reports of all ranks; raise ProgramError if they do not come.

        Args:
            event: The kind of report.
            deadline: A time of ``time.monotonic``.
            number: The round of the report.
        """
        while True:
            has_ended = self._process.poll() is not None
            self._read_log()
            found = [
                e for e in self._events if e["event"] == event and number in (None, e.get("round"))
            ]
            if len(found) == self._ranks:
                return found
            if has_ended:
                raise ProgramError(f"{self._last_error()}, see {self._log_file}")
            if time.monotonic() > deadline:
                raise ProgramError(f"cut off before its report {event!r}, see {self._log_file}")
            time.sleep(_POLL_S)

    def finish(self, deadline: float) -> dict[str, Any]:
        """Wait for the end; return the counters of the features that did work.

        Raises:
            ProgramError: The program failed, or does not end.
        """
        try:
            status = self._process.wait(max(0.0, min(_EXIT_TIMEOUT_S, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            raise ProgramError(f"did not end after its last step, see {self._log_file}") from None
        self._read_log()
        if status:
            raise ProgramError(f"{self._last_error()}, see {self._log_file}")
        if not self._report_file.exists():
            return {}
        features = json.loads(self._report_file.read_text(encoding="utf-8"))["features"]
        return {f["name"]: f["counters"] for f in features if did_work(f["counters"], f["work"])}

    def end(self) -> None:
        """End all processes that still run."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        end_processes(self._mark_entry)
        self._process.wait()

    def _read_log(self) -> None:
        """Take the lines of reports from the part of the log that is new."""
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        end = text.rfind("\n") + 1
        for line in text[self._read_chars : end].splitlines():
            _, is_report, values = line.partition(_PREFIX)
            if is_report:
                self._events.append(json.loads(values))
        self._read_chars = end

    def _last_error(self) -> str:
        """Return the first error in the log, because launchers print their own errors after it."""
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        error = _ERROR.search(text)
        return error[1][:200] if error else f"ended with status {self._process.returncode}"


def _user_environment() -> dict[str, str]:
    """Return the environment without settings of features, which variants set."""
    kept = ("OVPATCH_CACHE_DIR", "OVPATCH_LOG")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OVPATCH") or name in kept
    }
