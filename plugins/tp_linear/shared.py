"""One gather for several linears, computed together with their products.

[Note: products ahead] ``PrepareModuleInput`` gathers an attention's or a gated feed-forward's input once, in a
forward pre-hook of the parent, and the linears in it get the gathered tensor. To hide the gather under products,
these have to be computed in the hook. Which they are can be told from the parent: its own children that are cut by
columns and take a replicated input. The outputs wait, attached to the gathered tensor, until each linear is called
with that very tensor, and under the same autocast and grad mode; with another one it computes its product then.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel.style import PrepareModuleInput

from ovpatch_plugins.tp_linear import operators
from ovpatch_plugins.tp_linear import wires as wires_of
from ovpatch_plugins.tp_linear.counters import COUNTERS
from ovpatch_plugins.tp_linear.functions import Whole
from ovpatch_plugins.tp_linear.layouts import sequence_dim, traced
from ovpatch_plugins.tp_linear.state import STATE

if TYPE_CHECKING:
    from ovpatch_plugins.tp_linear.parallel import Parallel

_ATTRIBUTE = "_ovpatch_products"


class Products:
    """Outputs that wait for their linears.

    Args:
        outputs: By linear.
        conditions: Under which they were computed.
    """

    def __init__(self, outputs: dict[int, Tensor], conditions: tuple[Any, ...]) -> None:
        self._outputs, self._conditions = outputs, conditions

    def take(self, linear: nn.Linear, conditions: tuple[Any, ...]) -> Tensor | None:
        """Return a linear's output, once."""
        return self._outputs.pop(id(linear), None) if conditions == self._conditions else None

    def __del__(self) -> None:
        COUNTERS.unused += len(self._outputs)


def claim(x: Any, linear: nn.Linear) -> Tensor | None:
    """Return what was computed for a linear when its input was gathered, or None."""
    products: Products | None = getattr(x, _ATTRIBUTE, None)
    if products is None:
        return None
    output = products.take(linear, _conditions(x))
    if output is not None:
        COUNTERS.shared_calls += 1
    return output


class SharedGather:
    """Stands for the forward pre-hook by which ``PrepareModuleInput`` prepares a module's inputs.

    Args:
        stock: Stock's hook.
        style: The style that made it.
        mesh: Over which it gathers.
    """

    def __init__(self, stock: Callable[..., Any], style: PrepareModuleInput, mesh: DeviceMesh) -> None:
        self.stock, self._style, self._mesh = stock, style, mesh

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Prepare the inputs; ``args`` are the positional ones and, if the style wants them, those by keyword."""
        if not STATE.on or not STATE.shares or torch.compiler.is_compiling():
            return self.stock(module, *args)
        style: Any = copy.copy(self._style)  # stock walks the arguments, and asks this copy for each
        style._prepare_input_arg = functools.partial(self._argument, module)
        prepare = style._prepare_input_kwarg_fn if len(args) > 1 else style._prepare_input_fn
        return prepare(*args, self._mesh)

    def _argument(self, module: nn.Module, x: Any, mesh: DeviceMesh, layout: Any, desired: Any) -> Any:
        if gathers(layout, desired):
            found = self._gathered(module, x, layout)
            if found is not None:
                return found
        return self._style._prepare_input_arg(x, mesh, layout, desired)

    def _gathered(self, module: nn.Module, x: Any, layout: Any) -> Any:
        """Return the gathered input with the products of the linears that read it, or None if stock has to gather."""
        linears = readers(module, self._mesh)
        if not linears or traced():
            return None
        if isinstance(x, DTensor) and x.device_mesh == self._mesh and x.placements == (layout,):
            x = x.to_local()
        if type(x) is not Tensor or not x.numel():
            return None
        dim = sequence_dim(layout, x)
        if dim is None:
            return None
        local = self._style.use_local_output
        *outputs, whole = operators.gather_linear(
            x,
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            wires_of.of(vars(linears[0])["_ovpatch_parallel"].group, x.device),
            dim,
            STATE.how,
            whole=Whole.LOCAL if local else Whole.DTENSOR,
        )
        given: Any = whole
        if not local:
            given = DTensor.from_local(whole, self._mesh, (Replicate(),), run_check=False)
        outs = {id(linear): output for linear, output in zip(linears, outputs, strict=True)}
        setattr(given, _ATTRIBUTE, Products(outs, _conditions(given)))
        COUNTERS.calls += len(linears)
        return given


def gathers(layout: Any, desired: Any) -> bool:
    """Tell whether preparing an argument means to gather it."""
    return layout is not None and desired is not None and layout.is_shard() and desired.is_replicate()


def readers(module: nn.Module, mesh: DeviceMesh) -> list[nn.Linear]:
    """Return a module's own linears that are cut by columns, over ``mesh``, and take a replicated input."""
    found = []
    for child in module.children():
        parallel: Parallel | None = vars(child).get("_ovpatch_parallel")
        if parallel is None or not parallel.column or not parallel.takes_replicated or parallel.mesh != mesh:
            continue
        if isinstance(child, nn.Linear) and parallel.divides(child.weight, 0):
            found.append(child)
    return found


def _conditions(x: Tensor) -> tuple[Any, ...]:
    kind = x.device.type
    enabled = torch.is_autocast_enabled(kind)
    return torch.is_grad_enabled(), enabled, torch.get_autocast_dtype(kind) if enabled else None
