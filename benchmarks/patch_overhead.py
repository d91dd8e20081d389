"""What the patch layer costs: time added to ``import torch``, and to each call through an enabled wrap.

    python benchmarks/patch_overhead.py [--json FILE] [--rounds N]

Start-up is measured in fresh interpreters that take turns: stock, ovpatch after torch, ovpatch before torch. CPU time
is compared, because the wall time of an import varies by more than the budget on a busy machine; both are printed.
Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
import types
from pathlib import Path
from typing import Any

IMPORT_BUDGET_MS = 50.0
CALL_BUDGET_NS = 500.0

_APPLY = "import ovpatch; ovpatch.apply()"
_ORDERS = {
    "stock": "import torch",
    "torch, then ovpatch": f"import torch; {_APPLY}",
    "ovpatch, then torch": f"{_APPLY}; import torch",
}
_PROGRAM = """
import time
wall, cpu = time.perf_counter(), time.process_time()
{body}
print((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
"""
_CALLS = 100_000


def measure_imports(rounds: int) -> dict[str, Any]:
    """Return medians in ms of each order, and its difference to the stock one.

    Args:
        rounds: Fresh interpreters per order.
    """
    times: dict[str, list[tuple[float, float]]] = {order: [] for order in _ORDERS}
    for _ in range(rounds + 1):
        for order, body in _ORDERS.items():
            times[order].append(_run(body))
    walls = {order: statistics.median(wall for wall, _ in runs[1:]) for order, runs in times.items()}
    cpus = {order: statistics.median(cpu for _, cpu in runs[1:]) for order, runs in times.items()}
    added = {order: cpus[order] - cpus["stock"] for order in _ORDERS if order != "stock"}
    added_wall = {order: walls[order] - walls["stock"] for order in _ORDERS if order != "stock"}
    return {"wall_ms": walls, "cpu_ms": cpus, "added_cpu_ms": added, "added_wall_ms": added_wall, "rounds": rounds}


def _run(body: str) -> tuple[float, float]:
    # As installed: without settings, and with bytecode kept, which the first round (not counted) writes.
    dropped = ("OVPATCH", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    command = [sys.executable, "-c", _PROGRAM.format(body=body)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    wall, cpu = map(float, output.split())
    return wall, cpu


def measure_calls(rounds: int) -> dict[str, Any]:
    """Return medians in ns per call of several ways to call, stock and through an enabled wrap.

    Args:
        rounds: Turns of each, stock and patched by turns.
    """
    from ovpatch.patching import PatchManager

    module = types.ModuleType("ovpatch_overhead_target")
    source = "def f(x): return x\nclass C:\n    def method(self, x): return x\nclass Heir(C): pass"
    exec(source, module.__dict__)
    sys.modules[module.__name__] = module

    def spelled_out(original: Any) -> Any:
        return lambda x: original(x)

    def spelled_out_method(original: Any) -> Any:
        return lambda self, x: original(self, x)

    def passed_on(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs)

    cases = {
        "function": ("f", "f(1)", spelled_out),
        "method": ("C.method", "c.method(1)", spelled_out_method),
        "method, (*args, **kwargs)": ("C.method", "c.method(1)", passed_on),
        "method, keyword": ("C.method", "c.method(x=1)", passed_on),
        "inherited method": ("Heir.method", "h.method(1)", spelled_out_method),
    }
    results = {}
    for name, (path, statement, wrap) in cases.items():
        manager = PatchManager()
        manager.register_patch(f"{module.__name__}.{path}", wrap=wrap)
        stock, patched = [], []
        for _ in range(rounds):
            stock.append(_time(statement, module))
            with manager.applied():
                patched.append(_time(statement, module))
        medians = statistics.median(stock), statistics.median(patched)
        results[name] = {"stock_ns": medians[0], "patched_ns": medians[1], "added_ns": medians[1] - medians[0]}
    del sys.modules[module.__name__]
    return {"cases": results, "rounds": rounds, "calls": _CALLS}


def _time(statement: str, module: types.ModuleType) -> float:
    names = {"f": module.f, "c": module.C(), "h": module.Heir()}
    # CPU time of this thread: other work on the machine must not count.
    return timeit.timeit(statement, globals=names, number=_CALLS, timer=time.thread_time) / _CALLS * 1e9


def main() -> int:
    """Measure, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=11, help="fresh interpreters per order (default 11)")
    arguments = parser.parse_args()

    calls, imports = measure_calls(31), measure_imports(arguments.rounds)
    worst_import = max(imports["added_cpu_ms"].values())
    worst_call = max(case["added_ns"] for case in calls["cases"].values())
    print(f"import torch: {imports['cpu_ms']['stock']:.0f} ms CPU, {imports['wall_ms']['stock']:.0f} ms wall")
    for order, added in imports["added_cpu_ms"].items():
        wall = imports["added_wall_ms"][order]
        print(f"  {order:28} +{added:6.1f} ms CPU, {wall:+7.1f} ms wall   (budget {IMPORT_BUDGET_MS:.0f} ms)")
    print("a call through an enabled wrap")
    for name, case in calls["cases"].items():
        print(
            f"  {name:28} +{case['added_ns']:6.0f} ns over {case['stock_ns']:.0f} ns   (budget {CALL_BUDGET_NS:.0f} ns)"
        )
    good = worst_import <= IMPORT_BUDGET_MS and worst_call <= CALL_BUDGET_NS
    print("within budget" if good else "OVER BUDGET")
    if arguments.json:
        arguments.json.write_text(json.dumps(_record(imports, calls, good), indent=2) + "\n")
    return 0 if good else 1


def _record(imports: dict[str, Any], calls: dict[str, Any], good: bool) -> dict[str, Any]:
    import torch

    return {
        "imports": imports,
        "calls": calls,
        "budget": {"import_ms": IMPORT_BUDGET_MS, "call_ns": CALL_BUDGET_NS, "kept": good},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


if __name__ == "__main__":
    sys.exit(main())
