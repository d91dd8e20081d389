"""Outputs of linears that were computed when their input was gathered, until the linears are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ovpatch.overlap.tensor_parallel.layout import fill_output, get_local
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

LaterOperands = tuple[Tensor, Sequence[Tensor]]
"""Gathered rows, ``[M, k]``, and the memory of each linear's output, which the linear computes when it is called."""


class _Product(NamedTuple):
    output: Tensor
    place: Tensor | None  # the memory of an output that is still to be computed
    weight: Tensor
    bias: Tensor | None
    versions: tuple[Any, ...]


class GatherGuard:
    """Refuses a backward in which the gathered tensor's gradient is read.

    The products' gradients go to the input of the gather, past the gathered tensor. A hook or ``retain_grad()`` on that
    tensor would miss them, if it is registered after a product has been handed out.
    """

    def __init__(self) -> None:
        self.handed_out: list[
            tuple[Tensor, int]
        ] = []  # weights of products handed out, with their versions then
        self._gathered: Callable[[], Any] = lambda: None
        self._hooks: dict[int, Any] = {}

    def watch_tensor(self, gathered: Any) -> Callable[[], Any]:
        """Watch the gathered tensor, and return a weak reference to it."""
        key = id(gathered)
        self._gathered = weakref.ref(gathered, lambda _: PRECOMPUTED.pop(key, None))
        if (
            gathered.requires_grad
        ):  # hooks outlive the tensor, in a dictionary that the first one makes
            gathered.register_hook(lambda grad: None).remove()
            self._hooks = gathered._backward_hooks
        return self._gathered

    def check_backward(self) -> None:
        """Raise RuntimeError if the gathered tensor's gradient is read, or a weight has been written into."""
        for weight, version in self.handed_out:
            if weight._version != version:
                raise RuntimeError(
                    f"a weight {tuple(weight.shape)} needed for gradient computation has been "
                    "modified by an inplace "
                    "operation since its linear was called: change weights after backward"
                )
        gathered = self._gathered() if self.handed_out else None
        if gathered is not None:
            gathered._fix_weakref()  # its Python object may have been about to go
        if self.handed_out and (self._hooks or (gathered is not None and gathered.retains_grad)):
            raise RuntimeError(
                "a hook or retain_grad() on the gathered input of a module that PrepareModuleInput "
                "prepares would miss "
                "the gradients of its linears, which were computed together with the gather: "
                "register it before the "
                "linears are called, or set OVPATCH_TP_LINEAR_SHARED_GATHER=0"
            )


class PrecomputedOutputs:
    """Outputs that wait for their linears to be called with the gathered tensor; the guard records those handed out.

    [Note: nothing has changed since] An output is handed out only if nothing has changed since the gather: the weight,
    the gathered tensor's values, autocast, grad mode, and what keeps tensors for backward (a region of a checkpoint
    must keep what it will compute again). Otherwise the linear computes for itself. An output that was computed ahead
    also needs the weight's values of then. A version tells these, but not writes through ``.data``; so nothing is
    computed ahead where hooks that could write still have to run.
    """

    def __init__(
        self,
        gathered: Tensor,
        linears: Sequence[nn.Linear],
        outputs: Sequence[Tensor],
        watch: GatherGuard,
        dim: int,
        later: list[LaterOperands] | None,
    ) -> None:
        self.gathered = watch.watch_tensor(gathered)
        self._watch, self._conditions = watch, _capture_conditions(gathered)
        # Taken out: the autograd node refers to the list for as long as the graph lives.
        taken: tuple[Tensor | None, Sequence[Tensor]] = (None, ()) if later is None else later.pop()
        self._dim, (self._rows, places) = dim, taken
        self._waiting: dict[int, _Product] = {}
        for i, (linear, output) in enumerate(zip(linears, outputs, strict=True)):
            weight, bias = linear.weight, linear.bias
            versions, place = (_version(weight), _version(bias)), places[i] if places else None
            self._waiting[id(linear)] = _Product(output, place, weight, bias, versions)

    def take_output(self, x: Tensor, linear: nn.Linear) -> Tensor | None:
        """Return a linear's output, once; None if the linear has to compute it."""
        found = self._waiting.get(id(linear))
        if found is None or linear.weight is not found.weight or linear.bias is not found.bias:
            return None
        if _capture_conditions(x) != self._conditions or x._backward_hooks or x.retains_grad:
            return None
        if found.place is None:
            if (_version(found.weight), _version(found.bias)) != found.versions:
                return None
        elif not self._compute(found):
            return None
        del self._waiting[id(linear)]
        if not self._waiting:
            self._rows = None
        self._watch.handed_out.append((found.weight, found.weight._version))
        return found.output

    def _compute(self, found: _Product) -> bool:
        """Compute a product into its memory; return False if the weight has another number of rows by now."""
        place, rows = found.place, self._rows
        weight, bias = (
            get_local(found.weight),
            None if found.bias is None else get_local(found.bias),
        )
        if place is None or rows is None or len(weight) != place.shape[-1]:
            return False
        with torch.no_grad():
            fill_output(
                place,
                rows,
                weight.to(rows.dtype),
                None if bias is None else bias.to(rows.dtype),
                self._dim,
            )
        return True

    def __del__(self) -> None:
        COUNTERS.unused += sum(product.place is None for product in self._waiting.values())


# By the id of the gathered tensor. Not an attribute of it, which would be saved with it.
PRECOMPUTED: Final[dict[int, PrecomputedOutputs]] = {}


def claim_output(x: Any, linear: nn.Linear) -> Tensor | None:
    """Return the output that was computed for a linear when its input was gathered, or None."""
    products = PRECOMPUTED.get(id(x))
    gathered = None if products is None else products.gathered()
    if products is None or gathered is None or gathered is not x:
        return None
    output = products.take_output(gathered, linear)
    if output is not None:
        COUNTERS.calls += 1
        COUNTERS.shared_calls += 1
    return output


def _version(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (tensor._version, get_local(tensor)._version)


def _capture_conditions(x: Tensor) -> tuple[Any, ...]:
    kind = x.device.type
    enabled = torch.is_autocast_enabled(kind)
    keeping = torch._C._autograd._top_saved_tensors_default_hooks(False)
    dtype = torch.get_autocast_dtype(kind) if enabled else None
    stream = (
        torch._C._cuda_getCurrentRawStream(x.device.index) if kind == "cuda" else None
    )  # owns an output's memory
    return torch.is_grad_enabled(), dtype, keeping, stream, x.requires_grad, _version(x)
