"""The outputs of linears that were computed when their input was gathered, until the linears are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ovpatch.overlap.tensor_parallel.layout import fill_output, get_local
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

DeferredOperands = tuple[Tensor, Sequence[Tensor]]
"""Gathered rows, ``[M, k]``, and the memory of each linear's output, which the linear computes when it is called."""


class _PendingOutput(NamedTuple):
    """An output that its linear has not claimed yet.

    Attributes:
        output: The output, as the autograd node of the gather returned it.
        memory: The memory of an output that must still be computed; None if it was computed with the gather.
        weight: The weight at the time of the gather.
        bias: The bias at the time of the gather.
        versions: The versions of weight and bias at the time of the gather.
    """

    output: Tensor
    memory: Tensor | None
    weight: Tensor
    bias: Tensor | None
    versions: tuple[Any, ...]


class GatherGuard:
    """The check that refuses a backward in which the gathered tensor's gradient is read.

    The gradients of the GEMMs go to the input of the gather, and bypass the gathered tensor. A hook or
    ``retain_grad()`` on that tensor would miss them, if it is registered after a linear has claimed its output.

    Attributes:
        claimed_weights: The weights of claimed outputs, with the versions of them and their local tensors at that
            time.
    """

    def __init__(self) -> None:
        self.claimed_weights: list[tuple[Tensor, tuple[int, int] | None]] = []
        # A weak reference to the gathered tensor.
        self._gathered: Callable[[], Any] = lambda: None
        # The hooks of the gathered tensor, which may outlive it.
        self._hook_table: dict[int, Any] = {}

    def watch_tensor(self, gathered: Any) -> Callable[[], Any]:
        """Watch the gathered tensor, and return a weak reference to it."""
        key = id(gathered)
        self._gathered = weakref.ref(gathered, lambda _: PRECOMPUTED.pop(key, None))
        # Hooks outlive the tensor, in a dictionary that its first hook creates.
        if gathered.requires_grad:
            gathered.register_hook(lambda grad: None).remove()
            self._hook_table = gathered._backward_hooks
        return self._gathered

    def check_backward(self) -> None:
        """Check the tensors of the gather before its backward.

        Raises:
            RuntimeError: The gathered tensor's gradient is read, or the script has written to a weight since its
                linear was called.
        """
        for weight, version in self.claimed_weights:
            if _version(weight) != version:
                raise RuntimeError(
                    f"a weight {tuple(weight.shape)} needed for gradient computation has been "
                    "modified by an inplace operation since its linear was called: change weights after backward"
                )
        gathered = self._gathered() if self.claimed_weights else None
        # The Python object may have been about to be freed, while C++ keeps the tensor.
        if gathered is not None:
            gathered._fix_weakref()
        if self.claimed_weights and (
            self._hook_table or (gathered is not None and gathered.retains_grad)
        ):
            raise RuntimeError(
                "a hook or retain_grad() on the gathered input of a module that PrepareModuleInput prepares would miss "
                "the gradients of its linears, which were computed together with the gather: register it before the "
                "linears are called, or set OVPATCH_TP_LINEAR_SHARED_GATHER=0"
            )


