"""A backend of torch.compile that runs Inductor's custom passes on its graphs, and no code generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

Pass = Callable[[Graph], None]


def run_installed_pass(graph: Graph) -> None:
    """Run the pass that is installed in Inductor, if any, as the backend of Inductor does."""
    if config.post_grad_custom_pre_pass is not None:
        config.post_grad_custom_pre_pass(graph)


def make_backend(run_pass: Pass = run_installed_pass, codes: list[str] | None = None) -> Any:
    """Return a backend that runs a pass on the graphs that Inductor would get.

    Args:
        run_pass: The pass.
        codes: Gets the code of each graph before and after the pass, if given.
    """

    def compile_graph(module: GraphModule, inputs: Any) -> Any:
        before = module.code
        run_pass(module.graph)
        module.graph.lint()
        module.recompile()
        if codes is not None:
            codes.extend((before, module.code))
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def compile_by(backend: str, model: Any) -> Any:
    """Compile a model by a backend of torch's, or by :func:`make_backend` for ``graphs``."""
    chosen = make_backend() if backend == "graphs" else backend
    return torch.compile(model, backend=chosen, fullgraph=True)
