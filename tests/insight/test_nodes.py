"""Nodes that meet, run the same variants and send their files to node 0; and where a launcher's nodes meet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from ovpatch.cli import run_command
from ovpatch.insight import launch, nodes, variants
from ovpatch.insight.node_place import Place, find_place
from ovpatch.insight.nodes import Follower, Leader, NodeError
from ovpatch.insight.variants import Outcome, Variant
from ovpatch.session import worker_orders
from ovpatch.settings.settings import SettingsError
from tests.support.environment import cleaned, free_port

ROOT = Path(__file__).parents[2]

# --- files of processes ---


def test_processes_of_several_hosts_with_one_id_have_their_own_files(monkeypatch, tmp_path):
    names = ["tool's", "b", "c"]
    monkeypatch.setattr(socket, "gethostname", lambda: names[0])
    orders = worker_orders.Orders("worker", tmp_path).variables()
    numbers = []
    for name in list(names):
        names[0] = name
        numbers.append(worker_orders.number_process(orders))
    assert numbers[0] == os.getpid()
    assert len(set(numbers)) == 3
    assert variants.name_process(numbers[0], {}) == f"process {os.getpid()}"
    assert variants.name_process(numbers[1], {numbers[1]: "3"}) == (
        f"rank 3 (process {os.getpid()} of another host)"
    )
    # Without a tool there is no other host.
    assert worker_orders.number_process({}) == os.getpid()


def test_all_files_that_are_named_by_processes_get_other_names_on_node_0():
    written = {
        name
        for path in (ROOT / "ovpatch").rglob("*.py")
        for name in re.findall(
            r'"(\w+)-\{(?:worker_orders\.)?number(?:_process\(\))?\}', path.read_text()
        )
    }
    assert written == {"beat", "bench", "facts", "process", "stacks"}
    renamed = {name: variants.rename_for_node(f"{name}-7.json", 1) for name in written}
    assert not [name for name, new in renamed.items() if new == f"{name}-7.json"]


# --- where nodes meet ---

TORCHRUN = ("/usr/bin/torchrun", "--nproc-per-node", "8")
STATIC = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "5")
SLURM = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "a[08-09],b"}
RANKS = {"WORLD_SIZE": "16", "RANK": "9", "MASTER_ADDR": "a", "MASTER_PORT": "65535"}

ADDRESS = ("--main_process_ip", "a")

PLACES = {
    "one process": (["python", "train.py"], {}, None),
    "one node": ([*TORCHRUN, "train.py", "--nnodes", "2"], {}, None),
    "standalone": ([*TORCHRUN, "--standalone", "--nnodes", "1", "train.py"], {}, None),
    "torchrun, static": ([*TORCHRUN, *STATIC, "train.py"], {}, Place(2, 1, "a", 6)),
    "python -m": (
        ["python", "-m", "torch.distributed.run", *STATIC, "train.py"],
        {},
        Place(2, 1, "a", 6),
    ),
    "torchrun, c10d": (
        [*TORCHRUN, "--nnodes=4:4", "--rdzv_backend=c10d", "--rdzv_endpoint=a:7", "train.py"],
        {},
        Place(4, None, "a", 8),
    ),
    "torchrun, c10d, no port": (
        [*TORCHRUN, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a", "train.py"],
        {},
        Place(2, None, "a", 29401),
    ),
    "torchrun by variables": (
        [*TORCHRUN, "train.py"],
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"},
        Place(2, 0, "a", 29501),
    ),
    "torch.distributed.launch": (
        ["python", "-m", "torch.distributed.launch", "--use-env", *STATIC, "train.py"],
        {},
        Place(2, 1, "a", 6),
    ),
    "accelerate": (
        ["accelerate", "launch", "--num_machines=2", "--machine-rank", "1", *ADDRESS, "train.py"],
        {},
        Place(2, 1, "a", 29501),
    ),
    "accelerate on one node": (["accelerate", "launch", "train.py"], {}, None),
    "a word of a script": (
        ["python", "train.py", "--by", "accelerate"],
        RANKS,
        Place(16, 9, "a", 65534),
    ),
    "torchrun under srun": (
        [*TORCHRUN, "--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=a08:7", "train.py"],
        SLURM,
        Place(3, None, "a08", 8, ["a08", "a09", "b"]),
    ),
    "srun": (["python", "train.py"], SLURM, Place(3, 2, "a08", 29501, ["a08", "a09", "b"])),
    "ranks": (["python", "train.py"], RANKS, Place(16, 9, "a", 65534)),
    "a variable that another job left": (["python", "train.py"], {"WORLD_SIZE": "16"}, None),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_launcher_tells_where_its_nodes_meet(name, monkeypatch):
    command, variables, place = PLACES[name]
    cleaned(monkeypatch, **variables)
    assert find_place(command) == place
    assert find_place(command, count=1) is None


def test_the_settings_of_accelerate_tell_where_its_nodes_meet(monkeypatch, tmp_path):
    config = pytest.importorskip("accelerate.commands.config.config_args")
    cleaned(monkeypatch)
    file = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config, "default_config_file", str(file))
    monkeypatch.setattr(config, "default_yaml_config_file", str(file))
    command = ["/bin/accelerate", "launch", "train.py", "--num_machines", "2"]
    assert find_place(command) is None
    base = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\n"
    file.write_text(f"{base}machine_rank: 2 # here\nmain_process_ip: null\nnum_machines: 3\n")
    with pytest.raises(
        SettingsError, match=r"accelerate starts 3 machines.*main_process_ip.*--meet"
    ):
        find_place(command)
    assert find_place(command, None, "b:9") == Place(3, 2, "b", 9)
    file.write_text(f"{base}num_machines: 3\nmain_process_ip: a\nmain_process_port: 7\n")
    assert find_place(command) == Place(3, 0, "a", 8)
    assert find_place([*command[:2], "--cpu", "train.py"]) is None
    # Arguments win over the file, and the file that is named over the default one.
    named_file = tmp_path / "named.yaml"
    named_file.write_text(f"{base}num_machines: 4\nmachine_rank: 1\nmain_process_ip: c\n")
    named = ["accelerate-launch", "--config_file", str(named_file), "--main_process_port", "5"]
    assert find_place([*named, "train.py"]) == Place(4, 1, "c", 6)
    assert find_place([*named, "--rdzv_backend", "c10d", "train.py"]) == Place(4, None, "c", 6)
    assert find_place([*named, "--use_deepspeed", "train.py"]) is None
    by_hand = ["--use_deepspeed", "--deepspeed_multinode_launcher", "standard"]
    assert find_place([*named, *by_hand, "train.py"]) == Place(4, 1, "c", 6)
    for text in (
        "no: [",
        "unknown_key: 1\nnum_machines: 2\n",
        "\0",
        "",
        "[1]",
        f"{base}num_machines: two\n",
    ):
        named_file.write_text(text)
        assert find_place([*named, "train.py"]) is None


def test_options_of_the_user_win(monkeypatch):
    cleaned(monkeypatch)
    assert find_place(["deepspeed"], 2, "b:9") == Place(2, None, "b", 9)
    assert find_place([*TORCHRUN, *STATIC, "train.py"], None, "[::1]:9") == Place(2, 1, "::1", 9)
    etcd = [*TORCHRUN, "--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=c:1", "train.py"]
    assert find_place(etcd, None, "b:9") == Place(2, None, "b", 9)


BAD = {
    "a range": (["--nnodes", "1:4"], (), "--nnodes 1:4 is a range"),
    "etcd": (["--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=c:1"], (), "etcd-v2 c is"),
    "no endpoint": (["--nnodes=2", "--rdzv-backend=c10d"], (), "the rendezvous c10d is on none"),
    "no port": ([], (2, "host0"), "--meet host0 is not an address and a port"),
    "a large port": ([], (2, "host0:65536"), "Write it like --meet host0:29600"),
    "no address": ([], (2, None), "--nodes 2 needs a place where the nodes meet"),
    "no number": ([], (None, "host0:9"), "--meet host0:9 needs the number of nodes"),
}


@pytest.mark.parametrize("nodes", ["r[1-2]n[1-2]", "node[1-2]-ib", "a[1-]", "a[1-2],b[x]"])
def test_a_list_of_slurm_in_another_form_is_an_error_and_names_no_node(nodes, monkeypatch):
    cleaned(monkeypatch, **(SLURM | {"SLURM_STEP_NODELIST": nodes}))
    with pytest.raises(SettingsError, match=r"cannot read the list of nodes of Slurm.*--meet"):
        find_place(["python", "train.py"])
    assert find_place(["python", "train.py"], 3, "a:9") == Place(3, None, "a", 9)
    monkeypatch.setenv("MASTER_ADDR", "a")
    assert find_place(["python", "train.py"]) == Place(3, 2, "a", 29501)


@pytest.mark.parametrize("name", BAD)
def test_a_place_that_cannot_be_known_is_an_error_with_the_remedy(name, monkeypatch):
    cleaned(monkeypatch)
    words, given, message = BAD[name]
    with pytest.raises(SettingsError) as error:
        find_place([*TORCHRUN, *words, "train.py"], *given)
    assert message in str(error.value)
    assert "--meet" in str(error.value) or "--nodes 1" in str(error.value)


# --- the meeting ---


class Node(threading.Thread):
    """A node in a thread, with the result of its function or its error."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self._function, self.result, self.error = function, None, None
        self.start()

    def run(self):
        try:
            self.result = self._function()
        except Exception as error:  # noqa: BLE001 - the test judges it
            self.error = error

    def end(self):
        self.join(60)
        assert not self.is_alive(), "a node waits for something that does not come"
        return self.result


