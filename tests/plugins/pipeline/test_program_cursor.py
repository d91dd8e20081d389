"""The engine inside a loop of another library: the order of messages and weight gradients, and refused loops."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.pipelining.program_cursor import LoopError, ProgramCursor
from tests.support import signs


def run_step(
    engine: ProgramCursor, order: str, microbatches: int, *, varies: bool = False
) -> list[str]:
    """Return the events of a step of 1F1B on two ranks, and check its values."""
    rank, events = dist.get_rank(), list[str]()
    transport = engine._messages
    send, receive, wait = transport.send, transport.receive, transport._wait_for

    def note(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (events.append(name), function(*args, **kwargs))[1]

    def size(microbatch: int) -> int:
        return 2 + varies * microbatch

    with (
        mock.patch.object(transport, "send", note("send", send)),
        mock.patch.object(transport, "receive", note("receive", receive)),
        mock.patch.object(transport, "_wait_for", note("wait", wait)),
    ):
        engine.start_step(
            order,
            microbatches,
            torch.empty,
            lambda index: events.append(f"W{index}"),
            varies=varies,
        )
        forwards = backwards = 0
        for is_forward in (
            [True] * (2 - rank) + [False, True] * (microbatches - 2 + rank) + [False] * (2 - rank)
        ):
            found = engine.receive([(size(0),)], is_forward=is_forward)
            microbatch = forwards if is_forward else backwards
            events.append(f"{'F' if is_forward else 'B'}{microbatch}")
            if rank == is_forward:
                values = [tensor.tolist() for tensor in found]
                assert values == [[float(microbatch)] * size(microbatch)]
            else:
                assert found == []
            made = torch.full((size(microbatch),), float(microbatch))
            engine.send([made])
            # A loop frees a tensor in this way.
            made.data = torch.empty(1)
            forwards, backwards = forwards + is_forward, backwards + (not is_forward)
        engine.finish()
    return events


def steps_of_a_loop() -> dict[str, list[str]]:
    engine = ProgramCursor(dist.group.WORLD, torch.device("cpu"))
    found = {order: run_step(engine, order, 3) for order in ("1f1b", "zb-h1")}
    return found | {"varies": run_step(engine, "1f1b", 3, varies=True)}


def test_receives_start_ahead_and_weight_gradients_are_computed_after_the_send(ranks):
    first, last = (
        {name: " ".join(events) for name, events in events_by_name.items()}
        for events_by_name in ranks(2)(steps_of_a_loop)
    )
    assert (
        first["1f1b"]
        == "receive receive F0 send F1 send receive wait B0 W0 F2 send wait B1 W1 wait B2 W2"
    )
    assert (
        last["1f1b"]
        == "receive receive receive wait F0 B0 send W0 wait F1 B1 send W1 wait F2 B2 send W2"
    )
    assert (
        last["zb-h1"]
        == "receive receive receive wait F0 B0 send wait F1 B1 send W0 wait F2 B2 send W1 W2"
    )
    assert last["varies"].startswith("receive wait receive wait F0 B0 send W0 receive"), (
        "sizes come first, none ahead"
    )


def wrong_loops() -> list[str]:
    engine, texts = ProgramCursor(dist.group.WORLD, torch.device("cpu")), []

    def start() -> None:
        engine.start_step("1f1b", 1, torch.empty, print, varies=False)

    start()
    with pytest.raises(LoopError) as caught:
        engine.receive([(1,)], is_forward=False)
    texts.append(str(caught.value))
    start()
    with pytest.raises(LoopError) as caught:
        engine.finish()
    texts.append(str(caught.value))
    run_step(engine, "1f1b", 2)
    with pytest.raises(LoopError) as caught:
        engine.receive([(1,)], is_forward=True)
    return [*texts, str(caught.value)]


def test_a_loop_of_another_order_is_refused(ranks):
    for rank, texts in enumerate(ranks(2)(wrong_loops)):
        assert texts == [
            f"the loop runs B where its order has {rank}F0",
            f"the loop ended before {rank}F0",
            "the loop runs F where its order has the step's end",
        ]


def interrupted_steps() -> list[float]:
    engine, rank = ProgramCursor(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    found: list[float] = []
    # Each step ends after the first F, as if an exception had ended it on both ranks.
    for step in range(2):
        if rank > step:
            signs.await_others("in the second step")
        engine.start_step("1f1b", 2, torch.empty, print, varies=False)
        if step > rank:
            signs.give("in the second step")
        for received in engine.receive([(1,)], is_forward=True):
            found += received.tolist()
        engine.send([torch.tensor([7.0 + step])])
    run_step(engine, "1f1b", 3)
    assert not engine._messages._abandoned, "it is not kept for longer"
    return found


def test_messages_of_an_interrupted_step_reach_a_rank_that_comes_later(ranks):
    assert ranks(2)(interrupted_steps) == [[], [7.0, 8.0]]
