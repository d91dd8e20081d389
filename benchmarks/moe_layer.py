"""An expert-parallel layer: in sequence, cut naively, as transformers computes it, and by ``pipe_experts``.

    torchrun --nproc-per-node 8 -m benchmarks.moe_layer --shape dsv3 --json benchmarks/results/moe_layer.jsonl

Tokens are routed at random, evenly, or by ``--skew`` with one expert that gets a multiple of its even share, at most
all tokens. Arms alternate; each is warmed up and timed, forward and, with ``--backward``, backward as well; the slowest
rank counts. All arms must compute the results of ``in sequence``, except the limits: ``experts``, the layer without
communication, and ``all-to-alls``, communication of balanced routing alone. Without CUDA it runs on gloo (``--shape
tiny``).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.runs import CUDA, add_timing, alternate, clocked, device, get_world, start, timed
from ovpatch_plugins.pipe_experts import MoEConfig, expert_parallel_ffn
from ovpatch_plugins.pipe_experts.all_to_all import get_transport, list_unsupported_reasons
from ovpatch_plugins.pipe_experts.experts import swiglu
from ovpatch_plugins.pipe_experts.grouped_gemm import GroupSizes, grouped_linear

# Tokens of a rank, experts of a token, features, features between, experts of a rank.
SHAPES = {
    "mixtral": (4096, 2, 4096, 14336, 1),
    "dsv3": (4096, 8, 7168, 2048, 8),
    "qwen3": (4096, 8, 2048, 768, 16),
    "tiny": (64, 2, 32, 48, 4),
}
OURS = {
    "ovpatch, auto": MoEConfig("auto"),
    "ovpatch, none": MoEConfig("none"),
    **{f"ovpatch, experts {n}": MoEConfig("experts", n) for n in (2, 4, 8)},
    "ovpatch, experts 4, at once": MoEConfig("experts", 4, delay_wgrad=False),
    "ovpatch, experts 4, 2 communicators": MoEConfig("experts", 4, multi_stream=True),
    **{f"ovpatch, tokens {n}": MoEConfig("tokens", n) for n in (2, 4)},
    "ovpatch, tokens 2, 2 communicators": MoEConfig("tokens", 2, multi_stream=True),
}
# The numbers of programs of the kernel that sends rows over symmetric memory.
PROGRAMS = (8, 16)
OVER_SYMMETRIC = {
    f"ovpatch, {name}, symmetric, {programs} programs": (
        dataclasses.replace(config, exchange="symmetric"),
        programs,
    )
    for name, config in (("none", MoEConfig("none")), ("experts 8", MoEConfig("experts", 8)))
    for programs in PROGRAMS
}
LIMITS = ("experts", "all-to-alls")
Layer = Callable[[], Tensor]


def skew_of(wanted: float, top_k: int, experts: int) -> float:
    """Return how many times its share an expert can get, up to ``wanted``: a token goes to it once."""
    return min(wanted, experts / top_k)


class Problem:
    """A layer's weights, tokens and routing.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        tokens, top_k, hidden, ffn, local = SHAPES[args.shape]
        tokens = args.tokens or tokens
        world, rank = dist.get_world_size(), dist.get_rank()
        self.local, self.experts, self.top_k = local, local * world, top_k
        dtype = torch.bfloat16 if CUDA else torch.float32
        generator = torch.Generator(device()).manual_seed(rank)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, device=device(), dtype=dtype) * scale
            return drawn.requires_grad_(args.backward)

        self.x = draw(tokens, hidden)
        self.up, self.down = (
            draw(local, 2 * ffn, hidden, scale=hidden**-0.5),
            draw(local, hidden, ffn, scale=ffn**-0.5),
        )
        self.weights = torch.rand(tokens, top_k, generator=generator, device=device(), dtype=dtype)
        self.weights.requires_grad_(args.backward)
        chances = torch.rand(tokens, self.experts, generator=generator, device=device())
        # The result records the skew that these chances lead to.
        args.skew = skew_of(args.skew, top_k, self.experts)
        if args.skew > 1:
            favoured = (
                torch.rand(tokens, generator=generator, device=device())
                < args.skew * top_k / self.experts
            )
            chances[:, 0] = torch.where(favoured, 2.0, -1.0)
        self.index = chances.topk(top_k, dim=-1).indices
        self.group = get_world()

    def ours(self, config: MoEConfig) -> Tensor:
        """Compute by the feature."""
        return expert_parallel_ffn(
            self.x, self.index, self.weights, (self.up, self.down), swiglu, self.group, config
        )

    def over_symmetric(self, config: MoEConfig, programs: int) -> Tensor:
        """Compute by the feature, over symmetric memory.

        Raises:
            RuntimeError: The ranks have none.
        """
        transport = get_transport(self.group, self.x.device)
        if transport is None:
            raise RuntimeError("; ".join(list_unsupported_reasons()))
        transport.channels = programs
        return self.ours(config)

    def in_sequence(self) -> Tensor:
        """Compute with torch's own operations, in sequence."""
        rows, order, sent, received, numbers = self.dispatched(self.x, self.index)
        return self.combined(self.computed(rows, numbers), order, sent, received, self.weights)

    def naive(self, chunks: int) -> Tensor:
        """Compute chunks of tokens, each in sequence; all dispatches are launched first and waited for when read."""
        inputs = list(
            zip(*(t.chunk(chunks) for t in (self.x, self.index, self.weights)), strict=True)
        )
        dispatched = [(self.dispatched(x, index), weights) for x, index, weights in inputs]
        outs = [
            self.combined(self.computed(rows, numbers), order, sent, received, weights)
            for (rows, order, sent, received, numbers), weights in dispatched
        ]
        return torch.cat(outs)

    def dispatched(
        self, x: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor, list[int], list[int], Tensor]:
        """Sort tokens by expert and dispatch them; also return the order and splits for the combine."""
        chosen = index.reshape(-1)
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=self.experts).view(-1, self.local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = all_to_all_single_autograd(x[order // self.top_k], received, sent, self.group)
        return rows, order, sent, received, arriving

    def computed(self, rows: Tensor, arriving: Tensor) -> Tensor:
        """Apply this rank's experts to rows that are sorted by rank."""
        rows = torch.ops._c10d_functional.wait_tensor(rows) if not rows.requires_grad else rows * 1
        numbers = torch.arange(self.local, device=rows.device).repeat(len(arriving))
        order = numbers.repeat_interleave(arriving.reshape(-1), output_size=len(rows)).argsort(
            stable=True
        )
        ends = arriving.sum(0).cumsum(0, dtype=torch.int32)
        h = torch.nn.functional.grouped_mm(rows[order], self.up.transpose(-2, -1), offs=ends)
        h = torch.nn.functional.grouped_mm(swiglu(h), self.down.transpose(-2, -1), offs=ends)
        return torch.empty_like(h).index_copy(0, order, h)

    def combined(
        self, rows: Tensor, order: Tensor, sent: list[int], received: list[int], weights: Tensor
    ) -> Tensor:
        """Send rows back and sum them by token."""
        back = all_to_all_single_autograd(rows, sent, received, self.group)
        slots = torch.zeros_like(back).index_copy(0, order, back).view(*weights.shape, -1)
        return (slots * weights.unsqueeze(-1)).sum(1)

    def experts_alone(self) -> Tensor:
        """Compute as many rows as a rank sends, by its own experts evenly, without communication."""
        rows = self.x.repeat_interleave(self.top_k, 0)
        sizes = [len(part) for part in rows.tensor_split(self.local)]
        if CUDA:
            ends = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)
            h = torch.nn.functional.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
            return torch.nn.functional.grouped_mm(swiglu(h), self.down.transpose(-2, -1), offs=ends)
        groups = GroupSizes(sizes)
        return grouped_linear(
            swiglu(grouped_linear(rows.detach(), self.up.detach(), groups)),
            self.down.detach(),
            groups,
        )

    def all_to_alls(self) -> Tensor:
        """Send as many rows as a rank does, there and back, of balanced routing."""
        rows = self.x.detach().repeat_interleave(self.top_k, 0)
        received = torch.empty_like(rows)
        for _ in range(2):
            dist.all_to_all_single(received, rows, group=self.group)
        return received


def transformers_layer(problem: Problem) -> Layer:
    """Return transformers' own expert-parallel layer."""
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.integrations.moe import grouped_mm_experts_forward

    world = dist.get_world_size()
    mesh = init_device_mesh(device().type, (world, 1), mesh_dim_names=("ep", "tp"))

    class Experts(nn.Module):
        """The attributes that transformers' grouped experts read."""

        has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = (
            True,
            False,
            False,
            False,
            True,
        )
        num_experts, gate_up_proj, down_proj = problem.local, problem.up, problem.down

        def _apply_gate(self, h: Tensor) -> Tensor:
            return swiglu(h)

        def forward(self, *args: Tensor) -> Tensor:
            return grouped_mm_experts_forward(self, *args)

    layer = AllToAllEP(Experts(), mesh["ep"], mesh["tp"])
    return lambda: layer(problem.x, problem.index, problem.weights)


def defer(compute: Callable[..., Tensor], *args: Any) -> Callable[[], Layer]:
    """Return the maker of an arm that calls a function with arguments."""
    return lambda: functools.partial(compute, *args)


def arms(problem: Problem) -> dict[str, Callable[[], Layer]]:
    """Return the arms, each to be made when it is run."""
    return {
        "experts": lambda: problem.experts_alone,
        "all-to-alls": lambda: problem.all_to_alls,
        "in sequence": lambda: problem.in_sequence,
        "naive, 2 chunks": defer(problem.naive, 2),
        "naive, 4 chunks": defer(problem.naive, 4),
        "transformers": lambda: transformers_layer(problem),
        **{name: defer(problem.ours, config) for name, config in OURS.items()},
        **{
            name: defer(problem.over_symmetric, config, programs)
            for name, (config, programs) in OVER_SYMMETRIC.items()
            if CUDA
        },
    }


def check(name: str, layer: Layer, problem: Problem) -> None:
    """Check a layer against the layer in sequence, up to rounding.

    Raises:
        RuntimeError: The results differ.
    """
    with torch.no_grad():
        right, found = problem.in_sequence().float(), layer().float()
    worst = (right - found).abs().max() / right.abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst > 0.02:
        raise RuntimeError(
            f"{name} computes something else: it is off by {worst:.1%} of the largest output"
        )


def measure(name: str, problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm once."""
    layer = arms(problem)[name]()
    if name not in LIMITS:
        check(name, layer, problem)
    before = torch.cuda.memory_allocated() if CUDA else 0

    def step() -> None:
        out = layer()
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        for tensor in (problem.x, problem.up, problem.down, problem.weights):
            tensor.grad = None

    found = clocked(step, args, timed, base_bytes=before)
    gc.collect()
    return {"arm": name, **found}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--shape", choices=SHAPES, default="dsv3")
    made.add_argument("--tokens", type=int, help="of a rank; 4096 by default")
    made.add_argument(
        "--skew", type=float, default=1.0, help="how many times its share one expert gets, at most"
    )
    made.add_argument(
        "--backward", action="store_true", help="forward and backward, instead of forward alone"
    )
    made.add_argument("--arms", nargs="*", help="only these")
    add_timing(made, rounds=3)
    return made


def main() -> None:
    """Run all arms and print a table on rank 0."""
    args = parser().parse_args()
    start()
    problem = Problem(args)
    known = [*arms(problem)]
    if unknown := set(args.arms or ()) - set(known):
        parser().error(
            f"no such arms: {', '.join(sorted(unknown))}; choose from: {', '.join(known)}"
        )
    alternate("moe_layer", args.arms or known, lambda name: measure(name, problem, args), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
