"""One gather for several linears, computed together with their products.

[Note: products ahead] ``PrepareModuleInput`` gathers an attention's or a gated feed-forward's input once, in a
forward pre-hook of the parent, and the linears in it get the gathered tensor. To hide the gather under products,
these have to be computed in the hook. Which they are can be told from the parent: its own children that are cut by
columns and take a replicated input. The outputs wait until each linear is called with that very tensor.

[Note: nothing has changed since] A product computed ahead is what the linear would compute only if nothing has changed
since: its weight and bias, the gathered tensor's values, autocast, grad mode, and what keeps tensors for backward (a
region of a checkpoint must keep what it will compute again). Where something has, the linear computes for itself. Nor
is anything computed ahead for linears whose hooks may change what they compute, or would notice a gradient too many.

[Note: whose gradient it is] The products' gradients go to the input of the gather, past the gathered tensor. Who looks
at that tensor's gradient, by a hook or ``retain_grad()``, gets no products from it; who begins to after a product has
been handed out is told so in backward.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from ovpatch_plugins.tp_linear.weights import local

if TYPE_CHECKING:
    from ovpatch_plugins.tp_linear.parallel import Parallel


class _Product(NamedTuple):
    output: Tensor
    params: tuple[Tensor | None, ...]
    versions: tuple[Any, ...]


class Watch:
    """Tells backward whether somebody looks at the gathered tensor's gradient; see [Note: whose gradient it is].

    Attributes:
        handed_out: Whether a product was.
    """

    def __init__(self) -> None:
        self.handed_out = False
        self._gathered: Callable[[], Any] = lambda: None
        self._hooks: dict[int, Any] = {}

    def begin(self, gathered: Any) -> Callable[[], Any]:
        """Watch a tensor; return a weak reference to it."""
        self._gathered = weakref.ref(gathered, functools.partial(_let_go, id(gathered)))
        if gathered.requires_grad:  # hooks outlive the tensor, in a dictionary that the first one makes
            gathered.register_hook(_nothing).remove()
            self._hooks = gathered._backward_hooks
        return self._gathered

    def check(self) -> None:
        """Be called before backward.

        Raises:
            RuntimeError: Somebody looks.
        """
        gathered = self._gathered() if self.handed_out else None
        if gathered is not None:
            gathered._fix_weakref()  # its Python object may have been about to go
        if self.handed_out and (self._hooks or (gathered is not None and gathered.retains_grad)):
            raise RuntimeError(
                "a hook or retain_grad() on the gathered input of a module that PrepareModuleInput prepares would miss "
                "the gradients of its linears, which were computed together with the gather: register it before the "
                "linears are called, or set OVPATCH_TP_LINEAR_SHARED_GATHER=0"
            )


class Products:
    """Outputs that wait for their linears; see [Note: nothing has changed since].

    Args:
        gathered: The tensor with which the linears will be called.
        linears: The linears.
        outputs: Of each.
        watch: Told when an output is handed out.
    """

    def __init__(self, gathered: Tensor, linears: Sequence[nn.Linear], outputs: Sequence[Tensor], watch: Watch) -> None:
        self.gathered = watch.begin(gathered)
        self._watch, self._conditions = watch, _conditions(gathered)
        self._waiting: dict[int, _Product] = {}
        for linear, output in zip(linears, outputs, strict=True):
            params = linear.weight, linear.bias
            self._waiting[id(linear)] = _Product(output, params, tuple(map(_version, params)))

    def take(self, x: Tensor, linear: nn.Linear) -> Tensor | None:
        """Return a linear's output, once, unless it has to be computed now."""
        found = self._waiting.get(id(linear))
        if found is None:
            return None
        weight, bias = params = linear.weight, linear.bias
        if weight is not found.params[0] or bias is not found.params[1]:
            return None
        if tuple(map(_version, params)) != found.versions or _conditions(x) != self._conditions or _observed(x):
            return None
        del self._waiting[id(linear)]
        self._watch.handed_out = True
        return found.output

    def __del__(self) -> None:
        COUNTERS.unused += len(self._waiting)


