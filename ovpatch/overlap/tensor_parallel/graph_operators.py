"""The operators of compiled graphs: GEMMs and the collective of their rows, as one node of the graph.

[Note: one node] A traced collective becomes a node that waits before the next node reads its result, which ends the
overlap inside an operator. The handle of a collective cannot be traced at all. So a graph gets one node, which computes
at run time as the eager operators do. A node takes its group and its schedule by name, because graphs keep no objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ovpatch.overlap.tensor_parallel import operator_counts, tp_group
from ovpatch.overlap.tensor_parallel.schedules import parse_schedule
from ovpatch.overlap.tensor_parallel.schedules.stock import ColumnGrads
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup

# The operators live as long as this object.
_LIBRARY: Final = torch.library.Library("ovpatch", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    # torch.library.custom_op would check results at each call, which takes host time.
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ovpatch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ovpatch, name).default


def _gather_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    schedule: str,
    needs_gathered: bool,
) -> list[Tensor]:
    _count_call()
    outputs, gathered = parse_schedule(schedule).gather_linear(
        _find_ranks(group, x),
        x.contiguous(),
        [weight.t() for weight in weights],
        biases,
        needs_gathered,
    )
    if not needs_gathered:
        return outputs
    assert gathered is not None
    return [*outputs, gathered]


def _fake_gather_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    schedule: str,
    needs_gathered: bool,
) -> list[Tensor]:
    rows = x.shape[0] * find_group(group).size()
    outputs = [x.new_empty((rows, weight.shape[1])) for weight in weights]
    return [*outputs, x.new_empty((rows, x.shape[1]))] if needs_gathered else outputs


def _linears_scatter(
    xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, group: str, schedule: str
) -> Tensor:
    _count_call()
    ranks = _find_ranks(group, xs[0])
    if len(xs) == 1:
        return parse_schedule(schedule).linear_scatter(
            ranks, xs[0].contiguous(), weights[0].t(), bias
        )
    # A sum of GEMMs is the gradient of an input that several linears share.
    request = ColumnGrads(xs, None, weights, None, xs[0].dtype)
    result = parse_schedule(schedule).gather_linear_backward(ranks, request)
    assert result is not None
    return result


def _fake_linears_scatter(
    xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, group: str, schedule: str
) -> Tensor:
    return xs[0].new_empty((xs[0].shape[0] // find_group(group).size(), weights[0].shape[1]))


def find_group(name: Any) -> dist.ProcessGroup:
    """Return the process group of a name."""
    return distributed_c10d._resolve_process_group(name)


def _find_ranks(group: str, x: Tensor) -> TPGroup:
    return tp_group.get_tp_group(find_group(group), x.device)


def _count_call() -> None:
    # A graph calls no code of the feature, so the operators count themselves.
    operator_counts.counts.calls += 1
    operator_counts.counts.compiled_calls += 1


GATHER_LINEARS: Final = _define(
    "gather_linears(Tensor x, Tensor[] weights, Tensor?[] biases, str group, str schedule, bool needs_gathered)"
    " -> Tensor[]",
    _gather_linears,
    _fake_gather_linears,
)
"""Gathers rows ``[m, k]``, and multiplies them by weights ``[k, n_i]``, with biases ``[n_i]`` or None.

Returns ``[world * m, n_i]`` for each weight. With ``needs_gathered`` the gathered rows come last.
"""

LINEARS_SCATTER: Final = _define(
    "linears_scatter(Tensor[] xs, Tensor[] weights, Tensor? bias, str group, str schedule) -> Tensor",
    _linears_scatter,
    _fake_linears_scatter,
)
"""Sums the GEMMs of ``[world * m, k_i]`` and ``[k_i, n]`` over the operands and the ranks; returns this rank's rows.

The result is ``[m, n]``.

``bias``, ``[n]``, is this rank's term of the bias. Only a single GEMM may have one.
"""
