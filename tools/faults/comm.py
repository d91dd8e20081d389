"""The faults in ``ovpatch/overlap/comm/``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_DDP_TESTS: Final = "tests/plugins/ddp/"

FAULTS: Final = (
    Fault(
        "Dynamo compiles the reducer's hooks",
        "ovpatch/overlap/comm/streams.py",
        "eval_frame.set_code_exec_strategy(code, eval_frame.FrameExecStrategy(skip, skip))",
        "pass",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "rounds of agreement stay in the store",
        "ovpatch/overlap/comm/consensus.py",
        "            self._store.delete_key(",
        "            str(",
        ("tests/overlap/test_agreement_rounds.py",),
    ),
    Fault(
        "barrier: hosts pass before the last one has arrived",
        "ovpatch/overlap/comm/host_barrier.py",
        "if arrivals < (place // 2 + 1) * self._world:",
        "if False:",
        ("tests/overlap/test_gate.py::test_no_rank_leaves_before_the_last_has_arrived",),
    ),
    Fault(
        "barrier: no rank detects that a peer aborts",
        "ovpatch/overlap/comm/host_barrier.py",
        "            raise RuntimeError(_ERROR_ABORTED)",
        "            pass",
        ("tests/overlap/test_gate.py::test_a_rank_may_abort_before_ranks_have_agreed_on_a_name",),
    ),
    Fault(
        "barrier: a rank that aborts fails without peers",
        "ovpatch/overlap/comm/host_barrier.py",
        "except RankMismatchError:",
        "except KeyError:",
        ("tests/overlap/test_gate.py::test_a_rank_may_abort_before_ranks_have_agreed_on_a_name",),
    ),
    Fault(
        "barrier: hosts meet for different collectives",
        "ovpatch/overlap/comm/host_barrier.py",
        "if tags != self._tags[place % 2] * self._world:",
        "if False:",
        ("tests/overlap/test_gate.py::test_ranks_that_meet_for_different_collectives_raise",),
    ),
    Fault(
        "barrier: the tag of an earlier barrier stays in the sum",
        "ovpatch/overlap/comm/host_barrier.py",
        "replaced = self._tags[place % 2] if place >= 2 else 0",
        "replaced = 0",
        ("tests/overlap/test_gate.py::test_ranks_that_meet_for_different_collectives_raise",),
    ),
    Fault(
        "the failure of another rank is swallowed",
        "ovpatch/overlap/comm/step_flags.py",
        "raise RuntimeError(say_failed(steps[0]))",
        "return",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "collectives go on when a host waits in vain for its peers",
        "ovpatch/overlap/comm/host_barrier.py",
        "if self._should_abort_collectives and group is not None:",
        "if False:",
        (
            "tests/overlap/test_gate.py::test_a_rank_whose_deferred_wait_fails_aborts_the_collectives_in_flight",
        ),
    ),
    Fault(
        "one failure is reported in each step",
        "ovpatch/overlap/comm/step_flags.py",
        "self._last_step = step\n        self._num_failed = 0",
        "self._last_step = step",
        (_DDP_TESTS + "test_failures.py::test_a_rank_whose_peer_lost_a_backward_raises",),
    ),
    Fault(
        "a rank whose backward failed raises for its peers",
        "ovpatch/overlap/comm/step_flags.py",
        "oldest.totals()[0] > 0 and not oldest.has_failed",
        "oldest.totals()[0] > 0",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "the host barrier opens one rank early",
        "ovpatch/overlap/comm/host_barrier.py",
        "if arrivals < (place // 2 + 1) * self._world:",
        "if arrivals < (place // 2 + 1) * self._world - 1:",
        ("tests/overlap/test_gate.py",),
    ),
    Fault(
        "a reduction over hosts starts a stage before an earlier one",
        "ovpatch/overlap/comm/hosts.py",
        "limit = reduction.stage",
        "limit = None",
        ("tests/overlap/test_hosts.py",),
    ),
    Fault(
        "reductions over hosts continue after a failed stage",
        "ovpatch/overlap/comm/hosts.py",
        "self._failure = error",
        "pass",
        ("tests/overlap/test_hosts.py",),
    ),
    Fault(
        "hosts do not sum their shards",
        "ovpatch/overlap/comm/hosts.py",
        "[lambda: reduce_within(shards, inputs), lambda: reduce_across([staged])]",
        "[lambda: reduce_within(shards, inputs)]",
        ("tests/hosts/test_shards.py",),
    ),
    Fault(
        "streams do not sum the shards of hosts",
        "ovpatch/overlap/comm/hosts.py",
        "[lambda: reduce_within(outputs, inputs), lambda: reduce_across(outputs)]",
        "[lambda: reduce_within(outputs, inputs)]",
        ("tests/hosts/test_shards_on_streams.py",),
    ),
    Fault(
        "no stream waits between the stages of a reduction",
        "ovpatch/overlap/comm/hosts.py",
        "with unwatched_stream(self._find_stream(tensors[0].device)):\n"
        "            for stage in stages[1:]:\n"
        "                for work in works:\n"
        "                    work.wait()\n",
        "with unwatched_stream(self._find_stream(tensors[0].device)):\n"
        "            for stage in stages[1:]:\n",
        ("tests/overlap/test_hosts.py",),
    ),
    Fault(
        "sums over hosts stay in one lane",
        "ovpatch/overlap/comm/hosts.py",
        "groups.start([lambda: sum_within(tensors), sum_across, gather])",
        "groups.start([lambda: sum_within(tensors), sum_across])",
        ("tests/hosts/test_reductions.py",),
    ),
    Fault(
        "errors name no hosts",
        "ovpatch/overlap/comm/consensus.py",
        "if len(set(identifiers)) < 2:",
        "if True:",
        ("tests/hosts/test_errors.py",),
    ),
    Fault(
        "ranks exchange terms where a ring sends less over a link",
        "ovpatch/overlap/comm/hosts.py",
        "return 0 < sent < 2 * (world - 1)",
        "return bool(sent)",
        ("tests/overlap/test_hosts.py",),
    ),
    Fault(
        "ranks of several hosts all-reduce what an exchange sends with less",
        "ovpatch/overlap/comm/collectives.py",
        "or (self._exchanges and",
        "or (not self._exchanges and",
        ("tests/overlap/test_ungrouped.py",),
    ),
)
