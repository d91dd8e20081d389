"""The tools on several hosts, without a shared folder: node 0 judges all ranks, and its peers send their files.

The tools and ranks come from one server per host that has imported torch.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ovpatch.session.worker_orders import MAX_PID
from tests.support.preloaded import Server
from tests.support.rarely import RARELY

PROGRAM = Path(__file__).with_name("verified.py")
PORT = 29600
TOOL = """
import os, socket, sys
from ovpatch.cli import main
from ovpatch.insight import nodes
if os.environ.get("OLD") == socket.gethostname():
    nodes.__version__ = "0.0.1"
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def servers(cluster) -> Iterator[list[Server]]:
    made = [Server(enter=cluster.enter(host)) for host in range(2)]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def start(cluster, servers, tmp_path):
    """``start(tool, env, *options)`` -> exit code, stdout and stderr of a tool on each host.

    ``{host}`` in the options is the number of the host, as hosts share no folder.
    """
    (tmp_path / "tool.py").write_text(TOOL)

    def run(tool, env, *options, on=(0, 1)):
        programs = {}
        for host in on:
            server = servers[host]
            given = [option.format(host=tmp_path / f"host{host}") for option in options]
            meet = ("--nodes", "2", "--meet", f"{cluster.addresses[0]}:{PORT}")
            command = ("--", *server.command(ranks=2), str(PROGRAM))
            job = {
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "FIRST_RANK": str(2 * host),
                "MASTER_ADDR": cluster.addresses[0],
                "MASTER_PORT": str(PORT + 10),
            }
            line = [tool, "--features", "ddp", *given, *meet, *command]
            argv = [*server.command(), str(tmp_path / "tool.py"), *line]
            programs[host] = cluster.start(host, argv, env={**job, **env})
        deadline = time.monotonic() + 240
        results = [cluster.finish(host, program, deadline) for host, program in programs.items()]
        return [(result.rc, result.stdout, result.stderr) for result in results]

    return run


@pytest.fixture
def start_once(cluster, servers, tmp_path):
    """``start_once(tool, env, *options)`` -> the result of a tool on host 0, whose command starts the ranks of both."""
    (tmp_path / "tool.py").write_text(TOOL)
    lines = [
        f"FIRST_RANK={2 * host} {shlex.join([*servers[host].command(ranks=2), str(PROGRAM)])} &"
        for host in range(2)
    ]
    script = "\n".join([*lines, "wait $! && wait"])

    def run(tool, env, *options):
        job = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": cluster.addresses[0],
            "MASTER_PORT": str(PORT + 10),
        }
        line = [tool, "--features", "ddp", "--nodes", "1", *options, "--", "sh", "-c", script]
        argv = [*servers[0].command(), str(tmp_path / "tool.py"), *line]
        program = cluster.start(0, argv, env={**job, **env})
        return cluster.finish(0, program, time.monotonic() + 240)

    return run


def read_only_file(folder):
    """Return the JSON of node 0; the other node must not write any."""
    assert not (folder / "host1").exists()
    return json.loads((folder / "host0").read_text())


def test_node_0_compares_all_ranks_and_the_other_node_prints_one_line(start, tmp_path):
    leader, follower = start("verify", {}, "--steps", "2", "--json", "{host}")
    assert leader[0] == follower[0] == 0, (leader, follower)
    same = leader[1].splitlines()[0]
    assert re.fullmatch(r"SAME: all 144 values of 2 steps on 4 ranks have .* bits \(ddp\)", same)
    line = f"ovpatch verify: node 1 (host1) took part; node 0 (host0) concluded: {same}\n"
    assert follower[1] == line
    names = [f"rank {rank} (host host{rank // 2})" for rank in range(4)]
    assert f" values on {', '.join(names)}, to step 2" in leader[1]
    assert read_only_file(tmp_path)["processes"] == names


@RARELY
def test_a_program_that_differs_on_one_host_is_named_with_it(start):
    leader, follower = start("verify", {"OTHER": "host1"}, "--steps", "2")
    assert leader[0] == follower[0] == 1, (leader, follower)
    assert leader[1].startswith("DIFFERENT: first in 'gradient"), leader
    assert "at step 2 on rank 2 (host host1)" in leader[1].splitlines()[0]
    assert "node 0 (host0) concluded: DIFFERENT: first in" in follower[1]


