"""Counters and remarks of the feature in this process."""

from __future__ import annotations

import sys

from ovpatch.hookspecs import FeatureCounters
from ovpatch_plugins.pipe_experts.pipe_experts_options import STATE


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        calls: Forward passes of expert-parallel layers.
        parts: Chunks in which they were computed.
        stacked_calls: Calls whose experts the feature computes, with delayed weight gradients.
        taken_over: Calls of a library's layer, such as transformers'.
        library_experts: Calls of such a layer whose experts the library computed, chunk by chunk.
        symmetric: All-to-alls over symmetric memory, including the measured ones.
    """

    calls: int = 0
    parts: int = 0
    stacked_calls: int = 0
    taken_over: int = 0
    library_experts: int = 0
    symmetric: int = 0


COUNTERS = Counters()


def write_remarks(expert_parallel: str) -> list[str]:
    """Return the measured choices, and the reasons for fallbacks and for layers that were not cut.

    ``expert_parallel`` is the name of transformers' module of expert parallelism.
    """
    # A module that was never imported has nothing to report.
    autotune = sys.modules.get("ovpatch.overlap.kernels.autotuner")
    remarks = [] if autotune is None else list(autotune.report_lines("pipe_experts"))
    transport = sys.modules.get("ovpatch_plugins.pipe_experts.all_to_all")
    reasons = [] if transport is None else transport.list_unsupported_reasons()
    remarks += [
        f"rows are sent by c10d's all-to-alls, not over symmetric memory: {reason}"
        for reason in reasons
    ]
    if COUNTERS.library_experts:
        remarks.append(
            f"in {COUNTERS.library_experts} of {COUNTERS.taken_over} calls transformers computed "
            "its experts itself, part by part: they are not two GEMMs with stacked weights, or a "
            "script has replaced a function of them"
        )
    elif COUNTERS.calls:
        if (
            STATE.config.cut == "auto"
            and not COUNTERS.stacked_calls
            and COUNTERS.parts == COUNTERS.calls
        ):
            remarks.append(
                "layers were not cut: cut=auto measures experts with stacked weights only; for "
                "others try cut=experts"
            )
    elif "transformers" in sys.modules:
        where = (
            ""
            if expert_parallel in sys.modules
            else " (transformers' expert parallelism was not imported)"
        )
        remarks.append(
            f"no expert-parallel layer was found{where}: for layers of your own, call "
            "ovpatch_plugins.pipe_experts.run_experts() or expert_parallel_ffn()"
        )
    return remarks
