"""Random training programs for ``tools/fuzz.py``: habits of scripts, combined into the source of a program.

A kind is lines of Python for some places of one training loop; ``fuzz_kinds.txt`` has all of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

#: The beginning of each program.
PRELUDE: Final = """\
import contextlib, copy, io, pickle
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

class Then(nn.Module):
    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function
    def forward(self, x):
        return self.function(self.inner, x)

class Param(nn.Module):
    def __init__(self, value, function):
        super().__init__()
        self.value, self.function = nn.Parameter(value), function
    def forward(self, x):
        return self.function(self.value, x)

def batch(step, micro=0):
    seed = 1000 * step + 10 * micro + dist.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))

def compiled_frames():
    from torch._dynamo.utils import counters, get_compilation_metrics
    names = sorted(f"{one.co_name}, {bool(one.recompile_reason)}" for one in get_compilation_metrics())
    return [*names, sum(counters["graph_break"].values())]

def loss_of(output):
    return output.square().mean()

def grads():
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in net.named_parameters()}

def values():
    return {n: p.detach().clone() for n, p in net.named_parameters()} | {n: b.clone() for n, b in net.named_buffers()}

def params_with_grad():
    return [p for p in net.parameters() if p.requires_grad]

options = {"ddp": {}, "dist_optimizer": {"min_param_numel": 1}}
"""

#: The loop. A place that no kind fills has the text after "or", if there is one.
SKELETON: Final = """\
DEFINE
APPLY or ovpatch.apply("ddp", "dist_optimizer", options=options)
net = Net(LAYERS)
MADE
kwargs = dict(KWARGS)
EARLY
WRAP or model = DDP(net, **kwargs)
WRAPPED
PARAMS or params = list(net.parameters())
OPTIMIZER or opt = torch.optim.SGD(params, lr=0.1)
READY
for step in range(STEPS):
    START or opt.zero_grad()
    FORWARD or loss = loss_of(model(batch(step)))
    BEFORE
    BACKWARD or loss.backward()
    REDUCED
    STEP or opt.step()
    STEPPED
    END
