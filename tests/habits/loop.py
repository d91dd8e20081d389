"""The training loop that habits change, and what they need to do so.

A habit is a mixin of :class:`Loop` that overrides some of its places. The matrix runs each habit alone; the fuzzer
inherits from several. A single habit may replace a place of :data:`EXCLUSIVE`; at all others each habit calls
``super()``. Names that begin with two underscores belong to one habit, because Python adds the class to them.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

_Habit = TypeVar("_Habit", bound="type[Loop]")

#: All habits by name.
HABITS: Final[dict[str, type[Loop]]] = {}

#: The modules that define them, by family.
FAMILIES: Final = (
    "accumulation",
    "clipping",
    "compiled",
    "failures",
    "forwards",
    "gradients",
    "layers",
    "modes",
    "optimizers",
    "orders",
    "params",
    "reads",
    "state",
    "stateful",
    "switching",
    "wrapping",
    "zeroing",
)

#: The places that only one habit of a loop may replace.
EXCLUSIVE: Final = frozenset(
    {
        "turn_on",
        "is_optimizer_first",
        "wrap",
        "parameters",
        "optimizer",
        "start",
        "forward",
        "backward",
        "step",
    }
)

#: Seeds below this count through the alternatives of each habit. Larger ones draw each alternative independently.
FIRST_RANDOM_SEED: Final = 100


def habit(*, without: Collection[str] = ()) -> Callable[[_Habit], _Habit]:
    """Register a habit.

    Args:
        without: The habits that are never combined with it.
    """

    def add(cls: _Habit) -> _Habit:
        if cls.__name__ in HABITS:
            raise ValueError(f"two habits are called {cls.__name__}; rename one of them")
        cls.without = frozenset(without)
        HABITS[cls.__name__] = cls
        return cls

    return add


def family_of(cls: type[Loop]) -> str:
    """Return the family of a habit."""
    return cls.__module__.rpartition(".")[2]


def load_habits() -> dict[str, type[Loop]]:
    """Import all families and return :data:`HABITS`."""
    for family in FAMILIES:
        importlib.import_module(f"tests.habits.{family}")
    return HABITS


def find_habit(name: str) -> type[Loop]:
    """Return a habit by its name, or by ``module:class`` if no family has it.

    Raises:
        KeyError: There is no such habit.
    """
    module, _, attribute = name.rpartition(":")
    if module:
        found: type[Loop] = getattr(importlib.import_module(module), attribute)
        return found
    if name not in load_habits():
        raise KeyError(
            f"there is no habit {name!r}; `python -m tests.habits --list` prints all of them"
        )
    return HABITS[name]


def combine(names: Iterable[str]) -> type[Loop]:
    """Return the loop that has several habits; at a shared place the first one acts first.

    Habits that replace a place come last among the bases, so that those that add to it are not skipped.
    """
    habits = sorted(
        (find_habit(name) for name in reversed([*names])),
        key=lambda loop: bool(replaced_places(loop)),
    )
    # A class must not precede its own subclass among the bases.
    bases = [
        h
        for h in habits
        if not any(h is not derived and issubclass(derived, h) for derived in habits)
    ]
    return type("+".join(base.__name__ for base in bases), (*bases, Loop), {})


def changed_places(loop: type[Loop]) -> set[str]:
    """Return the exclusive places that a habit replaces or adds to."""
    return {place for place in EXCLUSIVE if getattr(loop, place) is not getattr(Loop, place)}


def replaced_places(loop: type[Loop]) -> set[str]:
    """Return the exclusive places that a habit replaces, instead of adding to another habit there."""
    own = [vars(base) for base in loop.__mro__ if issubclass(base, Loop) and base is not Loop]
    return {
        place
        for place in EXCLUSIVE
        for members in own
        if place in members and not _calls_super(members[place])
    }


def _calls_super(member: Any) -> bool:
    return "super" in getattr(getattr(member, "__code__", None), "co_names", ())


class Choice:
    """A class attribute that has one of several values in each loop, by the seed of the cell."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __set_name__(self, owner: type[Loop], name: str) -> None:
        self._name = name

    def __get__(self, loop: Loop | None, owner: type[Loop]) -> Any:
        if loop is None:
            return self
        if loop.seed < FIRST_RANDOM_SEED:
            return self.values[loop.seed % len(self.values)]
        return self.values[draw(loop.seed, self._name) % len(self.values)]


def draw(seed: int, name: str) -> int:
    """Return a number that depends on nothing else, so that a loop with fewer habits makes the same choices."""
    return zlib.crc32(f"{seed} {name}".encode())


def count_variants(cls: type[Loop]) -> int:
    """Return the number of seeds, counted from 0, with which a habit has had each of its alternatives."""
    members = (value for base in cls.__mro__ for value in vars(base).values())
    return max((len(value.values) for value in members if isinstance(value, Choice)), default=1)


class Net(nn.Module):
    """Residual layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    return output.square().mean()


def mean_of(tensor: torch.Tensor) -> float:
    """Return the mean of all elements; on three ranks, their sum would have the rounding errors of all of them."""
    return tensor.double().sum().item() / max(tensor.numel(), 1)


def call_in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a call in another thread, which ends before this function returns.

    What the thread raises is raised here. Otherwise a loop would continue after an error that only the next
    forward of stock PyTorch reports: ddp-reference.md, "Differences".
    """
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


