"""Calls to peers, whose main threads take no part in the reply."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.retention import FinalReads
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from tests.overlap.test_collectives import group

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


def meeting() -> PeerRpc:
    peers = PeerRpc.for_group(group())
    dist.barrier()
    return peers


def list_peers() -> list[int]:
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


# --- replies arrive as they were sent ---


def samples(rank: int) -> list[torch.Tensor]:
    """Return tensors of every dtype in three shapes, with all bytes of the dtype, and views that have gaps."""
    found = []
    for dtype in DTYPES:
        memory = torch.arange(rank, rank + 24 * dtype.itemsize, dtype=torch.uint8)
        full = (
            (memory % 2).bool()[:24].reshape(2, 3, 4)
            if dtype == torch.bool
            else memory.view(dtype).reshape(2, 3, 4)
        )
        found += [full, full[0, 0, 0], full[:0]]
    turned = torch.arange(12.0).reshape(3, 4).t()
    return [
        *found,
        turned,
        turned[::2],
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(3)),
    ]


def all_kinds() -> None:
    peers = meeting()
    peers.register(
        "samples",
        lambda question: ({"got": question, "rank": dist.get_rank()}, samples(dist.get_rank())),
    )
    for rank, (header, tensors) in peers.call(
        "samples", {"names": ["a", "ä"], "none": None}
    ).items():
        assert header == {"got": {"names": ["a", "ä"], "none": None}, "rank": rank}
        expected = samples(rank)
        assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in expected]
        assert [raw(t) for t in tensors] == [raw(t.detach().resolve_conj()) for t in expected]
    dist.barrier()


def test_all_dtypes_and_shapes_arrive_unchanged(ranks):
    ranks(2)(all_kinds)


def bulk() -> None:
    peers = meeting()
    mine = torch.arange(1 << 24, dtype=torch.int32) * (dist.get_rank() + 1)
    peers.register("bulk", lambda question: ({}, [mine]))
    ((peer, (_, (received,))),) = peers.call("bulk", {}).items()
    assert torch.equal(received, torch.arange(1 << 24, dtype=torch.int32) * (peer + 1))
    dist.barrier()


def test_64_megabytes_in_both_directions_concurrently(ranks):
    ranks(2)(bulk)


def rendezvous_of_replies() -> list[int]:
    """Call peers that reply only after all of them have received the call."""
    peers = meeting()
    store = dist.distributed_c10d._get_process_group_store(group())

    def reply(question: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        store.add("called", 1)
        while store.add("called", 0) < 3:
            time.sleep(0.005)
        return {}, [torch.tensor(dist.get_rank())]

    peers.register("together", reply)
    result = []
    if dist.get_rank() == 0:
        replies = peers.call("together", {}, timeout_s=100)
        result = [int(tensor) for _, (tensor,) in replies.values()]
        assert list(replies) == [1, 2, 3]
    dist.barrier()
    return result


def test_ranks_are_called_concurrently(ranks):
    assert ranks(4)(rendezvous_of_replies)[0] == [1, 2, 3]


def calling_during_collectives() -> None:
    peers = meeting()
    peers.register(
        "double",
        lambda question: ({"double": 2 * question["x"]}, [torch.full((1000,), question["x"])]),
    )
    wrong: list[object] = []
    calls: list[int] = []

    def keep_calling() -> None:
        for x in range(30):
            for header, (tensor,) in peers.call("double", {"x": x}).values():
                calls.append(x)
                if header != {"double": 2 * x} or tensor.tolist() != [x] * 1000:
                    wrong.append(header)

    threads = [threading.Thread(target=keep_calling) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 1000
    for thread in threads:
        thread.join()
    dist.barrier()
    assert not wrong
    assert len(calls) == 60


def test_ranks_call_each_other_from_several_threads_while_collectives_run(ranks):
    ranks(2)(calling_during_collectives)


def in_subgroups() -> list[int]:
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    mine = alone if dist.get_rank() == 1 else pair
    peers, world = PeerRpc.for_group(mine), meeting()
    assert peers is PeerRpc.for_group(mine)
    assert peers is not world
    peers.register("who", lambda question: ({"who": dist.get_rank()}, []))
    world.register("who", lambda question: ({"who": -1}, []))
    found = [header["who"] for header, _ in peers.call("who", {}).values()]
    assert all(header["who"] == -1 for header, _ in world.call("who", {}).values())
    dist.barrier()
    return found


def test_each_group_has_its_own_topics(ranks):
    assert ranks(3)(in_subgroups) == [[2], [], [0]]


# --- replies that block, fail or are missing ---


def blocked() -> None:
    peers = meeting()
    gate = threading.Event()

    def wait(question: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        assert gate.wait(30)
        return {"late": True}, []

    def open_gate(question: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        gate.set()
        return {}, []

    peers.register("wait", wait)
    peers.register("open", open_gate)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(peers.call("wait", {}))) for _ in range(8)
    ]
    if dist.get_rank() == 0:
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert not results
        peers.call("open", {}, timeout_s=100)
        for thread in threads:
            thread.join()
        assert results == [{1: ({"late": True}, [])}] * 8
    dist.barrier()


def test_replies_that_block_do_not_delay_other_replies(ranks):
    ranks(2)(blocked)


def error_of(peers: PeerRpc, topic: str, **options: Any) -> tuple[str, str]:
    try:
        peers.call(topic, {}, **options)
    except PeerError as error:
        return str(error), str(error.__cause__)
    return "", ""


def failing() -> tuple[str, str]:
    peers = meeting()

    def reply(question: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if dist.get_rank() == 1:
            raise KeyError("layer.7")
        if dist.get_rank() == 2:
            return {}, [torch.eye(2).to_sparse()]
        return {}, []

    peers.register("fails", reply)
    found = error_of(peers, "fails") if dist.get_rank() == 0 else ("", "")
    dist.barrier()
    return found


def test_the_caller_raises_the_exception_of_a_reply(ranks):
    text, cause = ranks(3)(failing)[0]
    assert "rank 1 failed: KeyError: 'layer.7'" in text
    assert "rank 2 failed: TypeError: a torch.sparse_coo tensor" in text
    assert text.endswith("correct it there.")
    assert "on rank 1:\nTraceback" in cause
    assert 'raise KeyError("layer.7")' in cause


def failing_in_a_finally() -> BaseException | None:
    peers = meeting()
    try:
        try:
            raise KeyError("of the script")
        finally:
            peers.call("unserved", {}, timeout_s=0.0)
    except PeerError as error:
        shown = None if error.__suppress_context__ else error.__context__
    dist.barrier()
    return shown


def test_an_exception_that_is_in_flight_is_shown(ranks):
    for shown in ranks(2)(failing_in_a_finally):
        assert repr(shown) == "KeyError('of the script')"


def unserved() -> tuple[str, float]:
    peers = meeting()
    begin, text = time.monotonic(), ""
    if dist.get_rank() == 0:
        text, _ = error_of(peers, "unknown", timeout_s=0.5)  # expires
    seconds = time.monotonic() - begin
    dist.barrier()
    return text, seconds


def test_an_unknown_topic_is_named(ranks):
    text, seconds = ranks(2)(unserved)[0]
    assert "no reply to 'unknown' within 0.5" in text
    assert "rank 1 does not serve this topic. Check the output of that rank" in text
    assert 0.5 <= seconds < 50


def late_service() -> None:
    """Serve a topic after it was called, withdraw it, and serve it again with another handler."""
    peers = meeting()
    for value in (1, 2):
        withdraw = None
        if dist.get_rank() == 0:
            header, _ = peers.call("late", {}, timeout_s=100)[1]
            assert header == {"value": value}
        else:
            time.sleep(0.1)
            withdraw = peers.register("late", lambda question, value=value: ({"value": value}, []))
            with pytest.raises(ValueError, match="is served already in this process group"):
                peers.register("late", lambda question: ({}, []))
        dist.barrier()
        if withdraw is not None:
            withdraw()
            # A second call does nothing.
            withdraw()
        dist.barrier()


def test_a_topic_may_come_later_and_again(ranks):
    ranks(2)(late_service)


def hanging() -> tuple[str, float]:
    """Call two peers, of which rank 2 hangs in its handler, and rank 1 has never used PeerRpc; return the error."""
    text, gate = "", threading.Event()
    begin = time.monotonic()

    def reply(question: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        gate.wait(30)
        return {}, []

    if dist.get_rank() != 1:
        PeerRpc.for_group(group()).register("hangs", reply)
    dist.barrier()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        text, _ = error_of(PeerRpc.for_group(group()), "hangs", timeout_s=1)  # expires
    seconds = time.monotonic() - begin
    dist.barrier()
    gate.set()
    return text, seconds


def test_late_ranks_are_named_with_their_progress(ranks):
    text, seconds = ranks(3)(hanging)[0]
    # On a busy machine the store may reply too late.
    unknown = (
        r"rank 1 (has not published its address|cannot be reached: the store [^;]* does not reply)"
    )
    late = rf"within 1(\.\d+)? s: {unknown}; rank 2 is working on its reply\. Check the"
    assert re.search(late, text), text
    assert text.endswith("give init_process_group() a larger timeout.")
    assert 1 <= seconds < 50


def ended() -> str:
    """Call rank 1 after it has stopped its server, as if its process had exited; return the error."""
    peers, text = meeting(), ""
    peers.register("topic", lambda question: ({}, []))
    dist.barrier()
    if dist.get_rank() == 0:
        peers.call("topic", {})
    dist.barrier()
    if dist.get_rank() == 1:
        peers._server.close()
    dist.barrier()
    if dist.get_rank() == 0:
        text, _ = error_of(peers, "topic", timeout_s=100)
    dist.barrier()
    return text


def test_the_remedy_for_a_rank_that_has_exited_names_its_output(ranks):
    text = ranks(2)(ended)[0]
    assert (
        "rank 1 has exited. Look for the first error in the output of the rank that has exited"
        in text
    ), text
    assert "timeout" not in text


def outside() -> None:
    peers = PeerRpc.for_group(group())
    with pytest.raises(ValueError, match=r"group ranks are 0 to 1, not \[2\]"):
        peers.call("topic", {}, ranks=[0, 2])
    peers.register("own", lambda question: ({}, []))
    with pytest.raises(TypeError, match="not JSON serializable"):
        peers.call("own", {"a": object()}, timeout_s=100)
    assert peers.call("own", {}, ranks=[]) == {}
    assert peers.call("own", {}, ranks=[dist.get_rank()]) == {dist.get_rank(): ({}, [])}
    assert peers._timeout_s >= 120, "the timeout of the group, which the pool sets"
    dist.barrier()


def test_ranks_and_arguments_are_checked(ranks):
    ranks(2)(outside)


def threads_of_ours() -> list[str]:
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("ovpatch-peers-")
    )


def after_destruction() -> None:
    from tests.support.worker import fresh_store

    for name in ("first", "second", "third"):
        rank, world = dist.get_rank(), dist.get_world_size()
        held = group()
        peers = meeting()
        peers.register("name", lambda question, name=name: ({"name": name}, []))
        assert [header for header, _ in peers.call("name", {}).values()] == [{"name": name}]
        if name == "second":
            # Peers might read these from a rank that has destroyed the group.
            retention.retain(held, torch.ones(1))
            FinalReads(held).start_final_calls(torch.ones(1))
        dist.barrier()
        dist.destroy_process_group()
        if name == "second":
            # The first group is still referenced.
            del held
        dist.init_process_group("gloo", store=fresh_store(name), rank=rank, world_size=world)
    with suppress(NameError):
        del held
    PeerRpc.for_group(group())
    deadline = time.monotonic() + 60
    while (
        len({name.rpartition("-")[2] for name in threads_of_ours()}) > 1
        or len(threads_of_ours()) > 4
    ):
        assert time.monotonic() < deadline, threads_of_ours()
        time.sleep(0.01)
    dist.barrier()


def test_a_new_group_after_destruction_has_its_own_servers_and_no_other_remain(ranks):
    ranks(2)(after_destruction)
