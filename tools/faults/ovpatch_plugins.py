"""The faults in the features without an own module."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

FAULTS: Final = (
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
