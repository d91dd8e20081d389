"""One training step with optimizer state sharded over data-parallel ranks: peers, limits, and ``dist_optimizer``.

    torchrun --nproc-per-node 8 -m benchmarks.zero_step --size 3.8b --json benchmarks/results/zero_step.jsonl

Arms alternate (A B C A B C …). Each is built again, warmed up and timed, step after step without a stop, so that
all-gathers overlap the next forward. The slowest rank counts. Arms named ``limit`` do the same forward and backward and
the update of a rank's share, and communicate nothing: one with fp32 weights under autocast, one with bf16 weights, and
one with bf16 weights in linears alone, under autocast. Megatron-Core is a peer where it is installed. Without CUDA it
runs on gloo (``--size tiny``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks.models import GPT, SIZES, flops_per_step
from benchmarks.runs import CUDA, add_timing, alternate, clocked, device, running, start
from ovpatch.overlap.comm.lifetimes import drop_values
from ovpatch.overlap.peer_rpc.retention import Retention

Step = Callable[[], None]
LR = 1e-4


class Problem:
    """The training of all arms: a GPT, its data, and how often it accumulates, clips and compiles.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.size, self.accumulate, self.clip, self.compile = (
            SIZES[args.size],
            args.accumulate,
            args.clip,
            args.compile,
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = args.batch, self.size["context"]
        self.tokens, self.targets = (
            torch.randint(0, self.size["vocabulary"], shape, generator=generator).to(device())
            for _ in range(2)
        )

    def model(self, dtype: torch.dtype = torch.float32) -> GPT:
        """Build the same model on all ranks."""
        torch.manual_seed(0)
        with torch.device(device()):
            model = GPT(**self.size).to(dtype)
        if self.compile == "blocks":
            for block in model.blocks:
                block.compile()
        return model

    def ready(self, model: nn.Module) -> nn.Module:
        """Compile a model, or a wrapper of one, if ``compile`` is on."""
        return torch.compile(model) if self.compile == "model" else model  # type: ignore[return-value]  # a module

    def backwards(
        self,
        model: nn.Module,
        autocast: bool,
        quiet: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Tensor:
        """Run the microbatches' forward and backward, all but the last under ``quiet()``; return the last loss."""
        for micro in range(self.accumulate):
            with quiet() if micro < self.accumulate - 1 else contextlib.nullcontext():
                with torch.autocast(device().type, dtype=torch.bfloat16, enabled=autocast):
                    loss = model(self.tokens, self.targets)
                loss.backward()
        return loss.detach()

    def clipped(self, params: Iterable[Tensor]) -> None:
        """Clip gradients as scripts do, if ``clip`` is on."""
        if self.clip:
            nn.utils.clip_grad_norm_(params, self.clip)


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer that all arms have."""
    return torch.optim.AdamW(params, lr=LR, fused=CUDA)


# ---------------------------------------------------------------- limits


def limit(problem: Problem, dtype: torch.dtype, linears: torch.dtype | None = None) -> Step:
    """Forward, backward and one rank's share of the update; weights of linears may have another dtype."""
    model = problem.model(dtype)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(linears or dtype)
    params = list(model.parameters())
    share = torch.zeros(
        sum(param.numel() for param in params) // dist.get_world_size(), device=device()
    )
    share.grad = torch.zeros_like(share)
    optimizer, trained = adamw([share]), problem.ready(model)

    def step() -> None:
        problem.backwards(trained, dtype is torch.float32)
        problem.clipped([share])
        optimizer.step()
        model.zero_grad()

    return step


# ---------------------------------------------------------------- peers


def ddp(
    problem: Problem, *, dtype: torch.dtype = torch.float32, zero: bool = False, **kwargs: Any
) -> Step:
    """Stock DDP, or ovpatch's if it is applied: the script is the same."""
    wrapped = DistributedDataParallel(
        problem.model(dtype), device_ids=[device().index] if CUDA else None, **kwargs
    )
    trained = problem.ready(wrapped)
    if zero:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LR,
            fused=CUDA,
        )
    else:
        optimizer = adamw(wrapped.parameters())

    def step() -> None:
        problem.backwards(trained, dtype is torch.float32, wrapped.no_sync)
        problem.clipped(wrapped.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zero)

    return step


def fsdp2(problem: Problem, *, reshard: bool) -> Step:
    """FSDP2 by block, parameters gathered in bf16, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = problem.model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in [*model.blocks, model]:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    optimizer, trained = adamw(model.parameters()), problem.ready(model)

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def step() -> None:
        problem.backwards(trained, False, quiet)
        problem.clipped(model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    return step


def megatron(problem: Problem) -> Step:
    """Megatron-Core's DDP and distributed optimizer, both overlaps, bf16 weights, fp32 main gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel as MegatronDDP
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    size, bf16 = problem.size, torch.bfloat16
    config = TransformerConfig(
        num_layers=size["layers"],
        hidden_size=size["width"],
        num_attention_heads=size["heads"],
        bf16=True,
        params_dtype=bf16,
    )
    overlap = {"overlap_param_gather": True, "use_distributed_optimizer": True}
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, **overlap
    )
    wrapped = MegatronDDP(config, reduction, problem.model(bf16))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=LR, bf16=True, params_dtype=bf16, clip_grad=problem.clip, **overlap
        ),
        [wrapped],
    )
    trained = problem.ready(wrapped)

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        problem.backwards(trained, False, wrapped.no_sync)
        wrapped.finish_grad_sync()
        optimizer.step()

    return step


