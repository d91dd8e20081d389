"""The state on which a block's forward depends: random numbers, autocast, tensors, and arguments."""

from __future__ import annotations

import copy
import ctypes
import functools
import operator
import pickle
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from ovpatch.overlap.comm.lifetimes import attached_values
from ovpatch.overlap.tensors.linear_ops import RandomStream, is_generator_class, make_random_stream
from ovpatch_plugins.recompute.recompute_report import note

# The key of the set of tensors that a block's forward changes in place.
_CHANGING: Final = "recompute: changing"


class RandomState:
    """The state of the random generators that a block may draw from, when its forward begins.

    The states of torch's generators of the CPU and of the inputs' devices are always kept. The states of
    generators that are arguments, or attributes of the block's modules, are always kept as well. The states
    of other generators, and of the global ones of Python and numpy, are kept if the forward has moved them.

    Args:
        tensors: The tensors among the block's arguments.
        generators: Generators of torch, Python or numpy.
        outside: Generators outside of the block's modules.
        draws_from_numpy: Whether to read numpy's full state, which is slow compared to a small block.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        generators: Sequence[Any],
        outside: Sequence[Any],
        draws_from_numpy: bool,
    ) -> None:
        self._cpu = torch.get_rng_state()
        on_devices = {
            tensor.device: tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")
        }
        self._kind = next(iter(on_devices)).type if on_devices else ""
        self._devices, self._states = (
            get_device_states(*on_devices.values()) if on_devices else ([], [])
        )
        self._streams: list[tuple[RandomStream, Any]] = []
        for generator in {id(generator): generator for generator in generators}.values():
            stream = make_random_stream(generator)
            self._streams.append((stream, stream.read()))
        # Streams that the forward may move, with their states before it; empty after it.
        self._other_streams = [
            (stream, stream.read()) for stream in map(make_random_stream, outside)
        ]
        self._python: Any = random.getstate()
        self._numpy: Any = _NUMPY.read() if draws_from_numpy else None
        self._numpy_position = _read_numpy_position()

    def end_forward(self) -> bool:
        """Keep the global streams of Python and numpy if the forward has moved them.

        Returns:
            Whether the forward moved numpy's stream.

        Raises:
            KeyError: The forward drew from numpy, and numpy's state was not read before.
        """
        for stream, state in self._other_streams:
            if not _is_same_state(state, stream.read()):
                self._streams.append((stream, state))
        self._other_streams = []
        after = random.getstate()
        # The 624 words of the tuple change only together with the position after them, or with the first word.
        if (after[1][-1], after[1][0], after[2]) != (
            self._python[1][-1],
            self._python[1][0],
            self._python[2],
        ):
            self._streams.append((_PYTHON, self._python))
        self._python = None
        has_moved = bool(_read_numpy_position() != self._numpy_position)
        if self._numpy is not None:
            # numpy draws the second normal deviate of a pair without moving the position.
            has_moved = has_moved or bool(_NUMPY.read()["has_gauss"] != self._numpy["has_gauss"])
            if has_moved:
                self._streams.append((_NUMPY, self._numpy))
            self._numpy = None
        elif has_moved:
            raise KeyError("numpy.random")
        return has_moved

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the forward's numbers again in this context; after it, the generators continue where they were."""
        now = [(stream, stream.read()) for stream, _ in self._streams]
        with torch.random.fork_rng(self._devices, device_type=self._kind or "cuda"):
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            try:
                for stream, state in self._streams:
                    stream.write(state)
                yield
            finally:
                for stream, state in now:
                    stream.write(state)


def _is_same_state(state: Any, later: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, later)
    # A state of numpy has arrays.
    return pickle.dumps(state) == pickle.dumps(later)


def _read_numpy() -> Any:
    return sys.modules["numpy.random"].get_state(legacy=False)


def _write_numpy(state: Any) -> None:
    sys.modules["numpy.random"].set_state(state)


_PYTHON: Final = RandomStream(random.getstate, random.setstate)
_NUMPY: Final = RandomStream(_read_numpy, _write_numpy)


def _read_numpy_position() -> Any:
    """Return a value that changes when numpy's global generator draws, and is faster to read than its state."""
    module: Any = sys.modules.get("numpy.random.mtrand")
    if module is None:
        return None
    bits = module._rand._bit_generator
    address = _find_numpy_position(bits)
    if address is None:
        return repr(bits.state)
    # The first word of the key changes when the position starts over.
    return ctypes.c_int.from_address(address).value, ctypes.c_uint32.from_address(
        address - _MT19937_BYTES
    ).value


# The size of the key of numpy's Mersenne Twister; the position follows it in memory.
_MT19937_BYTES: Final = 4 * 624


