"""A program that traces one steady training step as rank 0 of two, on torch's ``fake`` backend in one process.

    python -m tests.support.step_trace ddp                    # prints a trace as JSON
    python -m tests.support.step_trace ddp dist_optimizer

Importing ``fake_pg`` registers that backend. There is no peer, so the trace has no waiting, no device code and no
chance in it. Sums of flags are doubled, as if a peer had raised the same ones; otherwise no gradient would be sharded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.nn.parallel import DistributedDataParallel

#: Steps before the traced one: buckets and sharding have settled, and no periodic flags are due in it.
_WARM_UP_STEPS: Final = 24

#: Python 3.12 runs these in the frame of their function, so they do not count in earlier versions either.
_INLINED: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})

_ENTER_GENERATOR: Final = contextlib._GeneratorContextManager.__enter__.__code__


def _list_roots() -> list[str]:
    import ovpatch
    import ovpatch_plugins

    return [
        f"{path}{os.sep}" for package in (ovpatch, ovpatch_plugins) for path in package.__path__
    ]


class Calls:
    """The calls of functions of ovpatch and its plugins, while the object is the profiler of all threads.

    Attributes:
        found: File, function and first line of each call.
        generators: The functions of ovpatch that ``contextlib`` made context managers of, for each entry of one.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []
        self.generators: list[str] = []
        self._roots = _list_roots()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in _INLINED:
            return
        if code is _ENTER_GENERATOR:
            entered = frame.f_locals["self"].gen.gi_code
            if entered.co_filename.startswith(tuple(self._roots)):
                self.generators.append(entered.co_name)
        # The wrappers of patches have the globals of the wrapped function, so the file decides.
        for root in self._roots:
            if code.co_filename.startswith(root):
                file = os.path.relpath(code.co_filename, os.path.dirname(root.rstrip(os.sep)))
                # Python 3.10 has no co_qualname. The line distinguishes functions of one name.
                self.found.append(
                    (file, getattr(code, "co_qualname", code.co_name), code.co_firstlineno)
                )


def _double_flags() -> None:
    """Add the flags of a peer, equal to the flags of this rank, to each sum of integers."""
    original = dist.ProcessGroup.allreduce

    def allreduce(self: dist.ProcessGroup, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        work = original(self, tensors, options)
        if options.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                if tensor.dtype is torch.int32:
                    tensor.mul_(2)
        return work

    dist.ProcessGroup.allreduce = allreduce


def _count_norms() -> int:
    import ovpatch

    return ovpatch.report()["dist_optimizer"].counters.get("norms", 0)


def trace(*features: str) -> dict[str, Any]:
    """Return the calls of a steady step, with proof of its work.

    Args:
        *features: The features that are on.

    Returns:
        ``calls``: file, function and first line of each call, in order. ``grads``: the classes of the gradients after
        backward. ``counters``: by feature, how much each counter has grown in the step. ``generators``: the functions
        whose generators were context managers of a step that also scales, unscales and clips. ``norms``: how many
        norms ``dist_optimizer`` has summed in this step.
    """
    import ovpatch

    ovpatch.apply(
        *features, options={"dist_optimizer": {"min_param_numel": 1}} if len(features) > 1 else {}
    )
    # torch's own FakeStore keeps nothing, and peers find each other by the store.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    _double_flags()
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    )
    optimizer, inputs = torch.optim.AdamW(model.parameters(), 1e-3), torch.randn(4, 8)
    params = list(model.parameters())

    def step() -> list[str]:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        classes = [type(param.grad).__name__ for param in params]
        optimizer.step()
        return classes

    for _ in range(_WARM_UP_STEPS):
        step()
    # A collection would call finalizers of earlier steps.
    gc.collect()
    gc.disable()
    before = {feature: dict(ovpatch.report()[feature].counters) for feature in features}
    with Calls() as calls:
        classes = step()
    after = {feature: ovpatch.report()[feature].counters for feature in features}
    grown = {
        feature: {name: after[feature][name] - count for name, count in before[feature].items()}
        for feature in features
    }
    with Calls() as again:
        step()
    scaler = torch.amp.GradScaler("cpu")

    def scaled_step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    scaled_step()
    norms = _count_norms()
    with Calls() as scaled:
        scaled_step()
    return {
        "calls": calls.found,
        "generators": scaled.generators,
        "norms": _count_norms() - norms,
        "grads": classes,
        "counters": grown,
        "is_steady": calls.found == again.found,
    }


if __name__ == "__main__":
    print(json.dumps(trace(*sys.argv[1:])), flush=True)
    # An ordinary exit would wait for the peer.
    os._exit(0)
