"""The state of one optimizer, of which each rank keeps its parts.

[Note: what others see] Between steps ``optimizer.state[p]`` holds, under the names that the optimizer gave them,
tensors of full shape: placeholders, whose content is put together from the peers' parts when somebody reads it. A slice
must never be seen there: torch checks no shapes when a state is loaded, and its fused kernels write beyond the end of
one that is too short. What somebody puts there instead (a loaded checkpoint, a state changed by hand) is whole, and is
cut when the next step begins.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap import farewell, placeholders
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.placeholders import Placeholder
from ovpatch.overlap.weakly import weakly
from ovpatch_plugins.dist_optimizer.model_state import StateOfModel

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part, StandIns

_Model = TypeVar("_Model", bound=StateOfModel)

# How many optimizers have stepped over each model; the same on all ranks, which step in the same order.
_optimizers_of: weakref.WeakKeyDictionary[GradShards, int] = weakref.WeakKeyDictionary()


class ShardedState(Generic[_Model]):
    """The parts of one optimizer's state.

    Args:
        optimizer: The optimizer; held weakly.
        of_model: What keeps them, for one model.
    """

    def __init__(self, optimizer: Optimizer, of_model: Callable[[GradShards, int], _Model]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._of_model = of_model
        self._models: dict[int, _Model] = {}
        self._hooks = (
            optimizer.register_state_dict_post_hook(weakly(self._whole_state_dict), prepend=True),
            optimizer.register_load_state_dict_post_hook(weakly(self._loaded)),
        )

    def take_over(self, parts: Sequence[Part]) -> None:
        """Fill in what a step would ask for: gradients and state that are other shards', as of a model wrapped anew.

        Called before hosts come to the gathers, from when on no rank may ask (ovpatch/overlap/gate.py, [Note: ahead]).
        """
        if all(id(part.shards) in self._models for part in parts):
            return
        optimizer = self._optimizer()
        assert optimizer is not None
        for part in parts:
            ours = part.shards, self._models.get(id(part.shards))
            held = (part.param.grad, *optimizer.state.get(part.param, {}).values())
            placeholders.settle(one for one in held if isinstance(one, Placeholder) and one.source not in ours)

    def come(self) -> None:
        """Say that a step comes; see model_state.py, [Note: read before the step]."""
        for model in self._models.values():
            model.come()

    def refill(self) -> None:
        """Put together after a step, once all ranks have come to its end, what stays whole in ``optimizer.state``."""
        for model in self._models.values():
            model.refill()

    @contextmanager
    def written(self, parts: Sequence[Part], stand_ins: StandIns) -> Iterator[None]:
        """Put this rank's parts into ``optimizer.state``, as the stand-ins' state, for the time of a step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        by_model = [(part, self.model(part.shards)) for part in parts]
        with ExitStack() as afterwards:  # all of it, whatever raises: peers wait for the end of what has begun
            for model in dict.fromkeys(model for _, model in by_model):
                afterwards.callback(model.end_step, model.size)
                model.begin_step()
            updated: dict[_Model, list[tuple[Part, Parameter]]] = {}
            for part, model in by_model:
                stand_in = stand_ins.get(id(part.param))
                afterwards.callback(model.take_parts, part, optimizer.state, stand_in)
                model.put_parts(part, optimizer.state, stand_in)
                if stand_in is not None:
                    updated.setdefault(model, []).append((part, stand_in))
            for model, ones in updated.items():
                afterwards.callback(model.end_update, ones, optimizer.state)
                model.begin_update(ones, optimizer.state)
            yield

    def release(self) -> None:
        """Put whole tensors into ``optimizer.state``, while there are peers to ask; nothing of it is cut any more."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            leaving: list[StateOfModel] = [model for model in self._models.values() if model.leave()]
            values = [value for state in optimizer.state.values() for value in state.values()]
            placeholders.settle(v for v in values if isinstance(v, Placeholder) and v.source in leaving)

    def model(self, shards: GradShards) -> _Model:
        """Return what keeps the parts of one model's parameters."""
        if id(shards) not in self._models:
            number = _optimizers_of[shards] = _optimizers_of.get(shards, 0) + 1
            model = self._models[id(shards)] = self._of_model(shards, number)
            # A slower peer may still ask when the script has dropped the optimizer here.
            weakref.finalize(self._optimizer(), farewell.keep, shards.group, model).atexit = False
        return self._models[id(shards)]

    def _whole_state_dict(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace placeholders by whole tensors on the CPU, fetched together; ``optimizer.state`` keeps its own.

        All else goes to the CPU, too, but for scalars: torch.distributed.checkpoint wants one device.
        """
        wanted = [
            (number, name, value)
            for number, state in state_dict["state"].items()
            for name, value in state.items()
            if isinstance(value, Placeholder) and isinstance(value.source, StateOfModel)
        ]
        if not wanted:
            return
        copies = {number: _on_cpu(state) for number, state in state_dict["state"].items()}
        for _, group in itertools.groupby(sorted(wanted, key=_source), key=_source):
            ones = list(group)
            model = ones[0][2].source
            assert isinstance(model, StateOfModel)
            wholes = model.whole([value for *_, value in ones])
            for (number, name, _), whole in zip(ones, wholes, strict=True):
                copies[number][name] = whole
        state_dict["state"] = copies

    def _loaded(self, optimizer: Optimizer) -> None:
        """Cut what was loaded, at once: whole state takes the memory that this feature is there to spare."""
        for model in self._models.values():
            if not model.retired:
                model.load(optimizer.state)


def put_in_order(optimizer: Optimizer, known: int) -> None:
    """Put what has come into ``optimizer.state`` since it had ``known`` entries where stock puts it."""
    state = optimizer.state
    if len(state) > known:
        places = {param: i for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        for param in sorted(list(state)[known:], key=lambda param: places.get(param, -1)):
            state[param] = state.pop(param)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _copied(value: Tensor) -> Tensor:
    return value if value.ndim == 0 or isinstance(value, Placeholder) else value.cpu()


def _source(wanted: tuple[Any, str, Placeholder]) -> int:
    return id(wanted[2].source)
