"""The faults that ``tools/plant_faults.py`` plants: the replaced text, and the tests that catch it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_REDUCTION: Final = "ovpatch/overlap/data_parallel/"
_SHARDING: Final = "plugins/ovpatch_plugins/dist_optimizer/"
_DDP: Final = "plugins/ovpatch_plugins/ddp/"
_RPC: Final = "ovpatch/overlap/peer_rpc/"
_PIPELINING: Final = "ovpatch/overlap/pipelining/"
_PIPELINE: Final = "plugins/ovpatch_plugins/pipeline/"
_PIPELINE_TESTS: Final = "tests/plugins/pipeline/"
_RECOMPUTE: Final = "plugins/ovpatch_plugins/recompute/"
_REPEATED_TESTS: Final = "tests/plugins/recompute/test_repeated.py::"
_DDP_TESTS: Final = "tests/plugins/ddp/"
_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"
_CUTTING: Final = "plugins/ovpatch_plugins/pipeline/cutting/"
_CUTTING_TESTS: Final = "tests/plugins/pipeline/test_cut.py"


class FaultNotFoundError(ValueError):
    """The text that a fault replaces is not there exactly once. Adapt the fault to the sources."""


@dataclass(frozen=True)
class Fault:
    """A replacement in the sources.

    Attributes:
        name: What is wrong then.
        file: Where, relative to the repository.
        old: The code that is replaced, which the file has exactly once.
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
        pattern = re.compile(re.escape(self.old))
        if not pattern.search(text):
            pattern = _ignore_layout(self.old)
        count = len(pattern.findall(text))
        if count != 1:
            raise FaultNotFoundError(
                f"fault '{self.name}': {self.file} has {count} times what it replaces, not once: "
                f"{self.old!r}. Adapt the fault in tools/faults.py to the sources."
            )
        path.write_text(pattern.sub(lambda _: self.new, text), encoding="utf-8")


def _ignore_layout(code: str) -> re.Pattern[str]:
    """Return a pattern of the code in any layout that ``ruff format`` may give it."""
    closers = {")", "]", "}"}
    parts = [
        rf"(?:,\s*)?{re.escape(token)}" if token in closers else re.escape(token)
        for token in re.findall(r"\w+|\S", code)
    ]
    return re.compile(r"\s*".join(parts))


