"""Gathers and reduce-scatters that a GPU's copy engines carry, on one host.

[Note: copy engines] NCCL's kernels take multiprocessors from the products beside them. On two H200, a forward of 64 ms
took 76 to 83 beside gathers by NCCL, and 67 beside the same gathers by copy engines, which were faster as well: 370
GB/s where NCCL reached 220 to 260. Of a reduce-scatter only the sums take multiprocessors. On more GPUs, or over PCIe,
it may be the other way round, so ranks measure both and choose alike (:mod:`.choosing`).

[Note: two halves] A rank lays out in its window what peers will copy, or they lay it there; all meet; then everybody
takes. A window has two halves, which rounds use in turn. Who lays something out in round ``i`` waits for the meeting of
round ``i - 1`` first, to which nobody comes before he has taken all of round ``i - 2``, which was in the same half.

[Note: all rounds] A call is several rounds, and an exception may end it between two of them, on one rank. What that
rank would call next its peers would take for the rest of this. So it is refused.

[Note: nobody is left waiting] Ranks meet by signals in memory, in the order of their streams (:mod:`.meeting`), and
issue rounds in the same order, as they do collectives. A rank that is gone leaves the others waiting, as in a
collective; what ends them is the time-out of their next collective, or their launcher. Before a rank leaves by itself
it waits for its own meetings, so that its peers come to the end of theirs; no longer than the group's time-out.
"""
