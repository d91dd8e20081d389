"""The worker of ``ovpatch bench`` in each process: warm up, time the steps, write a file, and end the process.

It counts the samples, tokens and floating-point operations of a step, where they can be counted.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from ovpatch.insight import steps
from ovpatch.insight.steps import find_root_modules, list_children
from ovpatch.session import worker_reports
from ovpatch.session.worker_exit import write_at_exit
from ovpatch.session.worker_orders import Orders, number_process


class BorderClock:
    """Times at most ``steps`` measured steps without waiting for the device of the parameters.

    On CUDA a boundary records an event, made beforehand, on the optimizer's stream and reads the
    host's clock. Times are read after the last boundary. A step that the host only enqueues is timed
    on the device, and one that the host delays includes that delay.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._host: list[int] = []
        self._device = device
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]

    def mark_border(self) -> None:
        """Mark a step boundary."""
        if self._events:
            self._events[len(self._host)].record(torch.cuda.current_stream(self._device))
        self._host.append(time.perf_counter_ns())

    def read_host_times(self) -> list[float]:
        """Return the steps' times by the host's clock, in ms."""
        return [(after - before) / 1e6 for before, after in pairwise(self._host)]

    def read_times(self) -> list[float]:
        """Return the steps' times in ms, on the device if there is one; waits for the last event."""
        used = self._events[: len(self._host)]
        if not used:
            return self.read_host_times()
        # Wait for all of them, because the script may have changed streams.
        for event in used:
            event.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(used)]

    @property
    def clock_name(self) -> str:
        """``device events`` or ``host clock``."""
        return "device events" if self._events else "host clock"


class PeakMemory:
    """Peak memory of this process since construction; on CPU, since the process started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read_peak(self) -> dict[str, Any]:
        """Return bytes: ``allocated`` and ``reserved`` on the device, or ``resident`` on the host."""
        if self._device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
            }
        # Linux gives this peak in KiB.
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def choose_device(device: torch.device) -> torch.device:
    """Return the device to time: the device of the parameters, or the GPU of a script that keeps them on the host."""
    if device.type == "cpu" and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_fsdp2_module() -> bool:
    """Return whether FSDP2 has sharded a module of this process."""
    # fully_shard() gives a module a class that derives from FSDPModule.
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not isinstance(base, type):
        return False
    return any(
        issubclass(type(part), base) for root in find_root_modules() for part in root.modules()
    )


def get_device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def read_clock_mhz(device: torch.device) -> int | None:
    """Return the device's present clock in MHz, None if unknown."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # noqa: BLE001  # NVML's own errors: MIG instances have no clock
        return None


def start_worker(orders: Orders) -> None:
    """Start to measure this process; the orders' details are ``warmup`` (at least 3), ``steps`` and ``count_flops``.

    With ``records_facts`` instead of ``count_flops``, the facts for predictions are measured instead of the steps.
    """
    details = dict(orders.details)
    worker: _Worker | _FactsWorker
    if details.pop("records_facts", False):
        worker = _FactsWorker(orders.directory, **details)
    else:
        worker = _Worker(orders.directory, **details)
    worker.start()
    write_at_exit(worker.write_results)


