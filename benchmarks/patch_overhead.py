"""The cost of the patch layer: time added to ``import torch``, to the first step, and to each call through a wrap.

    python -m benchmarks.patch_overhead [--json FILE] [--rounds N]

Start-up is measured in fresh interpreters that take turns: stock, ovpatch after torch, ovpatch before torch. CPU time
is compared, the least of all rounds, since other work on the machine only adds to it; wall time is printed, too.
A first step runs on two gloo ranks: wrap a model, then forward, backward, step and a read of the parameters.
Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import types
from pathlib import Path
from typing import Any

IMPORT_BUDGET_MS = 35.0
STEP_BUDGET_MS = 200.0
CALL_BUDGET_NS = 500.0

_APPLY = "import ovpatch; ovpatch.apply()"
# The code before the measured part, and the measured part.
_ORDERS = {
    "stock": ("", "import torch"),
    "torch, then ovpatch": ("import torch", _APPLY),
    "ovpatch, then torch": ("", f"{_APPLY}; import torch"),
}
_PROGRAM = """
import time
{before}
wall, cpu = time.perf_counter(), time.process_time()
{body}
print((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
"""
_FIRST_STEPS = {
    "stock": "",
    "ddp": "import ovpatch; ovpatch.apply('ddp')",
    "ddp, dist_optimizer": "import ovpatch; ovpatch.apply('ddp', 'dist_optimizer')",
}
_STEP_SETUP = """
import sys, torch, torch.distributed as dist
{apply}
dist.init_process_group("gloo", init_method=f"file://{{sys.argv[2]}}/meet", rank=int(sys.argv[1]), world_size=2)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
dist.barrier()
"""
_STEP = """
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters())
wrapped(torch.ones(2, 256)).sum().backward()
optimizer.step()
sum(p.sum() for p in wrapped.parameters()).item()
"""
_CALLS = 100_000


def measure_imports(rounds: int) -> dict[str, Any]:
    """Return the least time in ms of each order, and what it adds to the stock one.

    Args:
        rounds: Fresh interpreters per order.
    """
    times: dict[str, list[tuple[float, float]]] = {order: [] for order in _ORDERS}
    for _ in range(rounds + 1):
        for order, (before, body) in _ORDERS.items():
            times[order].append(_run(_PROGRAM.format(before=before, body=body)))
    found: dict[str, Any] = {"rounds": rounds}
    for number, clock in enumerate(("wall_ms", "cpu_ms")):
        found[clock] = least = {
            order: min(run[number] for run in runs[1:]) for order, runs in times.items()
        }
        found[f"added_{clock}"] = {
            "torch, then ovpatch": least["torch, then ovpatch"],
            "ovpatch, then torch": least["ovpatch, then torch"] - least["stock"],
        }
    return found


def measure_first_steps(rounds: int) -> dict[str, Any]:
    """Return the least time in ms of the slower rank's first step, stock and with features.

    Args:
        rounds: Pairs of fresh interpreters, each way.
    """
    times: dict[str, list[tuple[float, float]]] = {features: [] for features in _FIRST_STEPS}
    for _ in range(rounds + 1):
        for features, apply in _FIRST_STEPS.items():
            program = _PROGRAM.format(before=_STEP_SETUP.format(apply=apply), body=_STEP)
            with tempfile.TemporaryDirectory() as folder:
                ranks = [_start(program, str(rank), folder) for rank in range(2)]
                clocks = [_finish(rank) for rank in ranks]
                times[features].append(
                    (max(wall for wall, _ in clocks), max(cpu for _, cpu in clocks))
                )
    found: dict[str, Any] = {"rounds": rounds}
    for number, clock in enumerate(("wall_ms", "cpu_ms")):
        found[clock] = least = {
            features: min(run[number] for run in runs[1:]) for features, runs in times.items()
        }
        found[f"added_{clock}"] = {
            arm: least[arm] - least["stock"] for arm in least if arm != "stock"
        }
    return found


def _run(program: str) -> tuple[float, float]:
    return _finish(_start(program))


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    # As installed: without settings, and with bytecode kept, which the first round (not counted) writes.
    dropped = ("OVPATCH", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> tuple[float, float]:
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(
            f"a measured program ended with {process.returncode}; its output is above"
        )
    wall, cpu = map(float, output.split())
    return wall, cpu


def measure_calls(rounds: int) -> dict[str, Any]:
    """Return medians in ns per call of several ways to call, stock and through an enabled wrap.

    Args:
        rounds: Turns of each, stock and patched alternately.
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
        results[name] = {
            "stock_ns": medians[0],
            "patched_ns": medians[1],
            "added_ns": medians[1] - medians[0],
        }
    del sys.modules[module.__name__]
    return {"cases": results, "rounds": rounds, "calls": _CALLS}


def _time(statement: str, module: types.ModuleType) -> float:
    names = {"f": module.f, "c": module.C(), "h": module.Heir()}
    # CPU time of this thread: other work on the machine must not count.
    return (
        timeit.timeit(statement, globals=names, number=_CALLS, timer=time.thread_time)
        / _CALLS
        * 1e9
    )


def main() -> int:
    """Measure, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--rounds", type=int, default=11, help="fresh interpreters per order (default 11)"
    )
    arguments = parser.parse_args()

    calls, imports, steps = (
        measure_calls(31),
        measure_imports(arguments.rounds),
        measure_first_steps(arguments.rounds),
    )
    worst_step = max(steps["added_cpu_ms"].values())
    worst_import = max(imports["added_cpu_ms"].values())
    worst_call = max(case["added_ns"] for case in calls["cases"].values())
    print(
        f"import torch: {imports['cpu_ms']['stock']:.0f} ms CPU, {imports['wall_ms']['stock']:.0f} "
        "ms wall"
    )
    for order, added in imports["added_cpu_ms"].items():
        wall = imports["added_wall_ms"][order]
        print(
            f"  {order:28} {added:+7.1f} ms CPU, {wall:+7.1f} ms wall   (budget "
            f"{IMPORT_BUDGET_MS:.0f} ms)"
        )
    print(
        f"a first step: {steps['cpu_ms']['stock']:.0f} ms CPU, {steps['wall_ms']['stock']:.0f} ms "
        "wall"
    )
    for features, added in steps["added_cpu_ms"].items():
        wall = steps["added_wall_ms"][features]
        print(
            f"  {features:28} {added:+7.1f} ms CPU, {wall:+7.1f} ms wall   (budget "
            f"{STEP_BUDGET_MS:.0f} ms)"
        )
    print("a call through an enabled wrap")
    for name, case in calls["cases"].items():
        print(
            f"  {name:28} +{case['added_ns']:6.0f} ns over {case['stock_ns']:.0f} ns   (budget "
            f"{CALL_BUDGET_NS:.0f} ns)"
        )
    good = (
        worst_import <= IMPORT_BUDGET_MS
        and worst_step <= STEP_BUDGET_MS
        and worst_call <= CALL_BUDGET_NS
    )
    print("within budget" if good else "OVER BUDGET")
    if arguments.json:
        arguments.json.write_text(json.dumps(_record(imports, steps, calls, good), indent=2) + "\n")
    return 0 if good else 1


def _record(
    imports: dict[str, Any], steps: dict[str, Any], calls: dict[str, Any], good: bool
) -> dict[str, Any]:
    from benchmarks.runs import described

    budget = {
        "import_ms": IMPORT_BUDGET_MS,
        "step_ms": STEP_BUDGET_MS,
        "call_ns": CALL_BUDGET_NS,
        "kept": good,
    }
    description = described("patch_overhead", {}, world=2)
    return description | {
        "imports": imports,
        "first_steps": steps,
        "calls": calls,
        "budget": budget,
    }


if __name__ == "__main__":
    sys.exit(main())
