"""The faults in the feature ``pipeline``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_PIPELINE: Final = "plugins/ovpatch_plugins/pipeline/"
_PIPELINE_TESTS: Final = "tests/plugins/pipeline/"
_CUTTING: Final = "plugins/ovpatch_plugins/pipeline/cutting/"
_CUTTING_TESTS: Final = "tests/plugins/pipeline/test_cut.py"
_BOUNDARY_TESTS: Final = "tests/plugins/pipeline/test_cut_boundaries.py"

FAULTS: Final = (
    Fault(
        "a pipeline does not report options that do nothing for its schedule",
        _PIPELINE + "pipeline_attach.py",
        "        if options[name] != defaults[name]",
        "        if options[name] is defaults",
        (
            "tests/test_unusable_options.py::test_an_option_that_does_not_fit_a_schedule_is_a_remark",
        ),
    ),
    Fault(
        "a plain chain of traced stages is left to torch",
        _PIPELINE + "pipeline_attach.py",
        "reader for user in users if user.target is operator.getitem for reader in user.users",
        "reader for user in users for reader in user.users",
        (_PIPELINE_TESTS + "test_traced.py",),
    ),
    Fault(
        "a pipeline scales gradients whose order has no REDUCE_GRAD",
        _PIPELINE + "pipeline_attach.py",
        "is_reduced=lowered.reductions is None or info.number in lowered.reductions",
        "is_reduced=True",
        (_PIPELINE_TESTS + "test_order_sources.py",),
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
        "a stage continues where its forward skipped a block of another one",
        _CUTTING + "stage_tree.py",
        "if index != (plan.due if plan.due < plan.low else plan.high):",
        "if False:",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "a stage computes on changed tensors instead of the received ones",
        _CUTTING + "cut_check.py",
        "            if not _is_unchanged(_read_leaf((args, kwargs), place), tensor, version):",
        "            if False:",
        (_BOUNDARY_TESTS,),
    ),
    Fault(
        "a stage sends tensors that were changed after its last block",
        _CUTTING + "cut_check.py",
        "            if not _is_unchanged(_read_leaf(inputs, place), tensor, version):",
        "            if False:",
        (_BOUNDARY_TESTS,),
    ),
    Fault(
        "a stage computes on tensors that were written after they had arrived",
        _CUTTING + "cut_check.py",
        "given is tensor and _read_version(given) == version",
        "given is tensor",
        (_BOUNDARY_TESTS,),
    ),
    Fault(
        "a stage runs its first block before the received tensors have arrived",
        _CUTTING + "cut_check.py",
        "if self._plan.due != self._plan.low:",
        "if False:",
        (_BOUNDARY_TESTS,),
    ),
    Fault(
        "a compiled block stays watched after the forward",
        _CUTTING + "cut_check.py",
        "        if own.get(_CALL) is self:\n",
        "        if False:\n",
        (_BOUNDARY_TESTS,),
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
        "            state.restore()\n            restore_random()\n",
        "            restore_random()\n",
        (_CUTTING_TESTS,),
    ),
    Fault(
        "the inference of shapes draws from the streams of Python and NumPy",
        _CUTTING + "cut_schedule.py",
        "            state.restore()\n            restore_random()\n",
        "            state.restore()\n",
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
        "a stage with Ws computes its weight gradients in B",
        _PIPELINE + "runtime/stage.py",
        "not (self._options.sends or splits)",
        "not self._options.sends",
        (_PIPELINE_TESTS + "test_exact.py::test_each_class_and_each_order",),
    ),
)
