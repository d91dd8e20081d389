"""One call of a block whose activations are computed again in backward.

``torch.utils.checkpoint`` ties a recomputation to the backward that asks for it. Here it can be launched before, while
a gradient that the backward waits for is under way. The rest is alike: saved-tensor hooks leave out the tensors that
the forward saves. The forward runs again, with the random numbers and the autocast of the first time, when the first
of these tensors is asked for, or when it is launched ahead.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ovpatch.overlap.comm.lifetimes import attached_values, outside_modes
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch_plugins.recompute.forward_state import (
    Autocast,
    BlockInputs,
    ModuleState,
    Params,
    RandomState,
    find_tensors,
)
from ovpatch_plugins.recompute.recompute_options import ALWAYS, AUTO
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from ovpatch_plugins.recompute.selective import Contexts

_KEY: Final = "ovpatch_recomputation"  # in the metadata of nodes that made a block's outputs
# Keys of a block's number of calls, and of whether its forward draws from numpy.
_CALLS: Final = "recompute: calls"
_DRAWS: Final = "recompute: draws from numpy"
_LITTLE: Final = (
    4  # a block is nearly through its backward when a quarter of its saved tensors is left
)


class RecomputeError(RuntimeError):
    """A block cannot be computed again as its forward was; the text names it and ends with the remedy."""


class _EnoughError(Exception):
    """Ends a recomputation behind the last tensor that backward needs."""


class _SavedTensor:
    """Stands in the graph for a tensor that was not kept."""

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: Recomputation) -> None:
        self.call = call
        self.value: Tensor | None = None  # while it is computed again and not yet used


class _Thread(threading.local):
    """Of a thread that computes: blocks it is in, and the call whose backward it is in."""

    depth = 0
    current: Callable[[], Recomputation | None] = staticmethod(lambda: None)


_thread = _Thread()


def is_inside_block() -> bool:
    """Return whether this thread computes a block already."""
    return _thread.depth > 0


class Recomputation:
    """What is kept of one call of a block: its inputs, and the state under which it ran.

    It lives as long as a tensor of the graph needs it, so it holds neither the output nor the saved tensors.

    Args:
        block: The block.
        name: Its name, for errors and profilers.
        modules: The block and the modules inside of it.
        forward: Its forward.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
        contexts: Those of forward and recomputation.

    Attributes:
        previous: Returns the call of the block whose output this one read, or None.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        modules: Sequence[nn.Module],
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        contexts: Contexts,
    ) -> None:
        self._block, self._name, self._forward = block, name, forward
        self._contexts = contexts
        self._modules = modules
        generators: list[Any] = []
        self._inputs = BlockInputs(args, kwargs, generators)
        self._saved: list[weakref.ref[_SavedTensor]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._left = 0  # tensors computed again and not yet used
        self._seen = 0  # tensors of the recomputation that runs
        self._has_begun = False  # backward has used one of them
        tensors = list(find_tensors([args, kwargs]))
        kept = attached_values(block)
        number = kept[_CALLS] = kept.get(_CALLS, -1) + 1
        # The first call, 0, counts as a power as well.
        is_power_of_two = number & (number - 1) == 0
        is_checked = CHECKS.when == ALWAYS or (CHECKS.when == AUTO and is_power_of_two)
        # Digests of the tensors that the forward saved, and flags on devices for the tensors of the recomputation.
        self._digests: list[Any] | None = [] if is_checked else None
        self._doubts: list[Tensor] = []
        self._autocast, self._state = Autocast(tensors), ModuleState(block, modules)
        generators += self._state.generators
        self._random = RandomState(tensors, generators, is_power_of_two or kept.get(_DRAWS, False))
        self._params: Params | None = None  # until the forward has ended
        self.previous = _find_call(tensor.grad_fn for tensor in tensors)

    # --- forward ---

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute the block, and return its output."""
        COUNTERS.calls += 1
        with _inside_block(), self._contexts[0], saved_tensors_hooks(self._pack, _unpack):
            output = self._forward(self._block, *args, **kwargs)
        try:
            if self._random.end_forward():
                attached_values(self._block)[_DRAWS] = True
            self._state.end_forward()
        except KeyError as error:
            raise self._make_error(
                f"its forward changes {error}, which earlier ones did not, so its state before the "
                "forward is not "
                "known",
                "Draw from a random generator that is an attribute of the module, have the first "
                "forward change the "
                "tensor, too",
            ) from None
        self._params = Params(self._modules)
        here = weakref.ref(self)
        for tensor in find_tensors(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata[_KEY] = here
        return output

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        made = _SavedTensor(self)
        self._saved.append(weakref.ref(made))
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        if self._digests is not None:
            self._digests.append(_digest(tensor))
        return made

    # --- backward ---

    def get(self, saved: _SavedTensor) -> Tensor:
        """Return a tensor that the forward saved, and let go of it."""
        if saved.value is None:
            self.launch()
        if not self._has_begun:
            self._has_begun = True
            _thread.current = weakref.ref(self)
            if self._doubts:
                _check_at_end_of_backward(self._doubts, self._make_doubt())
                self._doubts = []
        value, saved.value = saved.value, None
        self._left -= 1
        assert value is not None
        return value

    @property
    def is_launched(self) -> bool:
        """Whether it is computed again, and backward has not used all of it."""
        return self._left > 0

    @property
    def is_nearly_used(self) -> bool:
        """Whether its backward needs little more; the same on all ranks that run the same blocks."""
        return self._left * _LITTLE <= len(self._saved)

    @property
    def can_launch_ahead(self) -> bool:
        """Whether it can be computed again before its backward; see :class:`.Params`."""
        return self._params is not None and bool(self._saved) and self._params.are_there()

    def launch(self) -> None:
        """Compute the block again, up to the last tensor that backward needs.

        Raises:
            RecomputeError: It saves other tensors than in its forward, or its inputs have changed.
        """
        if self._params is None:
            raise RecomputeError(
                f"block {self._name} takes gradients inside its forward, which a recomputed block "
                "cannot. Leave it out "
                "with OVPATCH_RECOMPUTE_BLOCKS, or set OVPATCH_RECOMPUTE=0."
            )
        if changed := self._params.find_changed(self._block):
            raise RecomputeError(
                f"parameter {changed} of block {self._name} was changed in place between its "
                "forward and its backward. "
                "Change parameters after the backward, or set OVPATCH_RECOMPUTE=0."
            )
        COUNTERS.recomputations += 1
        args, kwargs = self._read_inputs()
        self._seen = self._left = 0
        self._has_begun = False
        self._doubts = []
        try:
            hooks = saved_tensors_hooks(self._take, lambda tensor: tensor)
            with suppress(_EnoughError), self._restored_state(), hooks:
                self._forward(self._block, *args, **kwargs)
            if self._seen != len(self._saved):
                raise self._make_error(
                    f"it saved {len(self._saved)} tensors for backward, and now {self._seen}"
                )
        except BaseException as error:
            self._drop()
            # A value that may hold a graph is kept weakly, so the second forward may no longer find it.
            if isinstance(error, AttributeError):
                raise self._make_error(
                    f"its forward found an attribute that no longer exists ({error}), because "
                    "attributes that "
                    "hold a graph, or an object that nothing else holds, are not kept for backward",
                    "Have the forward write the attribute before it reads it, store a detached "
                    "tensor in it",
                ) from error
            raise

    @contextmanager
    def _restored_state(self) -> Iterator[None]:
        label = profiler_label("recompute", "forward", self._name)
        with (
            profiler_span(label),
            _inside_block(),
            self._random.restored(),
            self._autocast.restored(),
            self._state.restored(),
            self._contexts[1],
            torch.enable_grad(),
        ):
            yield

    def _drop(self) -> None:
        """Let go of what a recomputation computed that did not end."""
        self._left = 0
        for saved in filter(None, (reference() for reference in self._saved)):
            saved.value = None

    def _take(self, tensor: Tensor) -> Tensor:
        index, self._seen = self._seen, self._seen + 1
        value = tensor.detach()
        if index < len(self._saved):
            kind, then = (tensor.shape, tensor.dtype, tensor.device), self._kinds[index]
            if kind != then:
                raise self._make_error(
                    f"tensor {index} that it saved was {_describe(then)}, and now is "
                    f"{_describe(kind)}"
                )
            if self._digests is not None:
                self._compare(index, tensor)
            saved = self._saved[index]()
            if saved is not None:
                saved.value = value
                self._left += 1
        if self._seen == len(self._saved):
            raise _EnoughError
        return value

    def _read_inputs(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        try:
            return self._inputs.read()
        except RuntimeError as error:
            raise RecomputeError(
                f"an input of block {self._name} was changed in place after its forward read it "
                f"({error}). Have the "
                "model make a new tensor there, or leave the block out with "
                "OVPATCH_RECOMPUTE_BLOCKS."
            ) from error

    def _compare(self, index: int, tensor: Tensor) -> None:
        assert self._digests is not None
        then = self._digests[index]
        if isinstance(then, int):
            if _digest(tensor) != then:
                raise self._make_error(
                    f"tensor {index} that it saved, {_describe(self._kinds[index])}, has other "
                    "values"
                )
        elif then is not None:
            with outside_modes():
                self._doubts.append(_differ(then, _take_sample(tensor)))

    def _make_doubt(self) -> RecomputeError:
        return self._make_error("tensors that it saved have other values")

    def _make_error(self, what: str, remedy: str = "") -> RecomputeError:
        """Return the error of a second forward that is not the first one.

        Args:
            what: What differs.
            remedy: How to mend that, as imperatives without a period. Default: for state outside of the modules.
        """
        if not remedy:
            what += (
                ". Its forward depends on state that cannot be restored, such as a random "
                "generator, a counter or a "
                "cache outside of its modules, or an operator adds in varying order"
            )
            remedy = (
                "Keep such state in an attribute of the module, set "
                "OVPATCH_RECOMPUTE_CHECK=never for such an operator"
            )
        return RecomputeError(
            f"block {self._name} does not compute the same again: {what}. {remedy}, leave the "
            "block out with "
            "OVPATCH_RECOMPUTE_BLOCKS, or set OVPATCH_RECOMPUTE=0."
        )


def _unpack(saved: _SavedTensor) -> Tensor:
    return saved.call.get(saved)


def _describe(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{dtype} {list(shape)} on {device}"


# --- whether a recomputation saves what the forward saved ---
#
# In the calls 0, 1, 2, 4, 8, ... of a block, each tensor that the forward saves leaves a digest. It is compared
# with the tensor that the recomputation saves. On the CPU it is a checksum of all bytes. On other devices sums may be
# taken in another order each time, so the digest is a sample of up to 1024 elements, and a few of them may differ, and
# all of them by rounding errors. Their flags stay on the device until the backward has ended; there the host waits for
# the device once. Parameters are left out: their versions are compared in every call.


class _Checks:
    """When digests are compared, as the option ``check``."""

    when = AUTO


CHECKS: Final = _Checks()

_SAMPLE: Final = 1024  # elements
# The share of a sample that may differ, and by how much: relative to the element and to the sample's mean square.
_SHARE: Final = 0.05
_TOLERANCE: Final = 1e-3


def _digest(tensor: Tensor) -> Any:
    """Return a checksum of a tensor's bytes, a sample on its device, or None where neither can be taken."""
    with outside_modes():
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if tensor.numel() <= 2 and not (tensor.is_floating_point() or tensor.is_complex()):
            # Attention without dropout saves a seed and an offset whose memory it leaves uninitialized.
            return None
        if not _is_exact(tensor):
            return (
                None
                if _is_capturing(tensor) or tensor.device.type == "meta"
                else _take_sample(tensor)
            )
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        count = dense.numel() * dense.element_size()
        return zlib.crc32((ctypes.c_ubyte * count).from_address(dense.data_ptr())) if count else 0


def _is_exact(tensor: Tensor) -> bool:
    """Return whether a tensor's operators compute the same bits each time, and its bytes can be read at once."""
    return tensor.device.type == "cpu"


def _is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is captured, which would replay a comparison that no host reads."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _take_sample(tensor: Tensor) -> Tensor:
    """Return a copy of some elements, evenly spread over each dimension; always the same."""
    view = tensor.detach()
    while view.numel() > _SAMPLE:
        dim = max(range(view.dim()), key=view.shape.__getitem__)
        # An odd step meets each place of a pattern whose period is a power of two, as heads and tiles have it.
        step = min(-(-view.numel() // _SAMPLE) | 1, view.shape[dim])
        view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view.clone()


def _differ(then: Tensor, now: Tensor) -> Tensor:
    """Return whether more elements of two samples differ than sums in another order explain, as a tensor."""
    is_different = then != now
    if then.is_floating_point() or then.is_complex():
        tolerance = max(_TOLERANCE, 8 * torch.finfo(then.dtype).eps)
        a, b = (sample if sample.is_complex() else sample.float() for sample in (then, now))
        is_far = (a - b).abs() > tolerance * (a.abs() + a.abs().square().mean().sqrt())
        is_different = is_far | (is_different & (a.isnan() != b.isnan()))
    return is_different.float().mean() > _SHARE


# Flags of each running backward, with the error to raise.
_pending: dict[int, list[tuple[Tensor, RecomputeError]]] = {}


def _check_at_end_of_backward(doubts: Sequence[Tensor], error: RecomputeError) -> None:
    task = torch._C._current_graph_task_id()
    pending = _pending.setdefault(task, [])
    pending.append((torch.stack(list(doubts)).any(), error))
    if task == -1:
        _check_pending(task)
    elif len(pending) == 1:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(_check_pending, task))


def _check_pending(task: int) -> None:
    for doubt, error in _pending.pop(task, ()):
        if doubt.item():
            raise error


# --- launched before a wait ---


def launch_inside() -> None:
    """Compute the next block of a backward again, before the backward waits for a collective.

    Only when the block whose backward runs is nearly through it: what it and the next one save would else be in memory
    at the same time. That is counted in tensors, which are as many on all ranks.
    """
    current = _thread.current()
    previous = current.previous() if current is not None and current.is_nearly_used else None
    if previous is not None:
        _launch_ahead(previous)


def make_launch_before(ahead: int) -> Callable[[Sequence[Any]], None]:
    """Return a function that computes the last blocks of a graph again, before the gradients of its outputs are there.

    Args:
        ahead: Number of blocks.
    """

    def launch_before(nodes: Sequence[Any]) -> None:
        call = _find_call(nodes)()
        for _ in range(ahead):
            if call is None:
                return
            _launch_ahead(call)
            call = call.previous()

    return launch_before


def _launch_ahead(call: Recomputation) -> None:
    if not call.is_launched and call.can_launch_ahead:
        call.launch()
        COUNTERS.launched_ahead += 1


def _find_call(nodes: Iterable[Any]) -> Callable[[], Recomputation | None]:
    """Return a weak reference to the call of a block that made the tensor of one of these nodes."""
    for node in nodes:
        found: weakref.ref[Recomputation] | None = None if node is None else node.metadata.get(_KEY)
        if found is not None:
            return found
    return lambda: None


@contextmanager
def _inside_block() -> Iterator[None]:
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1
