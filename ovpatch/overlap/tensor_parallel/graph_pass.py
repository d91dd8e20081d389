"""A pass over Inductor's graphs that fuses collectives with the GEMMs of their rows.

It turns ``all_gather -> GEMMs`` and ``GEMM (+ GEMM ..) -> reduce_scatter`` into operators of :mod:`.operators`. Every
other pattern stays in the graph unchanged, but for casts before a GEMM.

Autocast casts gathered rows for their GEMMs. A cast of each shard before the gather gives the same bits with fewer
bytes to send, so the pass moves the cast. The gradients of that input are cast back before their sum and the
reduce-scatter. Their sum in the narrow dtype would have other bits, so this pattern stays unchanged.

[Note: rows of a graph] A collective concatenates the rows of ranks, rank after rank. DTensor shards a sequence that
comes after a batch dimension, so a ``split`` and a ``cat`` move the ranks between both: rows are then
``[blocks, world, m // blocks]``. An operator has its rows rank after rank, so the pass permutes rows in blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ovpatch.overlap.tensor_parallel import operators, tp_group
from ovpatch.overlap.tensor_parallel.operators import (
    GATHER_LINEARS,
    INPUT_GRADS_SCATTER,
    LINEAR_SCATTER,
)

_ATEN: Final = torch.ops.aten
_COLLECTIVES: Final = torch.ops._c10d_functional

_ALL_GATHER: Final = _COLLECTIVES.all_gather_into_tensor.default
_REDUCE_SCATTER: Final = _COLLECTIVES.reduce_scatter_tensor.default

_CAST: Final = torch.ops.prims.convert_element_type.default

_RESHAPES: Final = (_ATEN.view.default, _ATEN.reshape.default)

# The nodes that compute a weight or a bias of a GEMM from a parameter. They only read, so they can move up.
_MOVABLE: Final = (
    *_RESHAPES,
    _ATEN.permute.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.div.Tensor,
    _CAST,
)


class FusionPass(CustomGraphPass):
    """The pass, for the groups whose ranks have agreed on the settings of the feature.

    Args:
        schedule: The name of the schedule that computes the operators.
    """

    def __init__(self, schedule: str) -> None:
        self._schedule = schedule

    def __call__(self, graph: Graph) -> None:
        """Fuse the collectives of a graph."""
        for wait in list(
            graph.find_nodes(op="call_function", target=_COLLECTIVES.wait_tensor.default)
        ):
            collective: Any = wait.args[0]
            if not _can_fuse(wait, collective):
                continue
            fused: _Gather | _Scatter | None
            if collective.target is _ALL_GATHER:
                _hoist_casts(graph, wait, collective)
                fused = _match_gather(graph, wait, collective)
            else:
                fused = _match_scatter(wait, collective)
            if fused is not None:
                fused.rewrite(graph, self._schedule)

    def uuid(self) -> Any:
        """Return the key of this pass in the cache of compiled graphs."""
        source = get_hash_for_files((__file__, operators.__file__))
        return "ovpatch", self._schedule, tuple(tp_group.list_agreed_groups()), source


def _can_fuse(wait: Node, collective: Any) -> bool:
    """Return whether a collective is one of an agreed group, on rows of a static shape that a GEMM can read."""
    if not isinstance(collective, Node) or collective.op != "call_function":
        return False
    args: Any = collective.args
    if collective.target not in (_ALL_GATHER, _REDUCE_SCATTER):
        return False
    rows, *_, world, group = args
    # The dtype and all sizes must be known before the graph runs.
    if any(len(_shape(node)) < 2 or not _dtype(node).is_floating_point for node in (rows, wait)):
        return False
    if world < 2 or group not in tp_group.list_agreed_groups():
        return False
    return [user for user in collective.users if user.target is wait.target] == [wait]


# - What nodes compute


def _shape(node: Any) -> tuple[int, ...]:
    """Return the static shape of a node's tensor; ``()`` for anything else."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, FakeTensor) or not all(isinstance(size, int) for size in value.shape):
        return ()
    return tuple(value.shape)


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_reshape_of_rows(node: Node) -> bool:
    """Return whether a node is a reshape that keeps features, and so the order of rows."""
    if node.target not in _RESHAPES:
        return False
    source = node.args[0]
    return isinstance(source, Node) and _shape(node)[-1:] == _shape(source)[-1:] != ()


