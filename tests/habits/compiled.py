"""Habits of compiled code, which show the frames that Dynamo compiled.

After ``revert()`` and ``apply()`` Dynamo compiles all code again: how-it-works.md.
"""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters, get_compilation_metrics

from tests.habits.loop import Loop, habit
from tests.habits.wrapping import REVERTS, over_a_mesh


class _Compiled(Loop):
    """A loop that shows what Dynamo compiled."""

    compiles = True

    def last(self):
        super().last()
        if self.has_mesh and self.applies_defaults:
            # tp_linear replaces the hooks of linears of DTensors, whose frames stock PyTorch compiles.
            return
        frames = sorted(
            f"{metrics.co_name}, {bool(metrics.recompile_reason)}"
            for metrics in get_compilation_metrics()
        )
        self.see("compiled", [*frames, sum(counters["graph_break"].values())])


@habit(without=("compile_the_wrapper", "compile_blocks", "compile_a_slice", *REVERTS))
class compile_the_model(_Compiled):
    """The model is compiled before the wrap."""

    def made(self):
        super().made()
        self.net = torch.compile(self.net, backend="eager")


@habit(without=("compile_the_model", "compile_blocks", "compile_a_slice", *REVERTS))
class compile_the_wrapper(_Compiled):
    """The wrapped model is compiled."""

    def wrapped(self):
        super().wrapped()
        wrapper = self.model
        self.model = torch.compile(wrapper, backend="eager")
        self.model.no_sync = wrapper.no_sync


@habit(
    without=("process_group", "compile_the_model", "compile_blocks", "compile_a_slice", *REVERTS)
)
class compile_a_wrapper_over_a_mesh(over_a_mesh, compile_the_wrapper):
    """``torch.compile`` of the wrapper, whose first forward makes DTensors."""


@habit(without=("compile_the_model", "compile_the_wrapper", *REVERTS))
class compile_blocks(_Compiled):
    """Each layer is compiled."""

    def made(self):
        super().made()
        for block in self.net.layers:
            block.compile(backend="eager")


def _run_slice(net, x):
    for layer in net.layers[:9]:
        x = x + torch.tanh(layer(x))
    return x


@habit(without=("compile_the_model", "compile_the_wrapper", *REVERTS))
class compile_a_slice(_Compiled):
    """A forward that takes a slice of the layers is compiled."""

    def made(self):
        super().made()
        net = self.net
        net.forward = torch.compile(lambda x: _run_slice(net, x), backend="eager")
