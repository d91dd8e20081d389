"""A group's choices; see the notes of :mod:`ovpatch.overlap.choosing`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import platform
import socket
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ovpatch.overlap.agreement import DisagreementError, agree, patience
from ovpatch.overlap.choosing.apart import apart
from ovpatch.overlap.choosing.budget import BUDGET, Budget
from ovpatch.overlap.choosing.cache import Cache
from ovpatch.overlap.choosing.numbers import Numbers
from ovpatch.overlap.choosing.race import Arms, Choice, Race, fastest
from ovpatch.overlap.choosing.records import record
from ovpatch.overlap.choosing.timing import measured
from ovpatch.overlap.collectives import backend_name
from ovpatch.overlap.cuda_graphs import capturing

PATIENCE_S = 300.0  # ranks may reach a first call at different times
FAILURE_S = 20.0  # ranks whose arm fails alike do so at about the same time
_SPARE = 1.25  # of memory, for what the allocator cannot use

_REMEDY = (
    "Ranks that choose by measurement must make the same calls, with the same shapes and settings; or set the option "
    "to one of its other values, which are not measured."
)


_UNMADE = "not measured, since a rank could not make what is measured; its report says why"


class _Problem(enum.IntEnum):
    """Why there are no arms on a rank; the largest of all ranks is told."""

    MEMORY = 1
    ERROR = 2


class Chooser:
    """What a group of ranks has chosen for a feature.

    It does not keep the group alive.

    Args:
        device: Where is computed.
        feature: For whom.
        directory: Where measurements are kept from run to run; None to keep none.
        budget: How long may be measured.
    """

    def __init__(self, device: torch.device, feature: str, directory: Path | None, budget: Budget) -> None:
        self._device, self._feature, self._directory, self._budget = device, feature, directory, budget
        self._choices: dict[tuple[bool, str, tuple[str, ...]], Choice] = {}
        self._cache: Cache | None = None

    def choose(self, group: dist.ProcessGroup, race: Race, communicator: dist.ProcessGroup | None = None) -> Choice:
        """Return which arm all ranks take.

        A collective if the key is new to the group, and one may be issued here; see [Note: when to measure].

        Args:
            group: The ranks, always the same.
            race: The arms.
            communicator: Over the same ranks, on which numbers are exchanged; by default the group itself.

        Raises:
            DisagreementError: Ranks ask for different keys, or a rank does not come.
        """
        fixed = torch.are_deterministic_algorithms_enabled()
        question = (fixed, race.key, race.arms)
        known = self._choices.get(question)
        if known is not None:
            return known
        if _is_hindered(self._device):
            return Choice(race.default, "nothing can be measured here", final=False)
        choice = self._choices[question] = self._settled(group, communicator or group, race, fixed)
        if choice.why:
            record(self._feature, choice.text(race.key))
        return choice

    def _settled(
        self, group: dist.ProcessGroup, communicator: dist.ProcessGroup, race: Race, fixed: bool
    ) -> Choice:
        if group.size() == 1 or dist.get_backend(group) == "fake" or len(race.arms) == 1:
            return Choice(race.arms[0], "")
        terms = {"what is computed": race.key, "arms": list(race.arms), "deterministic algorithms": fixed}
        limit = patience(group, self._device, PATIENCE_S)
        agree(group, f"{self._feature}: choice", terms, timeout_s=limit, remedy=_REMEDY)
        if fixed:
            return Choice(race.default, "not measured, since algorithms must be deterministic")
        return apart(functools.partial(self._found, group, communicator, race), self._device)

    def _found(self, group: dist.ProcessGroup, communicator: dist.ProcessGroup, race: Race) -> Choice:
        """Return the choice by what was measured earlier, or now."""
        numbers = Numbers(communicator, self._device)
        cache = self._cache
        if cache is None:
            cache = self._cache = Cache(self._directory, self._feature, self._environment(group, numbers))
        race = dataclasses.replace(race, arms=tuple(name for name in race.arms if race.usable(name)))
        if len(race.arms) == 1:
            return Choice(race.arms[0], "")
        first = group.rank() == 0
        earlier = cache.read().get(race.key, {}) if first else {}
        if cache.problem:
            record(self._feature, cache.problem)
        alike = set(earlier) == set(race.arms)
        given = [earlier[name] for name in race.arms] if alike else [0.0] * len(race.arms)
        found = numbers.of_first(given)
        if all(found):
            times = dict(zip(race.arms, found, strict=True))
            return Choice(fastest(times, race.default), "measured in an earlier run", times)
        if numbers.largest([-self._budget.left()])[0] >= 0:
            return self._unmeasured(race)
        with self._budget.spending():
            return self._measured(group, race, numbers, cache)

    def _measured(self, group: dist.ProcessGroup, race: Race, numbers: Numbers, cache: Cache) -> Choice:
        arms = self._made(race)
        (problem,) = numbers.largest([float(arms) if isinstance(arms, _Problem) else 0.0])
        if problem == _Problem.MEMORY:
            return Choice(race.default, f"not measured, which takes {race.needs / 2**30:.2g} GiB of memory")
        if problem or isinstance(arms, _Problem):
            return Choice(race.default, _UNMADE)
        works = functools.partial(self._works, group, race)
        times = measured(arms, numbers, self._device, self._budget.left, works)
        if times is None:
            return self._unmeasured(race)
        if group.rank() == 0:
            cache.write(race.key, times)
        return Choice(fastest(times, race.default), "measured", times)

    def _made(self, race: Race) -> Arms | _Problem:
        """Return the arms, the baseline first, or why there are none: the others would wait for a rank that raised."""
        if race.needs * _SPARE > _free(self._device):
            return _Problem.MEMORY
        try:
            arms = race.make(torch.Generator(self._device).manual_seed(0))
        except torch.OutOfMemoryError:
            return _Problem.MEMORY
        except RuntimeError as error:
            record(self._feature, f"nothing was measured for {race.key}: {type(error).__name__}: {_line(error)}")
            return _Problem.ERROR
        return {name: arms[name] for name in race.arms}

    def _works(self, group: dist.ProcessGroup, race: Race, name: str, arm: Callable[[], object]) -> bool:
        """Call an arm; see [Note: arms that fail]."""
        try:
            arm()
        except Exception as error:  # kernels' compilers have errors of their own
            if name == race.arms[0] or not _fails_everywhere(group, f"{self._feature}: {name}", race.key):
                raise
            record(self._feature, f"{name} was left out for {race.key}: {type(error).__name__}: {_line(error)}")
            return False
        return True

    def _unmeasured(self, race: Race) -> Choice:
        return Choice(race.default, f"not measured, since measuring has taken its {self._budget.seconds:g} s")

    def _environment(self, group: dist.ProcessGroup, numbers: Numbers) -> dict[str, str]:
        """Return what times depend on, beside what is computed."""
        hosts = numbers.of_all(zlib.crc32(socket.gethostname().encode()))
        on_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self._device) if on_gpu else platform.machine(),
            "ranks": str(group.size()),
            "hosts": str(len(set(hosts))),
            "backend": backend_name(group, self._device),
            "torch": str(torch.__version__),
            "ovpatch": importlib.metadata.version("ovpatch"),
        }


_choosers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.device], Chooser]] = (
    weakref.WeakKeyDictionary()
)


def chooser_of(group: dist.ProcessGroup, device: torch.device, feature: str, directory: Path | None) -> Chooser:
    """Return what chooses for a feature on a group; made once.

    Args:
        group: The ranks.
        device: Where is computed.
        feature: Its name.
        directory: Where measurements are kept from run to run; None to keep none.
    """
    made = _choosers.setdefault(group, {})
    key = (feature, device)
    if key not in made:
        made[key] = Chooser(device, feature, directory, BUDGET)
    return made[key]


def _fails_everywhere(group: dist.ProcessGroup, topic: str, key: str) -> bool:
    """Tell whether all ranks call this."""
    try:
        agree(group, topic, {"what fails": key}, timeout_s=FAILURE_S)
    except DisagreementError:
        return False
    return True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _is_hindered(device: torch.device) -> bool:
    """Tell whether nothing can be measured here; see [Note: when to measure]."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return True
    return capturing(device)


def _free(device: torch.device) -> float:
    """Return how many bytes could be allocated."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
