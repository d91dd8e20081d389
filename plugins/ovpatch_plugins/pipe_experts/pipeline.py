"""Dispatch, experts and combine of several parts, each part's communication under other parts' experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ovpatch_plugins.pipe_experts.exchange import tie

T = TypeVar("T")


class Awaitable(Protocol):
    """Rows on their way, such as :func:`ovpatch_plugins.pipe_experts.all_to_all` returns."""

    def wait(self) -> Tensor:
        """Return the rows."""


@torch._disable_dynamo
def pipelined(
    dispatch: Callable[[int], Awaitable],
    experts: Callable[[int, Tensor], Tensor],
    combine: Callable[[int, Tensor], Awaitable],
    parts: int,
    *,
    before: Callable[[int], object] | None = None,
    meanwhile: Callable[[], T] | None = None,
    trains: bool = False,
) -> tuple[list[Tensor], T | None]:
    """Run the parts of an expert-parallel layer so that their communication hides under their experts.

    All dispatches are launched first. Then each part's experts run as soon as its rows are there, and what they return
    is sent back under the next part's. Backward is the mirror image, by the order in which nodes were made; see
    [Note: launch and wait are nodes].

    Args:
        dispatch: Starts to send a part's rows to their experts' ranks.
        experts: Computes a part: what arrived, ``[rows, h]`` -> ``[rows, h]``. May ignore rows if there are none.
        combine: Starts to send back what a part's experts returned.
        parts: How many.
        before: Called with a part before its rows are waited for. The nodes that it makes run, in backward, while the
            gradients of the part's rows are on their way: weight gradients belong there.
        meanwhile: Computed while the first rows are on their way, such as shared experts.
        trains: Whether the experts have a weight that needs a gradient, the same on all ranks. Then every part takes
            part in backward, also one of tokens that need no gradient, in which no weight was used for want of rows.

    Returns:
        What came back of each part, and what ``meanwhile`` returned.
    """
    anchor = torch.empty(0, requires_grad=trains and torch.is_grad_enabled())
    under_way = [dispatch(part) for part in range(parts)]
    other = None if meanwhile is None else meanwhile()
    leaving = []
    for part, arriving in enumerate(under_way):
        if before is not None:
            before(part)
        rows = arriving.wait()
        leaving.append(combine(part, tie(experts(part, rows), rows, anchor)))
    return [rows.wait() for rows in leaving], other