class PrecomputedOutputs:
    """The outputs of a gather until their linears are called with the gathered tensor.

    [Note: nothing has changed since] A linear gets its output only if nothing has changed since the gather: the weight,
    the gathered tensor's values, autocast, grad mode, and the hooks that save tensors for backward. The hooks matter,
    because a checkpoint must save the tensors that it will recompute. Otherwise the linear computes its output itself.
    An output that was computed ahead also needs unchanged values of the weight. Versions show writes to these values,
    except writes through ``.data``. So no output is computed ahead if hooks that could write have yet to run.

    Args:
        gathered: The gathered tensor.
        linears: The linears.
        outputs: Their outputs.
        guard: Records the claimed outputs.
        dim: The sequence dimension of the gathered tensor.
        deferred: One item, the operands of outputs that the linears compute when they are called. None if the outputs
            are computed already.
    """

    def __init__(
        self,
        gathered: Tensor,
        linears: Sequence[nn.Linear],
        outputs: Sequence[Tensor],
        guard: GatherGuard,
        dim: int,
        deferred: list[DeferredOperands] | None,
    ) -> None:
        self.gathered = guard.watch_tensor(gathered)
        self._guard = guard
        self._conditions = _capture_conditions(gathered)
        # The autograd node refers to the list as long as the graph lives, so the list must not keep the operands.
        operands: tuple[Tensor | None, Sequence[Tensor]] = (
            (None, ()) if deferred is None else deferred.pop()
        )
        self._dim, (self._rows, memories) = dim, operands
        self._pending_outputs: dict[int, _PendingOutput] = {}
        for i, (linear, output) in enumerate(zip(linears, outputs, strict=True)):
            weight, bias = linear.weight, linear.bias
            versions, memory = (_version(weight), _version(bias)), memories[i] if memories else None
            self._pending_outputs[id(linear)] = _PendingOutput(
                output, memory, weight, bias, versions
            )

    def take_output(self, x: Tensor, linear: nn.Linear) -> Tensor | None:
        """Return a linear's output, once; None if the linear has to compute it."""
        pending = self._pending_outputs.get(id(linear))
        if (
            pending is None
            or linear.weight is not pending.weight
            or linear.bias is not pending.bias
        ):
            return None
        # A hook on the gathered tensor would miss the gradient of a GEMM in the node of the gather.
        if _capture_conditions(x) != self._conditions or x._backward_hooks or x.retains_grad:
            return None
        if pending.memory is None:
            if (_version(pending.weight), _version(pending.bias)) != pending.versions:
                return None
        elif not self._compute_deferred(pending):
            return None
        del self._pending_outputs[id(linear)]
        # The rows take much memory, and after the last output no linear needs them.
        if not self._pending_outputs:
            self._rows = None
        self._guard.claimed_weights.append((pending.weight, _version(pending.weight)))
        return pending.output

    def _compute_deferred(self, pending: _PendingOutput) -> bool:
        """Compute an output into its memory; return False if the weight now has another number of rows."""
        memory, rows = pending.memory, self._rows
        weight, bias = (
            get_local(pending.weight),
            None if pending.bias is None else get_local(pending.bias),
        )
        if memory is None or rows is None or len(weight) != memory.shape[-1]:
            return False
        with torch.no_grad():
            fill_output(
                memory,
                rows,
                weight.to(rows.dtype),
                None if bias is None else bias.to(rows.dtype),
                self._dim,
            )
        return True

    # The last reference goes with the gathered tensor, after which no linear can claim an output.
    def __del__(self) -> None:
        COUNTERS.unused += sum(pending.memory is None for pending in self._pending_outputs.values())


# The outputs by the id of the gathered tensor. An attribute of that tensor would be saved with it.
PRECOMPUTED: Final[dict[int, PrecomputedOutputs]] = {}


def claim_output(x: Any, linear: nn.Linear) -> Tensor | None:
    """Return the output of a linear that was prepared when its input was gathered, or None."""
    outputs = PRECOMPUTED.get(id(x))
    gathered = None if outputs is None else outputs.gathered()
    if outputs is None or gathered is None or gathered is not x:
        return None
    output = outputs.take_output(gathered, linear)
    if output is not None:
        COUNTERS.calls += 1
        COUNTERS.shared_calls += 1
    return output


def _version(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (tensor._version, get_local(tensor)._version)


def _capture_conditions(x: Tensor) -> tuple[Any, ...]:
    device_type = x.device.type
    is_autocast_on = torch.is_autocast_enabled(device_type)
    saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast_on else None
    # The stream of the gather owns the memory of the outputs.
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if device_type == "cuda" else None
    return torch.is_grad_enabled(), dtype, saved_tensor_hooks, stream, x.requires_grad, _version(x)
