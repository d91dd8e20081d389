"""The record of a run: digests and sketches of its values, and files of each process's events, one file per step."""

from __future__ import annotations

import inspect
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.insight import steps, variants
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.session.worker_exit import write_at_exit


@dataclass(frozen=True)
class RecordedEvent:
    """An event of a process."""

    # One of BACKWARD, STEP, SCALE and CHECKPOINT.
    event_type: str
    # Number of the optimizer, in the order of their first steps.
    index: int
    # Class of the optimizer, or file of the checkpoint.
    label: str
    # The number of the step, from 1.
    step: int
    # The recorded values by name. A name begins with the role of its value: loss, gradient, norm of
    # gradients, loss scale, parameter, buffer, frozen (a parameter), state, option (of an optimizer),
    # saved (in a checkpoint), random (the states of generators). `probes.py` makes the names, and
    # `noise_runs.py` those of generators; `get_role` reads the role.
    values: Mapping[str, KeptValue]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RecordedEvent:
        """Return an event from its stored form."""
        values = {name: KeptValue(*value) for name, value in data["values"].items()}
        return cls(data["event_type"], data["index"], data["label"], data["step"], values)

    @property
    def signature(self) -> tuple[str, int]:
        """The part that must be equal in two runs."""
        return self.event_type, self.index

    def __str__(self) -> str:
        return {
            BACKWARD: f"a backward (step {self.step})",
            STEP: f"step {self.step} of optimizer {self.index} ({self.label})",
            SCALE: "GradScaler.update()",
            CHECKPOINT: f"a checkpoint ({self.label})",
        }[self.event_type]


# A role ends at a space or, as in ``random.torch``, at a dot. Two roles contain spaces.
_ROLE: Final = re.compile(r"norm of gradients|loss scale|\w+")


def get_role(name: str) -> str:
    """Return the role of a recorded value; see :class:`RecordedEvent` for all roles."""
    found = _ROLE.match(name)
    return found[0] if found else name


@dataclass(frozen=True)
class RecordedRun:
    """The record of one variant."""

    # Files of each process, in order, by its name, such as ``rank 1``.
    processes: Mapping[str, Sequence[Path]]
    # Whether the variant failed or was ended, so that its events may stop anywhere.
    cut: bool = False

    def events(self, process: str) -> Iterator[RecordedEvent]:
        """Yield the events of a process, file by file."""
        for path in self.processes.get(process, ()):
            yield from map(RecordedEvent.from_data, torch.load(path, weights_only=True))


def read_recorded(
    folder: Path, *, cut: bool = False, hosts: Mapping[int, str] | None = None
) -> RecordedRun:
    """Return the record in the folder of a variant.

    Args:
        folder: The folder.
        cut: Whether the variant failed or was ended.
        hosts: The hosts of the ranks, which the names of processes then have. Default: there is one.
    """
    files: dict[tuple[tuple[int, ...], int, int], list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("events-*.pt"), key=lambda path: path.stem.rpartition("-")[2]):
        _, identity, born, pid, _, _ = path.stem.split("-")
        files[tuple(map(int, identity.split("."))), int(born), int(pid)].append(path)
    ranks: dict[int, list[list[Path]]] = defaultdict(list)
    for _, paths in sorted(files.items()):
        ranks[int(paths[-1].stem.split("-")[4])].append(paths)
    processes = {
        variants.name_rank(rank, hosts or {}) + (f", process {n + 1}" if n else ""): paths
        for rank, many in sorted(ranks.items())
        for n, paths in enumerate(many)
    }
    return RecordedRun(processes, cut)


#: Types of events.
BACKWARD: Final = "backward"
STEP: Final = "step"
SCALE: Final = "scale"
CHECKPOINT: Final = "checkpoint"


