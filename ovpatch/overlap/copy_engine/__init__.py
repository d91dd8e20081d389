"""All-gathers and reduce-scatters by a GPU's copy engines, on one host.

[Note: copy engines] The kernels of NCCL take multiprocessors from concurrent computation. Copies
between GPUs take none, and only the sums of a reduce-scatter do. With many GPUs, or over PCIe, NCCL
may still be faster. So ranks measure both concurrently with GEMMs, and all choose the same
(:mod:`.selection`).

Ranks synchronize by signals in memory, in the order of their streams. They issue rounds in the same
order, as they issue collectives. A dead rank leaves its peers waiting, as in a collective. The
timeout of the next collective of the peers, or their launcher, ends the job. Before a rank exits,
it waits for its copies, at most for the timeout of the group, so that its peers complete theirs.
"""
