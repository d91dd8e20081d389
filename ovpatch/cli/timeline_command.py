"""``ovpatch timeline``: records a few steps of an unmodified command and shows its exposed communication.

Tables go to stdout, progress, remarks and ovpatch's report to stderr, and the output of the command into a log.

The user's browser shows a trace by Perfetto's page, https://ui.perfetto.dev, which fetches the trace from this machine.
The page computes in the browser. Its own security policy lets it read from ``127.0.0.1:9001`` and from no other local
address.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovpatch.cli import command_line
from ovpatch.exit_codes import ExitCode
from ovpatch.insight.timeline.summary import Recording, make_run, read_recording
from ovpatch.insight.timeline.timeline_export import Output
from ovpatch.insight.timeline.trace import TraceError
from ovpatch.session.report_table import format_report, wants_colour
from ovpatch.settings import settings
from ovpatch.settings.settings import SettingsError

PAGE: Final = "https://ui.perfetto.dev"
PORT: Final = 9001
_FETCH_TIMEOUT_S: Final = 60.0


class _Handler(BaseHTTPRequestHandler):
    """A handler that serves one file to the page, and nothing else."""

    server: _Server

    def do_GET(self) -> None:
        """Send the trace."""
        if self.path != f"/{self.server.trace.name}":
            self.send_error(404)
            return
        data = self.server.trace.read_bytes()
        self._send_status(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.server.is_fetched = True

    def do_OPTIONS(self) -> None:
        """Allow the page to read. Browsers send this request before a public page reads from this machine."""
        self._send_status(204)
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.end_headers()

    def _send_status(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", PAGE)
        self.send_header("Cache-Control", "no-cache")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to stderr."""


class _Server(HTTPServer):
    """A server of one file for the browser on this machine."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        # Whether the browser has fetched the file, after which the server can end.
        self.is_fetched = False
        super().__init__(("127.0.0.1", PORT), _Handler)


def show(trace: Path) -> str:
    """Open a trace in the user's browser, and return the message for the user.

    Perfetto's page can fetch the trace from this process for a minute.
    """
    by_hand = f"open {trace} at {PAGE} by hand"
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return f"there is no browser here; {by_hand}"
    try:
        server = _Server(trace)
    except OSError as error:
        return (
            f"port {PORT}, from which Perfetto reads, cannot be used ({error.strerror}); {by_hand}"
        )
    with server:
        browser.open(f"{PAGE}/#!/?url=http://127.0.0.1:{server.server_port}/{trace.name}")
        end = time.monotonic() + _FETCH_TIMEOUT_S
        while not server.is_fetched and (remaining := end - time.monotonic()) > 0:
            server.timeout = remaining
            server.handle_request()
    return (
        f"shown at {PAGE}"
        if server.is_fetched
        else f"the browser did not fetch the trace; {by_hand}"
    )


if TYPE_CHECKING:
    from ovpatch.insight.nodes import Leader
    from ovpatch.insight.variants import Outcome, Variant

_WORKER: Final = "ovpatch.insight.timeline.timeline_worker"
_say: Final = partial(command_line.say, "timeline")
_ENDINGS: Final = (".json", ".json.gz")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch timeline``."""
    add = parser.add_argument
    add(
        "--step",
        type=command_line.parse_integer,
        default=5,
        metavar="K",
        help="first step to record, at least 2 (default: 5)",
    )
    add(
        "--steps",
        type=command_line.parse_integer,
        default=3,
        metavar="N",
        help="how many steps to record (default: 3)",
    )
    add(
        "--compare",
        action="store_true",
        help="run the command stock too; with traces: give two folders, stock first",
    )
    command_line.add_features(parser)
    add(
        "--out",
        type=Path,
        default=Path("ovpatch-timeline"),
        metavar="DIR",
        help="where the files go (./ovpatch-timeline)",
    )
    add(
        "--no-stop",
        action="store_true",
        help="let the command run to its end after the last recorded step",
    )
    add(
        "--operators",
        action="store_true",
        help="on GPUs, record torch's operators as well as kernels; costs more",
    )
    add("--no-picture", action="store_true", help="draw no picture, which needs matplotlib")
    add(
        "--open",
        action="store_true",
        help="show the trace in a browser, by ui.perfetto.dev, which reads it from here",
    )
    command_line.add_timeout(parser)
    command_line.add_nodes(parser)
    add(
        "--communication",
        metavar="REGEX",
        help="further kernels that count as communication, by name",
    )
    add(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="-- command… | trace.json…",
        help="what to run, or what to read",
    )