class _Worker:
    """The actions at the boundaries of W warm-up steps and N measured steps.

    - 1 to W-1: counts batches.
    - W-3 to W-1: counts operations of two steps, if ordered; the cheaper counts, since the other may hold an
      evaluation.
    - W to W+N: marks the clock; the last boundary writes the file and ends the process.

    A script that ends before W+N leaves the file with the measurements so far.
    """

    def __init__(self, directory: Path, warmup: int, steps: int, count_flops: bool) -> None:
        self._directory, self._warmup, self._last = directory, warmup, warmup + steps
        self._batches = BatchCounter()
        self._flops = [FlopCount(), FlopCount()] if count_flops else []
        self._clock: BorderClock | None = None
        self._memory: PeakMemory | None = None
        # The stepping process: a data loader's child inherits this object.
        self._pid: int | None = None

    def start(self) -> None:
        self._steps = steps.StepCounter(self._directory, self._at_border)
        self._steps.start_counting()

    def _at_border(self, number: int) -> None:
        if self._clock is None:
            self._warm(number)
            return
        self._clock.mark_border()
        if number == self._last:
            self.write_results()
            steps.exit_with_peers(self._directory)

    def _warm(self, number: int) -> None:
        # At the end the script may have destroyed its group and optimizer.
        if self._pid != os.getpid():
            self._pid, self._rank, self._world = (
                os.getpid(),
                steps.get_rank(),
                steps.get_world_size(),
            )
            self._device = choose_device(self._steps.find_device())
            self._has_fsdp2 = has_fsdp2_module()
        left = self._warmup - number
        if self._flops and left in (1, 2):
            self._flops[2 - left].stop_counting()
        if number == 1:
            self._batches.start_counting()
        elif left >= 1:
            self._batches.close_step()
        if left == 1:
            self._batches.stop_counting()
        if self._flops and left in (2, 3):
            self._flops[3 - left].start_counting()
        if left == 0:
            self._memory = PeakMemory(self._device)
            self._clock = BorderClock(self._device, self._last - self._warmup)
            self._clock.mark_border()

    def write_results(self) -> None:
        """Write the file once, if this process has taken steps."""
        if self._pid == os.getpid():
            self._pid = None
            worker_reports.save_json(
                self._directory / f"bench-{number_process()}.json", self._collect_results()
            )

    def _collect_results(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world": self._world,
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
            "torch": torch.__version__,
            "has_fsdp2": self._has_fsdp2,
            "device": get_device_name(self._device),
            "clock_mhz": read_clock_mhz(self._device),
            "steps": self._steps.count,
            "clock": self._clock.clock_name if self._clock is not None else None,
            "ms": self._clock.read_times() if self._clock is not None else [],
            "host_ms": self._clock.read_host_times() if self._clock is not None else [],
            "memory": self._memory.read_peak() if self._memory is not None else {},
            "batch": self._batches.to_json(),
            "flops": choose_cheaper(self._flops) if self._flops else None,
        }


class _FactsWorker:
    """Records the facts of a step in stock PyTorch that ``scaling.py`` needs, and times all-reduces after the last one.

    ``DistributedDataParallel`` itself times its forward, backward and communication, and knows its buckets.
    """

    def __init__(self, directory: Path, warmup: int, steps: int) -> None:
        self._directory, self._warmup, self._last = directory, warmup, warmup + steps
        self._ddp: DistributedDataParallel | None = None
        self._times: list[dict[str, float]] = []
        self._facts: dict[str, Any] = {}
        self._optimizer = OptimizerClock()

    def start(self) -> None:
        self._optimizer.start()
        self._steps = steps.StepCounter(self._directory, self._at_border)
        self._steps.start_counting()

    def _at_border(self, number: int) -> None:
        self._optimizer.close_step(should_keep=number > self._warmup)
        if number < self._warmup:
            return
        if number == self._warmup:
            self._ddp = find_largest_ddp()
            self._device = choose_device(self._steps.find_device())
            self._facts = {
                "rank": steps.get_rank(),
                "world": steps.get_world_size(),
                "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
                "host": socket.gethostname(),
                "backend": dist.get_backend() if dist.is_initialized() else "",
            }
            if self._ddp is not None:
                self._ddp._set_ddp_runtime_logging_sample_rate(1)
        elif self._ddp is not None:
            self._times.append(read_ddp_times(self._ddp._get_ddp_logging_data()))
        if number == self._last:
            self._facts["rings"] = {}
            if dist.is_initialized() and dist.get_world_size() > 1:
                buckets = list_bucket_bytes(self._ddp)
                self._facts["rings"] = time_rings(self._device, max(buckets))
            self.write_results()
            steps.exit_with_peers(self._directory)

    def write_results(self) -> None:
        """Write the file once, if the last step was reached."""
        if "rings" not in self._facts:
            return
        facts, self._facts = self._facts, {}
        for name in ("forward_ms", "backward_ms", "exposed_ms"):
            times = [step[name] for step in self._times if name in step]
            facts[name] = median(times) if times else None
        facts["optimizer_ms"] = self._optimizer.read_ms()
        facts["buckets"] = list_bucket_bytes(self._ddp)
        facts["steps"] = self._steps.count
        worker_reports.save_json(self._directory / f"facts-{number_process()}.json", facts)