# ---------------------------------------------------------------- arms

BOTH = ("ddp", "dist_optimizer")
SERIAL = {"ddp": {"overlap_grad_reduce": False}, "dist_optimizer": {"overlap_param_gather": False}}
BF16 = {"dtype": torch.bfloat16}
IN_FP32 = {"ddp": {"grad_reduce_in_fp32": True, "grad_accumulate_in_fp32": True}}
MAIN = {**IN_FP32, "dist_optimizer": {"main_params_in_fp32": True}}

PEERS: dict[str, Callable[[Problem], Step]] = {
    "limit, fp32": lambda problem: limit(problem, torch.float32),
    "limit, bf16": lambda problem: limit(problem, torch.bfloat16),
    "limit, bf16 linears": lambda problem: limit(problem, torch.float32, torch.bfloat16),
    "stock": ddp,
    "stock, bucket view": lambda problem: ddp(problem, gradient_as_bucket_view=True),
    "stock, bucket view, 400 MiB": lambda problem: ddp(
        problem, gradient_as_bucket_view=True, bucket_cap_mb=400
    ),
    "ZeroRedundancyOptimizer": lambda problem: ddp(
        problem, zero=True, gradient_as_bucket_view=True
    ),
    "FSDP2, ZeRO-2": lambda problem: fsdp2(problem, reshard=False),
    "FSDP2, ZeRO-3": lambda problem: fsdp2(problem, reshard=True),
    "Megatron-Core": megatron,
}
# Features, their options, and arguments of the script.
OURS: dict[str, tuple[tuple[str, ...], dict[str, dict[str, Any]], dict[str, Any]]] = {
    "ovpatch, ddp alone": (("ddp",), {}, {}),
    "ovpatch": (BOTH, {}, {}),
    "ovpatch, where faster": (BOTH, {"dist_optimizer": {"shard": "auto"}}, {}),
    "ovpatch, no overlap": (BOTH, SERIAL, {}),
    "ovpatch, gather in step": (BOTH, {"dist_optimizer": {"overlap_param_gather": False}}, {}),
    "ovpatch, gradients kept": (BOTH, {"dist_optimizer": {"grads_in_flight_mb": 0.0}}, {}),
    "ovpatch, NCCL": (BOTH, {"dist_optimizer": {"copy_engines": "off"}}, {}),
    "ovpatch, copy engines": (BOTH, {"dist_optimizer": {"copy_engines": "on"}}, {}),
    **{
        f"ovpatch, gather {mb} MiB": (BOTH, {"dist_optimizer": {"gather_bucket_mb": mb}}, {})
        for mb in (128, 256)
    },
    **{
        f"ovpatch, bucket {mb} MiB": (BOTH, {}, {"bucket_cap_mb": mb}) for mb in (50, 100, 200, 400)
    },
    **{f"ovpatch, max_ctas {n}": (BOTH, {"ddp": {"max_ctas": n}}, {}) for n in (8, 16)},
    "ovpatch, bf16 weights": (BOTH, MAIN, BF16),
    "ovpatch, bf16 weights, NCCL": (
        BOTH,
        {**MAIN, "dist_optimizer": MAIN["dist_optimizer"] | {"copy_engines": "off"}},
        BF16,
    ),
    "ovpatch, bf16 weights, copy engines": (
        BOTH,
        {**MAIN, "dist_optimizer": MAIN["dist_optimizer"] | {"copy_engines": "on"}},
        BF16,
    ),
    "ovpatch, bf16 weights, no overlap": (
        BOTH,
        {name: SERIAL[name] | MAIN[name] for name in BOTH},
        BF16,
    ),
}
ARMS = [*PEERS, *OURS]


@contextlib.contextmanager
def built(name: str, problem: Problem) -> Iterator[Step]:
    """Build an arm's step, with ovpatch applied as the arm demands."""
    if name in PEERS:
        yield PEERS[name](problem)
        return
    features, options, kwargs = OURS[name]
    with ovpatch.applied(*features, options=options):
        yield ddp(problem, **kwargs)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm once."""
    try:
        with built(name, Problem(args)) as step:
            found = clocked(step, args, running)
            del step
            # Otherwise reverting would gather tensors that are no longer used.
            gc.collect()
    finally:
        torch._dynamo.reset()
        gc.collect()
        dist.barrier()
        # After the barrier, no peer copies from this arm's memory any longer.
        drop_values(Retention, dist.group.WORLD)
        if CUDA:
            torch.cuda.empty_cache()
    return {"arm": name, **found}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--size", choices=SIZES, default="1b")
    made.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    made.add_argument("--batch", type=int, default=4, help="sequences per device and microbatch")
    made.add_argument("--accumulate", type=int, default=1)
    made.add_argument("--clip", type=float, default=0.0, help="clip gradients to this norm")
    made.add_argument(
        "--compile", choices=("model", "blocks"), help="compile the whole, or its blocks one by one"
    )
    add_timing(made, rounds=2)
    return made


def main() -> None:
    """Run all arms and print a table on rank 0."""
    args = parser().parse_args()
    start()
    with torch.device("meta"):
        model = GPT(**SIZES[args.size])
    context = SIZES[args.size]["context"]
    args.flops = flops_per_step(model, args.batch * args.accumulate * context, context)
    # The first arm of ovpatch measures choices, which later arms find in the cache.
    first = next((name for name in args.arms if name in OURS), None)
    alternate(
        "zero_step",
        args.arms,
        lambda name: measure(name, args),
        args,
        chooses=lambda name: name == first,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