FAULTS: Final = (
    Fault(
        "the last bucket is skipped",
        _REDUCTION + "grad_sync.py",
        "while self.started < len(self.buckets):",
        "while self.started < len(self.buckets) - 1:",
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
        "    with outside_modes(), torch.enable_grad():\n        if own:",
        "    with torch.enable_grad():\n        if own:",
        ("tests/plugins/dist_optimizer/test_modes.py",),
    ),
    Fault(
        "reads of lazy tensors run in dispatch modes of the script",
        "ovpatch/overlap/tensors/lazy_tensor.py",
        "    with _lock, outside_user_modes():\n        tensors_by_source",
        "    with _lock, torch.no_grad():\n        tensors_by_source",
        ("tests/plugins/dist_optimizer/test_modes.py",),
    ),
    Fault(
        "the positions of experts belong to a mode of the script",
        "plugins/ovpatch_plugins/pipe_experts/routing.py",
        "    with outside_modes():\n        return torch.tensor(plan",
        "    with torch.no_grad():\n        return torch.tensor(plan",
        ("tests/plugins/pipe_experts/test_modes.py",),
    ),
    Fault(
        "a source of lazy tensors fetches without its lock",
        "ovpatch/overlap/tensors/lazy_tensor.py",
        "guards.enter_context(source.reading())",
        "pass",
        ("tests/overlap/test_placeholders.py",),
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
        "ovpatch/overlap/tensors/shard.py",
        "min((rank + 1) * size, numel)",
        "min((rank + 1) * size - 1, numel)",
        (_SHARDING_TESTS + "test_loops.py",),
    ),
    Fault(
        "the hook of the first parameter does not fire",
        _REDUCTION + "grad_hooks.py",
        "if reducer is not None and not reducer.is_muted:",
        "if index and reducer is not None and not reducer.is_muted:",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "the first searched backward starts buckets early",
        _REDUCTION + "backward_plan.py",
        " or (is_searched and not facts.has_reduced)",
        "",
        ("tests/overlap/test_backward_plan.py",),
    ),
    Fault(
        "a backward is over when a backward inside of it is",
        _REDUCTION + "grad_reducer.py",
        "            self._task.queue_callback(self._on_task_ended, self._on_task_died)\n          "
        "  # `torch",
        "            # `torch",
        (_DDP_TESTS + "test_reentrant.py",),
    ),
    Fault(
        "uses of parameters under no_sync are forgotten",
        _REDUCTION + "grad_reducer.py",
        "self.is_muted = not plan_backward(self.facts, False).shares_usage",
        "self.is_muted = True",
        (_DDP_TESTS + "test_local_backwards.py", _DDP_TESTS + "test_loops.py"),
    ),
    Fault(
        "experts are reduced in a second backward",
        _REDUCTION + "grad_reducer.py",
        "            # Hooks have nothing more to report, unless a later backward reduces these "
        "uses.\n",
        "            if self.facts.has_experts:\n                self.arm()\n                "
        "return True\n",
        ("tests/plugins/pipe_experts/test_data_parallel.py",),
    ),
    Fault(
        "an option that was removed is accepted",
        "ovpatch/settings/feature_options.py",
        "if name in arguments or variable in environment:",
        "if False:",
        (_DDP_TESTS + "test_second_backwards.py",),
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
        "ovpatch/overlap/tensor_parallel/schedules/overlapped.py",
        "rows_by_rank[owner],\n                    (rank + 1) % world,\n                    rows_by_rank[owner - 1],",
        "rows_by_rank[owner - 1],\n                    (rank + 1) % world,\n                    rows_by_rank[owner],",
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
        "an interrupted swap is not completed",
        _SHARDING + "sharded_optimizer.py",
        "                    if state.is_swapped:\n",
        "                    if False:\n",
        (_SHARDING_TESTS + "test_interrupted_swaps.py",),
    ),
    Fault(
        "state that a capsule or a graph holds gets other memory",
        "ovpatch/overlap/tensors/tensor_memory.py",
        "        and use_count(tensor) == 1\n",
        "",
        (_SHARDING_TESTS + "test_held_state.py",),
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
        _REDUCTION + "grad_readiness.py",
        "self.expected[index] = before + count",
        "self.expected[index] = before + count + 1",
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
        _REDUCTION + "grad_bucket.py",
        "_write_grad(self.params[i], view, is_shared=True)",
        "_write_grad(self.params[i], view, is_shared=False)",
        ("tests/overlap/test_buckets.py", "tests/overlap/test_buckets_in_place.py"),
    ),
    Fault(
        "a reader gets the state of another step",
        "ovpatch/overlap/peer_rpc/sequence_lock.py",
        "                return self._begun_version > version\n",
        "                return False\n",
        ("tests/overlap/test_versioned.py",),
    ),
    Fault(
        "shards are put together in another order",
        "ovpatch/overlap/tensors/shard.py",
        "own = ranges[rank]",
        "own = ranges[-1 - rank]",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a stream does not wait for what arrives on another one",
        _SHARDING + "param_all_gather.py",
        "for work in finished.works if finished.event is None else (finished.event,):",
        "for work in finished.works[:0]:",
        ("tests/overlap/test_side_streams.py",),
    ),
    Fault(
        "a product that was computed ahead outlives a change of its weight",
        "plugins/ovpatch_plugins/tp_linear/precomputed.py",
        "if (_version(pending.weight), _version(pending.bias)) != pending.versions:",
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
        _RECOMPUTE + "forward_wrap.py",
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
        _RECOMPUTE + "recompute_attach.py",
        "and _SEEN not in attached_values(param)}",
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
            _DDP_TESTS
            + "test_stock_face.py::test_what_torch_warns_of_names_the_line_of_the_script",
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
        "modules that come later are not seen",
        _REDUCTION + "grad_hooks.py",
        "(any(self._leaf_tables) or self._list_children(model) != self._children)",
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
        _SHARDING + "step_patches.py",
        "if torch.compiler.is_compiling() or get_dynamo_callback() is not None:",
        "if torch.compiler.is_compiling():",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "a subclass whose step torch has written is unknown",
        _SHARDING + "step_patches.py",
        'if "_init_group" in vars(base) or not _inherits_step(base):',
        'if {"step", "_init_group"} & set(vars(base)):',
        (_SHARDING_TESTS + "test_subclasses.py",),
    ),
    Fault(
        "a step that a class has kept from before apply() counts as patched",
        _SHARDING + "step_patches.py",
        'return _without_hooks(vars(cls)["step"]) is _without_hooks(inherited)',
        "return inherited is not None",
        (_SHARDING_TESTS + "test_subclasses.py",),
    ),
    Fault(
        "a vote that a promise has ended is reported as another order",
        _SHARDING + "agreement.py",
        "elif outcome == _ENDS:\n            # A rank has promised to end this vote to a peer that "
        "missed the rank.\n"
        "            self._end(_REASON_MISSING)",
        "elif outcome == _ENDS:\n            self._end(_REASON_ORDER)",
        (_SHARDING_TESTS + "test_step_votes.py",),
    ),
    Fault(
        "graphs guard on a block's name",
        "plugins/ovpatch_plugins/recompute/recompute_attach.py",
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
        "ovpatch/session/feature_plan.py",
        "if missing:\n            top",
        "if False:\n            top",
        ("tests/test_missing_packages.py",),
    ),
    Fault(
        "a sum over ranks has every rank's bias",
        "ovpatch/overlap/tensor_parallel/operators.py",
        "bias / ranks.world",
        "bias",
        ("tests/plugins/tp_linear/test_drifted_copies.py",),
    ),
    Fault(
        "a vote does not name its subject",
        _SHARDING + "agreement.py",
        "        if high != -low:\n",
        "        if False:\n",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "orders that differ stay unnoticed where ranks do not vote",
        _SHARDING + "sharded_grads.py",
        "self.votes.reached[VOTES] + tag) % _DIGEST_MODULUS",
        "0) % _DIGEST_MODULUS",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "models are gathered in the order of the optimizer's parameters",
        _SHARDING + "sharded_grads.py",
        "return sorted(dict.fromkeys(models), key=lambda shards: (shards.group.group_name, "
        "shards.identity))",
        "return list(dict.fromkeys(models))",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "steps that cross wait for each other",
        _SHARDING + "agreement.py",
        "return rank == path[0]",
        "return False",
        (_SHARDING_TESTS + "test_two_groups.py",),
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
        "barrier: hosts pass before the last one has arrived",
        "ovpatch/overlap/comm/host_barrier.py",
        "return arrivals >= self._arrivals * self._world",
        "return True",
        ("tests/overlap/test_gate.py::test_nobody_leaves_before_the_last_has_come",),
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
        "retention: a rank drops shards that a slower peer reads",
        "ovpatch/overlap/peer_rpc/retention.py",
        "if self.list_awaited():",
        "if False:",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "retention: a rank that has destroyed its group serves no final call",
        _RPC + "rpc.py",
        "    return not retention.has_retained(group())",
        "    return True",
        ("tests/overlap/test_peers_end.py::test_so_it_does_if_the_group_was_destroyed_before",),
    ),
    Fault(
        "retention: a rank that has destroyed its group exits before the final calls",
        _RPC + "rpc.py",
        "            ranks = self._list_awaited()",
        "            ranks = []",
        ("tests/overlap/test_peers_end.py::test_so_it_does_if_the_group_was_destroyed_before",),
    ),
    Fault(
        "a call waits for a store whose host cannot be reached",
        _RPC + "client.py",
        "found = results.get(timeout=timeout_s)",
        "found = results.get()",
        (
            "tests/overlap/test_peers_server.py::test_a_store_that_never_replies_ends_no_later_than_the_call",
        ),
    ),
    Fault(
        "a state dict replaces the tensors into which a loader writes",
        _SHARDING + "state_dicts.py",
        "                    value.data = kept\n",
        "                    shown[name] = kept\n",
        (
            _SHARDING_TESTS
            + "test_state.py::test_a_distributed_checkpoint_is_loaded_into_the_tensors_of_a_state_dict",
        ),
    ),
    Fault(
        "retention: objects outlive their backwards",
        "ovpatch/overlap/peer_rpc/retention.py",
        "        retained.remaining_backwards -= 1\n",
        "",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "retention: a forked child calls peers",
        "ovpatch/overlap/peer_rpc/rpc.py",
        "if os.getpid() != self._pid:",
        "if False:",
        ("tests/overlap/test_peers_server.py::test_a_fork_is_no_rank_and_leaves_its_parent_alone",),
    ),
    Fault(
        "a finalizer waits for the lock of the server",
        _RPC + "server.py",
        """            if self._handlers.get(topic) is handler:
                self._handlers.pop(topic, None)
""",
        """            with self._changed:
                self._handlers.pop(topic, None)
""",
        ("tests/overlap/test_peers_server.py::test_a_handler_is_withdrawn_without_the_lock",),
    ),
    Fault(
        "the failure of another rank is swallowed",
        "ovpatch/overlap/comm/step_flags.py",
        "raise RuntimeError(say_failed(steps[0]))",
        "return",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "a pipeline scales gradients whose order has no REDUCE_GRAD",
        _PIPELINE + "pipeline_attach.py",
        "is_reduced=lowered.reductions is None or info.number in lowered.reductions",
        "is_reduced=True",
        (_PIPELINE_TESTS + "test_order_sources.py",),
    ),
    Fault(
        "a pipeline starts a receive later than its order allows",
        _PIPELINING + "ir.py",
        "limit = ahead + (step.receive is not None)",
        "limit = 1",
        (_PIPELINE_TESTS + "test_program.py",),
    ),
    Fault(
        "both directions of a bidirectional pipeline have the first microbatches",
        _PIPELINE + "variants/bidirectional.py",
        "first_input=way * (self._n_microbatches // _WAYS)",
        "first_input=0",
        (_PIPELINE_TESTS + "test_bidirectional.py",),
    ),
    Fault(
        "a new order of torch's is not detected",
        _PIPELINE + "pipeline_attach.py",
        "if attached is None or [id(fact)",
        "if attached is None or [id(attached)] * 0 and [id(fact)",
        (_PIPELINE_TESTS + "test_order_sources.py", _PIPELINE_TESTS + "test_pipeline_attach.py"),
    ),
    Fault(
        "linears of a failed pipeline step keep their deferral",
        _PIPELINE + "runtime/stage.py",
        "            self.queue.uninstall()\n            self.queue.clear()",
        "            self.queue.clear()",
        (_PIPELINE_TESTS + "test_failures.py",),
    ),
    Fault(
        "a larger memory limit has a longer pipeline step",
        "ovpatch/planner/solver.py",
        "if problem.fits(solution.schedule))], key=_read_step)",
        "if not problem)], key=_read_step)",
        ("tests/test_cli_pipeline.py::test_more_memory_never_makes_a_solved_step_longer",),
    ),
    Fault(
        "a stage continues where its forward skipped a block of another one",
        _CUTTING + "stage_tree.py",
        "if index != (plan.due if plan.due < plan.low else plan.high):",
        "if False:",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "stages are compared in evaluation alone",
        _CUTTING + "cut_check.py",
        "    model.train()\n",
        "",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a stage sends transposed tensors",
        _CUTTING + "stage_tree.py",
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
        "a vote does not report that a rank leaves",
        _SHARDING + "agreement.py",
        "(outcome, vote.spans_groups, vote.tag, -vote.tag)",
        "(_AGREES, vote.spans_groups, vote.tag, -vote.tag)",
        (
            _SHARDING_TESTS
            + "test_local_afterwards.py::test_one_rank_alone_may_add_gradients_of_its_own",
        ),
    ),
    Fault(
        "a rank forgets the votes that it has left",
        _SHARDING + "agreement.py",
        "self._wait(*self._left.popleft(), vote)",
        "self._left.popleft()",
        (_SHARDING_TESTS + "test_step_votes.py",),
    ),
    Fault(
        "a rank that left a vote does not learn that its peers have ended the votes",
        _SHARDING + "agreement.py",
        "lambda: self.reason or max(",
        "lambda: max(",
        (_SHARDING_TESTS + "test_step_votes.py",),
    ),
    Fault(
        "a vote inherits the modes of the script",
        _SHARDING + "agreement.py",
        "            with outside_modes():\n                return self._all_reduce(vote)",
        "            if vote:\n                return self._all_reduce(vote)",
        (_SHARDING_TESTS + "test_modes.py",),
    ),
    Fault(
        "retention: the state of an optimizer that ends is not kept for a peer that ends later",
        _RPC + "retention.py",
        "                retain(self._group, owner, backwards, self)\n",
        "                retain(self._group, owner, 1, self)\n",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "a vote does not name its kind",
        _SHARDING + "vote_tags.py",
        'f"{kind} {shards.identity}"',
        'f"{shards.identity}"',
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "a vote does not name its parameters",
        _SHARDING + "sharded_optimizer.py",
        "(number, *sorted(sharded.index for sharded in params))",
        "(number,)",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "collectives go on when a host waits in vain for its peers",
        "ovpatch/overlap/comm/host_barrier.py",
        "if self._should_abort_collectives and group is not None:",
        "if False:",
        (
            "tests/overlap/test_gate.py::test_who_waits_in_vain_for_hosts_aborts_the_collectives_in_flight",
        ),
    ),
    Fault(
        "one failure is reported in each step",
        "ovpatch/overlap/comm/step_flags.py",
        "self._last_step = step\n        self._num_failed = 0",
        "self._last_step = step",
        (_DDP_TESTS + "test_failures.py::test_a_rank_whose_peer_lost_a_backward_hears_of_it",),
    ),
    Fault(
        "a rank whose backward failed raises for its peers",
        "ovpatch/overlap/comm/step_flags.py",
        "oldest.totals()[0] > 0 and not oldest.has_failed",
        "oldest.totals()[0] > 0",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "a failed backward raises no flag",
        _REDUCTION + "grad_reducer.py",
        "self._send_flags(failed=True)",
        "self._send_flags(failed=False)",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "inputs of a failed backward are reduced in the next one",
        _REDUCTION + "grad_reducer.py",
        "                sync.drop_inputs()\n        self._go_idle",
        "                pass\n        self._go_idle",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "a failed backward leaves gradients that are being reduced",
        _REDUCTION + "grad_sync.py",
        "bucket.detach_grads()",
        "pass",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "each rank has its own order of buckets",
        _REDUCTION + "bucket_assignment.py",
        "dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)",
        "pass",
        (_DDP_TESTS + "test_backward_styles.py",),
    ),
    Fault(
        "buckets leave out parameters that the first backward did not use",
        _REDUCTION + "bucket_assignment.py",
        "order = [*self.ready_order, *sorted(missing)]",
        "order = list(self.ready_order)",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "a bucket starts before its last gradient",
        _REDUCTION + "grad_sync.py",
        "lacking[self.started] == 0",
        "lacking[self.started] <= 1",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a failed step leaves shards in the groups",
        _SHARDING + "sharded_param.py",
        "            return function(*args, **kwargs)\n"
        "        finally:\n"
        "            for group, params in groups:\n"
        '                group["params"] = params\n'
        "    finally:\n",
        "            return function(*args, **kwargs)\n"
        "        except OSError:\n"
        "            raise\n"
        "        else:\n"
        "            for group, params in groups:\n"
        '                group["params"] = params\n'
        "    except OSError:\n",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "an interrupted step counts as running",
        _SHARDING + "sharded_optimizer.py",
        "            finally:\n                self._is_stepping = False",
        "            except OSError:\n                raise\n"
        "            else:\n                self._is_stepping = False",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "an interrupted step loses its update",
        _SHARDING + "sharded_optimizer.py",
        "            self._sync.keep_update()",
        "            pass",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "an interrupted update of state does not end",
        _SHARDING + "sharded_state.py",
        "        finally:\n"
        "            # Peers wait for the end of a version that has begun, whatever error ended "
        "the step.\n",
        "        except OSError:\n            raise\n        else:\n",
        (_SHARDING_TESTS + "test_state.py",),
    ),
    Fault(
        "a dropped model takes its shards along",
        _SHARDING + "sharded_grads.py",
        "weakref.finalize(self._reducer(), retention.retain, self.group, self._peers).atexit = "
        "False",
        "pass",
        (_SHARDING_TESTS + "test_local_afterwards.py",),
    ),
    Fault(
        "state that peers may read is dropped after one backward",
        _RPC + "retention.py",
        "retained.remaining_backwards -= 1",
        "retained.remaining_backwards = 0",
        (_SHARDING_TESTS + "test_same_work.py",),
    ),
    Fault(
        "a gradient that the script keeps is lost in the next backward",
        _SHARDING + "sharded_grads.py",
        "if self._is_own(grad) and grad is not self.params[index].grad",
        "if grad is None",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a read that is due before a backward is left out",
        _RPC + "retention.py",
        "retention.before_backward.pop()()",
        "retention.before_backward.pop()",
        (_SHARDING_TESTS + "test_state_dict.py",),
    ),
    Fault(
        "the host barrier opens one rank early",
        "ovpatch/overlap/comm/host_barrier.py",
        "return arrivals >= self._arrivals * self._world",
        "return arrivals >= self._arrivals * self._world - 1",
        ("tests/overlap/test_gate.py",),
    ),
    Fault(
        "a step does not wait for readers",
        _SHARDING + "sharded_state.py",
        'PeerRpc.for_group(self.group).call(self._topic, {"next step": self._next_step}, self._shards.holders.peers)',
        "pass",
        (
            _SHARDING_TESTS
            + "test_state.py::test_a_rank_that_has_read_leaves_its_peers_the_time_to_read_as_well",
        ),
    ),
    Fault(
        "parameters are gathered in the optimizer's order",
        _SHARDING + "param_sync.py",
        "sorted(params, key=lambda sharded: (models.index(sharded.shards), sharded.index))",
        "list(params)",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "a step overwrites parameters that another optimizer gathers",
        _SHARDING + "sharded_optimizer.py",
        "                    sharded_optimizer._sync.finish()",
        "                    pass",
        (_SHARDING_TESTS + "test_models.py",),
    ),
    Fault(
        "an unused parameter gets a gradient of zeros",
        _REDUCTION + "usage_map.py",
        "if total == 0)",
        "if total < 0)",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "the usage map is never cleared",
        _REDUCTION + "usage_map.py",
        "self._used = [0] * len(self._used)",
        "pass",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a static graph does not learn its counts",
        _REDUCTION + "grad_reducer.py",
        "self.static_graph = StaticGraph(counts, unused, self.usage.is_uniform)",
        "self.static_graph = StaticGraph([1] * len(counts), unused, self.usage.is_uniform)",
        (_DDP_TESTS + "test_failures.py",),
    ),
    Fault(
        "gradients added under no_sync count as reduced",
        _REDUCTION + "grad_reducer.py",
        "second one through the same output.\n            self.sharder.is_local = True",
        "second one through the same output.\n            self.sharder.is_local = False",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "a microbatch is added to a lazy gradient",
        _SHARDING + "sharded_grads.py",
        "if self.has_lazy_grads and self.is_lazy(index):",
        "if False:",
        (_SHARDING_TESTS + "test_loop_styles.py",),
    ),
    Fault(
        "hooks on nodes change gradients that wait for their bucket",
        _REDUCTION + "grad_hooks.py",
        "if sum(map(len, self._node_tables)) > len(self._handles) + len(self._prehook_handles):",
        "if False:",
        (_DDP_TESTS + "test_foreign_hands.py::test_what_they_do_counts_as_under_stock",),
    ),
    Fault(
        "a staged gradient is no copy",
        _SHARDING + "sharded_bucket.py",
        "self._make_rows(i, self.params[i].grad).clone()",
        "self._make_rows(i, self.params[i].grad)",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "a gradient whose memory the script holds is not filled",
        _SHARDING + "sharded_bucket.py",
        "states[index] = GradState.ALIASED",
        "states[index] = GradState.SHARDED",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a gradient is read that the running backward has freed",
        _SHARDING + "sharded_grads.py",
        "if self._grads.states[index] is GradState.IN_FLIGHT:",
        "if False:",
        (_SHARDING_TESTS + "test_in_flight.py",),
    ),
    Fault(
        "the transport of parameters is chosen after the update",
        _SHARDING + "sharded_optimizer.py",
        "        if self._sync.copy_places:\n            self._sync.choose_transport()",
        "        pass",
        (
            _SHARDING_TESTS
            + "test_copy_engines.py::test_ranks_choose_the_transport_before_they_update",
        ),
    ),
    Fault(
        "the owner of moved state does not wait for its readers",
        _SHARDING + "sharded_optimizer.py",
        "                state.note_read()",
        "                pass",
        (
            _SHARDING_TESTS
            + "test_whole_parameters.py::test_a_rank_that_owns_all_moved_state_waits_for_its_readers",
        ),
    ),
    Fault(
        "updates by another owner are no writes",
        _SHARDING + "owned_state.py",
        "[self._writes.get(sharded.index, 1) for sharded in foreign]",
        "[0] * len(foreign)",
        (_SHARDING_TESTS + "test_whole_parameters.py",),
    ),
    Fault(
        "a main parameter misses the script's writes",
        _SHARDING + "main_params.py",
        "            self._refresh_main(mains, roundings)",
        "            pass",
        (_SHARDING_TESTS + "test_main_params.py",),
    ),
    Fault(
        "a gradient that was read is clipped without its shard",
        _SHARDING + "clip_grad.py",
        "model.reduced_shard(index).copy_(model.local_shard(index))",
        "pass",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
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
        _CUTTING + "stage_tree.py",
        "else self._copy(child, plan, made)",
        "else None",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a stage fails where a tower's forward depends on values",
        _CUTTING + "stage_tree.py",
        "                self._twin = _make_twin(self._shell, device)\n",
        "                raise\n",
        (_CUTTING_TESTS,),
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
        "groups.start([lambda: sum_within(shards, inputs), sum_across])",
        "groups.start([lambda: sum_within(shards, inputs)])",
        ("tests/hosts/test_shards.py",),
    ),
    Fault(
        "sums over hosts stay in one lane",
        "ovpatch/overlap/comm/hosts.py",
        "groups.start([lambda: sum_within(tensors), sum_across, gather])",
        "groups.start([lambda: sum_within(tensors), sum_across])",
        ("tests/hosts/test_reductions.py",),
    ),
    Fault(
        "the shards of each host count in norms",
        _SHARDING + "clip_grad.py",
        "if not shards.holders.is_first:",
        "if False:",
        ("tests/hosts/test_shards.py",),
    ),
    Fault(
        "a rank reads state from other hosts",
        _SHARDING + "sharded_state.py",
        "call(self._topic, arguments, holders.peers)",
        "call(self._topic, arguments)",
        ("tests/hosts/test_shards.py",),
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
        "errors name no hosts",
        "ovpatch/overlap/comm/consensus.py",
        "if len(set(identifiers)) < 2:",
        "if True:",
        ("tests/hosts/test_errors.py",),
    ),
)