def main(arguments: argparse.Namespace) -> int:
    """Record or read, write everything out, and print the tables."""
    pattern = _compile_pattern(arguments.communication)
    if arguments.compare:
        _refuse_missing(arguments.rest)
    if _are_traces(arguments.rest):
        return _show_results(arguments, pattern, None)
    names = ("step", "steps", "compare", "features", "no_stop", "operators")
    command = command_line.get_command(arguments.rest)
    return command_line.lead_or_follow(
        arguments, "timeline", command, names, partial(_show_results, arguments, pattern)
    )


def _show_results(
    arguments: argparse.Namespace, pattern: re.Pattern[str] | None, nodes: Leader | None
) -> int:
    output = Output(arguments.out, picture=not arguments.no_picture)
    if _are_traces(arguments.rest):
        recordings, code = list(_read_recordings(arguments, pattern)), int(ExitCode.OK)
        output.check_inputs(lanes.path for recording in recordings for lanes in recording.run.ranks)
        output.prepare_folder(keep_runs=True)
    else:
        recordings, code = _record(arguments, output, pattern, nodes)
    if not recordings:
        return code
    print(output.write_results(recordings, colour=wants_colour(sys.stdout)))
    for recording in recordings:
        for remark in recording.remarks:
            _say(remark)
    _say(f"written: {', '.join(map(str, output.written))}")
    if nodes is not None:
        nodes.verdict = f"the files are in {output.folder} there"
    if arguments.open:
        _say(show(output.trace))
    return code


def _compile_pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise SettingsError(
            f"--communication {text}: not a regular expression ({error}). Quote any of its "
            "characters ()[]*+?.|"
        ) from error


# --- traces that exist ---


def _are_traces(rest: Sequence[str]) -> bool:
    """Return whether the arguments are traces or their folders.

    Raises:
        SettingsError: The first argument is a trace, and another argument is none.
    """
    are_traces = [word.endswith(_ENDINGS) or Path(word).is_dir() for word in rest]
    if are_traces[:1] == [True] and not all(are_traces):
        word = rest[are_traces.index(False)]
        raise SettingsError(
            f"{rest[0]} is a trace and {word} is none. Put options before traces, and -- before a "
            "command."
        )
    return bool(are_traces) and all(are_traces)


def _refuse_missing(rest: Sequence[str]) -> None:
    """Raise SettingsError if a folder that ``--compare`` should read is missing, and looks like a command."""
    # Words after -- are a command.
    if len(rest) != 2 or rest[0] == "--":
        return
    missing = [word for word in rest if not Path(word).exists()]
    # A folder may have the name of a program, such as "test". A program gets a file or an option here.
    is_argument = Path(rest[1]).is_file() or rest[1].startswith("-")
    is_program = shutil.which(rest[0]) is not None and is_argument
    # A program that cannot be executed is another mistake.
    is_program |= Path(rest[0]).is_file() and not rest[0].endswith(_ENDINGS)
    if missing and not is_program:
        raise SettingsError(
            f"--compare {' '.join(rest)}: there is no {' and no '.join(missing)}. Name two folders of "
            "traces, or a command after --."
        )


def _read_recordings(
    arguments: argparse.Namespace, pattern: re.Pattern[str] | None
) -> Iterator[Recording]:
    from ovpatch.insight.timeline.tracks import read_all_ranks

    words = [[word] for word in arguments.rest] if arguments.compare else [arguments.rest]
    if arguments.compare and len(words) != 2:
        raise SettingsError(
            "--compare takes two folders of traces (or two traces), stock first; "
            f"{len(arguments.rest)} were given. Write: ovpatch timeline --compare stock/ patched/"
        )
    for name, own in zip(
        ("stock", "patched") if arguments.compare else ("recorded",), words, strict=True
    ):
        run = make_run(
            name,
            read_all_ranks([path for word in own for path in _list_traces(Path(word))], pattern),
        )
        yield Recording(run, remarks=tuple(f"{run.name}: {remark}" for remark in run.remarks))