class EventRecorder:
    """Collects the events of this process, and writes them to files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        self._pid, self._born, self._files = os.getpid(), time.time_ns(), 0
        self._rank: int | None = None
        self._events.clear()

    def record_event(
        self,
        event_type: str,
        values: Mapping[str, KeptValue],
        *,
        step: int,
        index: int = 0,
        label: str = "",
    ) -> None:
        """Add an event; see :class:`RecordedEvent` for its parts."""
        kept = {name: tuple(value) for name, value in values.items()}
        self._events.append(
            {
                "event_type": event_type,
                "index": index,
                "label": label,
                "step": step,
                "values": kept,
            }
        )

    def flush_events(self) -> None:
        """Write the events since the last flush. A missing directory is no error."""
        if not self._events or not self._directory.is_dir() or self._pid != os.getpid():
            return
        name = f"events-{_identity()}-{self._born}-{self._pid}-{self._know_rank()}-{self._files:06d}.pt"
        # The function without patches, because this is no checkpoint of the script.
        save = inspect.unwrap(torch.save)
        save(self._events, self._directory / f".{name}")
        os.replace(self._directory / f".{name}", self._directory / name)
        self._files += 1
        self._events.clear()

    def _know_rank(self) -> int:
        """Return the rank; a process keeps it when its group is destroyed."""
        if self._rank is None or (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            self._rank = steps.get_rank()
        return self._rank

    def flush_at_exit(self) -> None:
        """Write the rest when the process ends, and give forked children their own record."""
        write_at_exit(self.flush_events)
        os.register_at_fork(after_in_child=self._reset)


def _identity() -> str:
    """Return the position in multiprocessing's tree, such as ``0.2``; children have no fixed order of start."""
    from multiprocessing import process

    numbers: tuple[int, ...] = getattr(process.current_process(), "_identity", ())
    return ".".join(map(str, (0, *numbers)))


#: Elements per pass; the weights of a chunk take 16 MiB.
CHUNK: Final = 1 << 20

_MODULUS: Final = 1 << 64
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def compute_digest(tensor: Tensor) -> str:
    """Return a string that two strided tensors of one dtype and shape share if and only if all their bits are equal.

    The bits of element ``i`` are an integer ``x[i]``; a digest is two sums of ``w[i] * x[i]`` modulo ``2**64`` with
    fixed pseudo-random weights. The weights are odd and so have an inverse: a change of one element changes both sums,
    and changes of several elements practically never cancel in both. Integer sums do not depend on order or device.
    """
    bits = view_bits(tensor)
    weights = _weights(bits.device)
    starts = range(0, bits.numel(), CHUNK)
    parts = [bits[start : start + CHUNK].to(torch.int64) for start in starts]
    sums = (
        torch.stack([(weights[:, : len(part)] * part).sum(1) for part in parts]).tolist()
        if parts
        else []
    )
    total = [
        sum(_odd(2 * chunk + n) * row[n] for chunk, row in enumerate(sums)) % _MODULUS
        for n in range(2)
    ]
    return f"{total[0]:016x}{total[1]:016x}"


def view_bits(tensor: Tensor) -> Tensor:
    """Return a flat view, or copy, of a tensor as integers of its width; a complex element is two."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def hash_integers(numbers: Tensor) -> Tensor:
    """Return a pseudo-random 64-bit integer for each integer, by the finalizer of splitmix64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        # The mask makes this a logical shift, which does not repeat the sign.
        high = (numbers >> shift) & ((1 << (64 - shift)) - 1)
        numbers = (numbers ^ high) * factor
    return numbers


def _odd(number: int) -> int:
    """Return the weight of a chunk."""
    seeds = torch.tensor([number * 0x1E3779B97F4A7C15 % (1 << 63)], device="cpu")
    return int(hash_integers(seeds).item()) | 1


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    numbers = torch.arange(2 * CHUNK, dtype=torch.int64, device=device)
    return (hash_integers(numbers * 0x1E3779B97F4A7C15 + 1) | 1).view(2, CHUNK)


#: Sums of a large tensor's sketch.
BUCKETS: Final = 1 << 12