def place_of(index, port, count=2, **more):
    return Place(count, index, "127.0.0.1", port, **more)


def enter(index, port, terms=(), timeout=60.0, **place):
    return nodes.meet(place_of(index, port, **place), "verify", dict(terms), timeout)


class Runs:
    """A replacement of ``variants.run_variant`` on all nodes, each of which has its own command."""

    def __init__(self, monkeypatch):
        self.codes = {"node0": 0, "node1": 0}
        # The nodes that run until they are stopped.
        self.hangs = set()
        monkeypatch.setattr(variants, "run_variant", self.run)

    def run(self, variant, command, worker, out, *, timeout, progress=None, should_stop=bool):
        (node,) = command
        if isinstance(self.codes[node], Exception):
            raise self.codes[node]
        folder, log = out / variant.name, out / f"{variant.name}.log"
        folder.mkdir(parents=True)
        rank = node[-1]
        log.write_text(f"the log of {node}")
        process = {"pid": 7, "rank": rank, "host": node}
        (folder / "process-7.json").write_text(json.dumps(process))
        (folder / "beat-7").write_text("2")
        (folder / "stacks-7.txt").write_text(f"stacks of {node}")
        (folder / f"events-0-1-7-{rank}-0.pt").write_bytes(b"x" * (1 << 21))
        (folder / ".half").write_text("")
        while node in self.hangs and not should_stop():
            time.sleep(0.001)
        return Outcome(variant, folder, log, self.codes[node], 1.0)


