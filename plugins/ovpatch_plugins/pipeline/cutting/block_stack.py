"""The stack of blocks of a plain model, and the trace of one forward of the full model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch.overlap.autograd import is_differentiable
from ovpatch.overlap.tensors.linear_ops import is_generator_class, make_random_stream

Path = tuple[Any, ...]


class CutError(ValueError):
    """The error that a model cannot be cut into stages; the message has the reason and ends with the remedy."""


# --- nested values ---


def find_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, with their places."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_tensors(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from find_tensors(item, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from find_tensors(getattr(value, item.name), (*path, item.name))


def read_path(value: Any, path: Path) -> Any:
    """Return the value at a place of a nested value."""
    for key in path:
        value = value[key] if isinstance(value, (Mapping, tuple, list)) else getattr(value, key)
    return value


def map_leaves(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of a nested value with each leaf replaced."""
    changed: Any
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_leaves(item, function, (*path, key))
        return changed
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, function, (*path, index)) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for item in dataclasses.fields(value):
            setattr(
                changed,
                item.name,
                map_leaves(getattr(value, item.name), function, (*path, item.name)),
            )
        return changed
    return function(path, value)


def _without_tensors(value: Any) -> Any:
    return map_leaves(
        value, lambda _, leaf: leaf if isinstance(leaf, (bool, int, float, str)) else None
    )


# --- the stack ---


@dataclass(frozen=True)
class BlockStack:
    """The blocks of a model.

    Attributes:
        path: Name of their list in the model.
        blocks: The blocks, in order.
        keys: Their names in the list.
    """

    path: str
    blocks: tuple[nn.Module, ...]
    keys: tuple[str, ...]

    def name(self, index: int) -> str:
        """Return the name of a block."""
        return f"{self.path}.{self.keys[index]}" if self.path else self.keys[index]


