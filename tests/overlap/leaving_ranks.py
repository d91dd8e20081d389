"""A program whose ranks exit in several ways, through the exit of the interpreter. It prints their exit codes.

It forks the ranks itself, because the workers of the pool never exit by themselves.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ovpatch.overlap.peer_rpc.retention import FinalReads
from ovpatch.overlap.peer_rpc.rpc import PeerRpc

WORLD = 3
LATE_S = 0.6


def begin(rank: int, store: dist.Store) -> PeerRpc:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    peers = PeerRpc.for_group(dist.distributed_c10d._get_default_group())
    peers.register("value", lambda question: ({}, [torch.tensor(10 * rank)]))
    dist.barrier()
    return peers


def call_peers(peers: PeerRpc) -> None:
    values = {rank: int(tensor) for rank, (_, (tensor,)) in peers.call("value", {}).items()}
    assert values == {rank: 10 * rank for rank in range(WORLD) if rank != peers._rank}, values


def calls_last(last: int, rank: int, store: dist.Store) -> PeerRpc:
    """Call peers on rank ``last`` alone, after they have finished."""
    peers = begin(rank, store)
    if rank == last:
        time.sleep(LATE_S)
        call_peers(peers)
    return peers


def before_destruction(rank: int, store: dist.Store) -> None:
    calls_last(2, rank, store)
    PeerRpc.shutdown_all()
    dist.destroy_process_group()


class Shards:
    """The object that peers read."""


def destroyed_first(rank: int, store: dist.Store) -> None:
    """Ranks 1 and 2 read from each other for the last time, then destroy the group silently; rank 2 is late."""
    peers = begin(rank, store)
    group = dist.distributed_c10d._get_default_group()
    pair = [1, 2] if rank else []
    reads, shards = FinalReads(group, pair), Shards()
    holder = weakref.ref(shards)

    def answer(question: dict[str, object]) -> tuple[dict[str, object], list[torch.Tensor]]:
        is_there = holder() is not None
        reads.record_call(question)
        return {"is there": is_there}, []

    peers.register("shards", answer)
    dist.barrier()
    reads.start_final_calls(shards)
    del shards
    if rank == 2:
        time.sleep(LATE_S)
    callees = [peer for peer in pair if peer != rank]
    replies = peers.call("shards", reads.mark_final({}), callees)
    assert all(header == {"is there": True} for header, _ in replies.values()), replies
    dist.destroy_process_group()


def two_groups(rank: int, store: dist.Store) -> None:
    peers = begin(rank, store)
    pair = dist.new_group([1, 2])
    if rank:
        inner = PeerRpc.for_group(pair)
        inner.register("inner", lambda question: ({"rank": rank}, []))
        if rank == 1:
            time.sleep(LATE_S)
            call_peers(peers)
            assert inner.call("inner", {}) == {1: ({"rank": 2}, [])}


def crash() -> None:
    raise RuntimeError("the one that crashes")


def ends_late(late: int, end: Callable[[], object], rank: int, store: dist.Store) -> None:
    """Exit on rank ``late`` by ``end``. Rank 0 collects the ranks that have finished, and hosts the store."""
    begin(rank, store)
    if rank == late:
        time.sleep(LATE_S)
        end()


def never_used(rank: int, store: dist.Store) -> None:
    """Exit without any call between ranks, so that no rank waits for the sleeping one."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    PeerRpc.for_group(dist.distributed_c10d._get_default_group())
    dist.barrier()
    if rank == 1:
        time.sleep(2)


CASES: dict[str, Callable[[int, dist.Store], object]] = {
    "last_is_0": partial(calls_last, 0),
    "last_is_2": partial(calls_last, 2),
    "before_destruction": before_destruction,
    "destroyed_first": destroyed_first,
    "two_groups": two_groups,
    "one_raises": partial(ends_late, 1, crash),
    "one_is_killed": partial(ends_late, 1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    # Rank 0 exits without any clean-up.
    "first_is_gone": partial(ends_late, 0, lambda: os._exit(0)),
    "never_used": never_used,
}


# The exit of an interpreter with torch takes half a second of computing. In this case one rank raises and two exit
# normally, so it alone runs the full exit.
TO_THE_END = ("one_raises",)


def child(name: str, rank: int, folder: str, port: int) -> None:
    if name == "first_is_gone":
        store: dist.Store = dist.TCPStore(
            "127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60)
        )
    else:
        store = dist.FileStore(f"{folder}/{name}", WORLD)
    if name in CASES and name not in TO_THE_END:
        # The function that is registered first runs last.
        atexit.register(os._exit, 0)
    CASES.get(name, CASES["last_is_2"])(rank, store)


def fork(name: str, rank: int, folder: str, port: int) -> int:
    """Start a rank that exits as a script does."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child(name, rank, folder, port)
        sys.exit(0)
    return pid


def main(port: int, folder: str) -> None:
    """Run all cases at the same time; most of that time they sleep."""
    start = time.monotonic()
    running = {
        fork(name, rank, folder, port): (name, rank) for name in CASES for rank in range(WORLD)
    }
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=child, args=("children", rank, folder, 0)) for rank in range(WORLD)
    ]
    for process in children:
        process.start()
    results = {name: [(-1, 0.0)] * WORLD for name in CASES}
    while running:
        for pid, (name, rank) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                results[name][rank] = (os.waitstatus_to_exitcode(status), time.monotonic() - start)
        time.sleep(0.02)
    for process in children:
        process.join()
    results["children"] = [
        (-1 if process.exitcode is None else process.exitcode, 0.0) for process in children
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