@pytest.fixture
def runs(monkeypatch):
    return Runs(monkeypatch)


def follow(port, folder, index=None):
    def run():
        node = enter(index, port)
        assert isinstance(node, Follower)
        return node.follow(["node1"], folder)

    return run


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / "leader", tmp_path / "follower"]
    for folder in made:
        folder.mkdir()
    return made


def lead(runs, folders, check, index=0):
    """Return the result of node 1 after ``check(leader)`` in node 0."""
    port = free_port()
    # Without numbers, the node that comes first has the address here.
    leader = Node(lambda: enter(index, port))
    if index is None:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            pass
    follower = Node(follow(port, folders[1], None if index is None else 1))
    leader.end()
    assert isinstance(leader.result, Leader), leader.error
    check(leader.result)
    leader.result.end("SAME", 0)
    return follower


def run(leader, folder, name="stock", timeout=600.0):
    variant = Variant(name, "0", {"steps": 2}, {"A": "b"})
    return leader.run_variant(variant, ["node0"], "worker", folder, timeout=timeout)


@pytest.mark.parametrize("index", [0, None])
def test_node_0_gets_the_files_of_all_nodes(runs, folders, index):
    def check(leader):
        for name in ("stock", "patched"):
            outcome = run(leader, folders[0], name)
            assert (outcome.code, outcome.read_log()) == (0, "the log of node0")
            assert outcome.log.with_name(f"{name}.node1.log").read_text() == "the log of node1"
            # Processes of both nodes have the id 7.
            assert sorted(outcome.stacks.values()) == ["stacks of node0", "stacks of node1"]
            assert variants.read_hosts(outcome.folder) == {0: "node0", 1: "node1"}
            assert len(list(outcome.folder.glob("beat-*"))) == 2
            (events,) = outcome.folder.glob("events-*-1-0.pt")
            assert events.stat().st_size == 1 << 21
            ranks = variants.read_ranks(outcome.folder)
            names = [variants.name_process(pid, ranks) for pid in sorted(outcome.stacks)]
            assert names == ["rank 0 (process 7)", "rank 1 (process 7 of node 1)"]

    assert lead(runs, folders, check, index).end() == ("SAME", 0)
    # A follower deletes a run after its last message, so node 0 may still see some of it.
    assert not list(folders[1].glob("*/*")), "a follower keeps nothing"