class OptimizerClock:
    """Times the calls of all optimizers in each step, on the device if there is one."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        # The marks of this step, two for each call: events of the device, or seconds.
        self._marks: list[Any] = []
        self._steps: list[list[Any]] = []

    def start(self) -> None:
        """Install the hooks, before the hook that closes steps."""

        def mark(*_: object) -> None:
            if torch.cuda.is_initialized():
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._marks.append(event)
            else:
                self._marks.append(time.perf_counter())

        self._handles = [
            register_optimizer_step_pre_hook(mark),
            register_optimizer_step_post_hook(mark),
        ]

    def close_step(self, *, should_keep: bool) -> None:
        """Close a step at its boundary; a step of the warm-up is not kept."""
        if should_keep:
            self._steps.append(self._marks)
        self._marks = []

    def read_ms(self) -> float | None:
        """Return the median over the steps in ms, and remove the hooks; None without a complete step."""
        for handle in self._handles:
            handle.remove()
        times = []
        for marks in self._steps:
            pairs = zip(marks[::2], marks[1::2], strict=True)
            times.append(sum(self._measure(*pair) for pair in pairs))
        return median(times) if times else None

    def _measure(self, before: Any, after: Any) -> float:
        if isinstance(before, float):
            return float((after - before) * 1e3)
        after.synchronize()
        return float(before.elapsed_time(after))


def find_largest_ddp() -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` with most parameters; None if there is none."""
    # By type: isinstance() reads __class__, which makes lazy proxies load their objects.
    found = [
        cast("DistributedDataParallel", part)
        for root in find_root_modules()
        for part in root.modules()
        if issubclass(type(part), DistributedDataParallel)
    ]
    return max(found, key=lambda ddp: sum(map(Tensor.numel, ddp.parameters())), default=None)


