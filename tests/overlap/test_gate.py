"""The host barrier: no rank continues before the last rank has arrived, however often each rank arrives."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ovpatch
from ovpatch.overlap.comm import host_barrier
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.lifetimes import group_values
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer import (
    test_held_state,
    test_loop_styles,
    test_models,
    test_reads_of_gradients,
)
from tests.plugins.dist_optimizer.checks import (
    SMALL,
    all_cases,
    both,
    check_all,
    ddp,
    some,
    train_step,
)
from tests.plugins.dist_optimizer.test_loops import net
from tests.support import signs
from tests.support.errors import error_of
from tests.support.gloo import destroy_group


def meetings(late: int) -> list[tuple[float, float]]:
    """Arrive at some barriers after all peers, on rank ``late``; return the times of arrival and of the end."""
    barrier, found = HostBarrier.for_group(dist.group.WORLD), []
    for number in range(6):
        if dist.get_rank() == late and number in (2, 4):
            signs.await_others(f"at barrier {number}")
            time.sleep(0.05)
        arrived = time.time()
        signs.give(f"at barrier {number}")
        barrier.wait()
        found.append((arrived, time.time()))
    return found


def check_together(meetings: Iterable[tuple[Any, ...]]) -> None:
    """Demand that no rank left a barrier before the last rank arrived.

    Args:
        meetings: For each barrier, by rank, the times ``(arrival, ..., end)``.
    """
    for meeting in meetings:
        assert min(times[-1] for times in meeting) >= max(times[0] for times in meeting)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_leaves_before_the_last_has_arrived(ranks, world, late):
    check_together(zip(*ranks(world)(meetings, late), strict=True))


def ahead() -> list[tuple[float, float]]:
    """Arrive early on all ranks. Rank 0 waits at some barriers only after all its peers have left them."""
    barrier, found = HostBarrier.for_group(dist.group.WORLD), []
    for number in range(6):
        came = time.time()
        barrier.arrive()
        barrier.arrive()
        if dist.get_rank() == 0 and number % 2:
            signs.await_others(f"left {number}")
        barrier.wait()
        found.append((came, time.time()))
        signs.give(f"left {number}")
        assert barrier.wait(number == 3) == (number == 3), "a flag belongs to one barrier"
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_waits_for_a_rank_that_has_arrived(ranks, world):
    check_together(zip(*ranks(world)(ahead), strict=True))


def deferred() -> list[tuple[float, float]]:
    """Reach each barrier on rank 0 after its peers have continued; they wait in finish(), or at the next barrier."""
    barrier, found = HostBarrier.for_group(dist.group.WORLD), []
    # In the first wait ranks agree on the name of the barrier.
    barrier.wait()

    def come(number: int) -> float:
        if dist.get_rank() == 0:
            signs.await_others(f"continued {number}")
            time.sleep(0.05)
        came = time.time()
        barrier.defer_wait()
        signs.give(f"continued {number}")
        return came

    for number in range(4):
        came = come(number)
        # finish() passes this barrier, and wait() passes this one and the next.
        barrier.finish() if number < 2 else barrier.wait()
        barrier.finish()
        found.append((came, time.time()))
    came = come(4)
    # This is the wait of the next barrier.
    barrier.defer_wait()
    found.append((came, time.time()))
    barrier.finish()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_deferred_wait_is_done_at_its_end_or_before_the_next_barrier(ranks, world):
    check_together(zip(*ranks(world)(deferred), strict=True))


def failed_waits() -> list[list[int]]:
    """Return the numbers of aborts by failed deferred waits in each method, of the group's barrier and a second one."""
    found = []
    for barrier in (HostBarrier.for_group(dist.group.WORLD), HostBarrier(dist.group.WORLD)):
        barrier.wait()
        for end in (barrier.finish, barrier.wait, barrier.arrive, barrier.abort):
            barrier.defer_wait()
            with (
                mock.patch.object(host_barrier, "abort_transport") as transport,
                mock.patch.object(host_barrier, "abort_step_communicators") as communicators,
                mock.patch.object(HostBarrier, "_pass", side_effect=RuntimeError("no peer")),
                pytest.raises(RuntimeError, match="no peer"),
            ):
                end()
            barrier.finish()
            found.append([transport.call_count, communicators.call_count])
    return found


