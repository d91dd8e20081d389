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
    """What became of a program on one rank.

    Attributes:
        difference: The worst ones as a table, with both runs' exceptions; "" if there is none.
        error: Stock's exception, if it raised one.
        counters: What the features did.
    """

    difference: str
    error: str
    counters: Mapping[str, int]


def run_both(text: str, floor: float) -> Outcome:
    """Run a program stock, then patched.

    Args:
        text: The program. ``see(name, value)`` records; ``ovpatch.apply()`` and ``revert()`` do nothing under stock.
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
    """Do what :func:`_run` does, under stock; a program that hangs has this name in its stack."""
    return _run(text, _STOCK)


def _run(text: str, package: Any) -> tuple[dict[str, Any], str]:
    """Return what one run of a program shows, and the exception that ended it, as text."""
    torch.manual_seed(0)
    # Otherwise the second run would find the code of the first one, and count it.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    records: dict[str, Any] = {"error": None}
    error_text = ""

    def see(name: str, value: Any) -> None:
        records[f"{len(records)} {name}"] = _copied(value)

    module = sys.modules["program"] = types.ModuleType("program")  # where pickle and options find its classes
    vars(module).update(ovpatch=package, see=see)
    try:
        exec(compile(text, "program", "exec"), vars(module))
    except Exception as error:  # noqa: BLE001 - whatever a program raises is to be raised by both
        # Ours derive from stock's.
        records["error"] = next(cls.__name__ for cls in type(error).__mro__ if not cls.__module__.startswith("ovpatch"))
        error_text = f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__, limit=-8))}"
        error.__traceback__ = None  # its frames hold the model
    package.revert()
    del sys.modules["program"]
    vars(module).clear()
    gc.collect()  # the next run shall not meet this one's model
    dist.barrier()
    return records, error_text


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(one) for one in value]
    return value


def _counters() -> dict[str, int]:
    from ovpatch_plugins.ddp.ddp_report import COUNTERS
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS as SHARDED

    return COUNTERS.as_dict() | SHARDED.as_dict()