@dataclass(frozen=True)
class _Gemm:
    """A GEMM of rows ``[M, k]`` and a weight ``[k, n]``, with a bias ``[n]`` or None."""

    node: Node
    rows: Node
    weight: Node
    bias: Node | None

    @property
    def params(self) -> list[Node]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def _parse_gemm(node: Node) -> _Gemm | None:
    """Return the GEMM that a node computes; None for any other node."""
    if node.kwargs:
        return None
    if node.target is _ATEN.mm.default:
        bias, (rows, weight) = None, node.args
    elif node.target is _ATEN.addmm.default and len(node.args) == 3:
        bias, rows, weight = node.args
    else:
        return None
    operands = [operand for operand in (rows, weight, bias) if isinstance(operand, Node)]
    shapes = [_shape(operand) for operand in operands]
    # A bias that is a matrix has no place in the operators.
    if () in shapes or shapes[2:] not in ([], [_shape(node)[1:]]):
        return None
    if any(_dtype(operand) is not _dtype(node) for operand in operands):
        return None
    return _Gemm(node, operands[0], operands[1], None if bias is None else operands[2])


@dataclass(frozen=True)
class _Regrouping:
    """A ``split`` by ranks and a ``cat`` of all parts in another dimension; see [Note: rows of a graph]."""

    split: Node
    parts: tuple[Node, ...]
    cat: Node
    split_dim: int
    cat_dim: int

    @property
    def source(self) -> Any:
        """The tensor that is split."""
        return self.split.args[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes."""
        return (self.split, *self.parts, self.cat)


def _parse_regrouping(split: Any, world: int) -> _Regrouping | None:
    """Return the regrouping that begins with a node; None if there is none."""
    if not isinstance(split, Node) or split.target is not _ATEN.split.Tensor or split.kwargs:
        return None
    parts = tuple(split.users)
    cats = {user for part in parts for user in part.users}
    if len(cats) != 1 or any(part.target is not operator.getitem for part in parts):
        return None
    (cat,) = cats
    if cat.target is not _ATEN.cat.default or cat.kwargs:
        return None
    split_args: Any = split.args
    cat_args: Any = cat.args
    source, size, split_dim = (*split_args, 0)[:3]
    given, cat_dim = (*cat_args, 0)[:2]
    shape = _shape(source)
    if not shape or not isinstance(size, int) or shape[split_dim] != size * world:
        return None
    # The cat has all parts, once each and in the order of the ranks.
    if set(given) != set(parts) or [part.args[1] for part in given] != list(range(world)):
        return None
    return _Regrouping(split, parts, cat, split_dim % len(shape), cat_dim % len(shape))


# - Matching and rewriting


class _Inserter:
    """Inserts nodes before an anchor, with the fake tensors that later passes read."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        self._graph = graph
        self._anchor = anchor
        self._fake_mode = anchor.meta["val"].fake_mode

    def call(self, target: Any, *args: Any) -> Node:
        """Insert a call."""
        with self._graph.inserting_before(self._anchor):
            node = self._graph.call_function(target, args)
        self.update(node)
        return node

    def update(self, node: Node) -> None:
        """Compute the fake tensor of a node whose inputs have changed."""
        target: Any = node.target
        fake_args = map_arg(node.args, lambda argument: argument.meta["val"])
        fake_kwargs = map_arg(node.kwargs, lambda argument: argument.meta["val"])
        with self._fake_mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        # Some passes of torch read these facts instead.
        node.meta.pop("tensor_meta", None)

    def reshape(self, node: Node, *sizes: int) -> Node:
        """Insert a reshape, unless the node has these sizes."""
        return node if _shape(node) == sizes else self.call(_ATEN.reshape.default, node, [*sizes])

    def transpose(self, weight: Node) -> Node:
        """Insert the transpose of a matrix, which later passes simplify if the matrix is a transpose itself."""
        return self.call(_ATEN.permute.default, weight, [1, 0])

    def swap(self, rows: Node, outer: int, inner: int) -> Node:
        """Return rows ``[outer, inner, ..]`` in the order ``[inner, outer, ..]``, as a matrix."""
        count, features = _shape(rows)
        if outer == 1 or inner == 1:
            return rows
        blocks = self.reshape(rows, outer, inner, count // (outer * inner), features)
        permuted = self.call(_ATEN.permute.default, blocks, [1, 0, 2, 3])
        return self.reshape(permuted, count, features)


def _erase_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase the nodes without users.

    torch takes collectives for effects, so its elimination of dead code would keep them.
    """
    positions = _number_nodes(graph)
    for node in sorted(nodes, key=lambda node: positions[node], reverse=True):
        if not node.users:
            graph.erase_node(node)


def _number_nodes(graph: Graph) -> dict[Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


@dataclass(frozen=True)
class _Gather:
    """A gather and GEMMs of its rows.

    Attributes:
        wait: The node with the gathered rows.
        collective: The collective.
        copies: The reshapes and regroupings of the gathered rows, and the nodes of the latter.
        gemms: The GEMMs, each with its number of blocks; see [Note: rows of a graph].
        moved: The nodes after the collective that compute weights and biases, in order.
    """

    wait: Node
    collective: Node
    copies: Sequence[Node]
    gemms: Sequence[tuple[_Gemm, int]]
    moved: Sequence[Node]

    def rewrite(self, graph: Graph, schedule: str) -> None:
        """Replace the nodes by one operator."""
        x, world, group = self.collective.args
        assert isinstance(x, Node)
        assert isinstance(world, int)
        for node in self.moved:
            self.wait.prepend(node)
        insert = _Inserter(graph, self.wait)
        *sizes, features = _shape(x)
        needs_gathered = self._has_more_readers()
        fused = insert.call(
            GATHER_LINEARS,
            insert.reshape(x, prod(sizes), features),
            [insert.transpose(gemm.weight) for gemm, _ in self.gemms],
            [gemm.bias for gemm, _ in self.gemms],
            group,
            schedule,
            needs_gathered,
        )
        for index, (gemm, blocks) in enumerate(self.gemms):
            output = insert.call(operator.getitem, fused, index)
            gemm.node.replace_all_uses_with(insert.swap(output, world, blocks))
        if needs_gathered:
            gathered = insert.call(operator.getitem, fused, len(self.gemms))
            gathered = insert.reshape(gathered, *_shape(self.wait))
            self.wait.replace_all_uses_with(gathered)
            # A graph may return the result of the collective itself.
            self.collective.replace_all_uses_with(
                gathered, delete_user_cb=lambda user: user is not self.wait
            )
        gemm_nodes = [gemm.node for gemm, _ in self.gemms]
        _erase_unused(graph, [self.collective, self.wait, *self.copies, *gemm_nodes])

    def _has_more_readers(self) -> bool:
        """Return whether a node other than the GEMMs reads the gathered rows."""
        known = {self.wait, *self.copies, *(gemm.node for gemm, _ in self.gemms)}
        sources = (self.collective, self.wait, *self.copies)
        return any(user not in known for source in sources for user in source.users)


def _hoist_casts(graph: Graph, wait: Node, collective: Node) -> None:
    """Cast rows before their gather if the graph casts all gathered rows."""
    rows, world, _ = collective.args
    assert isinstance(rows, Node)
    assert isinstance(world, int)
    # The nodes with gathered rows that are not cast, each after its inputs.
    uncast: list[Node] = [wait]
    casts: list[Node] = []
    for source in (sources := [wait]):
        for user in source.users:
            regrouping = _parse_regrouping(user, world)
            if user.target is _CAST:
                casts.append(user)
            elif _is_reshape_of_rows(user):
                sources.append(user)
                uncast.append(user)
            elif regrouping is not None:
                sources.append(regrouping.cat)
                uncast += regrouping.nodes
            # The gather must send this reader all bits.
            else:
                return
    dtypes = {_dtype(cast) for cast in casts}
    if len(dtypes) != 1 or len(collective.users) != 1 or not any(map(_feeds_gemm, casts)):
        return
    (dtype,) = dtypes
    # An early cast to a wider dtype would send more bytes.
    if not dtype.is_floating_point or dtype.itemsize > _dtype(rows).itemsize:
        return
    # No cast shares its memory. The caller may write into a result, and another cast must not change.
    if len(casts) > 1 and any(map(_may_return, casts)):
        return
    insert = _Inserter(graph, collective)
    collective.replace_input_with(rows, insert.call(_CAST, rows, dtype))
    for node in (collective, *uncast):
        insert.update(node)
    for cast in casts:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        graph.erase_node(cast)


def _feeds_gemm(rows: Node) -> bool:
    """Return whether a GEMM multiplies rows, or a reshape of them, by a matrix."""
    for source in (sources := [rows]):
        for user in source.users:
            if _is_reshape_of_rows(user):
                sources.append(user)
            elif (gemm := _parse_gemm(user)) is not None and gemm.rows is source:
                return True
    return False


def _may_return(rows: Node) -> bool:
    """Return whether the graph may return rows, or a view of them."""
    for source in (sources := [rows]):
        for user in source.users:
            if user.op == "output":
                return True
            # Any other node may be a view.
            if _parse_gemm(user) is None and user not in sources:
                sources.append(user)
    return False


def _match_gather(graph: Graph, wait: Node, collective: Node) -> _Gather | None:
    world: Any = collective.args[-2]
    blocks_by_node = {wait: 1}
    copies: list[Node] = []
    readers: list[tuple[Node, Node]] = []
    for source in (sources := [wait]):
        for user in source.users:
            regrouping = _parse_regrouping(user, world) if blocks_by_node[source] == 1 else None
            if _is_reshape_of_rows(user):
                blocks_by_node[user] = blocks_by_node[source]
                sources.append(user)
                copies.append(user)
            elif regrouping is not None and _gathers_after(regrouping):
                rank_shape = _shape(regrouping.parts[0])
                blocks_by_node[regrouping.cat] = prod(rank_shape[: regrouping.cat_dim])
                sources.append(regrouping.cat)
                copies += regrouping.nodes
            else:
                readers.append((user, source))
    positions = _number_nodes(graph)
    readers.sort(key=lambda pair: positions[pair[0]])
    gemms, moved = [], set()
    for reader, source in readers:
        gemm = _parse_gemm(reader)
        if gemm is not None and gemm.rows is source:
            # The operator takes the place of the collective, so its operands must be computed before.
            late = set(_walk_operands(gemm.params, positions, positions[wait]))
            if all(node.target in _MOVABLE for node in late):
                gemms.append((gemm, blocks_by_node[source]))
                moved |= late
    if not gemms:
        return None
    ordered = sorted(moved, key=lambda node: positions[node])
    return _Gather(wait, collective, copies, gemms, ordered)


def _gathers_after(regrouping: _Regrouping) -> bool:
    """Return whether a regrouping moves the ranks from the first dimension to another one before the features."""
    return regrouping.split_dim == 0 and regrouping.cat_dim < len(_shape(regrouping.cat)) - 1


def _walk_operands(
    operands: Iterable[Node], positions: dict[Node, int], first: int
) -> Iterator[Node]:
    """Yield the nodes from a position on that operands depend on, themselves included."""
    for operand in operands:
        if positions[operand] >= first:
            yield operand
            yield from _walk_operands(operand.all_input_nodes, positions, first)


@dataclass(frozen=True)
class _Scatter:
    """A sum of GEMMs and its reduce-scatter.

    Attributes:
        wait: The node with this rank's rows.
        collective: The collective.
        nodes: The nodes between the GEMMs and the collective.
        gemms: The GEMMs.
        blocks: The number of blocks of the GEMMs' rows; see [Note: rows of a graph].
    """

    wait: Node
    collective: Node
    nodes: Sequence[Node]
    gemms: Sequence[_Gemm]
    blocks: int

    def rewrite(self, graph: Graph, schedule: str) -> None:
        """Replace the nodes by one operator."""
        world, group = self.collective.args[-2:]
        assert isinstance(world, int)
        insert = _Inserter(graph, self.collective)
        operands = [insert.swap(gemm.rows, self.blocks, world) for gemm in self.gemms]
        if len(self.gemms) == 1:
            (gemm,) = self.gemms
            weight = insert.transpose(gemm.weight)
            fused = insert.call(LINEAR_SCATTER, operands[0], weight, gemm.bias, group, schedule)
        else:
            weights = [gemm.weight for gemm in self.gemms]
            fused = insert.call(INPUT_GRADS_SCATTER, operands, weights, group, schedule)
        rows = insert.reshape(fused, *_shape(self.wait))
        self.wait.replace_all_uses_with(rows)
        # A graph may return the result of the collective itself.
        self.collective.replace_all_uses_with(
            rows, delete_user_cb=lambda user: user is not self.wait
        )
        gemm_nodes = [gemm.node for gemm in self.gemms]
        _erase_unused(graph, [self.collective, self.wait, *self.nodes, *gemm_nodes])


def _match_scatter(wait: Node, collective: Node) -> _Scatter | None:
    args: Any = collective.args
    node, reduction, world, _ = args
    if reduction != "sum":
        return None
    nodes: list[Node] = []
    blocks = 1
    while _is_reshape_of_rows(node) and len(node.users) == 1:
        nodes.append(node)
        node = node.all_input_nodes[0]
    if node.target is _ATEN.cat.default:
        split = next(iter(node.all_input_nodes[0].all_input_nodes), None)
        regrouping = _parse_regrouping(split, world)
        if regrouping is None or not _scatters_after(regrouping) or len(node.users) != 1:
            return None
        nodes += regrouping.nodes
        node = regrouping.source
        blocks = prod(_shape(node)[: regrouping.split_dim])
    # The sums of a gradient end with the first linear, so this walk finds the linears in the order of forward.
    gemms: list[_Gemm] = []
    terms = [node]
    while terms:
        term = terms.pop()
        if len(term.users) != 1:
            return None
        if (gemm := _parse_gemm(term)) is not None:
            gemms.append(gemm)
        elif _is_reshape_of_rows(term) or _is_sum(term):
            nodes.append(term)
            terms += term.all_input_nodes
        else:
            return None
    # The operator adds a bias to a single GEMM.
    if len(gemms) > 1 and any(gemm.bias is not None for gemm in gemms):
        return None
    return _Scatter(wait, collective, nodes, gemms, blocks)


def _scatters_after(regrouping: _Regrouping) -> bool:
    """Return whether a regrouping moves the ranks from another dimension before the features to the first one."""
    return regrouping.cat_dim == 0 and regrouping.split_dim < len(_shape(regrouping.cat)) - 1


def _is_sum(node: Node) -> bool:
    """Return whether a node adds two tensors of the shape and dtype of the sum."""
    terms = node.all_input_nodes
    if node.target is not _ATEN.add.Tensor or node.kwargs or len(terms) != 2:
        return False
    return all(
        _shape(term) == _shape(node) != () and _dtype(term) is _dtype(node) for term in terms
    )


# - Among the passes of Inductor


class InstalledPass:
    """The pass among the custom passes of Inductor, after the passes that the script has set.

    Args:
        schedule: See :class:`FusionPass`.
    """

    def __init__(self, schedule: str) -> None:
        self._script_passes = config.post_grad_custom_pre_pass
        self._installed = _append_pass(self._script_passes, FusionPass(schedule))
        config.post_grad_custom_pre_pass = self._installed

    def remove(self) -> None:
        """Restore the passes of the script, unless it has set others since."""
        if config.post_grad_custom_pre_pass is self._installed:
            config.post_grad_custom_pre_pass = self._script_passes


def _append_pass(script_passes: Any, fusion_pass: FusionPass) -> Any:
    if script_passes is None:
        return fusion_pass
    # Older versions of torch take a single pass.
    list_passes = getattr(custom_graph_pass, "get_custom_graph_passes", None)
    if list_passes is None:
        return _PassSequence(script_passes, fusion_pass)
    return (*list_passes(script_passes), fusion_pass)


class _PassSequence(CustomGraphPass):
    """A pass of the script, then the pass of this module."""

    def __init__(self, script_pass: Any, fusion_pass: FusionPass) -> None:
        self._script_pass = script_pass
        self._fusion_pass = fusion_pass

    def __call__(self, graph: Graph) -> None:
        """Run both passes."""
        self._script_pass(graph)
        self._fusion_pass(graph)

    def uuid(self) -> Any:
        """Return the keys of both passes; None, which turns the cache off, if the script's pass has none."""
        script_uuid = getattr(self._script_pass, "uuid", lambda: None)()
        return script_uuid and (script_uuid, self._fusion_pass.uuid())
