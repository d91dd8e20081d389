"""Habits of blocks whose forward depends on state: random streams, counters, caches, hooks; and their recomputation.

The blocks are the parts of ``tests/plugins/recompute``, where each is alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.habits.loop import Choice, Loop, habit
from tests.habits.wrapping import find_unused
from tests.plugins.recompute.parts import PARTS, read_state, seed_streams


class _Stateful(Loop):
    """Seeds the streams of the process, and records at the end which numbers follow and what the blocks have kept."""

    def made(self) -> None:
        # Other habits may train here.
        seed_streams()
        super().made()

    def last(self) -> None:
        super().last()
        self.see("state", read_state(self.net))


def _parts(name: str, doc: str, *parts: str, **members: Any) -> None:
    """Add a habit whose model has a block that computes one of these parts."""

    def layers(self):
        part = PARTS[getattr(self, f"_{name}__part")]()
        return [*super(cls, self).layers(), nn.Sequential(nn.SiLU(), part)]

    members |= {
        "__doc__": doc,
        "layers": layers,
        f"_{name}__part": Choice(*parts),
        "__module__": __name__,
    }
    cls = type(name, (_Stateful,), members)
    habit()(cls)


_parts(
    "own_generator",
    "A block draws from a generator in its attributes.",
    "generator",
    "Random",
    "numpy's generator",
    "RandomState",
)
_parts(
    "global_streams",
    "A block draws from the global streams of Python or numpy.",
    "Python",
    "Python, a pair of normal deviates",
    "numpy",
    "numpy, a pair of normal deviates",
    "permutation",
    "a stream that starts late",
)
_parts(
    "counter", "A block counts its calls.", "counter", "tensor changed in place", "tensor replaced"
)
_parts(
    "cache",
    "A block keeps values in a container or fills a cache.",
    "lazy cache",
    "tensors of containers changed in place",
    "list",
    "deque",
    "nested containers",
)
_parts(
    "generator_outside",
    "A block draws from a generator in a global variable, an object or a closure.",
    "generator of the script",
    "generator of the script, and its numbers are not saved",
    "generator in an object",
    "generators in a list in an attribute's object",
    "generator in a closure",
)
_parts(
    "forward_hooks_inside",
    "A module inside of a block has hooks.",
    "forward hook",
    "forward pre-hook",
    "tensor hook",
    "backward hook",
)


@habit(without=("static_graph", "static_graph_later"))
class layer_drop(_Stateful, find_unused):
    """A block is skipped at random, on all ranks together."""

    def layers(self):
        return [*super().layers(), nn.Sequential(nn.SiLU(), PARTS["layer drop"]())]


# These habits show what Dynamo compiles and how many operations run, which recomputation changes. A hook that steps may
# change a parameter before its block is recomputed, which is an error.
@habit(
    without=(
        "compile_the_model",
        "compile_the_wrapper",
        "compile_blocks",
        "compile_a_slice",
        "flop_counter",
        "step_in_hooks",
    )
)
class recomputed(Loop):
    """Blocks are recomputed in the patched run."""

    switches = True
    __granularity = Choice("full", "selective")

    def options(self):
        options = {"blocks": "layers.*", "granularity": self.__granularity}
        return super().options() | {"recompute": options}

    def turn_on(self):
        names, options = (*self.features, "recompute"), self.options()
        self.package.apply(*names, options={name: options[name] for name in names})