@functools.lru_cache(maxsize=1)
def _find_numpy_position(bits: Any) -> int | None:
    """Return the address of the position of numpy's Mersenne Twister; None for another generator or layout."""
    if type(bits).__name__ != "MT19937":
        return None
    first = bits.ctypes.state_address
    address: int = first + _MT19937_BYTES
    # A release of numpy may change the layout, so both values are compared with the public state.
    state = bits.state["state"]
    is_laid_out = ctypes.c_int.from_address(address).value == state["pos"]
    is_laid_out = is_laid_out and ctypes.c_uint32.from_address(first).value == int(state["key"][0])
    return address if is_laid_out else None


class Autocast:
    """The state of autocast when a forward begins."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors)])
        available = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in available
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Cast in this context as in the forward."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches))
            yield


class Params:
    """The parameters of a block's modules after its forward.

    FSDP2 swaps them for shards until the backward of the block is near. Until then, the block cannot be
    recomputed.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # The identity and the version of each parameter.
        self._versions = [(id(param), _version(param)) for param in self._list()]

    def _list(self) -> list[Tensor]:
        return [
            param
            for module in self._modules
            for param in module._parameters.values()
            if param is not None
        ]

    def are_there(self) -> bool:
        """Return whether the modules have the parameters of their forward."""
        return [id(param) for param in self._list()] == [key for key, _ in self._versions]

    def find_changed(self, block: nn.Module) -> str:
        """Return the name of a parameter that was changed in place since the forward, or ""."""
        params = self._list()
        now = [(id(param), _version(param)) for param in params]
        if now == self._versions:
            return ""
        versions = dict(self._versions)
        changed = {key for key, version in now if versions.get(key, version) != version}
        return next((name for name, param in block.named_parameters() if id(param) in changed), "")