# By the id of the gathered tensor. Not an attribute of it, which would be saved with it.
_products: dict[int, Products] = {}


def _let_go(key: int, _: Any) -> None:
    _products.pop(key, None)


def _nothing(_: Tensor) -> None:
    pass


def claim(x: Any, linear: nn.Linear) -> Tensor | None:
    """Return what was computed for a linear when its input was gathered, or None."""
    products = _products.get(id(x))
    gathered = None if products is None else products.gathered()
    if products is None or gathered is None or gathered is not x:
        return None
    output = products.take(gathered, linear)
    if output is not None:
        COUNTERS.calls += 1
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

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedGather:
        return self  # never changed

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
        """Return the gathered input, whose products wait for their linears, or None if stock has to gather."""
        if traced() or torch.is_inference_mode_enabled():  # where no version tells that a tensor has changed
            return None
        dim = sequence_dim(layout, x) if isinstance(x, Tensor) else None
        if dim is None or not x.numel():
            return None
        if isinstance(x, DTensor):
            if x.device_mesh != self._mesh or x.placements != (layout,) or x.shape[dim] % self._mesh.size():
                return None
            x = x.to_local()
        elif type(x) is not Tensor:
            return None
        linears = readers(module, self._mesh, x)
        if not linears:
            return None
        keep_local = self._style.use_local_output
        watch = Watch()
        *outputs, whole = operators.gather_linear(
            x,
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            wires_of.of(vars(linears[0])["_ovpatch_parallel"].group, x.device),
            dim,
            STATE.how,
            whole=Whole.LOCAL if keep_local else Whole.DTENSOR,
            check=watch.check,
        )
        given: Any = whole
        if not keep_local:
            given = DTensor.from_local(whole, self._mesh, (Replicate(),), run_check=False)
        _products[id(given)] = Products(given, linears, outputs, watch)
        return given


def gathers(layout: Any, desired: Any) -> bool:
    """Tell whether preparing an argument means to gather it."""
    return layout is not None and desired is not None and layout.is_shard() and desired.is_replicate()


def readers(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> list[nn.Linear]:
    """Return a module's own linears whose products can be computed ahead, from an input that has been gathered.

    They are cut by columns, over ``mesh``, and take a replicated input, of the features and the dtype of ``x``.
    """
    if torch.nn.modules.module._global_forward_pre_hooks:
        return []
    autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    found = []
    for child in module.children():
        parallel: Parallel | None = vars(child).get("_ovpatch_parallel")
        if parallel is None or not parallel.column or not parallel.takes_replicated or parallel.mesh != mesh:
            continue
        if not isinstance(child, nn.Linear) or child._forward_pre_hooks or child.in_features != x.shape[-1]:
            continue
        weight, bias = child.weight, child.bias
        fits = weight.dtype == x.dtype or (autocast and weight.dtype != torch.float64)
        plain = not weight._backward_hooks and not weight.is_inference() and (bias is None or not bias._backward_hooks)
        if fits and plain and parallel.divides(weight, 0):
            found.append(child)
    return found


def _observed(gathered: Tensor) -> bool:
    return bool(gathered._backward_hooks) or gathered.retains_grad


def _version(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (tensor._version, local(tensor)._version)


def _conditions(x: Tensor) -> tuple[Any, ...]:
    kind = x.device.type
    enabled = torch.is_autocast_enabled(kind)
    keeping = torch._C._autograd._top_saved_tensors_default_hooks(False)
    dtype = torch.get_autocast_dtype(kind) if enabled else None
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if kind == "cuda" else None  # owns an output's memory
    return torch.is_grad_enabled(), dtype, keeping, stream, x.requires_grad, _version(x)
