"""The faults in the patch layer: ``ovpatch/`` without ``overlap/``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_DDP_TESTS: Final = "tests/plugins/ddp/"

FAULTS: Final = (
    Fault(
        "another name of the first parameter is accepted",
        "ovpatch/patching/wrapper_chain.py",
        "if name != old_name and old_name not in names:",
        "if name != old_name and old_name not in names and name != names[0]:",
        ("tests/patching/test_checks.py",),
    ),
    Fault(
        "an option that was removed is accepted",
        "ovpatch/settings/feature_options.py",
        "if name in arguments or variable in environment:",
        "if False:",
        (_DDP_TESTS + "test_second_backwards.py",),
    ),
    Fault(
        "a patch is not reverted",
        "ovpatch/patching/manager.py",
        "chain.writes = [write for write in reversed(chain.writes) if not write.undo()]",
        "chain.writes = []",
        ("tests/patching/test_revert.py",),
    ),
    Fault(
        "warnings of torch name a file of ovpatch",
        "ovpatch/patching/wrapper_chain.py",
        'if any("stacklevel" in names for names',
        'if any("no such name" in names for names',
        (
            "tests/patching/test_defects.py",
            _DDP_TESTS + "test_stock_face.py::test_warnings_of_torch_name_the_line_of_the_script",
        ),
    ),
    Fault(
        "ranks wait for the marks of another node",
        "ovpatch/insight/steps.py",
        "    return range(start, start + int(count))\n",
        "    return range(get_world_size())\n",
        (
            "tests/insight/test_verify.py::test_two_nodes_wait_for_no_rank_in_the_folder_of_the_other",
        ),
    ),
    Fault(
        "a script that fails is called equal",
        "ovpatch/insight/verify/verification.py",
        '        if self._outcomes["stock"].code:\n            return _Answer(Conclusion.FAILS_LATER',
        "        if False:\n            return _Answer(Conclusion.FAILS_LATER",
        ("tests/insight/test_verify_verdicts.py",),
    ),
    Fault(
        "Dynamo compiles wrappers",
        "ovpatch/patching/wrapper_chain.py",
        "        _skip_wrapper(patch.wrap, function)\n",
        "",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "Dynamo compiles wrappers that another file makes",
        "ovpatch/patching/wrapper_chain.py",
        "os.path.dirname(code.co_filename) == os.path.dirname(made_by.co_filename)",
        "code.co_filename.removesuffix(_HIDDEN_SUFFIX) == made_by.co_filename",
        (
            "tests/plugins/test_compiled.py::test_compiled_layers_of_megatron_are_compiled_as_in_stock_pytorch",
        ),
    ),
    Fault(
        "an option that cannot act is ignored",
        "ovpatch/hookspecs.py",
        "if value == default:",
        "if True:",
        ("tests/test_unusable_options.py",),
    ),
    Fault(
        "a missing package is not seen",
        "ovpatch/session/feature_plan.py",
        "if missing:\n            top",
        "if False:\n            top",
        ("tests/test_missing_packages.py",),
    ),
    Fault(
        "a larger memory limit has a longer pipeline step",
        "ovpatch/planner/solver.py",
        "if problem.fits(solution.schedule))], key=_read_step)",
        "if not problem)], key=_read_step)",
        ("tests/test_cli_pipeline.py::test_more_memory_never_makes_a_solved_step_longer",),
    ),
    Fault(
        "node 0 does not wait for the files of its peers",
        "ovpatch/insight/nodes.py",
        "while len(self._ends) <= len(self._links) and self._lost is None:",
        "while False:",
        ("tests/insight/test_nodes.py",),
    ),
    Fault(
        "processes of two nodes share a file",
        "ovpatch/insight/nodes.py",
        "return self._folder / variants.rename_for_node(name, index)",
        "return self._folder / name",
        ("tests/insight/test_nodes.py",),
    ),
    Fault(
        "a lost node ends no run",
        "ovpatch/insight/nodes.py",
        "return self._lost is not None or self._is_grace_over()",
        "return self._is_grace_over()",
        ("tests/insight/test_nodes.py",),
    ),
    Fault(
        "nodes with other settings meet",
        "ovpatch/insight/nodes.py",
        "if theirs.get(name) != own[name]:",
        "if False:",
        ("tests/insight/test_nodes.py",),
    ),
    Fault(
        "levels of processes are added in a merged report",
        "ovpatch/session/worker_reports.py",
        "name: (max if name in levels else sum)(",
        "name: sum(",
        ("tests/test_reporting.py",),
    ),
    Fault(
        "processes of two hosts with one id write into one file",
        "ovpatch/session/worker_orders.py",
        "(FIRST_HOST_NUMBER + zlib.crc32(host.encode())) * MAX_PID + os.getpid()",
        "os.getpid()",
        (
            "tests/insight/test_nodes.py::test_processes_of_several_hosts_with_one_id_have_their_own_files",
        ),
    ),
    Fault(
        "bench --what-if predicts compute on one device as slow as next to NCCL",
        "ovpatch/insight/bench/scaling.py",
        "compute_ms=facts.compute_ms - slowed",
        "compute_ms=facts.compute_ms",
        ("tests/insight/test_scaling.py::test_one_gpu_is_predicted_from_two",),
    ),
    Fault(
        "a plan predicts the engine's own orders as torch would run them",
        "ovpatch/planner/what_if.py",
        "known.append((name, split_backwards(schedule)))",
        "known.append((name, split_backwards(schedule) if name in _STOCK_NAMES else schedule))",
        ("tests/plugins/pipeline/test_orders.py",),
    ),
)
