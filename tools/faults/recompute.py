"""The faults in the feature ``recompute``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_RECOMPUTE: Final = "plugins/ovpatch_plugins/recompute/"
_REPEATED_TESTS: Final = "tests/plugins/recompute/test_repeated.py::"

FAULTS: Final = (
    Fault(
        "a recomputation counts on from what the forward left",
        _RECOMPUTE + "forward_state.py",
        "self.write({name: _strengthen(value) for name, value in self.before.items()})",
        "pass",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputation draws the next numbers of a generator",
        _RECOMPUTE + "forward_state.py",
        "for stream, state in self._streams:",
        "for stream, state in self._streams[:0]:",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputation with other values passes for the forward",
        _RECOMPUTE + "recomputation.py",
        "if _digest(tensor) != then:",
        "if False:",
        (_REPEATED_TESTS + "test_state_out_of_reach_is_an_error",),
    ),
    Fault(
        "a kept output that was changed in place through a linear's view is used again",
        _RECOMPUTE + "selective.py",
        "elif func is _UNSAFE_VIEW:",
        "elif func is None:",
        ("tests/plugins/recompute/test_exact.py::test_a_kept_output_that_was_changed_is_an_error",),
    ),
    Fault(
        "a recomputation calls the hooks inside of its block again",
        _RECOMPUTE + "forward_wrap.py",
        "if hooked := _find_hook(block, modules):",
        'if hooked := "":',
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputed block keeps its last call alive",
        _RECOMPUTE + "forward_state.py",
        "return _Weak(weakref.ref(value))",
        "return value",
        (_REPEATED_TESTS + "test_a_call_does_not_keep_the_previous_one",),
    ),
    Fault(
        "each optimizer looks for its model again",
        _RECOMPUTE + "recompute_attach.py",
        " - seen\n",
        "\n",
        (_REPEATED_TESTS + "test_optimizers_find_their_models_without_a_walk",),
    ),
    Fault(
        "graphs guard on a block's name",
        "plugins/ovpatch_plugins/recompute/recompute_attach.py",
        "mark: Mark = granularity, tuple(keep),",
        "mark: Mark = granularity, (*keep, block.name)[: len(keep) + 1],",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "a recomputation starts from the tensors of a container as the forward has left them",
        "plugins/ovpatch_plugins/recompute/forward_state.py",
        "    return _Clone(clones[id(value)]) if id(value) in clones else value\n",
        "    return value\n",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputation does not follow the variables of closures",
        _RECOMPUTE + "outside_state.py",
        "self._visit_all(_read_closure(function))",
        "_read_closure(function)",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputation restores generators that code names in few calls only",
        _RECOMPUTE + "recomputation.py",
        "is_power_of_two or kept.get(_NAMES_GENERATORS)",
        "is_power_of_two",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputation that counts twice gives no warning",
        _RECOMPUTE + "outside_state.py",
        "if now.get(key) is not before.get(key) and now.get(key) != before.get(key):\n",
        "if not place:\n",
        (_REPEATED_TESTS + "test_a_number_that_is_counted_twice_gives_a_warning",),
    ),
    Fault(
        "a recomputation draws the next numbers of a generator outside of its modules",
        _RECOMPUTE + "forward_state.py",
        "            if not _is_same_state(state, stream.read()):\n",
        "            if not stream:\n",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a recomputation cuts the graph of a tensor in a container of which another tensor changes",
        "plugins/ovpatch_plugins/recompute/forward_state.py",
        "for i, clone in self._clones[name].items() if i in changed}",
        "for i, clone in self._clones[name].items()}",
        (_REPEATED_TESTS + "test_each_part_has_the_bits_of_torch",),
    ),
    Fault(
        "a compiled block that changes a tensor in place is recomputed in its graph",
        "plugins/ovpatch_plugins/recompute/forward_wrap.py",
        "    if _changes_inputs():\n",
        "    if False:\n",
        (_REPEATED_TESTS + "test_compiled_parts_have_the_bits_of_torch",),
    ),
)
