"""What a block's forward depends on, kept for its recomputation: random numbers, autocast, tensors, and arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from ovpatch.overlap.comm.kept_state import kept_values
from ovpatch_plugins.recompute.report import note

_CHANGING: Final = "recompute: buffers"  # of a block, that its forward changes


class RandomState:
    """The random generators of the CPU and of the inputs' devices when a forward begins."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        on_devices = {tensor.device: tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self._kind = next(iter(on_devices)).type if on_devices else ""
        self._devices, self._states = get_device_states(*on_devices.values()) if on_devices else ([], [])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the numbers of the forward again, and go on behind with those that are due."""
        with torch.random.fork_rng(self._devices, device_type=self._kind or "cuda"):
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            yield


class Autocast:
    """The state of autocast when a forward begins."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors)])
        available = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
        self._states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in available]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Cast as in the forward."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches))
            yield


class Params:
    """A block's parameters behind its forward.

    FSDP2 swaps them for shards until backward comes near; then the block cannot be computed ahead of that.
    """

    def __init__(self, block: nn.Module) -> None:
        self._versions = [(id(param), _version(param)) for param in block.parameters()]

    def are_there(self, block: nn.Module) -> bool:
        """Return whether the block has the parameters of its forward."""
        now = [id(param) for param in block.parameters()]
        return now == [key for key, _ in self._versions]

    def find_changed(self, block: nn.Module) -> str:
        """Return the name of a parameter that was changed in place since, or ""."""
        versions = dict(self._versions)
        for name, param in block.named_parameters():
            if versions.get(id(param), _version(param)) != _version(param):
                return name
        return ""


class Buffers:
    """A block's buffers that its forward changes, such as running averages, as they are before it.

    The recomputation starts from these again, and leaves what the forward left: they change once, as under stock. Which
    ones change is seen at the block's first forward, from their versions. Batch norm changes its averages without that.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._known: frozenset[str] | None = kept_values(block).get(_CHANGING)
        self._versions = {name: (id(buffer), _version(buffer)) for name, buffer in block.named_buffers()}
        wanted = self._versions if self._known is None else self._known
        self._before = {name: buffer.detach().clone() for name, buffer in block.named_buffers() if name in wanted}

    def end_forward(self) -> None:
        """Find out which of them have changed.

        Raises:
            KeyError: One has changed for the first time in a later forward.
        """
        changed = {
            name
            for name, buffer in self._block.named_buffers()
            if self._versions.get(name) != (id(buffer), _version(buffer))
        }
        if self._known is not None and not changed <= self._known:
            raise KeyError(min(changed - self._known))
        if self._known is None:
            self._known = frozenset(changed | _list_averages(self._block))
            kept_values(self._block)[_CHANGING] = self._known
            self._before = {name: value for name, value in self._before.items() if name in self._known}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the buffers of before the forward, and in the end those that are there now."""
        if not self._before:
            yield
            return
        places = {}
        for name in self._before:
            path, _, key = name.rpartition(".")
            places[name] = self._block.get_submodule(path)._buffers, key
        now = {name: buffers[key] for name, (buffers, key) in places.items()}
        try:
            for name, (buffers, key) in places.items():
                buffers[key] = self._before[name].clone()
            yield
        finally:
            for name, (buffers, key) in places.items():
                buffers[key] = now[name]


def _list_averages(block: nn.Module) -> set[str]:
    found = set()
    for path, module in block.named_modules():
        if module.training and getattr(module, "track_running_stats", False):
            found |= {f"{path}.{key}".lstrip(".") for key, value in module._buffers.items() if value is not None}
    return found


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
    """Saves tensors as an operation does: autograd notices when they are changed in place, and hooks may move them."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node is in no graph")


class BlockInputs:
    """Arguments of a call.

    Args:
        args: Arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tensors: list[Tensor] = []
        self._args = [_keep(item, tensors) for item in args]
        self._kwargs = {key: _keep(item, tensors) for key, item in kwargs.items()}
        token = torch.empty(0, requires_grad=True)
        # Torch 2.11 releases what a node saved as soon as no output of it is left.
        self._output: Any = _Save.apply(token, *tensors)  # type: ignore[no-untyped-call]  # torch's apply()

    def read(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments.

        Raises:
            RuntimeError: A tensor was changed in place since.
        """
        tensors = self._output.grad_fn.saved_tensors
        return [_restore(item, tensors) for item in self._args], {
            key: _restore(item, tensors) for key, item in self._kwargs.items()
        }


class _Place:
    """Stands for a tensor."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Cache:
    """A cache of keys and values as it was before a forward that adds to it."""

    def __init__(self, cache: Any) -> None:
        self._before = _copy_cache(cache)

    def copy(self) -> Any:
        """Return a cache for a recomputation."""
        return _copy_cache(self._before)


def is_cache(value: Any) -> bool:
    """Return whether an argument is a cache of keys and values of transformers."""
    return any(cls.__name__ == "Cache" and cls.__module__.startswith("transformers.") for cls in type(value).__mro__)


def _copy_cache(cache: Any) -> Any:
    """Copy a cache and its layers, which get new tensors where they grow, but not the tensors."""
    made = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(made, name, [copy.copy(item) if hasattr(item, "__dict__") else item for item in value])
    return made


def _keep(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value with places for its tensors, and with copies of what a forward might change."""

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return _Place(len(tensors) - 1)
        if not is_cache(leaf):
            return leaf
        note(
            "blocks get a key-value cache, which keeps keys and values of all of them: use_cache=False saves that "
            "memory"
        )
        return _Cache(leaf)

    return _map(value, keep)


def _restore(value: Any, tensors: Sequence[Tensor]) -> Any:
    def restore(leaf: Any) -> Any:
        if isinstance(leaf, _Place):
            return tensors[leaf.index]
        return leaf.copy() if isinstance(leaf, _Cache) else leaf

    return _map(value, restore)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value whose leaves, in tuples, lists and dictionaries, are changed."""
    if isinstance(value, tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)
