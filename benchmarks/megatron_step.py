"""A training step of Megatron-Core's GPT, stock and with feature ``megatron``; or the host's work for one linear.

    torchrun --nproc-per-node 8 -m benchmarks.megatron_step --tp 4 --pp 2 --json benchmarks/results/megatron_step.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.megatron_step --linear

The model comes from ``examples/train_megatron.py``: the local specification, since Transformer Engine's linears are not
the feature's. Arms alternate, and each is built again, with weights that the device draws: on the CPU, as the example
has it, that takes longer than all steps of an arm. A schedule of linears runs with Megatron's own pipeline, and one of
the pipeline with ``bulk``. ``--arms stock bulk`` runs a part. ``--linear`` takes tiny activations, so that the host is
the limit, and also counts the Python functions and the C functions that Python calls in forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import ovpatch
from benchmarks.runs import CUDA, add_timing, alternate, clocked, described, device, running, start

EXAMPLE: Final = Path(__file__).resolve().parent.parent / "examples" / "train_megatron.py"
ARMS: Final[dict[str, dict[str, Any] | None]] = {
    "stock": None,
    **{
        name: {"schedule": name, "pipeline_schedule": "stock"}
        for name in ("bulk", "ring", "chunk", "fused")
    },
    **{name: {"pipeline_schedule": name} for name in ("1f1b", "zb-h1")},
}
# The size of the input of a linear.
WIDTH, ROWS = 256, 16


@functools.cache
def load_example() -> Any:
    """Return the example's module, whose own ``apply()`` does nothing."""
    os.environ["OVPATCH"] = "0"
    spec = importlib.util.spec_from_file_location("train_megatron", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del os.environ["OVPATCH"]
    module.TransformerConfig = functools.partial(
        module.TransformerConfig, perform_initialization=False
    )
    return module


def print_progress(begin: float, what: str) -> None:
    """Print on rank 0 what is done, with the seconds since ``begin``."""
    if not dist.get_rank():
        print(f"{time.perf_counter() - begin:6.1f} s  {what}", flush=True)


def apply(arm: str) -> None:
    """Turn the feature on as an arm has it."""
    options = ARMS[arm]
    if options is not None:
        ovpatch.apply("megatron", options={"megatron": {"min_linear_gflop": 0} | options})


def build(args: argparse.Namespace) -> Callable[[], None]:
    """Return the training step of this rank's stage."""
    example = load_example()
    torch.manual_seed(0)
    model = example.make_model(args)
    with torch.no_grad():
        for param in model.parameters():
            # Vectors keep their initial values, ones and zeros.
            if param.dim() > 1:
                param.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    forward_backward, data = example.get_forward_backward_func(), example.batches(args)

    def step() -> None:
        model.zero_grad_buffer()
        forward_backward(
            forward_step_func=example.forward,
            data_iterator=data,
            model=[model],
            num_microbatches=args.microbatches,
            seq_length=args.context,
            micro_batch_size=args.batch_size,
            forward_only=False,
        )
        for param in model.parameters():
            param.grad = param.main_grad.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Build an arm, and return its times, its peak of memory and its counters."""
    gc.collect()
    apply(arm)
    found = {"arm": arm, **clocked(build(args), args, running)}
    if ARMS[arm] is not None:
        found["counters"] = dict(ovpatch.report()["megatron"].counters)
        ovpatch.revert()
    return found


# --- one linear ---


def make_linear(kind: str, args: argparse.Namespace) -> Callable[[], None]:
    """Return forward and backward of a sequence-parallel linear, ``[s, 1, k]``."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=args.tp,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    given = {
        "config": config,
        "init_method": torch.nn.init.xavier_normal_,
        "bias": False,
        "skip_bias_add": False,
    }
    if kind == "column":
        linear, shape = (
            layers.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False, **given),
            (ROWS // args.tp, WIDTH),
        )
    else:
        linear, shape = (
            layers.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True, **given),
            (ROWS, WIDTH // args.tp),
        )
    linear.to(device())
    x = torch.randn(
        shape[0], 1, shape[1], device=device(), dtype=torch.bfloat16, requires_grad=True
    )
    grad = torch.ones_like(linear(x)[0])

    def run() -> None:
        linear(x)[0].backward(grad)

    return run


def count_calls(function: Callable[[], None]) -> Counter[str]:
    """Return how many functions of Python and of C are called from Python."""
    events: Counter[str] = Counter()

    def count(_frame: Any, event: str, _argument: Any) -> None:
        events[event] += 1

    sys.setprofile(count)
    function()
    sys.setprofile(None)
    return events


def measure_linears(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of linear and each arm."""
    for kind in ("column", "row"):
        for arm in args.arms:
            options = ARMS[arm] or {}
            if "pipeline_schedule" in options and "schedule" not in options:
                continue
            apply(arm)
            run, times = make_linear(kind, args), []
            for _ in range(args.rounds + args.warmup):
                if CUDA:
                    torch.cuda.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(args.steps):
                    run()
                times.append((time.perf_counter() - begin) * 1e6 / args.steps)
            calls = count_calls(run)
            row = {
                "linear": kind,
                "arm": arm,
                "us": round(statistics.median(times[args.warmup :]), 1),
            }
            yield row | {"python": calls["call"], "c": calls["c_call"]}
            if ARMS[arm] is not None:
                ovpatch.revert()


def report_linears(args: argparse.Namespace) -> None:
    """Measure linears, print each as it comes, and append the result to ``args.json``."""
    rows, shows = [], not dist.get_rank()
    if shows:
        print(f"{'linear':10}{'arm':10}{'µs':>10}{'calls':>10}{'C calls':>10}")
    for row in measure_linears(args):
        rows.append(row)
        if shows:
            print(
                f"{row['linear']:10}{row['arm']:10}{row['us']:>10}{row['python']:>10}{row['c']:>10}",
                flush=True,
            )
    if shows and args.json:
        given = {key: value for key, value in vars(args).items() if key not in ("json", "arms")}
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**described("megatron_linear", given), "rows": rows}) + "\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    made.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    made.add_argument("--layers", type=int, default=4 if CUDA else 2)
    made.add_argument("--width", type=int, default=4096 if CUDA else 64)
    made.add_argument("--context", type=int, default=2048 if CUDA else 32)
    made.add_argument("--batch-size", type=int, default=1, help="sequences of a microbatch")
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the parameters"
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--linear", action="store_true", help="measure one linear alone")
    made.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    add_timing(made, rounds=2)
    made.set_defaults(warmup=2)
    return made


def main() -> None:
    """Measure steps, or linears alone."""
    begin = time.perf_counter()
    args = parser().parse_args()
    args.device = device().type
    start()
    print_progress(begin, "process group")
    example = load_example()
    print_progress(begin, "Megatron-Core is imported")
    if not CUDA:
        example.answer_for_the_cpu()
    if args.linear:
        args.tp = dist.get_world_size()
    example.parallel_state.initialize_model_parallel(args.tp, args.pp)
    example.random.initialize_rng_tracker(inference_rng_tracker=True)
    print_progress(begin, "groups of ranks")
    if args.linear:
        report_linears(args)
    else:
        alternate("megatron_step", args.arms, functools.partial(measure, args), args)
    example.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