def test_a_rank_whose_deferred_wait_fails_aborts_the_collectives_in_flight(ranks):
    assert ranks(2)(failed_waits) == [[[1, 1]] * 4 + [[0, 0]] * 4] * 2


def signalled() -> bool:
    """Wait in a signal handler while rank 1 waits for rank 0, like a handler that saves a checkpoint."""
    barrier, read = HostBarrier.for_group(dist.group.WORLD), []

    def handle(*_: Any) -> None:
        signs.give("interrupted")
        barrier.finish()
        read.append(True)

    late = dist.get_rank() == 0
    before = signal.signal(signal.SIGALRM, handle)
    try:
        barrier.wait()
        if late:
            signs.await_others("interrupted")
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        barrier.defer_wait()
        barrier.finish()
        barrier.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    return late or read == [True]


def test_a_signal_handler_may_wait_as_well(ranks):
    assert ranks(2)(signalled) == [True, True]


def aborting(who: list[int]) -> tuple[str, float]:
    """Abort the third barrier on the ranks ``who``; return the error of the next barrier, and the time in s."""
    barrier, begin = HostBarrier.for_group(dist.group.WORLD), time.monotonic()
    try:
        for number in range(5):
            if number == 2 and dist.get_rank() in who:
                barrier.abort()
                if len(who) == 1:
                    break
            else:
                barrier.wait()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


@pytest.mark.parametrize("world", [2, 3])
def test_peers_of_a_rank_that_aborts_get_an_error(ranks, world):
    _, *peers = ranks(world)(aborting, [0], timeout=60)
    for text, waited in peers:
        assert "with gradients that DistributedDataParallel had not reduced" in text
        assert "turn dist_optimizer off" in text
        assert waited < 30


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_all_abort_continue(ranks, world):
    assert [text for text, _ in ranks(world)(aborting, list(range(world)), timeout=60)] == [
        ""
    ] * world


def waiting_after_an_abort() -> list[bool]:
    """Abort a barrier at which the peer has arrived; return whether each later call of the peer raises."""
    barrier, found = HostBarrier.for_group(dist.group.WORLD), []
    barrier.wait()
    if dist.get_rank() == 1:
        barrier.defer_wait()
    dist.barrier()
    if dist.get_rank() == 0:
        barrier.abort()
    dist.barrier()
    for call in (barrier.finish, barrier.finish, barrier.wait) if dist.get_rank() == 1 else ():
        with pytest.raises(RuntimeError) as raised:
            call()
        found.append("does not join this collective" in str(raised.value))
    return found


def test_a_rank_that_has_arrived_at_an_aborted_barrier_reads_none_of_its_values(ranks):
    assert ranks(2)(waiting_after_an_abort) == [[], [True] * 3]


def aborting_first(peers_wait: bool) -> tuple[str, bool]:
    """Abort the very first barrier on rank 0 while its peers wait there, or use no barrier."""
    barrier, text = HostBarrier.for_group(dist.group.WORLD), ""
    with mock.patch.object(host_barrier, "LATE_START_S", 60 if peers_wait else 1):
        if dist.get_rank() == 0:
            barrier.abort()
        elif peers_wait:
            with pytest.raises(RuntimeError) as raised:
                barrier.wait()
            text = str(raised.value)
    dist.barrier()
    return text, bool(group_values(PeerRpc, dist.group.WORLD))


@pytest.mark.parametrize("peers_wait", [True, False])
def test_a_rank_may_abort_before_ranks_have_agreed_on_a_name(ranks, peers_wait):
    """Check that a barrier starts no server, because ranks agree on its name in the store."""
    own, *peers = ranks(3)(aborting_first, peers_wait, timeout=100)
    assert own == ("", False)
    for text, has_server in peers:
        assert not has_server
        assert ("does not join this collective" in text) is peers_wait


def exchange(flags: list[list[bool]]) -> list[bool]:
    return [HostBarrier.for_group(dist.group.WORLD).wait(mine[dist.get_rank()]) for mine in flags]


def test_all_ranks_read_a_flag_of_any_rank(ranks):
    flags = [[False] * 3, [True, False, False], [False, False, True], [True] * 3, [False] * 3]
    assert ranks(3)(exchange, flags) == 3 * [[False, True, True, True, False]]


