"""Plants faults in the sources, one at a time, and tells which of them the tests catch.

    $ python tools/plant_faults.py              # all, some twenty minutes
    $ python tools/plant_faults.py wait stale   # those whose names hold one of these words

A fault is a small replacement in one file of a scratch copy of the repository, in which the tests that should catch it
are run. The program ends with 1 if a fault is not caught, and with 2 if a replacement does not fit the sources, which
``tests/test_planted_faults.py`` checks in every run of the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_COPIED: Final = ("ovpatch", "plugins", "tests", "setup.cfg", "pyproject.toml")
_TIMEOUT_S: Final = 900.0
_FAILED: Final = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)

_REDUCTION: Final = "ovpatch/overlap/data_parallel/"
_SHARDING: Final = "plugins/ovpatch_plugins/dist_optimizer/"
_PIPELINE: Final = "plugins/ovpatch_plugins/pipeline/"
_PIPELINE_TESTS: Final = "tests/plugins/pipeline/"
_RECOMPUTE: Final = "plugins/ovpatch_plugins/recompute/"
_REPEATED_TESTS: Final = "tests/plugins/recompute/test_repeated.py::"
_DDP_TESTS: Final = "tests/plugins/ddp/"
_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"
_CUTTING: Final = "plugins/ovpatch_plugins/pipeline/"
_CUTTING_TESTS: Final = "tests/plugins/pipeline/test_cut.py"


class FaultNotFoundError(ValueError):
    """The text that a fault replaces is not there exactly once. Adapt the fault to the sources."""


@dataclass(frozen=True)
class Fault:
    """A replacement in the sources.

    Attributes:
        name: What is wrong then.
        file: Where, relative to the repository.
        old: A text that stands there exactly once.
        new: What takes its place.
        tests: What should fail: arguments for pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Change the file below ``root``.

        Raises:
            FaultNotFoundError: The old text is not there, or several times.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(self.old) != 1:
            raise FaultNotFoundError(
                f"fault '{self.name}': {self.file} has {text.count(self.old)} times what it replaces, not once: "
                f"{self.old!r}. Adapt the fault in tools/plant_faults.py to the sources."
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


FAULTS: Final = (
    Fault(
        "the last bucket is skipped",
        _REDUCTION + "grad_sync.py",
        "while self.launched < len(self.buckets):",
        "while self.launched < len(self.buckets) - 1:",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a wait for the reductions is left out",
        _REDUCTION + "grad_sync.py",
        "for work in self._works:\n            work.wait()",
        "for work in self._works:\n            pass",
        ("tests/overlap/test_ledger.py", _DDP_TESTS + "test_loops.py"),
    ),
    Fault(
        "gradients are divided by another number",
        _REDUCTION + "grad_sync.py",
        "self._divisor = 1 if average else group.size()",
        "self._divisor = 1 if average else group.size() + 1",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a reader finds parameters that are stale",
        "ovpatch/overlap/tensors/pending_param.py",
        "param.__class__ = PendingParameter",
        "pass",
        ("tests/overlap/test_pending_readers.py",),
    ),
    Fault(
        "the zero of lazy gradients belongs to a mode of the script",
        "ovpatch/overlap/tensors/lazy_tensor.py",
        "    with without_modes(), torch.enable_grad():\n        if own:",
        "    with torch.enable_grad():\n        if own:",
        ("tests/plugins/dist_optimizer/test_modes.py",),
    ),
    Fault(
        "another name of the first parameter is accepted",
        "ovpatch/patching/wrapper_chain.py",
        "if name != old_name and old_name not in names:",
        "if name != old_name and old_name not in names and name != names[0]:",
        ("tests/patching/test_checks.py",),
    ),
    Fault(
        "a gradient is added twice",
        _REDUCTION + "fp32_accumulation.py",
        "found.total.add_(added)",
        "found.total.add_(added, alpha=2)",
        (_DDP_TESTS + "test_sums_in_fp32.py",),
    ),
    Fault(
        "a shard ends one element early",
        "ovpatch/overlap/tensors/memory.py",
        "min((rank + 1) * size, numel)",
        "min((rank + 1) * size - 1, numel)",
        (_SHARDING_TESTS + "test_loops.py",),
    ),
    Fault(
        "the hook of the first parameter does not fire",
        _REDUCTION + "reducer.py",
        "if listener is not None and not listener.quiet:",
        "if index and listener is not None and not listener.quiet:",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a norm is that of this rank's shard",
        _SHARDING + "clip_grad.py",
        "    dist.all_reduce(powers, group=group)\n",
        "",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "an infinity on another rank is lost",
        _SHARDING + "clip_grad.py",
        "found[device].copy_(seen)",
        "pass",
        (_SHARDING_TESTS + "test_scaler.py",),
    ),
    Fault(
        "a ring sends what it should receive",
        "plugins/ovpatch_plugins/tp_linear/schedules/overlapped.py",
        "by_rank[owner], (rank + 1) % world, by_rank[owner - 1], (rank - 1) % world",
        "by_rank[owner - 1], (rank + 1) % world, by_rank[owner], (rank - 1) % world",
        ("tests/plugins/tp_linear/test_auto.py", "tests/plugins/tp_linear/test_rare.py"),
    ),
    Fault(
        "a patch is not reverted",
        "ovpatch/patching/manager.py",
        "chain.writes = [write for write in reversed(chain.writes) if not write.undo()]",
        "chain.writes = []",
        ("tests/patching/test_revert.py",),
    ),
    Fault(
        "a norm is not counted",
        _SHARDING + "clip_grad.py",
        "COUNTERS.norms += 1",
        "COUNTERS.norms += 0",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "one contribution more is expected than declared",
        _REDUCTION + "grad_sync.py",
        "self._expected[index] = before + count",
        "self._expected[index] = before + count + 1",
        (_DDP_TESTS + "test_declared.py",),
    ),
    Fault(
        "norms of half precision are computed in half precision",
        _SHARDING + "sharded_bucket.py",
        "[shard.to(wide) for shard in shards]",
        "list(shards)",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "a gradient is a view of the flat tensor of its bucket",
        _REDUCTION + "bucket.py",
        "_write_grad(self.params[i], view, is_shared=True)",
        "_write_grad(self.params[i], view, is_shared=False)",
        ("tests/overlap/test_buckets.py", "tests/overlap/test_buckets_in_place.py"),
    ),
    Fault(
        "a reader gets the state of another step",
        "ovpatch/overlap/peer_rpc/versioned.py",
        "                return self._begun > version\n",
        "                return False\n",
        ("tests/overlap/test_versioned.py",),
    ),
    Fault(
        "shards are put together in another order",
        "ovpatch/overlap/tensors/memory.py",
        "own = ranges[rank]",
        "own = ranges[-1 - rank]",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a stream does not wait for what arrives on another one",
        _SHARDING + "param_all_gather.py",
        "for work in arrived.works if arrived.event is None else (arrived.event,):",
        "for work in arrived.works[:0]:",
        ("tests/overlap/test_side_streams.py",),
    ),
    Fault(
        "a product that was computed ahead outlives a change of its weight",
        "plugins/ovpatch_plugins/tp_linear/precomputed.py",
        "if (_version(found.weight), _version(found.bias)) != found.versions:",
        "if False:",
        ("tests/plugins/tp_linear/test_shared.py",),
    ),
    Fault(
        "a recomputation counts on from what the forward left",
        _RECOMPUTE + "forward_state.py",
        "self.write({name: _strengthen(value) for name, value in self.before.items()})",
        "pass",
        (_REPEATED_TESTS + "test_each_part_is_stocks",),
    ),
    Fault(
        "a recomputation draws the next numbers of a generator",
        _RECOMPUTE + "forward_state.py",
        "for stream, state in self._streams:",
        "for stream, state in self._streams[:0]:",
        (_REPEATED_TESTS + "test_each_part_is_stocks",),
    ),
    Fault(
        "a recomputation with other values passes for the forward",
        _RECOMPUTE + "recomputation.py",
        "if _digest(tensor) != then:",
        "if False:",
        (_REPEATED_TESTS + "test_what_is_out_of_reach_is_an_error",),
    ),
    Fault(
        "a recomputation calls the hooks inside of its block again",
        _RECOMPUTE + "takeover.py",
        "if hooked := _find_hook(self, modules):",
        'if hooked := "":',
        (_REPEATED_TESTS + "test_each_part_is_stocks",),
    ),
    Fault(
        "a recomputed block keeps its last call alive",
        _RECOMPUTE + "forward_state.py",
        "return _Weak(weakref.ref(value))",
        "return value",
        (_REPEATED_TESTS + "test_a_call_does_not_keep_the_one_before",),
    ),
    Fault(
        "each optimizer looks for its model again",
        _RECOMPUTE + "takeover.py",
        "and _SEEN not in kept_values(param)}",
        "}",
        (_REPEATED_TESTS + "test_optimizers_find_their_models_without_a_walk",),
    ),
    Fault(
        "warnings of torch name a file of ovpatch",
        "ovpatch/patching/wrapper_chain.py",
        'if any("stacklevel" in names for names',
        'if any("no such name" in names for names',
        (
            "tests/patching/test_defects.py",
            _DDP_TESTS + "test_stock_face.py::test_what_torch_warns_of_names_the_line_of_the_script",
        ),
    ),
    Fault(
        "ranks wait for the marks of another node",
        "ovpatch/insight/steps.py",
        "    return range(start, start + int(count))\n",
        "    return range(get_world_size())\n",
        ("tests/insight/test_verify.py::test_two_nodes_wait_for_no_rank_in_the_folder_of_the_other",),
    ),
    Fault(
        "a script that fails is called equal",
        "ovpatch/insight/verify/verify.py",
        '        if self.outcomes["stock"].code:\n            return Conclusion.FAILS_LATER',
        "        if False:\n            return Conclusion.FAILS_LATER",
        ("tests/insight/test_verify_verdicts.py",),
    ),
    Fault(
        "modules that come later are not seen",
        _REDUCTION + "reducer.py",
        "(any(self._leaves) or self._list_children(model) != self._children)",
        "not self._children",
        (_DDP_TESTS + "test_foreign_hands.py",),
    ),
    Fault(
        "Dynamo compiles the reducer's hooks",
        "ovpatch/overlap/comm/streams.py",
        "eval_frame.set_code_exec_strategy(code, eval_frame.FrameExecStrategy(skip, skip))",
        "pass",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "Dynamo compiles wrappers",
        "ovpatch/patching/wrapper_chain.py",
        "        _skip_wrapper(patch.wrap, function)\n",
        "",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "a compiled step works on shards",
        _SHARDING + "takeover.py",
        "if torch.compiler.is_compiling() or get_dynamo_callback() is not None:",
        "if torch.compiler.is_compiling():",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "graphs guard on a block's name",
        "plugins/ovpatch_plugins/recompute/takeover.py",
        "mark: Mark = granularity, tuple(keep),",
        "mark: Mark = granularity, (*keep, block.name)[: len(keep) + 1],",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
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
        "ovpatch/session/plan.py",
        "if missing:\n            top",
        "if False:\n            top",
        ("tests/test_missing_packages.py",),
    ),
    Fault(
        "a sum over ranks has every rank's bias",
        "plugins/ovpatch_plugins/tp_linear/operators.py",
        "bias / ranks.world",
        "bias",
        ("tests/plugins/tp_linear/test_drifted_copies.py",),
    ),
    Fault(
        "a vote does not name its subject",
        "ovpatch/overlap/comm/step_flags.py",
        "self.has_diverged = high != -low and",
        "self.has_diverged = False and",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "orders that differ stay unnoticed where ranks do not vote",
        _SHARDING + "sharded_grads.py",
        "self._order.votes += 1",
        "pass",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "models are gathered in the order of the optimizer's parameters",
        _SHARDING + "sharded_grads.py",
        "return sorted(dict.fromkeys(models), key=lambda shards: (shards.group.group_name, shards.identity))",
        "return list(dict.fromkeys(models))",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "steps that cross wait for each other",
        _SHARDING + "step_log.py",
        "if (own_after, own_steps) > (after, steps) or own_left > left:",
        "if False:",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "state of a model that was wrapped again is kept",
        _SHARDING + "sharded_optimizer.py",
        "self._drop_model(optimizer, former)",
        "pass",
        (_SHARDING_TESTS + "test_leaks.py",),
    ),
    Fault(
        "a stock optimizer keeps its shards",
        _SHARDING + "sharded_optimizer.py",
        "            finalizer.detach()",
        "            pass",
        (_SHARDING_TESTS + "test_leaks.py",),
    ),
    Fault(
        "rounds of agreement stay in the store",
        "ovpatch/overlap/comm/consensus.py",
        "            self._store.delete_key(",
        "            str(",
        ("tests/overlap/test_agreement_rounds.py",),
    ),
    Fault(
        "the failure of another rank is swallowed",
        "ovpatch/overlap/comm/step_flags.py",
        "raise RuntimeError(text(steps[0]))",
        "return",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "a pipeline scales gradients whose order has no REDUCE_GRAD",
        _PIPELINE + "takeover.py",
        "run.is_reduced = lowered.reductions is None or number in lowered.reductions",
        "run.is_reduced = True",
        (_PIPELINE_TESTS + "test_order_sources.py",),
    ),
    Fault(
        "a pipeline starts a receive later than its order allows",
        _PIPELINE + "program.py",
        "limit = ahead + (step.receive is not None)",
        "limit = 1",
        (_PIPELINE_TESTS + "test_program.py",),
    ),
    Fault(
        "a failed apply() leaves the pipeline on for schedules of cut()",
        _PIPELINE + "options.py",
        "        ActiveOptions.current = None",
        "        del self",
        (_PIPELINE_TESTS + "test_bidirectional.py::test_a_failed_apply_leaves_no_feature_behind",),
    ),
    Fault(
        "a larger memory limit has a longer pipeline step",
        _PIPELINE + "solver.py",
        "if problem.fits(solution.schedule))], key=_read_step)",
        "if not problem)], key=_read_step)",
        ("tests/test_cli_pipeline.py::test_more_memory_never_makes_a_solved_step_longer",),
    ),
    Fault(
        "a stage continues where its forward skipped a block of another one",
        _CUTTING + "stage_module.py",
        "if index != (plan.due if plan.due < plan.low else plan.high):",
        "if False:",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "stages are compared in evaluation alone",
        _CUTTING + "cut_schedule.py",
        "    model.train()\n",
        "",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a stage sends transposed tensors",
        _CUTTING + "stage_module.py",
        "path).contiguous() for path",
        "path) for path",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "the inference of shapes counts in the state of blocks",
        _CUTTING + "cut_schedule.py",
        "        finally:\n            state.restore()\n\n",
        "        finally:\n            pass\n\n",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a cut leaves the hooks that a forward registers",
        _CUTTING + "block_stack.py",
        "                    own[key].clear()\n",
        "",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a cut compares behind a gate that is zero",
        _CUTTING + "block_stack.py",
        "param.data.uniform_(*_SMALL_VALUES, generator=draw)",
        "param.data.zero_()",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a cut leaves other values in parameters that are zero",
        _CUTTING + "block_stack.py",
        "                param.data.zero_()\n",
        "                pass\n",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a stage lacks a part that the model calls without its module",
        _CUTTING + "stage_module.py",
        "return None if inner is None or id(module) in inner.callers else self._copy(child, plan, made)",
        "return None",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a stage fails where a tower's forward depends on values",
        _CUTTING + "stage_module.py",
        "                self._twin = _make_twin(self._shell, device)\n",
        "                raise\n",
        (_CUTTING_TESTS,),
    ),
)


def choose(words: Sequence[str]) -> list[Fault]:
    """Return the faults whose names hold one of some words; all of them without words."""
    return [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]


def find_catcher(fault: Fault, root: Path) -> str:
    """Plant a fault in a copy of the repository, run its tests, and take it out again.

    Returns:
        The first test that failed; "" if none did.

    Raises:
        FaultNotFoundError: It does not fit the sources.
        RuntimeError: pytest could not run the tests.
    """
    before = (root / fault.file).read_bytes()
    fault.plant(root)
    try:
        code, output = _run_tests(fault.tests, root)
    finally:
        (root / fault.file).write_bytes(before)
    failed = _FAILED.search(output)
    if code == 0 or (code == 1 and failed):
        return failed[1] if failed else ""
    raise RuntimeError(f"fault '{fault.name}': pytest ended with {code}; correct its tests:\n{output[-2000:]}")


def _run_tests(tests: Sequence[str], root: Path) -> tuple[int, str]:
    """Return pytest's exit code and output; a run that had to be ended counts as failed: a rank waited for ever."""
    paths = [str(root), str(root / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "FAILED by its time limit"
    return done.returncode, done.stdout + done.stderr


def copy_repository(target: Path) -> None:
    """Copy what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy(source, target / name)


def main() -> int:
    """Plant the chosen faults and print a line for each."""
    parser = argparse.ArgumentParser(description="Plant faults and tell which of them the tests catch.")
    parser.add_argument("words", nargs="*", help="only faults whose names hold one of these")
    chosen, missed = choose(parser.parse_args().words), []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy_repository(Path(folder))
        for fault in chosen:
            begin = time.monotonic()
            try:
                catcher = find_catcher(fault, Path(folder))
            except (FaultNotFoundError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 2
            missed += [] if catcher else [fault]
            verdict = f"caught by {catcher}" if catcher else "NOT CAUGHT"
            print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {verdict}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
