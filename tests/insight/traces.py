"""Traces for tests: made by hand with the names that torch, NCCL and CUPTI give, or recorded and slimmed.

Renew the recorded ones, in ``tests/insight/data``, on two CPU ranks with

    ovpatch timeline --compare --steps 2 --out DIR -- torchrun --nproc-per-node 2 tests/insight/small.py
    python -m tests.insight.traces DIR

and those whose names begin with ``gpu-`` on two GPUs with

    ovpatch timeline --compare --step 12 --steps 1 --out DIR -- \
        torchrun --nproc-per-node 2 benchmarks/train_plain.py --size 1b
    python -m tests.insight.traces DIR gpu-
"""

from __future__ import annotations

import gzip
import json
import sys
from decimal import Decimal
from pathlib import Path

DATA = Path(__file__).parent / "data"

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_64x4_nn_align8>(Params)"
PEER_COPY = "Memcpy PtoP (Device -> Device)"

_ARGUMENTS = ("correlation", "device", "Collective name")

MAIN, COMPUTE_STREAM, NCCL_STREAM, DEVICE = 4242, 7, 20, 0


class Synthetic:
    """A trace under construction; times are integer microseconds from ``zero``, or text with decimals.

    Args:
        rank: Of ``distributedInfo``; None leaves that out.
        zero: The offset of all times, in microseconds.
        base: ``baseTimeNanoseconds``.
    """

    def __init__(self, rank=0, zero=1_000_000, base=1_790_857_026_000_000_000):
        self.events: list[dict] = []
        self.rank, self.zero, self.base, self.launched = rank, zero, base, 0

    def add(self, name, category, start, end, *, pid=MAIN, tid=MAIN, **args):
        times = {"ts": self.zero + start, "dur": end - start}
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": tid,
                **times,
                "args": args,
            }
        )
        return self

    def op(self, name, start, end, tid=MAIN):
        return self.add(name, "cpu_op", start, end, tid=tid)

    def note(self, name, start, end, tid=MAIN):
        return self.add(name, "user_annotation", start, end, tid=tid)

    def border(self, step, at):
        return self.note(f"ovpatch::timeline::border ({step})", at, at)

    def on_device(
        self,
        name,
        start,
        end,
        *,
        launch=None,
        stream=COMPUTE_STREAM,
        category="kernel",
        device=DEVICE,
        **args,
    ):
        """A kernel or copy; ``launch`` is when the host launched it, None for before the trace."""
        self.launched += 1
        common = {"correlation": self.launched}
        if launch is not None:
            self.add("cudaLaunchKernel", "cuda_runtime", launch, launch + 1, **common)
        args = {"device": device, "stream": stream, **common, **args}
        return self.add(name, category, start, end, pid=device, tid=stream, **args)

    def gemm(self, start, end, **more):
        return self.on_device(GEMM, start, end, **more)

    def nccl(self, start, end, name=ALL_REDUCE, **more):
        return self.on_device(name, start, end, stream=NCCL_STREAM, **more)

    def data(self):
        data = {"schemaVersion": 1, "baseTimeNanoseconds": self.base, "traceEvents": self.events}
        if self.rank is not None:
            data["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 2}
        return data

    def write(self, path: Path) -> Path:
        text = json.dumps(self.data())
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def recorded(variant: str) -> list[Path]:
    """Return the recorded traces of a variant, by rank."""
    return sorted(DATA.glob(f"{variant}-rank*.json.gz"))


def slim(source: Path, target: Path) -> None:
    """Keep the parts of a trace that are read, exactly as they were written."""
    from ovpatch.insight.timeline.trace import _USED, load_trace

    data = load_trace(source)
    events = [
        {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
        | _arguments(event)
        for event in data["traceEvents"]
        if event.get("cat") in _USED
    ]
    kept = {key: data[key] for key in ("schemaVersion", "distributedInfo", "baseTimeNanoseconds")}
    text = json.dumps({**kept, "traceEvents": events}, default=_exactly)
    text = text.replace('"<', "").replace('>"', "")
    target.write_bytes(gzip.compress(text.encode(), mtime=0))


def _arguments(event: dict) -> dict:
    """Keep the arguments by which events of a device belong to launches."""
    kept = {key: value for key, value in event.get("args", {}).items() if key in _ARGUMENTS}
    return {"args": kept} if kept else {}


def _exactly(value: Decimal) -> str:
    return f"<{value}>"


def main(folder: str, prefix: str = "") -> None:
    for variant in ("stock", "patched"):
        for path in sorted((Path(folder) / variant).glob("trace-rank*.json.gz")):
            slim(path, DATA / path.name.replace("trace", prefix + variant))


if __name__ == "__main__":
    main(*sys.argv[1:])
