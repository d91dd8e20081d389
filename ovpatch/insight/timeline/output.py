"""The folder with everything: raw traces, the picture, the merged trace and the numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ovpatch._version import __version__
from ovpatch.exit_codes import ExitCode
from ovpatch.insight.timeline import merging, picture, text
from ovpatch.insight.timeline.recording import Recording
from ovpatch.insight.timeline.summary import efficiency, to_json
from ovpatch.reports.workers import write_json

_PICTURES: Final = ("timeline.png", "timeline.svg")
_MERGED: Final = "timeline.json.gz"
_SUMMARY: Final = "summary.json"
_RUNS: Final = ("stock", "patched", "stock.log", "patched.log")


class OutputError(ValueError):
    """The results could not be kept; the text ends with the remedy."""

    exit_code = ExitCode.USAGE


class Output:
    """The output folder of one call.

    Args:
        folder: Where to.
        picture: Whether there shall be a picture.

    Raises:
        OutputError: The folder holds something else, or there is nothing to draw with.
    """

    def __init__(self, folder: Path, *, picture: bool) -> None:
        self.folder, self._picture = folder, picture
        self.written: list[Path] = []
        self._check()

    def _check(self) -> None:
        if self._picture:
            _can_draw()
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputError(f"--out {self.folder} is a file. Name a folder.")
        ours = {*_PICTURES, _MERGED, _SUMMARY, *_RUNS}
        others = sorted(path.name for path in self.folder.glob("*") if path.name not in ours)
        if others:
            raise OutputError(
                f"--out {self.folder} holds other things, such as {others[0]}. Name an empty folder or a new one."
            )

    def spare(self, traces: Iterable[Path]) -> None:
        """Make sure that none of the traces that are read would be replaced.

        Raises:
            OutputError: One would.
        """
        replaced = {(self.folder / name).resolve() for name in (*_PICTURES, _MERGED, _SUMMARY)}
        for trace in traces:
            if trace.resolve() in replaced:
                raise OutputError(f"{trace} would be replaced by what --out {self.folder} gets. Name another folder.")

    def prepare(self, *, keep_runs: bool) -> None:
        """Make the folder, without what an earlier call left in it.

        Args:
            keep_runs: Leave the raw traces; they may be what is read now.

        Raises:
            OutputError: It cannot be made, or would lose what is not ours.
        """
        for name in () if keep_runs else _RUNS:
            if _foreign(self.folder / name):
                raise OutputError(f"--out {self.folder} holds a folder {name} that is not ours. Name another folder.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (*_PICTURES, _MERGED, _SUMMARY, *(() if keep_runs else _RUNS)):
                _remove(self.folder / name)
        except OSError as error:
            raise OutputError(f"--out {self.folder}: {error.strerror}. Name a folder that can be written.") from error

    def discard(self) -> None:
        """Take back what :meth:`prepare` made, and the runs; nothing was recorded."""
        for name in _RUNS:
            _remove(self.folder / name)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write(self, recordings: Sequence[Recording], *, colour: bool = False) -> str:
        """Write the files and return the tables."""
        runs = [recording.run for recording in recordings]
        if self._picture:
            self.written = [self.folder / name for name in _PICTURES]
            picture.draw(runs, self.written)
        merging.write(runs, self.folder / _MERGED)
        write_json(self.folder / _SUMMARY, _summary(recordings))
        self.written += [self.folder / _MERGED, self.folder / _SUMMARY]
        costs = [f"{one.run.name}: {one.cost}" for one in recordings if one.cost is not None]
        return "\n".join([text.report(runs, colour=colour), *costs])


def _foreign(path: Path) -> bool:
    """Whether a folder named like one of a run is of somebody else: in each of ours, processes have signed in."""
    return (
        path.is_dir() and any(path.iterdir()) and not any((*path.glob("process-*.json"), *path.glob("failed-*.json")))
    )


def _can_draw() -> None:
    try:
        picture.check()
    except picture.NoMatplotlibError as error:
        raise OutputError(str(error)) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _summary(recordings: Sequence[Recording]) -> dict[str, Any]:
    runs = [recording.run for recording in recordings]
    found = efficiency(*runs) if len(runs) == 2 else None
    return {
        "version": __version__,
        "unit": "ns",
        "overlap_efficiency": found._asdict() if found is not None else None,
        "recording_cost": {one.run.name: one.cost and one.cost.share for one in recordings},
        "remarks": [remark for one in recordings for remark in one.remarks],
        "runs": [to_json(run) for run in runs],
    }