def test_the_node_that_fails_first_has_the_log(runs, folders, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.0)
    runs.codes["node1"] = 9
    # Node 0 would wait forever for its peer.
    runs.hangs.add("node0")

    def check(leader):
        outcome = run(leader, folders[0])
        assert (outcome.code, outcome.read_log()) == (9, "the log of node1")

    assert lead(runs, folders, check).end() == ("SAME", 0)


def test_node_0_stops_the_others_after_its_failure(runs, folders, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.0)
    runs.codes["node0"] = 9
    runs.hangs.add("node1")

    def check(leader):
        assert run(leader, folders[0]).read_log() == "the log of node0"

    assert lead(runs, folders, check).end() == ("SAME", 0)


def test_a_node_that_cannot_start_the_command_is_named(runs, folders):
    runs.codes["node1"] = launch.NotStartedError("torchrun: command not found", 127)

    def check(leader):
        name = socket.gethostname()
        with pytest.raises(
            NodeError, match=rf"^node 1 \({name}\) cannot run .*: torchrun: command not found\."
        ):
            run(leader, folders[0])

    lead(runs, folders, check).end()


def test_a_node_that_is_lost_ends_the_run_and_is_named(runs, folders):
    runs.hangs.add("node0")
    port = free_port()
    leader = Node(lambda: enter(0, port))
    follower = enter(1, port)
    leader.end()
    running = Node(lambda: run(leader.result, folders[0]))
    follower._link.close()
    running.end()
    assert "was lost in the run 'stock'" in str(running.error)
    assert str(running.error).startswith("node 1 (")


@pytest.mark.parametrize("ends", [True, False])
def test_a_follower_whose_node_0_ends_or_is_lost_ends_its_run(runs, folders, ends):
    runs.hangs.add("node1")
    port = free_port()
    leader = Node(lambda: enter(0, port))
    follower = Node(follow(port, folders[1], 1))
    leader.end()
    leader.result._send(
        1,
        {
            "kind": "run",
            "name": "stock",
            "features": "0",
            "details": {},
            "variables": {},
            "worker": "worker",
            "timeout": 1.0,
        },
    )
    if ends:
        leader.result.end("interrupted", 130)
    else:
        leader.result._links[1].close()
    assert follower.end() == (("interrupted", 130) if ends else None)
    assert ends or str(follower.error).startswith("node 0 was lost: ")


# --- reports ---


def test_node_0_gets_the_reports_of_all_nodes_after_the_command(folders, capfd):
    port = free_port()
    for index, folder in enumerate(folders):
        (folder / f"worker-7-{index}.json").write_text(str(index))
    leader = Node(lambda: run_command._is_delivered(place_of(0, port), folders[0]))
    follower = Node(lambda: run_command._is_delivered(place_of(1, port), folders[1]))
    assert (leader.end(), follower.end()) == (False, True), (leader.error, follower.error)
    assert sorted(path.read_text() for path in folders[0].iterdir()) == ["0", "1"]
    assert "the report of all nodes is on node 0" in capfd.readouterr().err


def test_a_node_whose_peers_do_not_report_writes_its_own_report(folders, capfd, monkeypatch):
    monkeypatch.setattr(run_command, "_MEETING_TIMEOUT_S", 0.1)  # expires
    for index, missing in ((0, "node 1 is missing"), (1, "cannot reach node 0")):
        assert not run_command._is_delivered(place_of(index, free_port()), folders[index])
        assert missing in capfd.readouterr().err


