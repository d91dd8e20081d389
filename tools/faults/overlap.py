"""The faults in the rooms of ``ovpatch/overlap/`` without an own module."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_PIPELINING: Final = "ovpatch/overlap/pipelining/"
_PIPELINE_TESTS: Final = "tests/plugins/pipeline/"

FAULTS: Final = (
    Fault(
        "a ring sends what it should receive",
        "ovpatch/overlap/tensor_parallel/schedules/overlapped.py",
        "rows_by_rank[owner],\n                    (rank + 1) % world,\n                    rows_by_rank[owner - 1],",
        "rows_by_rank[owner - 1],\n                    (rank + 1) % world,\n                    rows_by_rank[owner],",
        ("tests/plugins/tp_linear/test_auto.py", "tests/plugins/tp_linear/test_rare.py"),
    ),
    Fault(
        "schedule auto starts the gather of a backward that another schedule computes",
        "ovpatch/overlap/tensor_parallel/schedules/autotuned.py",
        "starts_grad_gather_early = False",
        "starts_grad_gather_early = True",
        (
            "tests/plugins/tp_linear/test_auto.py",
            "tests/plugins/tp_linear/test_auto_choices.py",
        ),
    ),
    Fault(
        "a sum by copies has the term of a peer twice",
        "ovpatch/overlap/kernels/copy_collectives.py",
        "own, own_address = self._compute_term(compute, self._rank, nbytes)",
        "own, own_address = self._compute_term(compute, self._peers[0], nbytes)",
        ("tests/plugins/tp_linear/test_copied.py",),
    ),
    Fault(
        "a sum over ranks has every rank's bias",
        "ovpatch/overlap/tensor_parallel/operators.py",
        "bias / ranks.world",
        "bias",
        ("tests/plugins/tp_linear/test_drifted_copies.py",),
    ),
    Fault(
        "rows of a compiled graph are permuted as if blocks were ranks",
        "ovpatch/overlap/tensor_parallel/graph_pass.py",
        "insert.swap(output, world, blocks)",
        "insert.swap(output, blocks, world)",
        ("tests/plugins/tp_linear/test_graph_pass.py",),
    ),
    Fault(
        "gathered rows are cast before their gather though the graph reads them uncast",
        "ovpatch/overlap/tensor_parallel/graph_pass.py",
        "            # The gather must send this reader all bits.\n            else:\n                return\n",
        "",
        ("tests/plugins/tp_linear/test_graph_pass.py",),
    ),
    Fault(
        "two results of a compiled graph share the memory of a cast",
        "ovpatch/overlap/tensor_parallel/graph_pass.py",
        "    if len(casts) > 1 and any(map(_may_return, casts)):\n        return\n",
        "",
        ("tests/plugins/tp_linear/test_graph_pass.py",),
    ),
    Fault(
        "compiled graphs have operators of groups that have not agreed",
        "ovpatch/overlap/tensor_parallel/graph_pass.py",
        "if world < 2 or group not in tp_group.list_agreed_groups():",
        "if world < 2:",
        ("tests/plugins/tp_linear/test_graph_pass.py",),
    ),
    Fault(
        "a pipeline starts a receive later than its order allows",
        _PIPELINING + "ir.py",
        "limit = ahead + (step.receive is not None)",
        "limit = 1",
        (_PIPELINE_TESTS + "test_program.py",),
    ),
)
