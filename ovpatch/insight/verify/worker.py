"""What begins in each process of a command that is verified."""

from __future__ import annotations

import torch

from ovpatch.insight import steps
from ovpatch.insight.verify import products, reordering, seeds
from ovpatch.insight.verify.recording import Recorder
from ovpatch.insight.verify.watching import Watch
from ovpatch.jobs.orders import Orders


def begin(orders: Orders) -> None:
    """Seed this process, record what it computes, and end it after the ordered number of steps.

    Args:
        orders: In their details, ``steps`` is that number, ``reorder`` tells which reordered arm it is, if any, and
            ``deterministic`` for deterministic algorithms, and ``strict`` for errors where there are none. ``pieces``
            says into how many the reordered arm cuts the sums of matrix products; 0 leaves them.
    """
    seeds.seed()
    if orders.details.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=not orders.details["strict"])
    recorder = Recorder(orders.directory)

    def at_border(number: int) -> None:
        recorder.flush()
        if number >= orders.details["steps"]:
            steps.leave(orders.directory)

    counter = steps.Steps(orders.directory, at_border)
    watch = Watch(recorder, counter)
    if orders.details.get("reorder"):
        reordering.reorder(watch.patches, orders.details["reorder"])
    if orders.details.get("pieces"):
        products.reorder(orders.details["pieces"])
    watch.begin()
    counter.watch()  # after ours: a step is recorded before it can be the last
    recorder.keep_to_the_end()
