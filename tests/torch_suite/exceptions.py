"""Tests of torch that pass stock and fail patched, each with the reason why that stays so."""

from __future__ import annotations

from typing import Final

ONE_MORE_COLLECTIVE: Final = (
    "On the CPU one number is all-reduced after each backward, by which ranks hear of one whose "
    "backward an exception "
    "ended; the test counts all-reduces. In the same tensor as gradients it would shift them, and "
    "with them the order "
    "in which gloo adds them up on three and more ranks."
)

GOES_ON: Final = (
    "After an error in backward stock refuses the next forward. Here a forward completes the "
    "failed step first, and "
    "training can go on; a graph that still differs from the first one raises again, in its "
    "backward."
)

C_LOGGER: Final = (
    "The test hands the wrapper's logger to a C++ function that accepts torch's C++ logger only."
)

NO_TIMES: Final = (
    "The data that _get_ddp_logging_data() returns has the fields of the construction, the buckets "
    "and the last error, "
    "but no times: to take them costs each step some calls."
)

REASONS: Final[dict[str, str]] = {
    "test_ddp_profiling_autograd_profiler (cpu)": ONE_MORE_COLLECTIVE,
    "test_ddp_profiling_torch_profiler (cpu)": ONE_MORE_COLLECTIVE,
    "test_invalid_static_graph (cpu)": GOES_ON,
    "test_ddp_logging_data_cpu (as it is)": NO_TIMES,
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger (cpu)": C_LOGGER,
}
"""Why a test fails patched, by its name in the results; in every arm."""


def table() -> str:
    """Return the rows of docs/compatibility.md."""
    rows = [f"| `{name}` | {reason} |" for name, reason in sorted(REASONS.items())]
    return "\n".join(["| Test | Why |", "| --- | --- |", *rows])