def read_ddp_times(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the times in ms that ``DistributedDataParallel`` logged for its last step, if it did.

    ``exposed_ms`` is the communication that no backward hid.
    """
    names = {"forward_ms": "forward_compute_time", "backward_ms": "backward_compute_time"}
    times = {name: logged[key] / 1e6 for name, key in names.items() if logged.get(key)}
    if "backward_comm_time" in logged:
        hidden = logged.get("backward_compute_comm_overlap_time", 0)
        times["exposed_ms"] = (logged["backward_comm_time"] - hidden) / 1e6
    return times


#: The capacity of a bucket in stock PyTorch, in bytes.
_BUCKET_BYTES: Final = 25 << 20


def list_bucket_bytes(ddp: DistributedDataParallel | None) -> list[int]:
    """Return the bytes of the buckets of a model; without a model, those of all trainable parameters in 25 MiB."""
    if ddp is not None:
        logged = ddp._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        return [int(size) for size in str(sizes).split(",")]
    params = {
        id(param): param
        for module in find_outermost_modules()
        for param in module.parameters()
        if param.requires_grad
    }
    total = sum(param.numel() * param.element_size() for param in params.values())
    return [min(_BUCKET_BYTES, total - done) for done in range(0, total, _BUCKET_BYTES)] or [1]


def time_rings(device: torch.device, nbytes: int) -> dict[str, dict[str, Any]]:
    """Return the times of all-reduces among the ranks of a host and across hosts; all ranks call this.

    Args:
        device: The device of the gradients.
        nbytes: The size of the large all-reduce; the small one has 64 bytes.
    """
    world = dist.get_world_size()
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0) or world
    if world % per_host:
        per_host = world
    rings = {"within": [range(first, first + per_host) for first in range(0, world, per_host)]}
    if world > per_host:
        rings["across"] = [range(place, world, per_host) for place in range(per_host)]
    found = {}
    for name, members in rings.items():
        if len(members[0]) < 2:
            continue
        groups = [dist.new_group(list(ranks)) for ranks in members]
        # Rings within hosts do not share links. Of those across hosts one gets the links for itself.
        rank = dist.get_rank()
        used = members if name == "within" else members[:1]
        own = next((i for i, ranks in enumerate(used) if rank in ranks), None)
        group = groups[own] if own is not None else None
        times = {
            "large_ms": _time_collective(dist.all_reduce, group, device, nbytes),
            "small_ms": _time_collective(dist.all_reduce, group, device, 64),
            "shard_ms": _time_collective(_exchange_shards, group, device, nbytes),
        }
        if own is not None:
            found[name] = {"size": len(members[own]), "bytes": nbytes, **times}
    return found


def _exchange_shards(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Run an all-to-all and an all-gather, which together send as much as an all-reduce of the tensor."""
    size = dist.get_world_size(group)
    even = tensor[: len(tensor) // size * size]
    dist.all_to_all_single(torch.empty_like(even), even, group=group)
    parts = list(even.chunk(size))
    dist.all_gather(parts, parts[0].clone(), group=group)


def _time_collective(
    collective: Callable[..., object],
    group: dist.ProcessGroup | None,
    device: torch.device,
    nbytes: int,
) -> float:
    """Return the median time of a collective in ms; ranks without a group only meet their peers."""
    tensor = torch.zeros(max(dist.get_world_size(), nbytes // 4), device=device)
    times = []
    for _ in range(7):
        _synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        if group is not None:
            collective(tensor, group=group)
            _synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


COMPILED = "the script compiles; compiled code does not pass through the counter"


class FlopCount:
    """A count of the floating-point operations of a step, by a dispatch mode and torch's formulas.

    Matrix products, convolutions and attention count, forward and backward. Recomputation by activation checkpointing
    counts, and separately, since MFU excludes it. Kernels that bypass torch's dispatcher do not count. No error here
    may reach the script.
    """

    def __init__(self) -> None:
        # Operations by the name of their dtype.
        self.by_dtype: Counter[str] = Counter()
        # Operations among these that :mod:`torch.utils.checkpoint` recomputed.
        self.again: Counter[str] = Counter()
        # The reason for which they are unknown; "" if they are known.
        self.reason = "the script ended before a step was counted"
        self._mode: _Counting | None = None
        self._thread = 0

    def start_counting(self) -> None:
        """Start, at a step boundary."""
        objection = _objection()
        if objection:
            self.reason = objection
        else:
            self._mode, self._thread = _Counting(self.by_dtype, self.again), threading.get_ident()
            # No with statement: two calls enter and leave the mode.
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # mypy excuses torch's names, no inherited ones

    def stop_counting(self) -> None:
        """Stop, at the next step boundary; a mode that is no longer on top of the stack stays."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        if self._thread != threading.get_ident() or _get_current_dispatch_mode() is not mode:
            mode.error = "the script changes dispatch modes, or threads, within a step"
        else:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # inherited, as in start()
        self.reason = mode.error or (
            "" if self.by_dtype else "a step has no matrix product that torch can count"
        )
        if is_compiling():
            self.reason = COMPILED

    def to_json(self) -> dict[str, Any]:
        """Return ``by_dtype``, the sum of ``again``, and ``reason``."""
        if self.reason:
            return {"by_dtype": {}, "again": 0, "reason": self.reason}
        return {"by_dtype": dict(self.by_dtype), "again": sum(self.again.values()), "reason": ""}


def choose_cheaper(counts: Sequence[FlopCount]) -> dict[str, Any]:
    """Return, as plain data, the count with the fewest operations, or why there is none."""
    found = [count.to_json() for count in counts]
    known = [count for count in found if not count["reason"]]
    return min(known, key=lambda count: sum(count["by_dtype"].values())) if known else found[-1]


def is_compiling() -> bool:
    """Return whether Dynamo has captured a graph in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


def _objection() -> str:
    if is_compiling():
        return COMPILED
    if torch._C._current_graph_task_id() != -1:
        return "the optimizer steps inside of backward"
    if _get_current_dispatch_mode() is not None:
        return "the script has its own dispatch mode"
    return ""


class _Counting(TorchDispatchMode):
    """Sums the cost of operators; of tensor subclasses, that of their local tensors."""

    supports_higher_order_operators = True

    def __init__(self, total: Counter[str], again: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # by super() no name of torch's, as in FlopCount.start()
        self._total, self._again = total, again
        self.error = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Fake tensors only work out a shape, and compute nothing.
        if any(issubclass(cls, FakeTensor) for cls in types):
            return func(*args, **(kwargs or {}))
        # A DTensor has the full shape. Its operation is dispatched again, with local tensors.
        if any(map(_dispatches, types)):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        parts = out if type(out) is tuple else (out,)
        computed = not any(isinstance(part, Tensor) and part.is_meta for part in parts)
        if formula is not None and not self.error and computed:
            self._add(formula, args, kwargs or {}, out)
        return out

    def _add(self, formula: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        try:
            cost = formula(*args, **kwargs, out_val=out)
        except Exception as error:  # noqa: BLE001  # the script must go on
            self.error = f"torch's formula failed: {error!r}"
            return
        self._total[_dtype(args)] += int(cost)
        if _recomputes():
            self._again[_dtype(args)] += int(cost)


_RECOMPUTING: Final = ("torch.utils.checkpoint", "ovpatch_plugins.recompute.recomputation")
"""Modules that run forwards again."""


def _recomputes() -> bool:
    """Return whether torch's checkpointing, or ``recompute``, runs this forward again in backward."""
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") not in _RECOMPUTING:
        frame = frame.f_back
    return frame is not None


def _dispatches(cls: type) -> bool:
    return getattr(cls, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def _dtype(args: Sequence[Any]) -> str:
    """Return the dtype of an operator: that of its last tensor, since addmm's first is the bias."""
    dtypes = [
        arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.dtype.is_floating_point
    ]
    return str(dtypes[-1]).removeprefix("torch.") if dtypes else "unknown"


_watching: BatchCounter | None = None


class BatchCounter:
    """Counts the samples and tokens of each step's batches.

    Candidates are the modules with trainable parameters that are no other module's child. The one that a step calls
    first counts, in every call with gradients on and outside of backward: microbatches add up; evaluation,
    recomputation and loss modules do not. If a step calls none of them, their children become the candidates. A global
    hook is no alternative: it lacks keyword arguments, and compiled code would be traced again.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        # The id of the module that this step called first.
        self._first: int | None = None
        # The numbers of samples, tokens and calls of this step.
        self._now = [0, 0, 0]
        self._seen: list[list[int]] = []
        self._name = ""

    def start_counting(self) -> None:
        """Install the hooks, at a step boundary."""
        global _watching
        _watching = self
        self._install_hooks(find_outermost_modules())

    def close_step(self) -> None:
        """Close a step, at its boundary."""
        if self._first is not None:
            self._seen.append(self._now)
        # The compiler would trace a hook into compiled code.
        elif not is_compiling():
            self._install_hooks(
                [
                    child
                    for module in self._modules
                    for child in module.children()
                    if _has_trainable(child)
                ]
            )
        self._first, self._now = None, [0, 0, 0]

    def stop_counting(self) -> None:
        """Remove the hooks."""
        global _watching
        _watching = None
        self._install_hooks([])

    def count_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Count one call of a candidate."""
        if self._first is None:
            self._first, self._name = id(module), type(module).__name__
        if self._first != id(module):
            return
        samples, tokens = measure_batch(args, kwargs)
        self._now = [
            total + more for total, more in zip(self._now, (samples, tokens, 1), strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the means over the counted steps, and the module; ``samples`` and ``tokens`` are None if unknown."""
        count = len(self._seen)
        totals = [sum(column) for column in zip(*self._seen, strict=True)] or [0, 0, 0]
        samples, tokens, calls = [total / max(count, 1) for total in totals]
        return {
            "samples": samples or None,
            "tokens": tokens or None,
            "calls": calls,
            "module": self._name,
        }

    def _install_hooks(self, modules: list[nn.Module]) -> None:
        for handle in self._handles:
            handle.remove()
        self._modules = [module for module in modules if _is_hookable(module)]
        self._handles = [
            module.register_forward_pre_hook(_called, with_kwargs=True) for module in self._modules
        ]


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook; a module-level function, so that a model with it can still be copied and pickled."""
    if (
        _watching is not None
        and torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
    ):
        _watching.count_call(module, args, kwargs)


def find_outermost_modules() -> list[nn.Module]:
    """Return the modules with trainable parameters that are no other module's child."""
    return [module for module in find_root_modules() if _has_trainable(module)]


def _has_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_hookable(module: nn.Module) -> bool:
    """Return whether a hook on a module runs, and runs outside of compiled code."""
    compiled_in_place = module.__dict__.get("_compiled_call_impl") is not None
    return not compiled_in_place and not isinstance(module, torch.jit.ScriptModule)


def measure_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the samples and tokens of one batch of a model's arguments, 0 if unknown.

    The argument ``input_ids``, otherwise the first tensor, has one sample per row; if it holds integers and has two
    dimensions, they are tokens.
    """
    tensors = list(_named_tensors("", (args, kwargs)))
    first = next(
        (tensor for name, tensor in tensors if name == "input_ids"),
        tensors[0][1] if tensors else None,
    )
    if first is None or first.dim() == 0:
        return 0, 0
    is_integer = (
        not first.dtype.is_floating_point
        and not first.dtype.is_complex
        and first.dtype is not torch.bool
    )
    return first.shape[0], first.numel() if is_integer and first.dim() == 2 else 0


def _named_tensors(name: Any, value: Any, depth: int = 5) -> Iterator[tuple[Any, Tensor]]:
    """Yield the tensors in nested mappings and sequences, each with its key or index."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for key, part in list_children(value) or ():
            yield from _named_tensors(key, part, depth - 1)
