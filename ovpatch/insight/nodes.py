"""The nodes of a job: each runs the same tool, and node 0 concludes from the files of all nodes.

Node 0 leads. It orders each run, the other nodes follow, and send the files that their processes
left. So the nodes need no shared file system, and each decision exists once. The tools talk over
a port next to that of the launcher, see ADR 0032.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import shutil
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ovpatch._version import __version__
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import launch, variants
from ovpatch.insight.node_place import Place
from ovpatch.insight.variants import Outcome, Variant
from ovpatch.settings.settings import SettingsError

# --- a connection ---

# Lengths of the header, which is JSON, and of the bytes of a file after it.
_FRAME: Final = struct.Struct("!IQ")
# A larger header comes from a program that is not ovpatch.
_MAX_HEADER_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 20
# The system reports a host without power, or without a link, after 45 s.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
_UNACKNOWLEDGED_MS: Final = 45_000
# Seconds for node 0 to greet a node that has connected, or the port is not that of ovpatch.
_GREETING_TIMEOUT_S: Final = 60.0
# A node sends its first message as soon as it has connected.
_HELLO_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.2
_POLL_S: Final = 0.5


class NodeError(Exception):
    """Nodes do not meet, differ, or one of them was lost; the message names it."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.UNDECIDED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _LostError(Exception):
    """The other end of a connection was lost, or is not ovpatch."""


class _StrangerError(_LostError):
    """The other end is not ovpatch, because it does not send the messages of ovpatch in time."""


