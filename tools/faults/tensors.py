"""The faults in ``ovpatch/overlap/tensors/``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"

FAULTS: Final = (
    Fault(
        "a reader finds parameters that are stale",
        "ovpatch/overlap/tensors/pending_param.py",
        "param.__class__ = PendingParameter",
        "pass",
        ("tests/overlap/test_pending_readers.py",),
    ),
    Fault(
        "C++ functions compute with the zero of a lazy gradient",
        "ovpatch/overlap/tensors/read_hooks.py",
        "                    fetch(values)\n",
        "",
        (_SHARDING_TESTS + "test_reads_in_cpp.py",),
    ),
    Fault(
        "C++ functions that no hook sees compute with zeros",
        "ovpatch/overlap/tensors/lazy_tensor.py",
        "math.nan if has_nan else 0",
        "0",
        (_SHARDING_TESTS + "test_reads_in_cpp.py",),
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
        "a source of lazy tensors fetches without its lock",
        "ovpatch/overlap/tensors/lazy_tensor.py",
        "guards.enter_context(source.reading())",
        "pass",
        ("tests/overlap/test_placeholders.py",),
    ),
    Fault(
        "a shard ends one element early",
        "ovpatch/overlap/tensors/shard.py",
        "min((rank + 1) * size, numel)",
        "min((rank + 1) * size - 1, numel)",
        (_SHARDING_TESTS + "test_loops.py",),
    ),
    Fault(
        "state that a capsule or a graph holds gets other memory",
        "ovpatch/overlap/tensors/tensor_memory.py",
        "        and use_count(tensor) == 1\n",
        "",
        (_SHARDING_TESTS + "test_held_state.py",),
    ),
    Fault(
        "shards are put together in another order",
        "ovpatch/overlap/tensors/shard.py",
        "own = ranges[rank]",
        "own = ranges[-1 - rank]",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
)
