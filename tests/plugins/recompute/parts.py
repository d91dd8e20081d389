"""Parts: habits of scripts whose forward depends on state, as blocks of a model.

Each part is alone in ``test_repeated.py``, and random models, also those of the fuzzers, have several.
"""

from __future__ import annotations

import itertools
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 6
_GENERATOR = torch.Generator()
CALLS: list[str] = []
_SHARED = types.SimpleNamespace(calls=0, generator=random.Random(0))
_COUNT = 0
_STATS: dict[str, int] = {}
_NUMBERS = itertools.count()


class Part(nn.Module):
    """A module that maps (batch, 6) to (batch, 6) by ``function(self, x)``."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def scale(part: Part, x: Tensor, amount: float) -> Tensor:
    """Scale a tensor that backward needs."""
    return x + (part.linear(x) * (1 + amount)).sigmoid()


def _mask(part: Part, x: Tensor) -> Tensor:
    return scale(part, x * (torch.rand(x.shape, generator=part.generator) > 0.3), 0.0)


def _count(part: Part, x: Tensor) -> Tensor:
    part.calls += 1
    return scale(part, x, 0.1 * part.calls)


def count_in_place(part: Part, x: Tensor) -> Tensor:
    part.total.add_(x.detach().mean().abs())
    return scale(part, x, part.total.item())


def _average_in_place(part: Part, x: Tensor) -> Tensor:
    for mean in (part.stats["mean"], part.stats["all"][0]):
        mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return scale(part, x - part.stats["mean"] - part.stats["all"][0], 0.0)


def _make_offset() -> Part:
    """Return a part with a container of a mean, changed in place, and of a tensor that carries a graph."""
    bias = nn.Parameter(torch.full((WIDTH,), 0.5))
    # Backward through a sum saves no tensor, so each step may repeat it.
    return Part(_add_offset, bias=bias, stats={"mean": torch.zeros(WIDTH), "offset": bias + 1})


def _add_offset(part: Part, x: Tensor) -> Tensor:
    part.stats["mean"].mul_(0.9).add_(0.1 * x.detach().mean(0))
    return scale(part, x - part.stats["mean"] + part.stats["offset"].sin(), 0.0)


def _carry(part: Part, x: Tensor) -> Tensor:
    part.state = 0.5 * part.state + x.detach().mean(0)
    return scale(part, x + part.state, 0.0)


def _append(part: Part, x: Tensor) -> Tensor:
    part.seen.append(x.detach().mean())
    return scale(part, x, 0.1 * len(part.seen))


def _add_item(part: Part, x: Tensor) -> Tensor:
    part.seen["total"].append(1)
    part.seen[len(part.seen)] = [x.detach().mean()]
    return scale(part, x, 0.1 * len(part.seen) + 0.01 * len(part.seen["total"]))


def _fill_lazily(part: Part, x: Tensor) -> Tensor:
    if not hasattr(part, "cached"):
        part.cached = torch.linspace(0, 1, WIDTH) + random.random()
    return scale(part, x * part.cached, 0.0)


def keep_loss(part: Part, x: Tensor) -> Tensor:
    part.loss = part.linear(x).square().mean()
    return scale(part, x, 0.0)


def _drop_layer(part: Part, x: Tensor) -> Tensor:
    return x.sin() if random.random() < 0.5 else scale(part, x, 0.0)


def _recur(part: Part, x: Tensor) -> Tensor:
    part.calls += 1
    # The workspace that the layer saves has gaps, which show the memory before.
    junk = [torch.full((size,), part.calls, dtype=torch.uint8) for size in range(1024, 65536, 1024)]
    del junk
    return scale(part, part.recurrent(x)[0], 0.0)


def _start_late(part: Part, x: Tensor) -> Tensor:
    part.calls += 1
    return scale(part, x, random.random() if part.calls > 3 else 0.0)


def _hook_in_graph(part: Part, x: Tensor) -> Tensor:
    y = part.linear(x).sigmoid()
    y.register_hook(lambda _grad: CALLS.append("tensor"))
    return x + y


def _with(part: Part, **changes: Any) -> Part:
    """Register hooks on a part's linear, by the name of the method that registers them."""
    for name, hook in changes.items():
        getattr(part.linear, name)(hook)
    return part


def note_call(_module: nn.Module, _args: Any, _output: Any = None) -> None:
    CALLS.append("forward")


def _note_backward(_module: nn.Module, _grads: Any, _output: Any) -> None:
    CALLS.append("backward")


