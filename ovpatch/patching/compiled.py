"""Code that torch.compile made before a patch came or went."""

from __future__ import annotations

import sys


def forget_compiled_code() -> None:
    """Make compiled functions compile again at their next call.

    Dynamo does not guard on methods of library classes: a graph traced before ``apply()`` would go on without the
    patch, and one traced before ``revert()`` with it, in either case silently.
    """
    dynamo = sys.modules.get("torch._dynamo")
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None or convert_frame is None or getattr(dynamo.__spec__, "_initializing", False):
        return
    if not convert_frame.input_codes.seen:
        return
    dynamo.reset_code_caches()
