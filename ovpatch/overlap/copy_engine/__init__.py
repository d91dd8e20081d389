"""All-gathers and reduce-scatters by a GPU's copy engines, on one host.

[Note: copy engines] NCCL's kernels take multiprocessors from the computation beside them; copies between GPUs take
none, and of a reduce-scatter only the sums do. On many GPUs, or over PCIe, NCCL may still be faster. So ranks measure
both beside matrix products and choose alike (:mod:`.selection`).

Ranks synchronise by signals in memory, in the order of their streams, and issue rounds in the same order, as they do
collectives. A dead rank leaves the others waiting, as in a collective; the time-out of their next collective, or their
launcher, ends that. Before a rank exits, it waits for its own copies, so that its peers complete theirs; no longer than
the group's time-out.
"""
