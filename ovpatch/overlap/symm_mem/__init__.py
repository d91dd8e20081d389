"""Memory that all ranks of a group can write to, and kernels that use it."""
