"""Runs a program of ``tools/fuzz.py`` on a rank, stock and patched, and compares what it shows."""

from __future__ import annotations

import gc
import sys
import traceback
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch._dynamo
import torch.distributed as dist

import ovpatch
from ovpatch.insight.equality import Verdict
from tests.support.equality import Comparison, compare

#: Takes the place of ``ovpatch`` in the stock run.
_STOCK: Final = types.SimpleNamespace(apply=lambda *_, **__: None, revert=lambda: None)

_OTHER_BUCKETS: Final = "kwargs['bucket_cap_mb'] = 1e-4 if kwargs.get('bucket_cap_mb', 25) > 1 else 100\nmodel = DDP("


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program on a rank.

    Attributes:
        difference: The worst ones as a table, with both runs' exceptions; "" if there is none.
        error: The exception of the stock run, or "".
        counters: What the features did.
    """

    difference: str
    error: str
    counters: Mapping[str, int]


def run_both(text: str, floor: float) -> Outcome:
    """Run a program stock, then patched.

    Args:
        text: The program. ``see(name, value)`` records; ``ovpatch.apply()`` and ``revert()`` do nothing in stock.
        floor: A difference that is allowed; 0 demands the same bits.
    """
    warnings.simplefilter("ignore")
    stock, stock_error = run_stock(text)
    before = _counters()
    patched, patched_error = _run(text, ovpatch)
    counters = {name: value - before[name] for name, value in _counters().items()}
    compared = compare(stock, patched, floor=floor)
    if compared.verdict is not Verdict.BITWISE and dist.get_world_size() > 2:
        # The order of sums is another one; so it is between stock and stock with other buckets.
        reordered, _ = run_stock(text.replace("model = DDP(", _OTHER_BUCKETS, 1))
        compared = compare(stock, patched, reordered=reordered, floor=max(floor, 1e-6))
        floor = max(floor, 1e-6)
    difference = _describe(compared, exact=not floor)
    if difference:
        difference += f"\n\nstock raises: {stock_error or 'nothing'}\n\npatched raises: {patched_error or 'nothing'}"
    return Outcome(difference, stock_error.partition("\n")[0], counters)


def _describe(compared: Comparison, *, exact: bool) -> str:
    try:
        (compared.assert_bitwise if exact else compared.assert_equal)()
    except AssertionError as error:
        return str(error)
    return ""


def run_stock(text: str) -> tuple[dict[str, Any], str]:
    """Call :func:`_run` for the stock run; a program that hangs has this name in its stack."""
    return _run(text, _STOCK)


def _run(text: str, package: Any) -> tuple[dict[str, Any], str]:
    """Return the records of a run of a program, and the text of the exception that ended it."""
    torch.manual_seed(0)
    # Otherwise the second run would find the code of the first one, and count it.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    records: dict[str, Any] = {"error": None}
    error_text = ""

    def see(name: str, value: Any) -> None:
        records[f"{len(records)} {name}"] = _copied(value)

    # Pickle and options find the classes of the program in this module.
    module = sys.modules["program"] = types.ModuleType("program")
    vars(module).update(ovpatch=package, see=see)
    try:
        exec(compile(text, "program", "exec"), vars(module))
    except Exception as error:  # noqa: BLE001 - both runs must raise the same
        # The errors of ovpatch derive from torch's.
        records["error"] = next(cls.__name__ for cls in type(error).__mro__ if not cls.__module__.startswith("ovpatch"))
        error_text = f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__, limit=-8))}"
        error.__traceback__ = None  # its frames hold the model
    package.revert()
    del sys.modules["program"]
    vars(module).clear()
    # The next run must not meet the model of this run.
    gc.collect()
    dist.barrier()
    return records, error_text


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value


def _counters() -> dict[str, int]:
    from ovpatch_plugins.ddp.report import COUNTERS
    from ovpatch_plugins.dist_optimizer.report import COUNTERS as SHARDED

    return COUNTERS.as_dict() | SHARDED.as_dict()
