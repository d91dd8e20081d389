"""One call of a block whose activations are computed again in backward.

In ``torch.utils.checkpoint``, the backward that reads a tensor starts the recomputation. Here a recomputation
can be launched earlier, while a gradient that the backward waits for is in flight. The rest is the same:
saved-tensor hooks leave out the tensors that the forward saves. The forward runs again, with the random
numbers and the autocast of its first run, when it is launched ahead or when backward reads the first of
these tensors.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
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
from ovpatch_plugins.recompute.outside_state import OutsideNumbers, find_generators
from ovpatch_plugins.recompute.recompute_options import ALWAYS, AUTO
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from ovpatch_plugins.recompute.selective import Contexts

# The key of a call in the metadata of the nodes that made the block's outputs.
_KEY: Final = "ovpatch_recomputation"
# The keys of a block's number of calls, of whether its code names generators outside of its modules, and of
# whether its forward draws from numpy.
_CALLS: Final = "recompute: calls"
_NAMES_GENERATORS: Final = "recompute: names generators"
_DRAWS: Final = "recompute: draws from numpy"
# A block is nearly through its backward when this part of its saved tensors, a quarter, is left.
_NEARLY_USED_DIVISOR: Final = 4


class RecomputeError(RuntimeError):
    """The error of a block whose second forward differs from the first.

    The message names the block and ends with the remedy.
    """


class _EnoughError(Exception):
    """The exception that ends a recomputation after the last tensor that backward needs."""


class _SavedTensor:
    """A placeholder in the graph for a tensor that the forward did not keep."""

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: Recomputation) -> None:
        self.call = call
        # None unless the tensor was computed again and backward has not used it.
        self.value: Tensor | None = None


class _Thread(threading.local):
    """State of a thread that computes.

    Attributes:
        depth: Number of blocks that the thread is in.
        current: Returns the call whose backward the thread is in, or None.
    """

    depth = 0
    current: Callable[[], Recomputation | None] = staticmethod(lambda: None)


_thread = _Thread()


def is_inside_block() -> bool:
    """Return whether this thread computes a block."""
    return _thread.depth > 0


class Recomputation:
    """The state of one call of a block: its inputs, and the conditions under which it ran.

    The graph's placeholders keep this object alive, so it holds neither the output nor the saved tensors.

    Args:
        block: The block.
        name: Its name, for errors and profilers.
        modules: The block and the modules inside of it.
        forward: Its forward.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
        contexts: The contexts of its forward and of its recomputation.

    Attributes:
        previous: Returns the call of the block whose output this call read, or None.
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
        self._block = block
        self._name = name
        self._forward = forward
        self._contexts = contexts
        self._modules = modules
        generators: list[Any] = []
        self._inputs = BlockInputs(args, kwargs, generators)
        # The tensors that the forward saved, in order, and their shapes, dtypes and devices.
        self._saved: list[weakref.ref[_SavedTensor]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        # The number of tensors that were computed again and that backward has not used.
        self._left = 0
        # The number of tensors that the running recomputation has saved.
        self._seen = 0
        # Whether backward has used a tensor of the last recomputation.
        self._has_begun = False
        tensors = list(find_tensors([args, kwargs]))
        kept = attached_values(block)
        number = kept[_CALLS] = kept.get(_CALLS, -1) + 1
        # The first call, 0, also counts as a power of two.
        is_power_of_two = number & (number - 1) == 0
        is_checked = CHECKS.when == ALWAYS or (CHECKS.when == AUTO and is_power_of_two)
        # Digests of the tensors that the forward saved; None if this call is not checked.
        self._digests: list[Any] | None = [] if is_checked else None
        # Flags on devices: whether a tensor of the recomputation differs from its digest.
        self._doubts: list[Tensor] = []
        self._autocast = Autocast(tensors)
        self._state = ModuleState(block, modules)
        generators += self._state.generators
        # Code that leads to no generator is read again in few calls.
        is_searched = is_power_of_two or kept.get(_NAMES_GENERATORS)
        outside = find_generators(modules) if is_searched else []
        kept[_NAMES_GENERATORS] = bool(outside)
        self._watches_numbers = is_power_of_two
        self._random = RandomState(
            tensors, generators, outside, is_power_of_two or kept.get(_DRAWS, False)
        )
        # None until the forward has ended.
        self._params: Params | None = None
        self.previous = _find_call(tensor.grad_fn for tensor in tensors)

    # --- forward ---

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute the block and return its output."""
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
                "forward is not known",
                "Draw from a random generator that is an attribute of the module, have the first "
                "forward change the tensor, too",
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
        """Return a tensor that the forward saved, and drop the reference to it."""
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
        """True if the block was computed again and backward has not used all of its tensors."""
        return self._left > 0

    @property
    def is_nearly_used(self) -> bool:
        """True if its backward needs few more tensors; the same on all ranks that run the same blocks."""
        return self._left * _NEARLY_USED_DIVISOR <= len(self._saved)

    @property
    def can_launch_ahead(self) -> bool:
        """True if the block can be computed again before its backward; see :class:`.Params`."""
        return self._params is not None and bool(self._saved) and self._params.are_there()

    def launch(self) -> None:
        """Compute the block again, up to the last tensor that backward needs.

        Raises:
            RecomputeError: The block saves other tensors than in its forward, or its inputs have changed.
        """
        if self._params is None:
            raise RecomputeError(
                f"ovpatch: block {self._name} takes gradients inside its forward, which a recomputed "
                "block cannot do. Leave it out with OVPATCH_RECOMPUTE_BLOCKS, or set "
                "OVPATCH_RECOMPUTE=0."
            )
        if changed := self._params.find_changed(self._block):
            raise RecomputeError(
                f"ovpatch: parameter {changed} of block {self._name} was changed in place between its "
                "forward and its backward. Change parameters after the backward, or set "
                "OVPATCH_RECOMPUTE=0."
            )
        COUNTERS.recomputations += 1
        args, kwargs = self._read_inputs()
        self._seen = 0
        self._left = 0
        self._has_begun = False
        self._doubts = []
        numbers = OutsideNumbers(self._modules) if self._watches_numbers else None
        try:
            hooks = saved_tensors_hooks(self._take, lambda tensor: tensor)
            with suppress(_EnoughError), self._restored_state(), hooks:
                self._forward(self._block, *args, **kwargs)
            if self._seen != len(self._saved):
                raise self._make_error(
                    f"it saved {len(self._saved)} tensors for backward, and now {self._seen}"
                )
            if numbers is not None and (name := numbers.find_changed()):
                warnings.warn(
                    f"ovpatch: the number {name} outside of the modules of block {self._name} changed "
                    "while the block was computed again. A forward that counts there counts twice. "
                    "Keep the number in an attribute of the module, or leave the block out with "
                    "OVPATCH_RECOMPUTE_BLOCKS.",
                    stacklevel=2,
                )
        except BaseException as error:
            self._drop()
            # Values that may hold a graph are kept weakly, so the second forward may not find them.
            if isinstance(error, AttributeError):
                raise self._make_error(
                    f"its forward found an attribute that no longer exists ({error}), because "
                    "attributes that hold a graph, or an object that nothing else holds, are not kept "
                    "for backward",
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
        """Drop the tensors of a recomputation that failed."""
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
                f"ovpatch: an input of block {self._name} was changed in place after its forward "
                f"read it ({error}). Have the model make a new tensor there, or leave the block out "
                "with OVPATCH_RECOMPUTE_BLOCKS."
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
        """Return the error of a second forward that differs from the first.

        Args:
            what: The difference.
            remedy: The remedy, as imperatives without a period. Default: the remedy for state outside of the
                modules.
        """
        if not remedy:
            what += (
                ". Its forward depends on state that cannot be restored, such as a random "
                "generator, a counter or a cache outside of its modules, or an operator adds in "
                "varying order"
            )
            remedy = (
                "Keep such state in an attribute of the module, set "
                "OVPATCH_RECOMPUTE_CHECK=never for such an operator"
            )
        return RecomputeError(
            f"ovpatch: block {self._name} does not compute the same again: {what}. {remedy}, leave "
            "the block out with OVPATCH_RECOMPUTE_BLOCKS, or set OVPATCH_RECOMPUTE=0."
        )


def _unpack(saved: _SavedTensor) -> Tensor:
    return saved.call.get(saved)


def _describe(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{dtype} {list(shape)} on {device}"


# --- the comparison of saved tensors ---
#
# In the calls 0, 1, 2, 4, 8, ... of a block, each tensor that the forward saves leaves a digest. The recomputation
# compares the digest with the tensor that it saves. On the CPU the digest is a checksum of all bytes. Other devices may
# add in another order each time. There the digest is a sample of up to 1024 elements: a few elements may differ, and
# all may differ by rounding errors. The flags stay on the device until the backward has ended, and then the host waits
# for the device once. Parameters are left out, because their versions are compared in every call.


class _Checks:
    """The setting of the comparisons.

    Attributes:
        when: The value of the option ``check``.
    """

    when = AUTO


CHECKS: Final = _Checks()

# The largest number of elements of a sample.
_SAMPLE: Final = 1024
# The share of a sample that may differ.
_SHARE: Final = 0.05
# The largest difference that counts as equal, relative to the element and to the sample's root mean square.
_TOLERANCE: Final = 1e-3


def _digest(tensor: Tensor) -> Any:
    """Return a checksum of a tensor's bytes, or a sample on its device; None if neither can be taken."""
    with outside_modes():
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if _may_be_uninitialized(tensor):
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


def _may_be_uninitialized(tensor: Tensor) -> bool:
    """Return whether a tensor may hold memory that its operator has not written.

    Attention without dropout saves a seed and an offset like that, and recurrent layers a workspace with gaps.
    """
    is_integral = not (tensor.is_floating_point() or tensor.is_complex())
    return (tensor.numel() <= 2 and is_integral) or (
        tensor.dtype is torch.uint8 and tensor.dim() == 1
    )


def _is_exact(tensor: Tensor) -> bool:
    """Return whether a tensor's operators compute the same bits each time, and the host can read its bytes."""
    return tensor.device.type == "cpu"


def _is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured; it would replay a comparison that no host reads."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _take_sample(tensor: Tensor) -> Tensor:
    """Return a copy of elements that are evenly spread over each dimension; the choice is deterministic."""
    view = tensor.detach()
    while view.numel() > _SAMPLE:
        dim = max(range(view.dim()), key=view.shape.__getitem__)
        # Heads and tiles repeat with a period of a power of two. An odd step meets each place of such a pattern.
        step = min(-(-view.numel() // _SAMPLE) | 1, view.shape[dim])
        view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view.clone()


def _differ(then: Tensor, now: Tensor) -> Tensor:
    """Return, as a tensor, whether more elements of two samples differ than another order of sums explains."""
    is_different = then != now
    if then.is_floating_point() or then.is_complex():
        tolerance = max(_TOLERANCE, 8 * torch.finfo(then.dtype).eps)
        a, b = (sample if sample.is_complex() else sample.float() for sample in (then, now))
        is_far = (a - b).abs() > tolerance * (a.abs() + a.abs().square().mean().sqrt())
        is_different = is_far | (is_different & (a.isnan() != b.isnan()))
    return is_different.float().mean() > _SHARE


# The flags of each running backward, with the errors to raise.
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


# --- launches before a wait ---


def launch_inside() -> None:
    """Compute the next block of a backward again, before the backward waits for a collective.

    This happens only if the running block is nearly through its backward. Otherwise the tensors that it and
    the next block save would be in memory at the same time. Tensors are counted, because their number is the
    same on all ranks.
    """
    current = _thread.current()
    previous = current.previous() if current is not None and current.is_nearly_used else None
    if previous is not None:
        _launch_ahead(previous)


def make_launch_before(ahead: int) -> Callable[[Sequence[Any]], None]:
    """Return a function that computes the last blocks of a graph again, before its outputs have gradients.

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