def test_a_node_that_does_not_come_is_named_and_nothing_runs(start):
    ((code, out, err),) = start("verify", {}, "--timeout", "1", on=[0])
    assert (code, out) == (3, "")
    assert "1 of 2 nodes is missing, host0 here. Start the same command on every node" in err
    assert "If the command itself starts all nodes, give --nodes 1, and --out" in err
    assert "run 1" not in err


@pytest.mark.parametrize("tool", ["verify", "bench"])
def test_a_node_with_another_version_is_named_on_all_nodes_and_nothing_runs(start, tool):
    leader, follower = start(tool, {"OLD": "host1"})
    named = 'node 1 (host1) differs from node 0 (host0) in version: "0.0.1" there, '
    for code, out, err in (leader, follower):
        assert (code, out) == (3, ""), (leader, follower)
        assert named in err
        assert "run 1" not in err


def test_a_node_without_a_route_to_node_0_says_so(cluster, start):
    cluster.set_link(1, up=False)
    ((code, out, err),) = start("verify", {}, "--timeout", "1", on=[1])
    cluster.set_link(1, up=True)
    assert (code, out) == (3, "")
    assert f"this node (host1) cannot reach node 0 at {cluster.addresses[0]} port {PORT}" in err
    assert "choose another one by --meet HOST:PORT" in err


def test_a_command_that_starts_all_nodes_is_judged_once_from_a_shared_folder(start_once, tmp_path):
    found = start_once("verify", {"OTHER": "host1"}, "--steps", "2", "--out", str(tmp_path / "all"))
    assert found.rc == 1, found.describe()
    assert found.stdout.startswith("DIFFERENT: first in 'gradient"), found.describe()
    assert "at step 2 on rank 2 (host host1)" in found.stdout.splitlines()[0]
    # The numbers of processes on the other host cannot be those of this one.
    files = (tmp_path / "all" / "patched").glob("process-*.json")
    hosts = {int(path.stem[8:]) > MAX_PID: json.loads(path.read_text())["host"] for path in files}
    assert hosts == {False: "host0", True: "host1"}


@RARELY
def test_the_report_of_a_command_that_starts_all_nodes_has_all_ranks(start_once, tmp_path):
    options = ("--out", str(tmp_path / "all"), "--report", str(tmp_path / "report"))
    found = start_once("run", {}, *options)
    assert found.rc == 0, found.describe()
    report = json.loads((tmp_path / "report").read_text())
    assert sorted(process["rank"] for process in report["processes"]) == [0, 1, 2, 3]


@RARELY
def test_bench_times_all_ranks(start, tmp_path):
    question = ("--what-if", "hosts=4,gpus=2,link=1Gbit")
    steps = ("--rounds", "1", "--steps", "5", "--warmup", "3", "--json", "{host}", *question)
    leader, follower = start("bench", {}, *steps)
    assert leader[0] == follower[0] == 0, (leader, follower)
    found = read_only_file(tmp_path)
    runs = found["runs"]
    assert [run["kind"] for run in runs] == ["stock", "patched"]
    assert all((run["measured"]["world"], run["measured"]["missing"]) == (4, []) for run in runs)
    assert "this node saw" not in leader[1]
    # The prediction starts from the hosts and ranks of both nodes.
    rows = [(row["hosts"], row["gpus"]) for row in found["what_if"]["rows"]]
    assert rows == [(1, 1), (1, 2), (2, 2), (4, 2)]
    assert "node 0 (host0) concluded: " in follower[1]


def test_timeline_shows_all_ranks(start, tmp_path):
    leader, follower = start("timeline", {}, "--out", "{host}", "--no-picture")
    assert leader[0] == follower[0] == 0, (leader, follower)
    traces = [path.name for path in (tmp_path / "host0" / "patched").glob("trace-rank*")]
    assert sorted(traces) == [f"trace-rank{rank}.json.gz" for rank in range(4)]
    assert not (tmp_path / "host1").exists()


@RARELY
def test_the_report_has_all_ranks(start, tmp_path):
    leader, follower = start("run", {}, "--report", "{host}")
    assert leader[0] == follower[0] == 0, (leader, follower)
    report = read_only_file(tmp_path)
    assert sorted(process["rank"] for process in report["processes"]) == [0, 1, 2, 3]
    assert "node 1 (host1) reported; the report of all nodes is on node 0 (host0)" in follower[2]
