"""Published bubble rates of solved pipeline schedules."""

from __future__ import annotations

from ovpatch.overlap.pipelining.orders import build_placement
from ovpatch.planner.simulator import Costs, Footprint
from ovpatch.planner.solver import Problem

# Bubble rates that the scheduler of the authors of the zero-bubble paper prints for memory of 1, 1.5, 2 and 2.5 p
# forwards. A key has ranks, microbatches, F, B, W and the time of a transfer.
PUBLISHED = {
    (4, 8, 1000, 1000, 1000, 0): (0.1111, 0.0400, 0, 0),
    (4, 16, 1000, 1000, 1000, 0): (0.0588, 0.0204, 0, 0),
    (8, 32, 1000, 1000, 1000, 0): (0.0680, 0.0303, 0, 0),
    (4, 8, 1000, 1000, 1000, 20): (0.1189, 0.0446, 0.0050, 0.0050),
    (8, 32, 1000, 1000, 1000, 20): (0.0730, 0.0334, 0.0029, 0.0029),
    (4, 8, 1000, 1100, 900, 50): (0.1489, 0.0805, 0.0400, 0.0400),
    (4, 16, 1000, 1100, 900, 50): (0.0805, 0.0419, 0.0204, 0),
    (8, 16, 1000, 1100, 900, 50): (0.1696, 0.1028, 0.0381, 0.0381),
    (8, 32, 1000, 1100, 900, 50): (0.0926, 0.0542, 0.0194, 0.0083),
    (4, 16, 1000, 1300, 700, 50): (0.1011, 0.0716, 0.0457, 0.0184),
    (8, 32, 1000, 1300, 700, 50): (0.1160, 0.0866, 0.0616, 0.0283),
}
# The same rates for its V schedules at the memory of 1F1B, by half-size stages.
PUBLISHED_V = (0, 0, 0, 0.0115, 0.0113, 0.0438, 0.0224, 0.0607, 0.0313, 0.0467, 0.0574)
MEMORIES = (1, 1.5, 2, 2.5)
VECTORS = [
    (*size, k, rate)
    for size, rates in PUBLISHED.items()
    for k, rate in zip(MEMORIES, rates, strict=True)
]
ROUNDED = 6e-5
# Memory of a microbatch: activations until B, and the part of them that W needs.
KEPT, WEIGHT = 34.0, 32.0


def make_problem(
    ranks, microbatches, forward, backward, weight, send, memory, *, vee=False
) -> Problem:
    parts = 2 if vee else 1
    placement = build_placement("vee" if vee else "straight", ranks=ranks, chunks=parts)
    stages = len(placement)
    costs = Costs.uniform(
        stages, forward=forward / parts, backward=backward / parts, weight=weight / parts, send=send
    )
    footprint = Footprint((KEPT / parts,) * stages, (WEIGHT / parts,) * stages)
    return Problem(placement, microbatches, costs, memory * ranks * KEPT, footprint)
