"""The autograd graph that leads to tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

# Autocast casts a weight, and a linear transposes it, before a GEMM reads it.
_CASTS: Final = ("TBackward0", "ToCopyBackward0")
_REENTRANT: Final = "CheckpointFunctionBackward"


def walk_graph(outputs: Sequence[Tensor]) -> tuple[set[Any], dict[int, Tensor]]:
    """Return the nodes of the graph that leads to tensors, and its leaves by id."""
    # Edges of inputs without a gradient lead to None.
    seen: set[Any] = {None}
    # A list instead of recursion, because graphs of deep models exceed Python's limit of recursion.
    nodes: list[Any] = [tensor.grad_fn for tensor in outputs]
    # An output that is a leaf has no node in the graph, so the walk below would miss it.
    leaves: dict[int, Tensor] = {
        id(output): output for output in outputs if output.grad_fn is None and output.requires_grad
    }
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        nodes += [parent for parent, _ in node.next_functions]
    return seen - {None}, leaves


def find_readers(outputs: Sequence[Tensor]) -> tuple[dict[int, set[Any]], bool]:
    """Find the nodes that read each leaf of the graph of some tensors.

    If a leaf is transposed, or cast by autocast, the readers of the result count as its readers. The caller reads the
    tensors themselves, and None represents the caller.

    Returns:
        The readers by the leaf's id, and whether they are complete: a reentrant checkpoint hides a part of the graph.
    """
    nodes, leaves = walk_graph(outputs)
    parents: defaultdict[Any, set[Any]] = defaultdict(set)
    for output in outputs:
        parents[output.grad_fn].add(None)
    for node in nodes:
        for child, _ in node.next_functions:
            parents[child].add(node)
    readers = {
        id(node.variable): _skip_casts(parents, node) for node in nodes if hasattr(node, "variable")
    }
    for output in outputs:
        if id(output) in leaves:
            readers.setdefault(id(output), set()).add(None)
    return readers, not any(type(node).__name__ == _REENTRANT for node in nodes)


def _skip_casts(parents: Mapping[Any, set[Any]], node: Any) -> set[Any]:
    readers: set[Any] = set()
    for parent in parents[node]:
        readers |= _skip_casts(parents, parent) if type(parent).__name__ in _CASTS else {parent}
    return readers