see("end", values())
LAST
"""

#: Of kinds that fill one of these places a program has one.
_FOR_ONE: Final = frozenset({"APPLY", "EARLY", "PARAMS", "OPTIMIZER", "START", "FORWARD", "BACKWARD", "STEP"})

#: Kinds with which the last bits may differ: dist_optimizer-reference.md, "Contract".
_FLOORS: Final = {
    "habit clip norm": 1e-4,
    "habit clip one by one": 1e-4,
    "habit clips in any order": 1e-4,
    "habit total norm": 1e-4,
    "habit expanded gradient": 1e-6,
    "optimizer fused": 1e-4,
    "layer bfloat16": 0.15,
    # It divides by the root of a difference, which may be close to zero.
    "optimizer rmsprop": 1e-4,
}

_PLACE: Final = re.compile(r"^( *)([A-Z]{2,})(?: or (.*))?\n", re.MULTILINE)
_CHOICE: Final = re.compile(r"\{([^{}]*\|[^{}]*|=)\}")
_OPTIMIZER: Final = "opt = torch.optim."


@dataclass(frozen=True)
class Kind:
    """Something that scripts do.

    Attributes:
        family: ``layer``, ``kwarg``, ``optimizer`` or ``habit``.
        name: What it is.
        lines: The code for each place.
    """

    family: str
    name: str
    lines: Mapping[str, str]

    @property
    def without(self) -> set[str]:
        """The names of kinds that are not in one program with it."""
        return set(filter(None, self.lines.get("WITHOUT", "").split(", ")))

    def chosen(self, rng: random.Random) -> Kind:
        """Return the kind with one of each of its alternatives."""
        last = ""

        def choose(found: re.Match[str]) -> str:
            nonlocal last
            last = last if found[1] == "=" else rng.choice(found[1].split("|"))
            return last

        lines = [(_CHOICE.sub(choose, place), _CHOICE.sub(choose, text)) for place, text in self.lines.items()]
        return replace(self, lines=dict(lines))


def read_kinds() -> list[Kind]:
    """Read the kinds; a line of the file is one with its only text, or the beginning of a habit."""
    kinds, place = list[Kind](), ""
    for line in Path(__file__).with_name("fuzz_kinds.txt").read_text().splitlines():
        text = line.strip()
        if not text or line.startswith("#"):
            continue
        if line.startswith("    "):
            habit = dict(kinds[-1].lines)
            habit[place] = "\n".join(filter(None, [habit.get(place), line[4:]]))
            kinds[-1] = replace(kinds[-1], lines=habit)
        elif line.startswith("  "):
            place = text
        else:
            family, _, rest = text.partition(" ")
            name, _, only = rest.partition(": ")
            kinds.append(Kind(family, name, {_place_of(family): only} if only else {}))
    return kinds


def _place_of(family: str) -> str:
    return {"layer": "LAYERS", "kwarg": "KWARGS", "optimizer": "OPTIMIZER"}[family]


@dataclass(frozen=True)
class Program:
    """A training program: its kinds, and how many steps the loop has."""

    kinds: tuple[Kind, ...]
    steps: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds."""
        return tuple(f"{kind.family} {kind.name}" for kind in self.kinds)

    @property
    def floor(self) -> float:
        """The difference that is allowed; 0 demands the same bits."""
        return max((_FLOORS.get(name, 0.0) for name in self.names), default=0.0)

    def text(self) -> str:
        """Return the program's text, without :data:`PRELUDE`."""
        found: dict[str, list[str]] = {}
        for kind in self.kinds:
            for place, text in kind.lines.items():
                found.setdefault(place, []).append(_OPTIMIZER + text if kind.family == "optimizer" else text)
        return _PLACE.sub(lambda line: _fill(line, found), self._inline(found))

    def _inline(self, found: dict[str, list[str]]) -> str:
        """Fill the places inside of lines; have the optimizer made before the wrapper, if a kind demands it."""
        if "EARLY" in found:
            optimizer = found.pop("OPTIMIZER", [_OPTIMIZER + "SGD(params, lr=0.1)"])
            found["EARLY"] = [*found.pop("PARAMS", ["params = list(net.parameters())"]), *optimizer]
            found["OPTIMIZER"] = found["PARAMS"] = ["pass"]
        text = SKELETON.replace("STEPS", str(self.steps))
        kwargs = {kwarg.partition("=")[0]: kwarg for kwarg in found.pop("KWARGS", [])}
        text = text.replace("KWARGS", ", ".join(kwargs.values()))
        layers = found.pop("LAYERS", ["nn.Linear(6, 6)"])
        return text.replace("LAYERS", "".join(f"\n    {layer}," for layer in layers) + "\n")


def _fill(line: re.Match[str], found: Mapping[str, Sequence[str]]) -> str:
    texts = found.get(line[2], [line[3]] if line[3] else [])
    return "".join(f"{line[1]}{part}\n" for text in texts for part in text.split("\n"))


def make_program(kinds: Sequence[Kind], rng: random.Random, word: str = "") -> Program:
    """Put kinds together at random.

    Args:
        kinds: All of them.
        rng: Decides.
        word: One kind whose name holds it is in the program.
    """
    by_family = {family: [kind for kind in kinds if kind.family == family] for family in _NUMBERS}
    wanted = [rng.choice([kind for kind in kinds if word in f"{kind.family} {kind.name}"])] if word else []
    for family, weights in _NUMBERS.items():
        count = rng.choices(range(len(weights)), weights)[0]
        wanted += rng.sample(by_family[family], count)
    return Program(tuple(kind.chosen(rng) for kind in _compatible(wanted)), rng.randint(3, 6))


#: How many kinds of a family a program has: the weights of 0, 1, 2 ...
_NUMBERS: Final[Mapping[str, Sequence[float]]] = {
    "layer": (0, 3, 4, 3),
    "kwarg": (4, 4, 3, 1),
    "optimizer": (2, 8),
    "habit": (0, 1, 3, 5, 5, 4, 3, 2),
}


def _compatible(kinds: Sequence[Kind]) -> Iterator[Kind]:
    """Leave out kinds whose place another one has, or that do not go with another one."""
    taken, names, refused = set[str](), set[str](), set[str]()
    for kind in kinds:
        places, without = _FOR_ONE.intersection(kind.lines), kind.without
        also = {"find unused"} if "find_unused" in kind.lines.get("KWARGS", "") else set()
        if not (places & taken or without & names or (also | {kind.name}) & refused):
            taken |= places
            names |= also | {kind.name}
            refused |= without
            yield kind
