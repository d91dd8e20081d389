"""Callers that a server admits, stale addresses, and forks."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm import lifetimes
from ovpatch.overlap.peer_rpc import client
from ovpatch.overlap.peer_rpc.client import Endpoint, Endpoints, Request
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from ovpatch.overlap.peer_rpc.sequence_lock import SequenceLock
from ovpatch.overlap.peer_rpc.server import Server
from ovpatch.overlap.peer_rpc.wire import Connection, pack
from ovpatch.overlap.tensors import lazy_tensor

NOBODY = "00" * 32


@pytest.fixture
def server():
    started = Server("test", [], lambda message: False)
    started.register("echo", lambda question: (question, [torch.ones(2)]))
    yield started
    started.finish()
    started.close()


class Group:
    """The part of a process group that a directory of endpoints reads."""

    def size(self) -> int:
        return 2


@pytest.fixture
def directory(monkeypatch):
    group, store = Group(), dist.HashStore()
    monkeypatch.setattr(client, "group_store", lambda found: store)
    found = Endpoints(group)
    # The directory holds the group weakly.
    found.group = group
    return found


def echo(directory: Endpoints, seconds: float = 20, **options) -> Request:
    question = {"topic": "echo", "arguments": {"a": 1}}
    inquiry = Request(directory, [1], question, time.monotonic() + seconds, **options)
    inquiry.run()
    return inquiry


def test_a_caller_with_the_secret_gets_a_reply(server, directory):
    directory.publish(1, server.endpoint)
    header, (tensor,) = echo(directory).replies[1]
    assert (header, tensor.tolist()) == ({"a": 1}, [1.0, 1.0])


def test_a_handler_is_withdrawn_without_the_lock(server):
    """Check a case from garbage collection: the owner of the lock may wait for the thread that frees the handler."""
    withdraw = server.register("withdrawn", lambda question: (question, []))
    thread = threading.Thread(target=withdraw, daemon=True)
    with server._changed:
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert "withdrawn" not in server._handlers


@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_the_number_of_concurrent_calls_is_limited(directory, at_once):
    """Check that ranks which have not published their address yet do not count."""
    count, lock, in_flight, most = 30, threading.Lock(), [], []

    def reply(question):
        with lock:
            in_flight.append(1)
            most.append(len(in_flight))
        time.sleep(0.002)
        with lock:
            in_flight.pop()
        return question, []

    servers = [Server(f"test {rank}", [], lambda message: False) for rank in range(count)]
    for rank, server in enumerate(servers):
        server.register("echo", reply)
        if rank % 3:
            directory.publish(rank, server.endpoint)
    late = [(rank, server.endpoint) for rank, server in enumerate(servers) if rank % 3 == 0]
    timer = threading.Timer(0.1, lambda: [directory.publish(*server) for server in late])
    question = {"topic": "echo", "arguments": {"a": 1}}
    inquiry = Request(
        directory, range(count), question, time.monotonic() + 20, max_connections=at_once
    )
    timer.start()
    inquiry.run()
    assert sorted(inquiry.replies) == list(range(count))
    assert all(header == {"a": 1} for header, _ in inquiry.replies.values())
    assert max(most) <= at_once
    for server in servers:
        server.finish()
        server.close()


def test_a_caller_without_the_secret_is_refused(server):
    line = replace(server.endpoint, secret=NOBODY).connect(0, time.monotonic() + 10)
    line.reply_to_challenge(bytes.fromhex(NOBODY))
    line.send({"topic": "echo", "arguments": {}, "timeout_s": 10})
    with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
        line.receive()
    line.close()
    assert server.last_call_time == 0


def test_a_server_without_the_secret_is_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    lines = [object.__new__(Connection) for _ in range(2)]
    for line, sock in zip(lines, (ours, theirs), strict=True):
        line._socket, line.deadline = sock, time.monotonic() + 10
    theirs.sendall(b"n" * 32)
    signature = lines[0].reply_to_challenge(b"secret")
    theirs.sendall(b"f" * 32)
    with pytest.raises(PermissionError, match="another process"):
        lines[0].verify_signature(signature)
    ours.close()
    theirs.close()


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("stale", ["nobody listens", "another one listens", "another secret"])
def test_a_stale_address_is_looked_up_again_until_the_rank_has_published_a_new_one(
    server, directory, stale
):
    port = unused_port() if stale == "nobody listens" else server.endpoint.port
    old = Server("old", [], lambda message: True)
    if stale == "another one listens":
        # The group of this server was destroyed.
        port = old.endpoint.port
    directory.publish(1, replace(server.endpoint, secret=NOBODY, port=port))
    threading.Timer(0.3, directory.publish, (1, server.endpoint)).start()
    assert echo(directory).replies[1][0] == {"a": 1}
    old.close()


def test_a_stale_address_without_a_successor_is_reported_with_the_reason(server, directory):
    directory.publish(1, replace(server.endpoint, port=unused_port()))
    assert echo(directory, 0.3).list_pending() == {1: "cannot be reached: Connection refused"}
    directory.publish(1, replace(server.endpoint, secret=NOBODY))
    assert "cannot be reached: " in echo(directory, 0.3).list_pending()[1]


@pytest.mark.parametrize("should_retry", [True, False])
def test_a_store_that_never_replies_ends_no_later_than_the_call(
    server, directory, monkeypatch, should_retry
):
    """The link to the host of the store is down, so its client waits forever."""
    directory.publish(1, server.endpoint)
    is_over = threading.Event()
    # It has no rank at the end.
    stuck = SimpleNamespace(check=lambda keys: not is_over.wait())
    monkeypatch.setattr(client, "group_store", lambda group: stuck)
    inquiry = echo(directory, 0.3, should_retry=should_retry)
    found = inquiry.list_pending() if should_retry else inquiry.failures
    assert found == {1: "cannot be reached: the store that has its address does not reply"}
    # A rank that was reached before is known.
    directory.verified[1] = server.endpoint
    assert echo(directory).replies
    is_over.set()


def test_a_rank_that_replied_once_and_refuses_now_has_exited(server, directory):
    directory.publish(1, server.endpoint)
    echo(directory)
    server.close()
    while any(thread.name == "ovpatch-peers-accept-test" for thread in threading.enumerate()):
        time.sleep(0.01)
    begin = time.monotonic()
    assert echo(directory, 60).failures == {1: "has exited"}
    assert time.monotonic() - begin < 30


def test_a_rank_that_exits_during_a_call_is_reported_immediately(server, directory):
    def vanish(question):
        for line in list(vanishing):
            line.shutdown(socket.SHUT_RDWR)
        return {}, []

    vanishing = []
    take = server._handle
    server._handle = lambda line: (vanishing.append(line._socket), take(line))[1]
    server.register("vanish", vanish)
    directory.publish(1, server.endpoint)
    inquiry = Request(directory, [1], {"topic": "vanish", "arguments": {}}, time.monotonic() + 60)
    inquiry.run()
    assert inquiry.failures == {1: "exited before it had replied"}


def test_all_ranks_of_a_lost_host_take_the_time_of_one(directory, monkeypatch):
    """Check that the end of a rank does not wait for each rank of a host whose link is down."""
    asked = []

    def get_no_reply(address, timeout):
        asked.append(address)
        raise TimeoutError("timed out") if address[0] == "a" else ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", get_no_reply)
    for rank in range(8):
        directory.publish(rank, Endpoint(NOBODY, "elsewhere", ["a" if rank < 4 else "b"], rank))
    ended = Request(
        directory, range(8), {"shutdown": True}, time.monotonic() + 60, should_retry=False
    )
    ended.run()
    assert sorted(ended.failures) == list(range(8))
    assert asked == [("a", 0), *(("b", rank) for rank in range(4, 8))]
    # A call that waits for its ranks tries each of them again.
    asked.clear()
    calls = Request(directory, range(2), {"topic": "echo", "arguments": {}}, time.monotonic() + 60)
    calls.poll()
    calls.close()
    assert asked == [("a", 0), ("a", 1)]


def test_an_address_that_this_machine_has_itself_leads_to_no_other_machine(monkeypatch):
    monkeypatch.setattr(client, "_list_interface_addresses", lambda: ["172.17.0.1", "10.0.0.1"])

    def list_addresses(host, *addresses):
        return Endpoint(NOBODY, host, addresses, 1).list_addresses()

    assert list_addresses("elsewhere", "10.0.0.2", "172.17.0.1") == ["10.0.0.2"]
    # Containers may have their own names and the network of their machine.
    assert list_addresses("elsewhere", "10.0.0.1") == ["10.0.0.1"]
    here = list_addresses(socket.gethostname(), "10.0.0.1", "172.17.0.1")
    assert here == ["127.0.0.1", "::1", "10.0.0.1", "172.17.0.1"]


def test_silent_connections_of_other_programs_delay_no_caller(server, directory):
    strangers = [socket.create_connection(("127.0.0.1", server.endpoint.port)) for _ in range(10)]
    directory.publish(1, server.endpoint)
    assert echo(directory, 8).replies
    for stranger in strangers:
        stranger.close()


def test_existing_threads_reply_if_no_more_threads_can_be_started(server, directory, monkeypatch):
    """Check the state at the exit of Python 3.12."""

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    directory.publish(1, server.endpoint)
    for _ in range(10):
        assert echo(directory).replies


def test_the_loopback_device_serves_only_the_same_machine():
    here = Endpoint("", socket.gethostname(), ("10.0.0.5",), 1)
    assert here.list_addresses() == ["127.0.0.1", "::1", "10.0.0.5"]
    assert replace(here, host="elsewhere").list_addresses() == ["10.0.0.5"]
    assert replace(here, host="elsewhere", addresses=()).list_addresses() == ["127.0.0.1", "::1"]
    assert not any(address.startswith("127.") for address in client.list_own_addresses(None))


def test_an_endpoint_is_json_in_the_store(server, directory):
    directory.publish(1, server.endpoint)
    assert (
        json.loads(client.group_store(None).get("ovpatch/peers/2/1"))["port"]
        == asdict(server.endpoint)["port"]
    )
    assert directory.look_up(0, 60) is None


def test_values_that_cannot_be_sent_are_refused():
    with pytest.raises(
        TypeError, match=r"sparse_coo tensor of torch\.float32 cannot be sent; send its dense parts"
    ):
        pack({}, [torch.eye(2).to_sparse()])
    with pytest.raises(TypeError, match="JSON"):
        pack({"a": {1, 2}})


# --- forks ---


def in_a_fork() -> str:
    group = dist.distributed_c10d._get_default_group()
    peers = PeerRpc.for_group(group)
    peers.register("value", lambda question: ({"rank": dist.get_rank()}, []))
    # All ranks have published their addresses, as after a step.
    dist.barrier()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        texts = []
        for action in (
            lambda: peers.register("other", lambda question: ({}, [])),
            lambda: peers.call("value", {}),
            lambda: PeerRpc.for_group(group).call("value", {}),
        ):
            try:
                texts.append(str(action()))
            except PeerError as error:
                texts.append(str(error))
        peers._server.close()
        PeerRpc.shutdown_all()
        listening = peers._server._listener.fileno() != -1
        os.write(writer, json.dumps([texts, listening]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(reader, 10000).decode()
    os.close(reader)
    os.close(writer)
    dist.barrier()
    assert all(header == {"rank": rank} for rank, (header, _) in peers.call("value", {}).items())
    dist.barrier()
    return text


def test_a_fork_is_not_a_rank_and_does_not_affect_its_parent(ranks):
    for text in ranks(2)(in_a_fork):
        texts, listening = json.loads(text)
        assert len(texts) == 3
        assert all(text.endswith("Read it before the fork, or in the parent.") for text in texts)
        assert not listening


def test_a_fork_renews_locks_that_another_thread_holds(server):
    """Check locks in a forked child, in which the thread that holds them does not exist."""
    held, release, versions = (
        threading.Event(),
        threading.Event(),
        SequenceLock(torch.device("cpu")),
    )

    def hold() -> None:
        with lazy_tensor._lock, lifetimes._lock, server._changed, versions._changed:
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        pid = os.fork()
        if pid == 0:
            locks = lazy_tensor._lock, lifetimes._lock, server._changed, versions._changed
            os._exit(0 if all(lock.acquire(blocking=False) for lock in locks) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not lazy_tensor._lock.acquire(blocking=False), (
            "the locks of the parent must not change"
        )
    finally:
        release.set()
    holder.join()