def _zero(part: Part, x: Tensor) -> Tensor:
    return scale(part, x, 0.0)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "generator": lambda: Part(_mask, generator=torch.Generator().manual_seed(5)),
    "Python": lambda: Part(lambda part, x: scale(part, x, random.random())),
    "Python, a pair of normal deviates": lambda: Part(
        lambda part, x: scale(part, x, random.gauss(0, 1))
    ),
    "Random": lambda: Part(lambda part, x: scale(part, x, part.rng.random()), rng=random.Random(3)),
    "numpy": lambda: Part(lambda part, x: scale(part, x, float(np.random.rand()))),
    "numpy, a pair of normal deviates": lambda: Part(
        lambda part, x: scale(part, x, float(np.random.randn()))
    ),
    "numpy's generator": lambda: Part(
        lambda part, x: scale(part, x, part.rng.random()), rng=np.random.default_rng(3)
    ),
    "RandomState": lambda: Part(
        lambda part, x: scale(part, x, part.rng.rand()), rng=np.random.RandomState(3)
    ),
    "permutation": lambda: Part(
        lambda part, x: scale(part, x[:, torch.from_numpy(np.random.permutation(WIDTH))], 0)
    ),
    "layer drop": lambda: Part(_drop_layer),
    "a stream that starts late": lambda: Part(_start_late, calls=0),
    "counter": lambda: Part(_count, calls=0),
    "tensor changed in place": lambda: Part(count_in_place, total=torch.zeros(())),
    "tensors of containers changed in place": lambda: Part(
        _average_in_place, stats={"mean": torch.zeros(WIDTH), "all": [torch.zeros(WIDTH)]}
    ),
    "tensors of a container changed in place, and with a graph": _make_offset,
    "tensor replaced": lambda: Part(_carry, state=torch.zeros(WIDTH)),
    "list": lambda: Part(_append, seen=[]),
    "deque": lambda: Part(_append, seen=deque(maxlen=4)),
    "nested containers": lambda: Part(_add_item, seen=defaultdict(list)),
    "lazy cache": lambda: Part(_fill_lazily),
    "loss in an attribute": lambda: Part(keep_loss),
    "training flag": lambda: Part(lambda part, x: scale(part, x, 0.1 * part.training)),
    "forward hook": lambda: _with(Part(_zero), register_forward_hook=note_call),
    "forward pre-hook": lambda: _with(Part(_zero), register_forward_pre_hook=note_call),
    "backward hook": lambda: _with(Part(_zero), register_full_backward_hook=_note_backward),
    "tensor hook": lambda: Part(_hook_in_graph),
    "recurrent": lambda: Part(_recur, calls=0, recurrent=nn.LSTM(WIDTH, WIDTH)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


def _add_noise(part: Part, x: Tensor) -> Tensor:
    """Add numbers that no saved tensor shows, before the last saved tensor."""
    noise = torch.rand(x.shape, generator=_GENERATOR)
    return x + noise + part.linear(x).sigmoid()


def _count_in_object(part: Part, x: Tensor) -> Tensor:
    _SHARED.calls += 1
    return scale(part, x, 0.1 * _SHARED.calls)


def _count_globally(part: Part, x: Tensor) -> Tensor:
    global _COUNT
    _COUNT += 1
    return scale(part, x, 0.1 * _COUNT)


class _CountedPart(Part):
    counted = 0


def _count_in_class(part: Part, x: Tensor) -> Tensor:
    _CountedPart.counted += 1
    return scale(part, x, 0.1 * part.counted)


def _make_closure() -> Part:
    generator = torch.Generator().manual_seed(7)

    def draw(part: Part, x: Tensor) -> Tensor:
        part.drawn = torch.rand(x.shape, generator=generator)
        return x + part.drawn + scale(part, x, 0.0)

    return Part(draw)


class _Streams:
    """An object of the script with generators in a list."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(2)]

    def draw(self, x: Tensor) -> Tensor:
        return sum(torch.rand(x.shape, generator=generator) for generator in self.generators)


def _draw_in_object(part: Part, x: Tensor) -> Tensor:
    part.drawn = part.streams.draw(x)
    return scale(part, x * part.drawn, 0.0)


# Parts that draw from generators outside of the modules, to which names in their code lead.
PARTS |= {
    "generator of the script": lambda: Part(
        lambda part, x: scale(part, x * (torch.rand(x.shape, generator=_GENERATOR) > 0.3), 0.0)
    ),
    "generator of the script, and its numbers are not saved": lambda: Part(_add_noise),
    "generator in an object": lambda: Part(
        lambda part, x: scale(part, x, _SHARED.generator.random())
    ),
    "generators in a list in an attribute's object": lambda: Part(
        _draw_in_object, streams=_Streams()
    ),
    "generator in a closure": _make_closure,
}

# Parts whose state is out of reach.
LOST: dict[str, Callable[[], nn.Module]] = {
    "iterator of the script": lambda: Part(lambda part, x: scale(part, x, 0.1 * next(_NUMBERS))),
    "counter of the script": lambda: Part(_count_globally),
    "counter in an object": lambda: Part(_count_in_object),
    "counter in a class": lambda: _CountedPart(_count_in_class),
}


def _count_in_dictionary(part: Part, x: Tensor) -> Tensor:
    """Count in an item that the first call adds."""
    _STATS["dictionary"] = _STATS.get("dictionary", 0) + 1
    return scale(part, x, 0.0)


def _count_in_list(part: Part, x: Tensor) -> Tensor:
    part.counts.items[0] += 1
    return scale(part, x, 0.0)


def _count_in_attribute(part: Part, x: Tensor) -> Tensor:
    part.counts.calls += 1
    return scale(part, x, 0.0)


def _make_counting_closure() -> Part:
    in_closure = 0

    def count(part: Part, x: Tensor) -> Tensor:
        nonlocal in_closure
        in_closure += 1
        return scale(part, x, 0.0)

    return Part(count)


def _keep_longest(part: Part, x: Tensor) -> Tensor:
    """Keep the longest input, as a table of positions does; a recomputation changes nothing."""
    _STATS["longest"] = max(_STATS.get("longest", 0), len(x))
    return scale(part, x, 0.0)


# Parts that count where no saved tensor shows it, with the names in the warning.
NOTIFIED: dict[str, Callable[[], nn.Module]] = {
    "dictionary": lambda: Part(_count_in_dictionary),
    "with the key 0": lambda: Part(
        _count_in_list, counts=types.SimpleNamespace(items=[0, torch.ones(1)])
    ),
    "calls": lambda: Part(_count_in_attribute, counts=types.SimpleNamespace(calls=0)),
    "in_closure": _make_counting_closure,
}
# A part that changes a number only once.
UNNOTIFIED = {"a longest input": lambda: Part(_keep_longest)}


class Stack(nn.Module):
    """Blocks of parts between two linears."""

    def __init__(self, blocks: list[list[Callable[[], nn.Module]]]) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.Sequential(*(make() for make in parts)) for parts in blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for layer in self.layers:
            h = layer(h)
        result: Tensor = self.head(h).square().mean()
        losses = [part.loss for part in self.modules() if hasattr(part, "loss")]
        return result + sum(losses)


def read_state(model: nn.Module) -> list[Tensor]:
    """Return the attributes of the parts, and the next number of each random stream, as tensors."""
    found = [
        torch.rand(2),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        len(CALLS),
        torch.rand(2, generator=_GENERATOR),
        _SHARED.generator.random(),
    ]
    for part in model.modules():
        for name in ("calls", "total", "state", "cached", "loss", "drawn"):
            found.append(getattr(part, name, 0))
        seen = getattr(part, "seen", ())
        found.append(len(seen))
        generator: Any = getattr(part, "generator", None)
        found.append(0 if generator is None else torch.rand(2, generator=generator))
        found.append(
            part.rng.random() if hasattr(part, "rng") and hasattr(part.rng, "random") else 0
        )
    return [torch.as_tensor(value).detach().clone() for value in found]


def seed_streams() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    _GENERATOR.manual_seed(1)
    CALLS.clear()
    _STATS.clear()
    _SHARED.calls, _SHARED.generator = 0, random.Random(0)
    global _COUNT, _NUMBERS
    _COUNT = _CountedPart.counted = 0
    _NUMBERS = itertools.count()


def train(
    blocks: list[list[Callable[[], nn.Module]]],
    steps: int = 5,
    micro: int = 2,
    compile_model: Callable[[Any], Any] = lambda model: model,
) -> list[Any]:
    """Train, with two forwards before their backwards, and return the state after each step."""
    seed_streams()
    model = Stack(blocks)
    run = compile_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(steps):
        inputs = [
            torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + i))
            for i in range(micro)
        ]
        losses = [run(x) for x in inputs]
        # A script may evaluate before its backward.
        model.eval()
        for loss in losses:
            loss.backward()
        model.train()
        found += [*(loss.detach() for loss in losses), *read_state(model)]
        found += [
            None if param.grad is None else param.grad.clone() for param in model.parameters()
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found + [param.detach().clone() for param in model.parameters()]