# --- nodes that do not meet ---


def test_a_node_that_does_not_come_is_named(monkeypatch):
    name = socket.gethostname()
    for place, missing in (
        (place_of(0, free_port(), 3, names=["a", "b", "c"]), r"node 1 \(b\), node 2 \(c\) are"),
        (place_of(0, free_port()), "node 1 is"),
        (place_of(None, free_port()), "1 of 2 nodes is"),
        (place_of(None, free_port(), names=[name, "b"]), r"1 of 2 nodes \(b\) is"),
    ):
        with pytest.raises(NodeError, match=rf"came within 0.1 s: {missing} missing, {name} here"):
            nodes.meet(place, "verify", {}, 0.1)


def test_a_node_0_that_does_not_come_is_named_with_the_reason():
    with pytest.raises(NodeError, match=r"cannot reach node 0 at 127.0.0.1 port .* refused\. Star"):
        enter(1, free_port(), timeout=0.1)
    unknown = Place(2, 1, "no-such-host.invalid", 9)
    with pytest.raises(NodeError, match=r"cannot reach node 0 at no-such-host.invalid port 9"):
        nodes.meet(unknown, "verify", {}, 0.1)


@pytest.mark.parametrize("index", [1, None])
def test_nodes_with_other_settings_are_named(index):
    port = free_port()
    leader = Node(lambda: enter(0, port, {"steps": 5}))
    with pytest.raises(NodeError) as error:
        enter(index or 1, port, {"steps": 3})
    leader.end()
    assert "differs from node 0" in str(leader.error)
    assert "in steps: 3 there, 5 here" in str(leader.error)
    assert str(error.value) == f"node 0 ended the meeting: {leader.error}"


def test_two_nodes_with_one_number_are_an_error():
    port = free_port()
    leader = Node(lambda: enter(0, port, count=3))
    both = [Node(lambda: enter(1, port, count=3)) for _ in range(2)]
    for node in (leader, *both):
        node.end()
        assert "has the same number as another node" in str(node.error)


def test_a_program_that_is_not_ovpatch_does_not_disturb_the_meeting(runs, monkeypatch):
    # The fourth one sends a part of a message, and stays silent.
    monkeypatch.setattr(nodes, "_HELLO_TIMEOUT_S", 2.0)  # expires
    port = free_port()
    leader = Node(lambda: enter(0, port))
    strangers = []
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2" + bytes(8) + b"[]", b"", b"GET "):
        while (stranger := socket.socket()).connect_ex(("127.0.0.1", port)):
            pass
        stranger.send(data) if data else None
        strangers.append(stranger)
    follower = enter(1, port)
    leader.end()
    assert (follower.index, len(follower.names)) == (1, 2)


def test_a_port_that_is_not_that_of_ovpatch_is_named(monkeypatch):
    monkeypatch.setattr(nodes, "_GREETING_TIMEOUT_S", 0.1)  # expires
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(NodeError, match=f"port {port} of 127.0.0.1 is used by a program"):
            enter(1, port)
        with pytest.raises(NodeError, match=f"node 0 cannot listen on port {port}"):
            enter(0, port)


@pytest.mark.parametrize(
    ("data", "more"),
    [
        pytest.param(b"\0\0\0\2", b"", id="a part"),
        pytest.param((1 << 19).to_bytes(4, "big") + bytes(8), b" ", id="one byte at a time"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", id="another protocol"),
    ],
)
def test_a_port_that_does_not_greet_like_ovpatch_is_named(monkeypatch, data, more):
    monkeypatch.setattr(nodes, "_GREETING_TIMEOUT_S", 0.3)  # expires
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            stranger, _ = listener.accept()
            with stranger, contextlib.suppress(OSError):
                stranger.sendall(data)
                while more:
                    stranger.sendall(more)
                    time.sleep(0.01)
                # The stranger closes its end after ovpatch.
                while stranger.recv(1 << 16):
                    pass

        program = threading.Thread(target=greet, daemon=True)
        program.start()
        with pytest.raises(NodeError, match=r"used by a program that is not ovpatch\. Choose"):
            enter(1, listener.getsockname()[1])
        program.join()
