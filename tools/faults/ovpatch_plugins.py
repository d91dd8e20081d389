"""The faults in the features without an own module."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_COMPILED_TESTS: Final = "tests/plugins/test_compiled.py"

FAULTS: Final = (
    Fault(
        "a static graph queues its callback for a reducer that does not know it",
        "plugins/ovpatch_plugins/ddp/ddp_attach.py",
        "            ddp._static_graph_delay_allreduce_enqueued = True\n",
        "            pass\n",
        ("tests/plugins/ddp/test_takeover.py",),
    ),
    Fault(
        "schedule auto chooses a forward that autocast keeps from running",
        "plugins/ovpatch_plugins/tp_linear/shared_all_gather.py",
        "can_split = dtype is x.dtype",
        "can_split = True",
        ("tests/plugins/tp_linear/test_auto_choices.py",),
    ),
    Fault(
        "Dynamo compiles the experts' counters",
        "plugins/ovpatch_plugins/pipe_experts/huggingface_experts.py",
        "@torch._disable_dynamo\ndef compute_experts(",
        "def compute_experts(",
        (_COMPILED_TESTS,),
    ),
    Fault(
        "Dynamo compiles the functions of Megatron's linears by themselves",
        "plugins/ovpatch_plugins/megatron/linears.py",
        "        if not torch.compiler.is_compiling() and _get_dynamo_callback() is None:\n",
        "        if not torch.compiler.is_compiling():\n",
        (_COMPILED_TESTS,),
    ),
    Fault(
        "the positions of experts belong to a mode of the script",
        "plugins/ovpatch_plugins/pipe_experts/routing.py",
        "    with outside_modes():\n        return torch.tensor(plan",
        "    with torch.no_grad():\n        return torch.tensor(plan",
        ("tests/plugins/pipe_experts/test_modes.py",),
    ),
    Fault(
        "a product that was computed ahead outlives a change of its weight",
        "plugins/ovpatch_plugins/tp_linear/precomputed.py",
        "if (_version(pending.weight), _version(pending.bias)) != pending.versions:",
        "if False:",
        ("tests/plugins/tp_linear/test_shared.py",),
    ),
)