def find_block_stack(
    model: nn.Module, path: str | None = None, run: Callable[[], object] | None = None
) -> BlockStack:
    """Return the list of blocks with the most parameters that the model's forward goes through.

    Lists whose members are of one class come before those of mixed classes.

    Args:
        model: The model.
        path: Name of the list, whose members may differ in class. Default: the function finds the list.
        run: Runs the model once. Default: the largest list counts, even if the forward does not go through it.

    Raises:
        CutError: There is no such list.
    """
    if path is not None:
        try:
            found = model.get_submodule(path)
        except AttributeError:
            found = None
        if not isinstance(found, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or len(found) < 2:
            raise CutError(
                f"blocks={path!r} names no list of two or more blocks in {type(model).__name__}. "
                "Give the name of a ModuleList, ModuleDict or Sequential, as model.named_modules() shows "
                "it."
            )
        return _make_stack(path, found)
    candidates = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or len(module) < 2:
            continue
        # Blocks of one class are most likely the model's layers, but a ModuleList of several classes may have them.
        is_uniform = len({type(child) for child in module.children()}) == 1
        size = sum(param.numel() for param in module.parameters())
        if size and (is_uniform or isinstance(module, nn.ModuleList)):
            candidates.append((is_uniform, size, name, module))
    if not candidates:
        raise CutError(
            f"{type(model).__name__} has no list of blocks of one class. Name the list that its "
            'forward goes through, as in cut(..., blocks="model.layers"), or put the blocks into a '
            "ModuleList."
        )
    candidates.sort(key=lambda candidate: candidate[:2], reverse=True)
    lists = {name: module for _, _, name, module in candidates}
    called = _list_called(lists, run) if run is not None and len(lists) > 1 else []
    # Without a list that the forward goes through, the largest one counts, and its trace raises the
    # error.
    best = next((name for name in lists if name in called), candidates[0][2])
    return _make_stack(best, lists[best])


def _list_called(lists: Mapping[str, nn.Module], run: Callable[[], object]) -> list[str]:
    """Return the names of the lists whose members a forward calls once each, in order."""
    calls: dict[str, list[int]] = {name: [] for name in lists}
    handles = [
        block.register_forward_pre_hook(
            lambda *_, name=name, index=index: calls[name].append(index)
        )
        for name, module in lists.items()
        for index, block in enumerate(module.children())
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, module in lists.items() if calls[name] == list(range(len(module)))]  # type: ignore[arg-type]


def _make_stack(path: str, module: nn.Module) -> BlockStack:
    keys, blocks = zip(*module.named_children(), strict=True)
    if len(set(map(id, blocks))) < len(blocks):
        raise CutError(
            f"a block occurs twice in {path or 'the model'}. Build each block as its own module."
        )
    return BlockStack(path, blocks, keys)


# --- a forward of the full model ---


@dataclass
class Boundary:
    """The tensors that pass from one block to the next, where a stage begins.

    Attributes:
        outputs: Places of the hidden states in the output of the previous block.
        inputs: Their places in ``(args, kwargs)`` of the next block.
        tensors: The hidden states of the traced forward, with their graph.
        leaves: The same values, detached, with which the forward continued.
    """

    outputs: list[Path]
    inputs: list[Path]
    tensors: list[Tensor]
    leaves: list[Tensor]


@dataclass
class ModuleCall:
    """Calls of a module outside of the stack.

    Attributes:
        blocks_before: Number of blocks that had begun before its first call.
        tensors: Number of tensors that it returned.
        nodes: Nodes that made its outputs, if these can have a gradient.
        callers: Ids of the modules outside of the stack inside of which all its calls happened.
    """

    blocks_before: int
    callers: set[int]
    tensors: int = 0
    nodes: list[Any] = field(default_factory=list)

    @property
    def is_differentiable(self) -> bool:
        """True if all outputs of the module can have a gradient."""
        return 0 < self.tensors == len(self.nodes)


@dataclass
class Trace:
    """One forward of the full model.

    Attributes:
        device: The device of the model's parameters.
        templates: Outputs of the blocks, without their tensors.
        boundaries: Boundaries by the index of the next block.
        calls: Calls of the modules outside of the stack, by the module's id.
        output: The output of the model.
        results: Detached tensors that each block returned.
        random_states: Functions that restore the random generators' states at the entry of a block, by its index.
    """

    device: torch.device
    templates: list[Any] = field(default_factory=list)
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    calls: dict[int, ModuleCall] = field(default_factory=dict)
    output: Any = None
    results: list[list[Tensor]] = field(default_factory=list)
    random_states: dict[int, Callable[[], None]] = field(default_factory=dict)


def trace_model(
    model: nn.Module,
    stack: BlockStack,
    starts: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    between: Callable[[], object] | None = None,
) -> Trace:
    """Run the full model once and record the tensors that pass between its blocks.

    Args:
        model: The model, with parameters that all require gradients.
        stack: Its blocks.
        starts: Blocks with which stages begin, without the first.
        args: Arguments of one microbatch.
        kwargs: Keyword arguments of one microbatch.
        between: Called after each block.

    Raises:
        CutError: The model does not call its blocks in order, or it changes hidden states between blocks.
    """
    trace = Trace(next(model.parameters()).device)
    previous: list[tuple[Path, Tensor, Tensor]] = []
    inside: set[int] = set()
    running: list[int] = []
    handles: list[Any] = []

    def enter(index: int, args: Any, kwargs: Any) -> None:
        if index != len(trace.templates) or inside:
            raise CutError(_describe_order(model, stack, index, len(trace.templates)))
        if index in starts:
            trace.boundaries[index] = _find_boundary(stack, index, previous, (args, kwargs))
            trace.random_states[index] = save_random_states(trace.device)
        inside.add(index)

    def leave(index: int, output: Any) -> Any:
        inside.discard(index)
        trace.templates.append(_without_tensors(output))
        trace.results.append([tensor.detach() for _, tensor in find_tensors(output)])
        if between is not None:
            between()
        # A stage that begins with the next block gets detached tensors, as it does in training.
        if index + 1 not in starts:
            return output
        detached = map_leaves(output, lambda _, leaf: _detach(leaf))
        previous[:] = [
            (path, tensor, read_path(detached, path)) for path, tensor in find_tensors(output)
        ]
        return detached

    def begin(module: nn.Module) -> None:
        if not inside:
            running.append(id(module))

    def note(module: nn.Module, output: Any) -> None:
        if inside:
            return
        # Calls that failed, and whose errors the model caught, are still in the list.
        while running.pop() != id(module):
            pass
        call = trace.calls.setdefault(id(module), ModuleCall(len(trace.templates), set(running)))
        call.callers &= set(running)
        found = [tensor for _, tensor in find_tensors(output)]
        call.tensors += len(found)
        call.nodes += [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]

    for index, block in enumerate(stack.blocks):
        hook: Any = lambda _, args, kwargs, index=index: enter(index, args, kwargs)  # noqa: E731
        handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
        hook = lambda _, __, output, index=index: leave(index, output)  # noqa: E731
        handles.append(block.register_forward_hook(hook))
    for module in list_outside(model, stack):
        handles.append(
            module.register_forward_pre_hook(lambda module, _: begin(module), prepend=True)
        )
        handles.append(module.register_forward_hook(lambda module, _, output: note(module, output)))
    try:
        trace.output = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if model.training and 0 < len(trace.templates) < len(stack.blocks):
        raise CutError(_describe_order(model, stack, len(stack.blocks), len(trace.templates)))
    if len(trace.templates) < len(stack.blocks):
        raise CutError(
            f"the model's forward calls {len(trace.templates)} of the {len(stack.blocks)} blocks "
            f"of {stack.path}. Name the list that it goes through with blocks=, and have it call "
            "blocks, not their forward() or their parts."
        )
    return trace


def _describe_order(model: nn.Module, stack: BlockStack, index: int, due: int) -> str:
    """Return the reason against cutting a forward that calls a block, or ends, although another block was due."""
    if model.training and index > due:
        probabilities = [
            f"{name}.{key}".lstrip(".")
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if "layerdrop" in key.lower() and isinstance(value, float) and value > 0
        ]
        remedy = (
            "".join(f"{name} = " for name in probabilities) + "0.0"
            if probabilities
            else "its probability to 0"
        )
        return (
            f"the model's forward skips {stack.name(due)} in training, as LayerDrop does, and "
            "stages cannot decide together which blocks to skip. Have the forward call all blocks: "
            f"before cut(), set {remedy}."
        )
    if index < due:
        how = f"calls {stack.name(index)} again, or out of order"
    else:
        how = f"calls {stack.name(index)} where {stack.name(due)} was due"
    return (
        f"the model {how}: its forward does not go through the blocks once, in order. Cut a model "
        "whose forward does, or name another list with blocks=."
    )


def _detach(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _find_boundary(
    stack: BlockStack, index: int, previous: Sequence[tuple[Path, Tensor, Tensor]], inputs: Any
) -> Boundary:
    found = Boundary([], [], [], [])
    given = list(find_tensors(inputs))
    for path, tensor, leaf in previous:
        place = next((place for place, tensor_given in given if tensor_given is leaf), None)
        if place is not None:
            found.outputs.append(path)
            found.inputs.append(place)
            found.tensors.append(tensor)
            found.leaves.append(leaf)
    if not any(tensor.is_floating_point() for tensor in found.tensors):
        raise CutError(
            f"the output of {stack.name(index - 1)} is not the input of {stack.name(index)}: the "
            "model's forward computes on hidden states between blocks, as a loop does that adds "
            "residuals outside of them. Move that into the blocks."
        )
    return found


def list_outside(model: nn.Module, stack: BlockStack) -> list[nn.Module]:
    """Return the modules outside of the stack, without the modules that contain the stack."""
    # Modules that contain the stack run around the blocks, so they are no parts of a single stage.
    container = model.get_submodule(stack.path)
    around = {id(model), id(container)}
    parts = stack.path.split(".") if stack.path else []
    around |= {id(model.get_submodule(".".join(parts[:end]))) for end in range(1, len(parts))}
    inside = {id(module) for block in stack.blocks for module in block.modules()}
    return [module for module in model.modules() if id(module) not in around | inside]


# --- the state that a forward changes ---

_CONTAINERS: Final = (list, dict, set, OrderedDict, deque)


def save_random_states(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the states that the generators of Python, NumPy and torch have now."""
    restores: list[Callable[[], object]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type not in ("cpu", "meta"):
        backend = torch.get_device_module(device)
        restores.append(
            functools.partial(backend.set_rng_state, backend.get_rng_state(device), device)
        )
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        restores.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for function in restores:
            function()

    return restore


def seed_all(device: torch.device, torch_seed: int, python_seed: int) -> None:
    """Seed the generators that :func:`save_random_states` saves, and no others, unlike ``torch.manual_seed()``."""
    torch.default_generator.manual_seed(torch_seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(torch_seed)
    random.seed(python_seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(python_seed)


class ForwardState:
    """The state that a forward may change in some modules: buffers, generators, counters, caches and hooks.

    Args:
        modules: The modules.
        has_objects: Whether the state has all attributes and hooks, also those that a forward adds. Otherwise it has
            only numbers, strings, and the contents of lists, mappings and sets.
    """

    def __init__(self, modules: Iterable[nn.Module], *, has_objects: bool = True) -> None:
        self._has_objects = has_objects
        self._modules = list(modules)
        # - By module
        self._attributes = [
            {key: value for key, value in vars(module).items() if key not in MODULE_STATE}
            for module in self._modules
        ]
        self._buffers = [dict(module._buffers) for module in self._modules]
        self._hooks = [
            {key: copy.copy(vars(module)[key]) for key in _HOOKS} for module in self._modules
        ]
        # - Contents of attributes and buffers
        values = [value for attributes in self._attributes for value in attributes.values()]
        classes: list[Any] = list(map(type, values))
        generators = [
            value for value, cls in zip(values, classes, strict=True) if is_generator_class(cls)
        ]
        streams = [make_random_stream(generator) for generator in generators]
        self._streams = [(stream, stream.read()) for stream in streams]
        self._containers = {
            id(value): (value, copy.copy(value)) for value in values if type(value) in _CONTAINERS
        }
        tensors = [buffer for buffers in self._buffers for buffer in buffers.values()]
        self._tensors = {
            id(buffer): (buffer, buffer.detach().clone())
            for buffer in tensors
            if buffer is not None and not buffer.is_meta
        }

    def restore(self) -> None:
        """Restore the state that the modules had."""
        kept = zip(self._modules, self._attributes, self._buffers, self._hooks, strict=True)
        for module, attributes, buffers, hooks in kept:
            own = vars(module)
            if self._has_objects:
                for key in own.keys() - attributes.keys() - MODULE_STATE:
                    del own[key]
                own.update(attributes)
                # An attribute may record that the first forward has registered hooks, as in transformers.
                for key, saved in hooks.items():
                    own[key].clear()
                    own[key].update(saved)
            else:
                own.update(
                    (key, value)
                    for key, value in attributes.items()
                    if isinstance(value, (int, float, str))
                )
            module._buffers.clear()
            module._buffers.update(buffers)
        for stream, state in self._streams:
            stream.write(state)
        for container, kept in self._containers.values():
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(kept)
        with torch.no_grad():
            for buffer, value in self._tensors.values():
                # A graph may have saved the buffer without reading it in backward, as batch norms save their
                # statistics. A write with a new version would invalidate that graph.
                if not torch.equal(buffer, value):
                    buffer.data.copy_(value)


MODULE_STATE: Final = frozenset(nn.Module().__dict__)
"""Attributes in which torch keeps the parts of a module."""

_HOOKS: Final = tuple(
    key for key, value in vars(nn.Module()).items() if "hooks" in key and isinstance(value, dict)
)


@contextlib.contextmanager
def prepared(model: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Let a model evaluate with gradients for all parameters and without zeros, and restore everything at the end.

    Modes, flags of gradients, zeros, random numbers, buffers and attributes are restored. The yielded function restores
    the last three between two forwards.
    """
    modes = {module: module.training for module in model.modules()}
    params = list(model.parameters())
    flags = [param.requires_grad for param in params]
    state, restore_random = ForwardState(model.modules()), save_random_states(device)
    # The versions reveal writes of the forward to its parameters.
    versions = [param._version for param in params]
    zeros = [param for param in params if _is_zero(param)]

    def restore() -> None:
        restore_random()
        for param, version in zip(params, versions, strict=True):
            # Attributes stay as they are, because the forward may keep in them how it has changed its parameters.
            if param._version != version:
                name = next(name for name, named in model.named_parameters() if named is param)
                raise CutError(
                    f"the model's forward writes its parameter {name}, and each stage has its own "
                    "parameters. Cut a model whose forward only reads them; load the weights again "
                    "before you use this one."
                )
        state.restore()

    with torch.enable_grad():
        try:
            model.eval()
            for param in params:
                param.requires_grad_(is_differentiable(param))
            # A gate or a projection that starts at zero hides all values that go through it, and so hides differences.
            # Writes to the data have no effect on the version.
            for index, param in enumerate(zeros):
                draw = torch.Generator(param.device).manual_seed(index)
                param.data.uniform_(*_SMALL_VALUES, generator=draw)
            yield restore
        finally:
            for module, mode in modes.items():
                module.training = mode
            for param, flag in zip(params, flags, strict=True):
                param.requires_grad_(flag)
            for param in zeros:
                param.data.zero_()
            # A forward that wrote a parameter has raised this error before.
            with contextlib.suppress(CutError):
                restore()


# The range of the values that replace zeros.
_SMALL_VALUES: Final = (0.05, 0.15)


def _is_zero(param: nn.Parameter) -> bool:
    """Return whether all values of a plain parameter are zero."""
    if (
        type(param.detach()) is not Tensor
        or param.is_meta
        or not param.is_floating_point()
        or param.itemsize < 2
    ):
        return False
    return not param.detach().any() and not param.detach().signbit().any()