@torch.no_grad()
def compute_sketch(tensor: Tensor) -> Tensor:
    """Return a real, strided tensor folded into ``BUCKETS`` float64 sums, on its own device.

    Element ``i`` is added, with a fixed pseudo-random sign, to sum ``i mod BUCKETS``, which is divided by the square
    root of its number of elements. The fold is linear: the difference of two sketches is the sketch of the difference.
    Noise of size e in every element is about e in every sum; a difference d of one element is d over that root. NaNs
    and infinities count as 0 here; :func:`describe_nonfinite` has their positions, and the digest has all bits.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for number, start in enumerate(range(0, flat.numel(), CHUNK)):
        part = flat[start : start + CHUNK].to(torch.float64)
        part = torch.where(part.isfinite(), part, 0.0)
        part = torch.nn.functional.pad(part, (0, -len(part) % BUCKETS)).view(-1, BUCKETS)
        chunk_signs = _sign(torch.arange(BUCKETS, device=flat.device) + ((number + 1) << 42))
        total += (part * _signs(flat.device)[: len(part)]).sum(0) * chunk_signs
    return total / math.sqrt(max(1, -(-flat.numel() // BUCKETS)))


@torch.no_grad()
def describe_nonfinite(tensor: Tensor) -> str:
    """Return the number of a strided tensor's NaNs and infinities with a digest of their positions; "" for none."""
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return ""
    tensor = tensor.detach()
    marks = tensor.isnan() * 1 + tensor.isposinf() * 2 + tensor.isneginf() * 3
    return f"{int((marks != 0).sum())} not finite, {compute_digest(marks.to(torch.uint8))}"


@lru_cache(maxsize=16)
def _signs(device: torch.device) -> Tensor:
    return _sign(torch.arange(CHUNK, device=device) + (1 << 40)).view(-1, BUCKETS)


def _sign(numbers: Tensor) -> Tensor:
    """Return plus or minus one for each integer."""
    return ((hash_integers(numbers) & 1) * 2 - 1).to(torch.float64)


#: The number of elements up to which a tensor is kept as it is.
MAX_KEPT_ELEMENTS: Final = 1 << 14

#: Form of an unreadable value, such as a tensor on the meta device; its digest is its class.
UNREAD: Final = "unread"

_SCALARS: Final = (bool, int, float, complex)


class KeptValue(NamedTuple):
    """One value, as stored."""

    # The class of the value, with dtype and shape, for example ``float32 [3, 4]``, ``float``, ``text`` or ``none``.
    form: str
    # Digest of all bits of the value.
    digest: str
    # The value itself, or the sketch of a large tensor; None if the digest suffices.
    values: Any = None
    # Whether ``values`` is a sketch.
    folded: bool = False
    # For a sketch, the number and positions of NaNs and infinities.
    not_finite: str = ""


def keep_text(value: str) -> KeptValue:
    """Record a string, such as a digest."""
    return KeptValue("text", value)


@torch.no_grad()
def keep_value(value: Any) -> KeptValue:
    """Record a value as it is now: of a DTensor, its local tensor; of an unreadable value, only its class."""
    if isinstance(value, Tensor):
        return _keep_tensor(lazy_tensor.peek(value))
    if value is None:
        return KeptValue("none", "")
    if isinstance(value, str):
        return keep_text(value)
    return (
        KeptValue(type(value).__name__, repr(value), value)
        if type(value) in _SCALARS
        else _keep_unread(value)
    )


def _keep_unread(value: Any) -> KeptValue:
    return KeptValue(UNREAD, type(value).__name__)


def _keep_tensor(tensor: Tensor) -> KeptValue:
    # By name: importing DTensor takes half a second, and a torch without torch.distributed has none.
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        tensor = tensor.to_local()  # type: ignore[attr-defined]  # DTensor's; mypy knows only of a Tensor
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return _keep_unread(tensor)
    try:
        return _keep_strided(tensor.to_dense() if tensor.layout is not torch.strided else tensor)
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
    ):
        # The tensor is uninitialised, or its class has no plain values.
        return _keep_unread(tensor)


def describe_form(tensor: Tensor) -> str:
    """Return dtype and shape, for example ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _keep_strided(tensor: Tensor) -> KeptValue:
    form, bits = describe_form(tensor), compute_digest(tensor)
    if tensor.numel() <= MAX_KEPT_ELEMENTS:
        return KeptValue(form, bits, tensor.detach().to("cpu", copy=True).contiguous())
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if real.is_floating_point() and real.element_size() == 1:
        # torch has almost no functions for float8.
        real = real.to(torch.float32)
    return KeptValue(form, bits, compute_sketch(real).cpu(), True, describe_nonfinite(real))