def _list_traces(path: Path) -> list[Path]:
    """Return a trace, or the traces in a folder: our own traces if it has any, otherwise every JSON file."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("trace-rank*.json*")) or sorted(
        f for f in path.iterdir() if f.name.endswith(_ENDINGS)
    )
    if not files:
        raise TraceError(
            f"{path} holds no traces. Name a folder with files *.json or *.json.gz of "
            "torch.profiler."
        )
    return files


# --- a command ---


def _record(
    arguments: argparse.Namespace,
    output: Output,
    pattern: re.Pattern[str] | None,
    nodes: Leader | None,
) -> tuple[list[Recording], int]:
    """Run each variant and read its traces. A failed variant is shown up to its failure."""
    from ovpatch.insight import variants
    from ovpatch.insight.nodes import choose_runner

    command = command_line.get_command(arguments.rest)
    wanted = _get_recorded_steps(arguments)
    variants.check_autoload()
    chosen = _choose_variants(arguments, wanted)
    command_line.check_command(command)
    output.prepare_folder(keep_runs=False)
    recordings, code, failed = [], int(ExitCode.OK), False
    for variant in chosen:
        _say(
            f"running {variant.name}, steps {wanted[0]} to {wanted[-1]} are recorded: "
            f"{' '.join(command)}"
        )
        run_variant = choose_runner(nodes, must_see_all_ranks=arguments.nodes is None)
        outcome = run_variant(variant, command, _WORKER, output.folder, timeout=arguments.timeout)
        code = _judge(outcome) or code
        try:
            recordings.append(read_recording(variant.name, outcome.folder, wanted, pattern))
        # The second variant may still have something to show.
        except TraceError as error:
            _say("interrupted; nothing was recorded" if outcome.interrupted else str(error))
            code = code or ExitCode.UNDECIDED
        failed = failed or bool(outcome.code or outcome.failures or outcome.timed_out)
        if outcome.interrupted:
            break
    # After a failure the log has the reason, so the folder stays.
    if not recordings and not failed:
        output.discard_folder()
    return recordings, code


def _get_recorded_steps(arguments: argparse.Namespace) -> range:
    if arguments.step < 2:
        raise SettingsError(f"--step {arguments.step}: step 1 has no start marker. Give 2 or more.")
    if arguments.steps < 1:
        raise SettingsError(
            f"--steps {arguments.steps}: nothing would be recorded. Give 1 or more."
        )
    return range(arguments.step, arguments.step + arguments.steps)


def _choose_variants(arguments: argparse.Namespace, wanted: range) -> list[Variant]:
    from ovpatch.insight.variants import STOCK, Variant

    details = {"step": wanted[0], "steps": len(wanted)}
    details |= {"stop": not arguments.no_stop, "operators": arguments.operators}
    patched = Variant("patched", arguments.features, details)
    environment = command_line.make_environment(arguments.features)
    command_line.check_settings(environment, arguments.features)
    command_line.warn_of_near_misses(environment, "timeline")
    off = settings.read_environment(environment).selection.kind == "nothing"
    if off and arguments.compare:
        raise SettingsError("--compare with OVPATCH=0 would compare two stock runs. Unset OVPATCH.")
    if off:
        return [Variant("stock", STOCK, details)]
    return [Variant("stock", STOCK, details), patched] if arguments.compare else [patched]


def _judge(outcome: Outcome) -> int:
    """Print the report and the problems of a variant, and return its exit code."""
    if outcome.variant.patched and outcome.report is not None:
        _say(
            f"{outcome.variant.name}:\n{format_report(outcome.report, colour=wants_colour(sys.stderr))}"
        )
    for failure in outcome.failures:
        _say(
            f"{outcome.variant.name}: process {failure['pid']} (rank {failure['rank']}): "
            f"{failure['error']}"
        )
    if outcome.timed_out:
        _say(
            f"{outcome.variant.name}: no step for too long, so it was ended. Its stacks are in "
            f"{outcome.folder}"
        )
    elif outcome.code:
        name, end = outcome.variant.name, outcome.describe_exit()
        _say(f"{name}: the command ended with {end}; see {outcome.log}\n{outcome.read_failure()}")
    elif outcome.variant.patched and not outcome.applied:
        _say(
            f"{outcome.variant.name}: no feature of ovpatch was on in every process. Run `ovpatch "
            "doctor` for the reason."
        )
        return ExitCode.PROBLEM
    return outcome.code or (
        ExitCode.PROBLEM if outcome.failures or outcome.timed_out else ExitCode.OK
    )
