"""The faults in ``ovpatch/overlap/data_parallel/``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_REDUCTION: Final = "ovpatch/overlap/data_parallel/"
_DDP_TESTS: Final = "tests/plugins/ddp/"
_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"

FAULTS: Final = (
    Fault(
        "gradients of DTensors under DistributedDataParallel arrive at the end of the backward",
        "ovpatch/overlap/data_parallel/mesh_grads.py",
        "            node._set_sequence_nr(_NEARLY_LAST)",
        "            pass",
        ("tests/plugins/tp_linear/test_contract.py",),
    ),
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
        "a gradient is added twice",
        _REDUCTION + "fp32_accumulation.py",
        "found.total.add_(added)",
        "found.total.add_(added, alpha=2)",
        (_DDP_TESTS + "test_sums_in_fp32.py",),
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
        "            self._task.queue_callback(self._on_task_ended, self._on_task_died)\n"
        "            # `torch.autograd.grad` passes the output as well, and accumulates nothing.\n"
        "            has_experts = self.facts.has_experts\n"
        "            nodes = self.owner.find_nodes(self.hooks) if has_experts else self.hooks.nodes\n"
        "            if will_accumulate(nodes) and self.state is ReducerState.ARMED:\n"
        "                self._begin_backward()\n",
        "            if will_accumulate(self.hooks.nodes):\n                self._join_backward()\n",
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
        "one contribution more is expected than declared",
        _REDUCTION + "grad_sync.py",
        "self.expected[index] = before + count",
        "self.expected[index] = before + count + 1",
        (_DDP_TESTS + "test_declared.py",),
    ),
    Fault(
        "a gradient is a view of the flat tensor of its bucket",
        _REDUCTION + "grad_bucket.py",
        "_write_grad(self.params[i], view, is_shared=True)",
        "_write_grad(self.params[i], view, is_shared=False)",
        ("tests/overlap/test_buckets.py", "tests/overlap/test_buckets_in_place.py"),
    ),
    Fault(
        "the memory of a copied gradient counts as saved",
        _REDUCTION + "grad_bucket.py",
        "self.saved_nbytes -= target.nbytes",
        "pass",
        ("tests/plugins/ddp/test_saved_memory.py",),
    ),
    Fault(
        "hooks are attached to a frozen parameter that autograd refuses to train",
        _REDUCTION + "grad_hooks.py",
        "for param in frozen if _is_refused(param)]",
        "for param in ()]",
        ("tests/plugins/dist_optimizer/test_changed_parameters.py",),
    ),
    Fault(
        "a frozen parameter gets data of another dtype while hooks are attached",
        _REDUCTION + "grad_hooks.py",
        "dtype = data.dtype if is_differentiable(data) else torch.float32",
        "dtype = torch.float32",
        ("tests/plugins/dist_optimizer/test_changed_parameters.py",),
    ),
    Fault(
        "modules that come later are not seen",
        _REDUCTION + "grad_hooks.py",
        "(any(self._leaf_tables) or self._list_children(model) != self._children)",
        "not self._children",
        (_DDP_TESTS + "test_foreign_hands.py",),
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
        "over links, each small gradient is a message next to a large one",
        _REDUCTION + "bucket_assignment.py",
        "if not (self.sharder.sharded or self.sends_each):",
        "if not self.sharder.sharded:",
        ("tests/overlap/test_layout.py",),
    ),
    Fault(
        "hosts have the buckets of one host",
        _REDUCTION + "grad_reducer.py",
        "len(config.layout.ranks) > 1,",
        "False,",
        ("tests/hosts/test_reductions.py",),
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
        "hooks on nodes change gradients that wait for their bucket",
        _REDUCTION + "grad_hooks.py",
        "if sum(map(len, self._node_tables)) > len(self._handles) + len(self._prehook_handles):",
        "if False:",
        (_DDP_TESTS + "test_foreign_hands.py::test_hooks_on_nodes_act_as_in_stock_pytorch",),
    ),
)