class Loop:
    """The training loop that every habit changes in some places.

    Attributes:
        seed: Decides each :class:`Choice`.
        features: The features that :meth:`turn_on` applies.
        package: ``ovpatch``, or a stand-in whose ``apply()`` and ``revert()`` do nothing.
        see: Records a value by a name.
        noise_run: The number of a run whose buckets are cut differently, which measures the noise of stock PyTorch.
            0 for the run that is compared.
        is_optimizer_first: Whether the optimizer is created before the model is wrapped.
        compiles: Whether the loop compiles code, so that each run needs a fresh compiler.
        has_mesh: Whether the model has DTensors, or the wrapper a mesh.
        applies_defaults: Whether the loop applies all default features, ``tp_linear`` among them.
        switches: Whether the loop turns features on and off itself, or sets their options.
        needs_own_group: Whether ranks stop sharding in the process group, so that a cell needs one for itself.
        net: The model.
        model: The wrapped model.
        params: The parameters that the loop trains.
        opt: The optimizer.
        loss: The loss of this step.
    """

    without: frozenset[str] = frozenset()
    is_optimizer_first = False
    compiles = False
    has_mesh = False
    applies_defaults = False
    switches = False
    needs_own_group = False

    def __init__(
        self,
        see: Callable[[str, Any], None],
        package: Any,
        *,
        features: tuple[str, ...] = (),
        seed: int = 0,
        noise_run: int = 0,
    ) -> None:
        self.see = see
        self.package = package
        self.features = features
        self.seed = seed
        self.noise_run = noise_run

    # - Before the first step

    @property
    def steps(self) -> int:
        """The number of steps."""
        return 4 if self.seed < FIRST_RANDOM_SEED else 3 + draw(self.seed, "steps") % 4

    def options(self) -> dict[str, dict[str, Any]]:
        """Return the options of features."""
        return {"ddp": {}, "dist_optimizer": {"min_param_numel": 1}}

    def turn_on(self) -> None:
        """Apply the features."""
        options = self.options()
        self.package.apply(*self.features, options={name: options[name] for name in self.features})

    def layers(self) -> list[nn.Module]:
        """Return the layers, to which :meth:`build` adds plain ones if they are few."""
        return []

    def build(self) -> nn.Module:
        """Return the model."""
        layers = self.layers()
        if not layers:
            layers = [nn.Sequential(nn.Linear(6, 30), nn.GELU(), nn.Linear(30, 6))]
        if len(layers) < 2:
            # Every model has something to shard.
            layers = [nn.Linear(6, 6), *layers]
        return Net(*layers)

    def made(self) -> None:
        """Act on the new model."""

    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of the wrapper."""
        return {}

    def wrap(self) -> nn.Module:
        """Return the wrapped model."""
        kwargs = self.kwargs()
        if self.noise_run:
            other_cap = 1e-4 if kwargs.get("bucket_cap_mb", 25) > 1 else 100
            kwargs["bucket_cap_mb"] = (other_cap, 2e-4, 5e-4)[self.noise_run - 1]
        return DDP(self.net, **kwargs)

    def wrapped(self) -> None:
        """Act on the wrapped model, before there is an optimizer."""

    def parameters(self) -> list[Any]:
        """Return the parameters or groups of the optimizer. A habit that trains others sets ``params``, too."""
        return self.params

    def optimizer(self, params: list[Any]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(params, lr=0.1)

    def ready(self) -> None:
        """Act before the first step."""

    # - In each step

    def start(self, step: int) -> None:
        """Zero the gradients."""
        self.opt.zero_grad()

    def forward(self, step: int) -> None:
        """Compute the loss."""
        self.loss = loss_of(self.model(self.batch(step)))

    def before(self, step: int) -> None:
        """Act between the forward and the backward."""

    def backward(self, step: int) -> None:
        """Compute the gradients."""
        self.loss.backward()

    def reduced(self, step: int) -> None:
        """Act between the backward and the step."""

    def step(self, step: int) -> None:
        """Update the parameters."""
        self.opt.step()

    def stepped(self, step: int) -> None:
        """Act after the step."""

    def end(self, step: int) -> None:
        """Act at the end of the step, after all that :meth:`stepped` does."""

    def last(self) -> None:
        """Act after training."""

    # - What habits use

    def batch(self, step: int, micro: int = 0) -> torch.Tensor:
        """Return random inputs that differ by step, microbatch and rank."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
        return torch.randn(4, 6, generator=generator)

    def grads(self) -> dict[str, torch.Tensor | None]:
        """Read all gradients."""
        named = self.net.named_parameters()
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}

    def values(self) -> dict[str, torch.Tensor]:
        """Read all parameters and buffers."""
        params = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        return params | {name: b.clone() for name, b in self.net.named_buffers()}

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are not frozen."""
        return [p for p in self.net.parameters() if p.requires_grad]

    def dense(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient that is not sparse."""
        return [p for p in self.params if p.grad is not None and not p.grad.is_sparse]

    # - The loop

    def run(self) -> None:
        """Train."""
        self.turn_on()
        self.net = self.build()
        self.made()
        if self.is_optimizer_first:
            self._make_optimizer()
        self.model = self.wrap()
        self.wrapped()
        if not self.is_optimizer_first:
            self._make_optimizer()
        self.ready()
        for step in range(self.steps):
            self.start(step)
            self.forward(step)
            self.before(step)
            self.backward(step)
            self.reduced(step)
            self.step(step)
            self.stepped(step)
            self.end(step)
        self.see("end", self.values())
        self.last()

    def _make_optimizer(self) -> None:
        self.params = list(self.net.parameters())
        self.opt = self.optimizer(self.parameters())