def hurried(meetings: int) -> list[bool]:
    """Run barriers without a pause, so the fastest rank raises its next flag while peers still read the last one."""
    barrier, rank = HostBarrier.for_group(dist.group.WORLD), dist.get_rank()
    return [barrier.wait(number % 4 == rank) for number in range(meetings)]


def test_a_flag_belongs_to_one_barrier(ranks):
    assert ranks(3)(hurried, 400) == 3 * [[number % 4 < 3 for number in range(400)]]


def interrupted_meetings() -> list[bool]:
    """Interrupt rank 0 while it waits, then wait again; rank 1 raises its flag at the barrier after the next."""
    barrier, rank = HostBarrier.for_group(dist.group.WORLD), dist.get_rank()
    barrier.wait()
    if rank == 0:
        with (
            mock.patch.object(HostBarrier, "_poll_store", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            barrier.wait(False)
    dist.barrier()
    return [barrier.wait(rank == 1 and number == 1) for number in range(3)]


def test_a_rank_that_is_interrupted_returns_to_the_same_barrier(ranks):
    assert ranks(2)(interrupted_meetings) == [[False, True, False]] * 2


def keys_left() -> int:
    store = dist.distributed_c10d._get_default_store()
    barrier = HostBarrier.for_group(dist.group.WORLD)
    barrier.wait()
    before = store.num_keys()
    for number in range(50):
        barrier.wait()
        barrier.wait(number % 3 == dist.get_rank())
    dist.barrier()
    return store.num_keys() - before


def test_barriers_leave_no_keys_in_the_store(ranks):
    assert max(ranks(2)(keys_left)) < 20


def in_a_file(path: str) -> int:
    """Return the growth of the file of a store in bytes while a rank waits."""
    barrier = HostBarrier(dist.group.WORLD)
    barrier._store = dist.PrefixStore("gate", dist.FileStore(path, dist.get_world_size()))
    barrier._is_in_file = host_barrier._is_in_file(barrier._store)
    flags = [barrier.wait(number == dist.get_rank()) for number in range(3)]
    assert flags == [True, True, False]
    size = os.path.getsize(path)
    if dist.get_rank() == 0:
        time.sleep(0.3)
    barrier.arrive()
    barrier.wait()
    return os.path.getsize(path) - size


def test_a_store_in_a_file_does_not_grow_while_ranks_wait(ranks, tmp_path):
    assert max(ranks(2)(in_a_file, str(tmp_path / "store"))) < 1000


def tagged(how: str, tags: list[list[int]], in_file: str) -> tuple[int, int, str]:
    """Meet with a tag of each rank by barrier, over blocks of four barriers.

    Returns:
        The number of barriers that the rank has passed, the number of methods that raise afterwards, and the error.
    """
    with mock.patch.object(host_barrier, "_BLOCK_BARRIERS", 4):
        barrier, passed = HostBarrier(dist.group.WORLD), 0
        if in_file:
            store = dist.FileStore(in_file, dist.get_world_size())
            barrier._store, barrier._is_in_file = dist.PrefixStore(how, store), True
        try:
            for by_rank in tags:
                tag = by_rank[dist.get_rank()]
                if how == "wait":
                    barrier.wait(tag=tag)
                else:
                    if how == "arrive":
                        barrier.arrive(tag)
                    barrier.arrive(tag)
                    barrier.defer_wait()
                    barrier.finish()
                passed += 1
        except RuntimeError as error:
            methods = (barrier.wait, barrier.arrive, barrier.defer_wait, barrier.finish)
            texts = [error_of(method) for method in methods]
            # A peer still reads the numbers of the barrier.
            dist.barrier()
            return passed, texts.count(str(error)), str(error)
        dist.barrier()
        return passed, 0, ""


def same_tags(world: int, count: int) -> list[list[int]]:
    return [[number * 7919 + (1 << 29)] * world for number in range(count)]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_meet_for_different_collectives_raise(ranks, world, tmp_path):
    for how in ("wait", "arrive", "defer_wait"):
        path = str(tmp_path / how) if how == "wait" else ""
        assert ranks(world)(tagged, how, same_tags(world, 25), path) == [(25, 0, "")] * world
        for begin in (0, 1, 5, 6):
            tags = [*same_tags(world, begin), [*range(world - 1), 1 << 28], [3] * world]
            for passed, failures, text in ranks(world)(tagged, how, tags, ""):
                assert (passed, failures) == (begin, 4), (how, begin)
                assert "Use the same order on every rank" in text


def tag_bits(world: int) -> int:
    """Return the number of bits of a tag, and check that the numbers of full blocks fit into the store."""
    group = mock.Mock(size=lambda: world)
    with (
        mock.patch.object(host_barrier, "group_store"),
        mock.patch.object(host_barrier, "group_timeout_s", return_value=1.0),
    ):
        barrier = HostBarrier(group, "name")
    arrivals = host_barrier._BLOCK_BARRIERS // 2 * world
    assert arrivals < barrier._tag_unit
    assert arrivals + world * barrier._tag_mask * barrier._tag_unit < barrier._abort_unit
    assert (world + 1) * barrier._abort_unit <= 1 << 63
    return barrier._tag_mask.bit_length()


def test_the_numbers_of_a_barrier_fit_into_the_store():
    bits = {world: tag_bits(world) for world in (2, 3, 8, 64, 512, 1024, 4096, 1 << 16)}
    assert bits == {2: 30, 3: 30, 8: 30, 64: 30, 512: 22, 1024: 19, 4096: 13, 65536: 1}


def groups() -> None:
    """Wait at the barriers of two groups, which must be independent."""
    pair = dist.new_group([0, 1])
    for _ in range(3):
        HostBarrier.for_group(dist.group.WORLD).wait()
    if dist.get_rank() < 2:
        HostBarrier.for_group(pair).wait()
    HostBarrier.for_group(dist.group.WORLD).wait()
    assert HostBarrier.for_group(dist.group.WORLD)._get_key() != (
        HostBarrier.for_group(pair)._get_key() if dist.get_rank() < 2 else ""
    )
    PeerRpc.shutdown_all(dist.group.WORLD)


def test_each_group_has_its_own_barrier(ranks):
    ranks(3)(groups)


def absent() -> str:
    barrier = HostBarrier.for_group(dist.group.WORLD)
    barrier.wait()
    barrier._timeout_s = 0.3
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            barrier.wait()
        text = str(raised.value)
    dist.barrier()
    return text


def test_a_missing_rank_is_an_error(ranks):
    text, _ = ranks(2)(absent)
    assert "not all ranks reached" in text
    assert "within 0.3 s" in text


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Use host barriers on the CPU as well, and count the calls of their methods."""
    calls: collections.Counter[str] = collections.Counter()

    def counting(name: str) -> Any:
        original = getattr(HostBarrier, name)

        def call(self: HostBarrier, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(self, *args, **kwargs)

        return mock.patch.object(HostBarrier, name, call)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(host_barrier, "is_needed", return_value=True))
        for name in ("wait", "arrive", "defer_wait"):
            stack.enter_context(counting(name))
        yield calls


def local_on(who: list[int], copy_engines: str = "off") -> tuple[str, float, int]:
    """Add to gradients under no_sync() before step 3, on the ranks ``who``; return the error, its time, and the steps.

    Hosts must run ahead of their devices.
    """
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    before, options = COUNTERS.steps, {"min_param_numel": 1, "copy_engines": copy_engines}
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": options}):
        model = ddp(net(), process_group=dist.new_group(timeout=timedelta(seconds=60)))
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        try:
            for number in range(6):
                opt.zero_grad()
                model(data(number, 5, 6)).square().mean().backward()
                if number == 3 and dist.get_rank() in who:
                    with model.no_sync():
                        model(data(number, 5, 6)).square().mean().backward()
                begin = time.monotonic()
                opt.step()
                if number == 3 and len(who) == 1 and dist.get_rank() in who:
                    raise RuntimeError(
                        "peers had not continued. Do the same on every rank, or turn "
                        "dist_optimizer off"
                    )
            text = ""
        except RuntimeError as error:
            text = str(error)
        took = time.monotonic() - begin
        del model, opt
        dist.barrier()
    return text, took, COUNTERS.steps - before


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_with_local_gradients_keeps_no_host_waiting(ranks, world):
    with_local, *peers = ranks(world)(gated_hosts, [0], timeout=100)
    # Whether this error comes from the step depends on whether its peers have already continued.
    assert "Do the same on every rank, or turn dist_optimizer off" in with_local[0]
    for text, took, _ in peers:
        assert "with gradients that DistributedDataParallel had not reduced" in text
        assert took < 35


def gated_hosts(who: list[int]) -> tuple[str, float, int]:
    with counted():
        return local_on(who)


def test_hosts_whose_gradients_are_all_local_continue(ranks):
    for text, _, steps in ranks(2)(gated_hosts, [0, 1], timeout=100):
        assert text == ""
        assert steps == 3


def step_second(kind: str, first: bool, alone: bool) -> tuple[str, float]:
    """Step a new optimizer on rank 0 in step 3 as well; return the error, and its time in s.

    Args:
        kind: "same" or "other": the class of the new optimizer equals that of the old one, or differs.
        first: Whether the new optimizer steps before the old one.
        alone: Whether rank 0 drops the old optimizer after step 3.
    """
    model = ddp(net(), process_group=dist.new_group(timeout=timedelta(seconds=40)))
    opts = [torch.optim.AdamW(model.parameters(), 0.01)]
    # Rank 0 ends after the step in which its peers raise, because later backwards would wait for them.
    for number in range(5):
        model.zero_grad()
        begin, steps = time.monotonic(), False
        try:
            model(data(number, 5, 6)).square().mean().backward()
            if number == 3 and dist.get_rank() == 0:
                new = (torch.optim.AdamW if kind == "same" else torch.optim.SGD)(
                    model.parameters(), 0.01
                )
                opts.insert(0 if first else 1, new)
            steps = True
            for opt in opts:
                opt.step()
            for param in model.parameters():
                param.sum()
            if alone:
                del opts[:-1], opt
        except RuntimeError as error:
            # Rank 0 had fallen back, and its next backward has waited for peers that are missing.
            if not steps and dist.get_rank() == 0:
                return "", 0.0
            return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def step_second_with_barriers(kind: str, first: bool, alone: bool) -> tuple[str, float, int]:
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    with (
        counted(),
        ovpatch.applied(
            "ddp", "dist_optimizer", options={"dist_optimizer": {"min_param_numel": 1}}
        ),
    ):
        found = step_second(kind, first, alone)
        dist.barrier()
    return *found, COUNTERS.stock_optimizers


SECOND_OPTIMIZERS = [
    (kind, first, alone)
    for kind in ("same", "other")
    for first in (True, False)
    for alone in (False, True)
]
ON_THREE = [("same", True, False), ("same", False, True), ("other", True, True)]


@pytest.mark.parametrize(
    ("kind", "first", "alone", "world"),
    [*((*case, 2) for case in SECOND_OPTIMIZERS), *((*case, 3) for case in ON_THREE)],
)
def test_a_second_optimizer_that_one_rank_alone_steps_is_an_error_within_seconds(
    ranks, world, kind, first, alone
):
    """Check hosts that run ahead. They cannot agree before each step, so they cannot all fall back instead."""
    results = ranks(world)(step_second_with_barriers, kind, first, alone, timeout=100)
    (own, took, _), *peers = results
    assert took < 35
    # Hosts that wait for each other agree to fall back.
    if all(number and not text for text, _, number in results):
        return
    known = (
        "stepped another optimizer than this rank. Do the same on every rank",
        "in orders that differ",
    )
    assert not own or any(text in own for text in (*known, "ranks step different optimizers"))
    for text, took, _ in peers:
        assert any(error in text for error in known), text
        assert took < 35


def gated(loop: Any, cases: Any, steps: int) -> Any:
    """Run training loops on the CPU with host barriers, as on a device whose host runs ahead."""
    with counted() as calls:
        results = all_cases(loop, cases)
    assert calls["wait"] + calls["defer_wait"] > 2 * steps * len(cases), (
        "hosts did not use the barrier"
    )
    assert calls["defer_wait"] > steps * len(cases), "hosts waited as soon as they had arrived"
    assert calls["arrive"] >= steps * len(cases), "hosts did not announce their arrival"
    return results


def test_training_with_host_barriers(ranks):
    styles = some({style: {"style": style} for style in test_loop_styles.STYLES})
    check_all(ranks(2)(gated, test_loop_styles.train, styles, test_loop_styles.STEPS - 1))
    uses = {use: {"use": use} for use in ("rank 0 logs", "rank 0 logs one", "clip by value")}
    check_all(ranks(2)(gated, test_reads_of_gradients.train, uses, 6))


def held_with_barriers(kind: str) -> dict[str, Any]:
    with counted() as calls:
        result = both(
            test_held_state.held, kind, "object", "after", True, options=test_held_state.ALL
        )
    assert calls["defer_wait"] or kind != "adamw", "hosts waited as soon as they had arrived"
    return result


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_held_over_steps_with_host_barriers(ranks, kind):
    test_held_state.check_held(ranks(2)(held_with_barriers, kind, timeout=60))


def read_alone(late: int) -> list[float]:
    """Train, read state, gradients and parameters late on one rank alone, and destroy the group.

    Returns:
        The sums that the rank ``late`` has read, then the sums of all parameters after the group was destroyed.
    """
    group = dist.new_group()
    model = ddp(net(), process_group=group)
    opt = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for number in range(6):
        opt.zero_grad()
        model(data(number, 5, 6)).square().mean().backward()
        if dist.get_rank() == late:
            time.sleep(0.05)
            found += [p.grad.sum().item() for p in model.parameters()]
        opt.step()
        if dist.get_rank() == late:
            time.sleep(0.05)
            states = opt.state_dict()["state"].values()
            found += [state["exp_avg"].sum().item() for state in states]
            found += [p.sum().item() for p in model.parameters()]
    destroy_group(group)
    return found + [p.sum().item() for p in model.parameters()]


def read_alone_as(late: int, patched: bool) -> list[float]:
    if not patched:
        return read_alone(late)
    options = {"dist_optimizer": {"min_param_numel": 1}}
    with counted() as calls, ovpatch.applied("ddp", "dist_optimizer", options=options):
        found = read_alone(late)
    assert calls["defer_wait"] > 6, "hosts waited as soon as they had arrived"
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_one_rank_alone_reads_while_waits_of_hosts_are_deferred(ranks, late):
    stock, patched = (ranks(2)(read_alone_as, late, how, timeout=60) for how in (False, True))
    assert patched == stock


def called_ahead() -> list[str]:
    """Return the topics that hosts call after they have arrived, while gradients and state are laid out again."""
    topics, call = [], PeerRpc.call

    def recorded(self: PeerRpc, topic: str, *args: Any, **kwargs: Any) -> Any:
        if any(barrier._has_arrived for _, barrier in group_values(HostBarrier)):
            topics.append(topic)
        return call(self, topic, *args, **kwargs)

    with counted() as calls, mock.patch.object(PeerRpc, "call", recorded):
        both(test_models.wrapped_twice)
        both(test_models.cast_later)
    assert calls["arrive"]
    return topics


def test_a_rank_that_has_arrived_calls_no_peer(ranks):
    assert ranks(2)(called_ahead) == [[], []]


class Own(torch.optim.SGD):
    """An optimizer class of the user, whose step is unknown to the feature."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def calls_of_a_step(case: str) -> dict[str, int]:
    options = SMALL | {"element_wise": f"{__name__}.Own"}
    with (
        counted() as calls,
        ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": options}),
    ):
        model = ddp(net())
        optimizer = (Own if case == "named" else torch.optim.SGD)(model.parameters(), lr=0.1)
        for step in range(9):
            if step == 5:
                calls.clear()
            train_step(model, optimizer, step)
        return {name: count // 4 for name, count in calls.items()}


def test_the_number_of_host_barriers_in_a_step(ranks):
    """Check the barriers in the backward and for the gathers.

    A class that may call peers in its step arrives after the step, and waits immediately.
    """
    assert ranks(2)(calls_of_a_step, "torch's") == 2 * [{"defer_wait": 2, "arrive": 3}]
    assert ranks(2)(calls_of_a_step, "named") == 2 * [{"defer_wait": 1, "arrive": 1, "wait": 1}]
