"""Kernels and copies of ovpatch's own, and the measurements that choose between them and a backend's.

Symmetric memory lets the GPUs of one host write to each other: Triton kernels (``workspace_kernels``) and copies
by a GPU's copy engines (``copy_…``) use it. The autotuner measures what is the fastest.

[Note: copy engines] The kernels of NCCL take multiprocessors from concurrent computation. Copies
between GPUs take none, and only the sums of a reduce-scatter do. With many GPUs, or over PCIe, NCCL
may still be faster. So ranks measure both concurrently with GEMMs, and all choose the same
(:mod:`.copy_choice`).

Ranks synchronize by signals in memory, in the order of their streams. They issue rounds in the same
order, as they issue collectives. A dead rank leaves its peers waiting, as in a collective. The
timeout of the next collective of the peers, or their launcher, ends the job. Before a rank exits,
it waits for its copies, at most for the timeout of the group, so that its peers complete theirs.
"""