class ModuleState:
    """The buffers and attributes of a block's modules that its forward changes, as they are before it.

    Counters, caches and running averages are examples. The recomputation starts from these values and then
    restores the values of the forward, so the values change once, as in stock PyTorch. Attributes are
    compared after the forward; lists, dictionaries and sets are compared by their items. At the block's
    first forward, the versions of tensors, also of those in lists and dictionaries, show which of them it
    changes in place. Batch norm changes its
    averages without a new version.

    Args:
        block: The block.
        modules: The block and the modules inside of it.

    Attributes:
        generators: The random generators among the attributes.
    """

    def __init__(self, block: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._block = block
        self._modules = modules
        # The tensors that earlier forwards changed in place; None in the first forward.
        self._known: frozenset[tuple[int, str]] | None = attached_values(block).get(_CHANGING)
        self._is_training = [module.training for module in modules]
        self.generators: list[Any] = []
        self._places: list[_Place] = []
        for module in modules:
            if module._buffers:
                self._places.append(_Place(module, module._buffers, self._known, self.generators))
            cls: Any = type(module)
            if _is_of_script(cls):
                self._places.append(_Place(module, vars(module), self._known, self.generators))

    def end_forward(self) -> None:
        """Find the values that the forward has changed.

        Raises:
            KeyError: A tensor was changed in place for the first time in a later forward.
        """
        changed: set[tuple[int, str]] = set()
        for place in self._places:
            changed |= place.end_forward(self._known or frozenset())
        if self._known is None or not changed <= self._known:
            attached_values(self._block)[_CHANGING] = frozenset(changed.union(self._known or ()))
        self._places = [place for place in self._places if place.before]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the values of before the forward in this context; afterwards, restore the current values."""
        is_training = [module.training for module in self._modules]
        if not self._places and is_training == self._is_training:
            yield
            return
        now = [(place, place.swap_in()) for place in self._places]
        try:
            self._set_training(self._is_training)
            yield
        finally:
            self._set_training(is_training)
            for place, values in now:
                place.write(values)

    def _set_training(self, is_training: Sequence[bool]) -> None:
        for module, flag in zip(self._modules, is_training, strict=True):
            if module.training != flag:
                module.training = flag


class _Missing:
    """The value of an attribute that does not exist."""


class _Clone(NamedTuple):
    """A tensor that the forward changed in place, as it was before."""

    tensor: Tensor


class _Weak(NamedTuple):
    """A weak reference to a value that may hold a graph.

    A strong one would keep the previous call of a block alive.
    """

    reference: weakref.ref[Any]


class _Place:
    """A dictionary of a module: its buffers or its attributes.

    Attributes:
        before: The values that the forward has changed, as they were before. During the forward, all values.
    """

    def __init__(
        self,
        module: nn.Module,
        values: dict[str, Any],
        known: Container[tuple[int, str]] | None,
        generators: list[Any],
    ) -> None:
        self._module = module
        self._values = values
        averages = (
            values is module._buffers
            and module.training
            and getattr(module, "track_running_stats", False)
        )
        self._has_averages = bool(averages)
        self.before: dict[str, Any] = dict(values)
        # - State of before the forward, by name; empty afterwards
        # Copies of lists, dictionaries and sets.
        self._copies: dict[str, Any] = {}
        # The versions of tensors: of the value, or of those inside of a list or dictionary.
        self._versions: dict[str, list[int]] = {}
        # Copies of tensors that the forward may change in place, by the tensor's id.
        self._clones: dict[str, dict[int, Tensor]] = {}
        for name in values.keys() - _MODULE_FIELDS:
            value = values[name]
            cls: Any = type(value)
            if cls in _PLAIN:
                continue
            if cls in _CONTAINERS:
                self._copies[name] = _copy_container(value)
            if tensors := list(_list_tensors(value)):
                self._versions[name] = list(map(_version, tensors))
                if known is None or averages or (id(module), name) in known:
                    self._clones[name] = {id(tensor): tensor.detach().clone() for tensor in tensors}
            elif is_generator_class(cls):
                generators.append(value)

    def end_forward(self, known: Container[tuple[int, str]]) -> set[tuple[int, str]]:
        """Keep the values that the forward has changed, and return the tensors that it changed in place.

        Raises:
            KeyError: A tensor was changed in place for the first time in a later forward.
        """
        before, self.before, written = self.before, {}, set()
        values, module = self._values, self._module
        is_rebound = len(values) != len(before) or not all(
            map(operator.is_, values.values(), before.values())
        )
        for name in before if is_rebound else (*self._versions, *self._copies):
            if name in _MODULE_FIELDS:
                continue
            value, key = before[name], (id(module), name)
            kept = self._copies.get(name, value)
            tensors = list(_list_tensors(kept)) if name in self._versions else []
            changed = {
                id(tensor)
                for tensor, version in zip(tensors, self._versions.get(name, ()), strict=True)
                if _version(tensor) != version
            }
            if kept is value and (self._has_averages or key in known):
                changed.update(map(id, tensors))
            if changed:
                if name not in self._clones:
                    raise KeyError(name)
                written.add(key)
                clones = {i: clone for i, clone in self._clones[name].items() if i in changed}
                self.before[name] = _weaken(_put_clones(kept, clones))
            elif name in self._copies:
                if values.get(name) is not value or not _has_same_items(value, kept):
                    self.before[name] = _weaken(kept)
            elif values.get(name, _Missing) is not value:
                self.before[name] = _weaken(value)
        if is_rebound:
            self.before.update(dict.fromkeys(values.keys() - before.keys(), _Missing))
        self._copies = {}
        self._clones = {}
        self._versions = {}
        return written

    def swap_in(self) -> dict[str, Any]:
        """Write the values of before the forward, and return the values that they replace."""
        now = {name: self._values.get(name, _Missing) for name in self.before}
        self.write({name: _strengthen(value) for name, value in self.before.items()})
        return now

    def write(self, values: Mapping[str, Any]) -> None:
        """Write values, and remove attributes whose value is missing."""
        for name, value in values.items():
            if value is _Missing:
                self._values.pop(name, None)
            else:
                self._values[name] = value


# The fields that each module has; they are no state of the computation.
_MODULE_FIELDS: Final = frozenset(vars(nn.Module()))
# Types whose values cannot change.
_PLAIN: Final = frozenset(
    {bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_LISTS: Final = (list, deque)
_DICTIONARIES: Final = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS: Final = frozenset({*_LISTS, *_DICTIONARIES, set})


def _copy_container(value: Any) -> Any:
    """Copy a list, dictionary or set, and the ones inside of it, but no other items."""
    made = copy.copy(value)
    if type(value) is not set:
        for key, item in enumerate(value) if type(value) in _LISTS else value.items():
            if type(item) in _CONTAINERS:
                made[key] = _copy_container(item)
    return made


def _has_same_items(value: Any, copied: Any) -> bool:
    """Return whether a container has the very items of its copy."""
    if type(value) not in _CONTAINERS:
        return value is copied
    if type(value) is not type(copied) or len(value) != len(copied):
        return False
    if type(value) in _DICTIONARIES:
        return all(
            key in copied and _has_same_items(item, copied[key]) for key, item in value.items()
        )
    if type(value) is set:
        return bool(value == copied)
    return all(map(_has_same_items, value, copied))


def _list_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in a list or dictionary and in the ones inside of it."""
    if type(value) in _DICTIONARIES or type(value) in _LISTS:
        for item in value.values() if type(value) in _DICTIONARIES else value:
            yield from _list_tensors(item)
    elif issubclass(type(value), Tensor):
        yield value


def _put_clones(value: Any, clones: Mapping[int, Tensor]) -> Any:
    """Return the clone of a tensor, or a copy of a list or dictionary with the clones of its tensors."""
    if type(value) in _DICTIONARIES or type(value) in _LISTS:
        return _map_container(value, lambda item: _put_clones(item, clones))
    return _Clone(clones[id(value)]) if id(value) in clones else value


def _weaken(value: Any) -> Any:
    """Return a value to keep for the recomputation; a weak reference if it may hold a graph.

    The graph holds the call of the block that made the value. With strong references, each call of a block
    that leaves its output in an attribute would keep the previous call alive.
    """
    if type(value) in _CONTAINERS or type(value) is tuple:
        return _map_container(value, _weaken)
    is_tensor, has_attributes = issubclass(type(value), Tensor), type(value).__dictoffset__ != 0
    if value.grad_fn is not None if is_tensor else has_attributes:
        # Instances of some classes cannot be referenced weakly.
        with suppress(TypeError):
            return _Weak(weakref.ref(value))
    return value


def _strengthen(value: Any) -> Any:
    """Return a value from :func:`_weaken` for one recomputation, which may change the value."""
    if type(value) is _Weak:
        found = value.reference()
        return _Missing if found is None else found
    if type(value) in _CONTAINERS or type(value) is tuple:
        return _map_container(value, _strengthen)
    return value.tensor.clone() if type(value) is _Clone else value


def _map_container(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in _DICTIONARIES:
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = change(item)
        return made
    if type(value) is deque:
        return deque(map(change, value), value.maxlen)
    return type(value)(map(change, value))


@functools.lru_cache(maxsize=1024)
def _is_of_script(cls: Any) -> bool:
    """Return whether the attributes of a class's instances may be state of the computation.

    Torch's own modules do not count calls. Some modules, such as FSDP's, prepare themselves in their first
    forward and must not do so again.
    """
    return any(
        not base.__module__.startswith("torch.") for base in cls.__mro__ if base is not object
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# --- arguments ---


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)


class _Save(torch.autograd.Function):
    """A node that saves tensors as an operation does.

    Autograd detects in-place changes of such tensors, and hooks may offload them.
    """

    @staticmethod
    def forward(ctx: Any, _token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node is in no graph")


class BlockInputs:
    """The arguments of a call.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        generators: A list to which the random generators among them are added.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], generators: list[Any]
    ) -> None:
        tensors: list[Tensor] = []
        self._args = [_keep(item, tensors, generators) for item in args]
        self._kwargs = {key: _keep(item, tensors, generators) for key, item in kwargs.items()}
        token = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        # The output is kept, because torch 2.11 releases a node's saved tensors with its last output.
        self._output: Any = _Save.apply(token, *tensors)  # type: ignore[no-untyped-call]  # torch's apply()

    def read(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments.

        Raises:
            RuntimeError: A tensor was changed in place after the forward read it.
        """
        tensors = self._output.grad_fn.saved_tensors
        return [_restore(item, tensors) for item in self._args], {
            key: _restore(item, tensors) for key, item in self._kwargs.items()
        }


class _Argument:
    """The place of a tensor in an argument, by its index among all tensors."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Cache:
    """A copy of a cache of keys and values, made before a forward that adds to the cache."""

    def __init__(self, cache: Any) -> None:
        self._before = _copy_cache(cache)

    def copy(self) -> Any:
        """Return a cache for a recomputation."""
        return _copy_cache(self._before)


def is_cache(value: Any) -> bool:
    """Return whether an argument is a key-value cache of transformers."""
    return any(
        cls.__name__ == "Cache" and cls.__module__.startswith("transformers.")
        for cls in type(value).__mro__
    )


def _copy_cache(cache: Any) -> Any:
    """Copy a cache and its layers, but not their tensors: layers get new tensors when they grow."""
    made = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(
                made,
                name,
                [copy.copy(item) if hasattr(item, "__dict__") else item for item in value],
            )
    return made


def _keep(value: Any, tensors: list[Tensor], generators: list[Any]) -> Any:
    """Replace the tensors of a value by their indices, and values that a forward might change by copies."""

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return _Argument(len(tensors) - 1)
        cls: Any = type(leaf)
        if is_generator_class(cls):
            generators.append(leaf)
        if not is_cache(leaf):
            return leaf
        note(
            "blocks get a key-value cache, which keeps keys and values of all blocks: set "
            "use_cache=False to save that memory"
        )
        return _Cache(leaf)

    return _map(value, keep)


def _restore(value: Any, tensors: Sequence[Tensor]) -> Any:
    def restore(leaf: Any) -> Any:
        if isinstance(leaf, _Argument):
            return tensors[leaf.index]
        return leaf.copy() if isinstance(leaf, _Cache) else leaf

    return _map(value, restore)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dictionaries."""
    if isinstance(value, tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)