class _Link:
    """A connection between the tools of two nodes, over which headers and files are sent."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # The time at which a message must have arrived; None if this end waits without a limit.
        self._deadline: float | None = None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether something has arrived, or the other end was lost."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def send(self, header: Mapping[str, Any], file: Path | None = None) -> None:
        """Send a header, and the bytes of a file after it; raise _LostError if the other end was lost."""
        data = json.dumps(header).encode()
        try:
            if file is None:
                self._socket.sendall(_FRAME.pack(len(data), 0) + data)
                return
            with file.open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                self._socket.sendall(_FRAME.pack(len(data), size) + data)
                # A log may grow, and the other end expects this number of bytes.
                self._socket.sendfile(source, 0, size) if size else None
        except OSError as error:
            raise _LostError(str(error)) from error

    def receive_within(self, timeout_s: float) -> dict[str, Any]:
        """Return a header that has no file; raise _StrangerError if it does not arrive in time."""
        self._deadline = time.monotonic() + timeout_s
        try:
            return self.receive()
        finally:
            self._deadline = None

    def receive(self, choose: Callable[[Mapping[str, Any]], Path] | None = None) -> dict[str, Any]:
        """Return a header, after its file was written to the path that ``choose`` returns for it.

        Raises:
            _LostError: The other end was lost, or is not ovpatch.
        """
        length, size = _FRAME.unpack(self._read(_FRAME.size))
        if length > _MAX_HEADER_BYTES or (size and choose is None):
            raise _StrangerError("not ovpatch")
        try:
            header = json.loads(self._read(length))
        except ValueError as error:
            raise _StrangerError("not ovpatch") from error
        if not isinstance(header, dict):
            raise _StrangerError("not ovpatch")
        if choose is not None and header.get("kind") == "file":
            with choose(header).open("wb") as target:
                while size:
                    data = self._read(min(size, _CHUNK_BYTES))
                    target.write(data)
                    size -= len(data)
        return header

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            # The limit is for the message, because a stranger may send one byte at a time.
            if self._deadline is not None and not self.is_ready(self._deadline - time.monotonic()):
                raise _StrangerError("no reply")
            try:
                part = self._socket.recv(count - len(data))
            except OSError as error:
                raise _LostError(str(error)) from error
            if not part:
                raise _LostError("the connection was closed")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


# --- the meeting ---

_ERROR_PORT: Final = (
    "node 0 cannot listen on port {} ({}). Free the port, or choose another one by --meet HOST:PORT "
    "on all nodes."
)
_ERROR_MISSING: Final = (
    "not all nodes came within {:g} s: {} missing, {} here. Start the same command on every node at "
    "about the same time, or give --timeout more seconds. If the command itself starts all nodes, give "
    "--nodes 1, and --out with a folder that all of them see."
)
_ERROR_UNREACHABLE: Final = (
    "this node ({}) cannot reach node 0 at {} port {} within {:g} s: {}. Start the same command on "
    "every node. If that port is closed between the nodes, choose another one by --meet HOST:PORT."
)
_ERROR_STRANGER: Final = (
    "port {1} of {0} is used by a program that is not ovpatch. Choose another port by --meet "
    "HOST:PORT on all nodes."
)
_ERROR_SAME_INDEX: Final = (
    "{} has the same number as another node. Give each node its own --node-rank, or RANK."
)
_ERROR_DIFFERENT: Final = (
    "{} differs from node 0 ({}) in {}: {} there, {} here. Start the same command with the same "
    "version of ovpatch on every node."
)
_ERROR_LOST: Final = (
    "{} was lost{}: its tool has ended, or its host or link is down. See the output there, and start "
    "the command again on every node."
)
_ERROR_NOT_STARTED: Final = (
    "{} cannot run the command: {}. Correct it there, and start the command again on every node."
)
_ERROR_UNSEEN: Final = (
    "{}, so other nodes have ranks, and nothing in the command says where nodes meet. Give --nodes N "
    "and --meet HOST:PORT on each node, or --nodes 1, with which each node judges its own ranks."
)
_ERROR_REFUSED: Final = "node 0 ended the meeting: {}"


def meet(
    place: Place,
    tool: str,
    terms: Mapping[str, Any],
    timeout_s: float,
    say: Callable[[str], None] = lambda message: None,
    *,
    needs_all: bool = True,
) -> Leader | Follower:
    """Wait for the other nodes, and return this node's part.

    Args:
        place: The place of this node.
        tool: The name of the subcommand.
        terms: JSON values that must be equal on all nodes.
        timeout_s: Seconds to wait.
        say: Shows progress.
        needs_all: Whether a missing node is an error; otherwise node 0 only names it.

    Raises:
        NodeError: A node is missing or differs.
    """
    hello = {
        "name": socket.gethostname(),
        "index": place.index,
        "terms": {"version": __version__, "subcommand": tool, **terms},
    }
    listener = _listen(place)
    if listener is None:
        return Follower(place, hello, timeout_s)
    with listener:
        return Leader(place, hello, timeout_s, listener, say, needs_all=needs_all)


def _listen(place: Place) -> socket.socket | None:
    """Return the socket at which node 0 listens; None if this is another node."""
    if place.index:
        return None
    try:
        if place.index is None:
            # Only a machine with this address can bind to it. The name of a machine may lead to its
            # loopback there, which other nodes cannot reach, so node 0 listens at all addresses.
            family, _, _, _, address = socket.getaddrinfo(
                place.host, place.port, type=socket.SOCK_STREAM
            )[0]
            socket.create_server(address[:2], family=family).close()
        has_both = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", place.port),
            family=socket.AF_INET6 if has_both else socket.AF_INET,
            backlog=place.count,
            dualstack_ipv6=has_both,
        )
    except OSError as error:
        is_other = error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
        if place.index is None and (is_other or isinstance(error, socket.gaierror)):
            return None
        raise NodeError(_ERROR_PORT.format(place.port, error.strerror)) from error


def name_node(index: int, name: str) -> str:
    """Return the name of a node for the user."""
    return f"node {index} ({name})"


def _name_missing(place: Place, came: Mapping[int | None, Sequence[str]]) -> str:
    """Return the nodes that have not come, by the names that are known, and how many are missing."""
    names = [name for some in came.values() for name in some]
    if place.index is not None:
        missing = [index for index in range(place.count) if index not in came]
        return ", ".join(
            name_node(index, place.names[index]) if place.names else f"node {index}"
            for index in missing
        ) + (" is" if len(missing) == 1 else " are")
    known = [name for name in place.names if name not in names]
    count = place.count - len(names)
    listed = f" ({', '.join(known)})" if len(known) == count else ""
    return f"{count} of {place.count} nodes{listed} {'is' if count == 1 else 'are'}"


# --- node 0 ---


def choose_runner(
    nodes: Leader | None, *, must_see_all_ranks: bool = False
) -> Callable[..., Outcome]:
    """Return the function that runs a variant on all nodes, or on this node if there is no leader.

    Args:
        nodes: Node 0 of nodes that meet.
        must_see_all_ranks: Whether it is an error that ranks of a run are on other nodes, which do not meet this
            one. The other nodes might run other variants, and then ranks would wait for each other.
    """
    if nodes is not None:
        return nodes.run_variant
    return _run_if_alone if must_see_all_ranks else variants.run_variant


def _run_if_alone(*args: Any, **kwargs: Any) -> Outcome:
    outcome = variants.run_variant(*args, **kwargs)
    # A failure is reported otherwise.
    is_good = not (outcome.interrupted or outcome.timed_out or outcome.code)
    if is_good and (seen := variants.describe_node(outcome.folder)):
        raise SettingsError(_ERROR_UNSEEN.format(seen))
    return outcome


class Leader:
    """Node 0: it orders the runs of all nodes, and gets their files.

    Attributes:
        names: The host names of all nodes, by index.
        verdict: The line that the other nodes show at the end.
    """

    def __init__(
        self,
        place: Place,
        hello: Mapping[str, Any],
        timeout_s: float,
        listener: socket.socket,
        say: Callable[[str], None],
        *,
        needs_all: bool,
    ) -> None:
        self.verdict = ""
        self._say = say
        self._links: dict[int, _Link] = {}
        self.names = [str(hello["name"])]

        # - The current run
        self._run = ""
        # The folder of this node for the files of all.
        self._folder = Path()
        # The ends of the nodes that have ended the run, the first to end first.
        self._ends: dict[int, dict[str, Any]] = {}
        # The time of the first end that was a failure; the remaining nodes then end soon, or hang.
        self._first_failure: float | None = None
        self._has_stopped = False
        self._lost: int | None = None

        say(f"waiting for {place.count} nodes at port {place.port}")
        came = self._accept(place, timeout_s, listener)
        self._admit(place, hello, timeout_s, came, needs_all=needs_all)
        say(f"{len(self.names)} nodes: {', '.join(self.names)}")

    def _accept(
        self, place: Place, timeout_s: float, listener: socket.socket
    ) -> list[tuple[_Link, dict[str, Any]]]:
        """Return the connections of the nodes that come in time, and what they say of themselves."""
        came: list[tuple[_Link, dict[str, Any]]] = []
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while len(came) < place.count - 1 and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is listener:
                        selector.register(_Link(listener.accept()[0]), selectors.EVENT_READ)
                        continue
                    link = key.fileobj
                    assert isinstance(link, _Link)
                    selector.unregister(link)
                    # A program that is not ovpatch may try the port.
                    with contextlib.suppress(_LostError):
                        came.append((link, _greet(link)))
        return came

    def _admit(
        self,
        place: Place,
        hello: Mapping[str, Any],
        timeout_s: float,
        came: Sequence[tuple[_Link, dict[str, Any]]],
        *,
        needs_all: bool,
    ) -> None:
        """Number the nodes that came, or end the meeting for all of them."""
        ordered = sorted(came, key=lambda pair: pair[1]["index"] or 0)
        self._links = {index: link for index, (link, _) in enumerate(ordered, 1)}
        self.names += [theirs["name"] for _, theirs in ordered]
        problem = ""
        for index, (_, theirs) in enumerate(ordered, 1):
            node = name_node(index, theirs["name"])
            problem = problem or _find_difference(node, theirs["terms"], hello)
            is_double = place.index is not None and len(came) == place.count - 1
            if not problem and is_double and theirs["index"] != index:
                problem = _ERROR_SAME_INDEX.format(name_node(theirs["index"] or 0, theirs["name"]))
        if not problem and len(came) < place.count - 1:
            indexes: dict[int | None, list[str]] = {place.index: [hello["name"]]}
            for _, theirs in ordered:
                indexes.setdefault(theirs["index"], []).append(theirs["name"])
            missing = _ERROR_MISSING.format(
                timeout_s, _name_missing(place, indexes), ", ".join(self.names)
            )
            problem = missing if needs_all else ""
            if not needs_all:
                self._say(missing)
        if problem:
            self.end(problem, ExitCode.UNDECIDED)
            raise NodeError(problem)
        for index in self._links:
            welcome = {"kind": "welcome", "index": index, "names": self.names}
            self._send(index, welcome)

    def _send(self, index: int, header: Mapping[str, Any]) -> None:
        try:
            self._links[index].send(header)
        except _LostError:
            self._lost = index

    def end(self, verdict: str, code: int) -> None:
        """End the meeting: each node shows the verdict, and exits with the code."""
        for index, link in self._links.items():
            self._send(index, {"kind": "end", "text": verdict, "code": int(code)})
            link.close()
        self._links = {}

    def collect(self, folder: Path) -> None:
        """Get the files that each node delivers into a folder."""
        self._run, self._folder, self._ends = "report", folder, {}
        for index in self._links:
            self._send(index, {"kind": "collect"})
        while len(self._ends) < len(self._links) and self._lost is None:
            self._poll(_POLL_S)
        self._check_lost()

    # ---------------------------------------------------------------- a run

    def run_variant(
        self,
        variant: Variant,
        command: Sequence[str],
        worker: str,
        out: Path,
        *,
        timeout: float,
        progress: Callable[[int], None] = lambda step: None,
    ) -> Outcome:
        """Run one variant on all nodes; see :func:`ovpatch.insight.variants.run_variant`.

        The outcome has the files of all nodes, and the code and the log of the node that failed
        first.

        Raises:
            NodeError: A node was lost, or cannot start the command.
        """
        self._run, self._folder = variant.name, out / variant.name
        self._ends, self._first_failure, self._has_stopped = {}, None, False
        order = {
            "kind": "run",
            "name": variant.name,
            "features": variant.features,
            "details": dict(variant.details),
            "variables": dict(variant.variables),
            "worker": worker,
            "timeout": timeout,
        }
        for index in self._links:
            self._send(index, order)
        self._check_lost()
        outcome = variants.run_variant(
            variant,
            command,
            worker,
            out,
            timeout=timeout,
            progress=progress,
            should_stop=self._should_stop,
        )
        self._note_end(0, _describe_end(outcome))
        while len(self._ends) <= len(self._links) and self._lost is None:
            self._poll(_POLL_S)
            if not self._has_stopped and (outcome.interrupted or self._is_grace_over()):
                self._has_stopped = True
                for index in self._links.keys() - self._ends.keys():
                    self._send(index, {"kind": "stop"})
        self._check_lost()
        return self._merge(outcome)

    def _should_stop(self) -> bool:
        """Return whether this node must end its run, because another one was lost or failed long ago."""
        self._poll(0.0)
        return self._lost is not None or self._is_grace_over()

    def _is_grace_over(self) -> bool:
        since = self._first_failure
        return since is not None and time.monotonic() - since > launch.GRACE

    def _poll(self, timeout_s: float) -> None:
        """Receive what nodes have sent."""
        with selectors.DefaultSelector() as selector:
            for index, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, index)
            for key, _ in selector.select(timeout_s):
                self._receive(key.data)

    def _receive(self, index: int) -> None:
        def choose(header: Mapping[str, Any]) -> Path:
            # The name comes over the network.
            name = Path(str(header["name"])).name
            if name == "log":
                return self._get_log(index)
            return self._folder / variants.rename_for_node(name, index)

        try:
            header = self._links[index].receive(choose)
        except _LostError:
            self._lost = index
            return
        if header["kind"] == "done":
            self._note_end(index, header)

    def _get_log(self, index: int) -> Path:
        log = self._folder.with_name(f"{self._run}.log")
        return log.with_name(f"{self._run}.node{index}.log") if index else log

    def _note_end(self, index: int, end: dict[str, Any]) -> None:
        self._ends[index] = end
        if end["code"] and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _check_lost(self) -> None:
        """Raise NodeError if a node was lost, or could not start the command."""
        if self._lost is not None:
            node = name_node(self._lost, self.names[self._lost])
            raise NodeError(_ERROR_LOST.format(node, f" in the run '{self._run}'"))
        for index, end in self._ends.items():
            if end.get("error"):
                node = name_node(index, self.names[index])
                raise NodeError(_ERROR_NOT_STARTED.format(node, end["error"].rstrip(".")))

    def _merge(self, outcome: Outcome) -> Outcome:
        first = next((index for index, end in self._ends.items() if end["code"]), 0)
        ends = self._ends.values()
        return replace(
            outcome,
            log=self._get_log(first),
            code=self._ends[first]["code"],
            timed_out=any(end["timed_out"] for end in ends),
            interrupted=any(end["interrupted"] for end in ends),
            stacks=variants.read_stacks(outcome.folder),
        )


def _greet(link: _Link) -> dict[str, Any]:
    # A stranger may connect and stay silent.
    hello = link.receive_within(_HELLO_TIMEOUT_S)
    if not {"name", "index", "terms"} <= hello.keys():
        raise _StrangerError("not ovpatch")
    link.send({"kind": "greeting"})
    return hello


def _find_difference(node: str, theirs: Mapping[str, Any], hello: Mapping[str, Any]) -> str:
    own = hello["terms"]
    for name in own:
        if theirs.get(name) != own[name]:
            return _ERROR_DIFFERENT.format(
                node, hello["name"], name, json.dumps(theirs.get(name)), json.dumps(own[name])
            )
    return ""


def _describe_end(outcome: Outcome) -> dict[str, Any]:
    return {
        "kind": "done",
        "code": outcome.code,
        "timed_out": outcome.timed_out,
        "interrupted": outcome.interrupted,
    }


# --- the other nodes ---


class Follower:
    """A node that runs what node 0 orders, and sends its files there.

    Attributes:
        index: The number of this node.
        names: The host names of all nodes, by index.
    """

    def __init__(self, place: Place, hello: Mapping[str, Any], timeout_s: float) -> None:
        self._link = _connect(place, hello, timeout_s)
        welcome = self._receive()
        if welcome["kind"] == "end":
            raise NodeError(_ERROR_REFUSED.format(welcome["text"]))
        self.index: int = welcome["index"]
        self.names: list[str] = welcome["names"]
        self._is_leader_lost = False
        # The end of the meeting, if node 0 has sent it during a run.
        self._end: dict[str, Any] | None = None

    def follow(self, command: Sequence[str], out: Path) -> tuple[str, int]:
        """Run what node 0 orders until it has concluded; return its verdict and the exit code.

        Args:
            command: The command of this node.
            out: An empty folder for the runs.

        Raises:
            NodeError: Node 0 was lost.
        """
        number = 0
        while (order := self._end or self._receive())["kind"] != "end":
            # Node 0 may stop a run that has just ended.
            if order["kind"] == "run":
                number += 1
                folder = out / str(number)
                folder.mkdir()
                self._run(order, command, folder)
                # The records of a run may be large.
                shutil.rmtree(folder, ignore_errors=True)
        return order["text"], order["code"]

    def deliver(self, folder: Path) -> None:
        """Send the files of a folder to node 0; raise NodeError if it was lost."""
        self._receive()
        self._send_files(folder)
        self._send({"kind": "done", "code": 0})
        self._receive()

    def _run(self, order: Mapping[str, Any], command: Sequence[str], out: Path) -> None:
        variant = Variant(order["name"], order["features"], order["details"], order["variables"])
        try:
            outcome = variants.run_variant(
                variant,
                command,
                order["worker"],
                out,
                timeout=order["timeout"],
                should_stop=self._should_stop,
            )
        except (launch.NotStartedError, OSError) as error:
            failure = {"code": int(ExitCode.UNDECIDED), "timed_out": False, "interrupted": False}
            self._send({"kind": "done", **failure, "error": str(error)})
            return
        if self._end is not None:
            return
        self._send_files(outcome.folder)
        self._send({"kind": "file", "name": "log"}, outcome.log)
        self._send(_describe_end(outcome))

    def _send_files(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            # A killed process leaves an incomplete file, whose name begins with a dot.
            if path.is_file() and not path.name.startswith("."):
                self._send({"kind": "file", "name": path.name}, path)

    def _should_stop(self) -> bool:
        """Return whether node 0 has stopped the run or the meeting, or was lost."""
        if self._is_leader_lost or self._end is not None:
            return True
        if not self._link.is_ready():
            return False
        try:
            order = self._link.receive()
        except _LostError:
            self._is_leader_lost = True
        else:
            self._end = order if order["kind"] == "end" else None
        return True

    def _send(self, header: Mapping[str, Any], file: Path | None = None) -> None:
        try:
            self._link.send(header, file)
        except _LostError as error:
            raise self._make_error() from error

    def _receive(self) -> dict[str, Any]:
        try:
            return self._link.receive()
        except _LostError as error:
            raise self._make_error() from error

    def _make_error(self) -> NodeError:
        return NodeError(_ERROR_LOST.format("node 0", ""))


def _connect(place: Place, hello: Mapping[str, Any], timeout_s: float) -> _Link:
    """Return the connection to node 0 after its greeting."""
    deadline = time.monotonic() + timeout_s
    reason: object = "no reply"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = _Link(socket.create_connection((place.host, place.port), left))
        except OSError as error:
            reason = error.strerror or error
            time.sleep(_RETRY_S)
            continue
        try:
            link.send(hello)
            link.receive_within(_GREETING_TIMEOUT_S)
            return link
        except _LostError as error:
            link.close()
            if isinstance(error, _StrangerError):
                raise NodeError(_ERROR_STRANGER.format(place.host, place.port)) from None
            # Node 0 may have ended just now, and starts again.
            reason = error
            time.sleep(_RETRY_S)
    raise NodeError(
        _ERROR_UNREACHABLE.format(
            hello["name"], place.host, place.port, timeout_s, str(reason).lower()
        )
    )
