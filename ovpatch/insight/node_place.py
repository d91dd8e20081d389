"""The place of a tool's node among the nodes of a job, by the launcher's arguments and variables."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ovpatch.settings.settings import SettingsError

# The ports of torchrun and torch, if none is given.
_RENDEZVOUS_PORT: Final = 29400
_MASTER_PORT: Final = 29500
_MAX_PORT: Final = 65535

# The words that start a launcher, and those before "launch".
_TORCHRUN: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE_LAUNCH: Final = ("accelerate-launch", "accelerate.commands.launch")
_ACCELERATE: Final = ("accelerate", "accelerate.commands.accelerate_cli")
# Options of ``accelerate launch``. Its file has the same names.
_ACCELERATE_OPTIONS: Final = (
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
)

_REMEDY_MEET: Final = (
    "Give --nodes N and --meet HOST:PORT, with an address of one node that all nodes reach."
)
_ERROR_RANGE: Final = (
    "--nnodes {} is a range, but runs of different numbers of nodes cannot be compared. Give one "
    "number, or --nodes 1, with which each node judges its own ranks."
)
_ERROR_BACKEND: Final = (
    "the rendezvous {} is on none of the nodes, so they do not know where to meet. " + _REMEDY_MEET
)
_ERROR_MEET: Final = "--meet {} is not an address and a port. Write it like --meet host0:29600."
_ERROR_ONE_OPTION: Final = (
    "--nodes {} needs a place where the nodes meet, and the command names none. " + _REMEDY_MEET
)
_ERROR_NO_COUNT: Final = (
    "--meet {} needs the number of nodes, and the command names none. " + _REMEDY_MEET
)
_ERROR_ACCELERATE: Final = (
    "accelerate starts {} machines, but neither its arguments nor its file of settings has "
    "main_process_ip, so the nodes do not know where to meet. " + _REMEDY_MEET
)
_ERROR_SLURM: Final = (
    "the nodes do not know where to meet: ovpatch cannot read the list of nodes of Slurm, {}. "
    + _REMEDY_MEET
)


@dataclass(frozen=True)
class Place:
    """The place of this node among the nodes of a job.

    Attributes:
        count: The number of nodes.
        index: The number of this node; None if the launcher does not number nodes before they
            meet. Node 0 is then a node with the address ``host``.
        host: The address of node 0.
        port: The port at which node 0 listens.
        names: The host names of all nodes, if the scheduler lists them; otherwise empty.
    """

    count: int
    index: int | None
    host: str
    port: int
    names: Sequence[str] = ()


def find_place(
    command: Sequence[str], count: int | None = None, meet: str | None = None
) -> Place | None:
    """Return the place of this node by the command and the environment; None for a job of one node.

    Args:
        command: The command that this node runs.
        count: The number of nodes that the user gave, if any; 1 turns the meeting off.
        meet: The address and port that the user gave, if any.

    Raises:
        SettingsError: The nodes cannot know where to meet.
    """
    if count == 1:
        return None
    if meet is not None:
        host, port = _parse_address(meet)
        found = _find(command, strict=False) or _find_by_environment(strict=False)
        if found is None and count is None:
            raise SettingsError(_ERROR_NO_COUNT.format(meet))
        index = None if found is None or count not in (None, found.count) else found.index
        number = count if found is None or count is not None else found.count
        assert number is not None, "one of the two is known"
        return Place(number, index, host, port)
    found = _find(command, strict=True)
    if count is not None and (found is None or found.count != count):
        raise SettingsError(_ERROR_ONE_OPTION.format(count))
    return found


def _parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
        raise SettingsError(_ERROR_MEET.format(text))
    return host.strip("[]"), int(port)


def _find(command: Sequence[str], *, strict: bool) -> Place | None:
    """Return the place by the arguments of the launcher that a command starts, or by the environment.

    Args:
        command: The command.
        strict: Whether a job whose nodes cannot know where to meet is an error.
    """
    for position, word in enumerate(command):
        name, arguments = os.path.basename(word), command[position + 1 :]
        if name in _TORCHRUN:
            # Of torch.distributed.launch alone, which starts torchrun.
            words = [word for word in arguments if word not in ("--use-env", "--use_env")]
            return _find_by_torchrun(words, strict=strict)
        if name in _ACCELERATE_LAUNCH:
            return _find_by_accelerate(arguments, strict=strict)
        if name in _ACCELERATE and arguments[:1] == ["launch"]:
            return _find_by_accelerate(arguments[1:], strict=strict)
    return _find_by_environment(strict=strict)


def _find_by_torchrun(arguments: Sequence[str], *, strict: bool) -> Place | None:
    """Return the place by torchrun's arguments, and its variables ``PET_…``.

    Args:
        arguments: The words after ``torchrun``.
        strict: Whether a job whose nodes cannot know where to meet is an error.
    """
    # Torch takes seconds to import, and most jobs have one node.
    if "PET_NNODES" not in os.environ and not any("nnodes" in word for word in arguments):
        return None
    from torch.distributed.run import get_args_parser

    # Torchrun itself reports wrong arguments.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        parsed = get_args_parser().parse_args(list(arguments))
        return _read_torchrun(parsed, strict=strict)
    return None


def _read_torchrun(parsed: Any, *, strict: bool) -> Place | None:
    least, _, most = str(parsed.nnodes).partition(":")
    if parsed.standalone or not least.isdigit() or (most or least) == "1":
        return None
    if most and most != least and strict:
        raise SettingsError(_ERROR_RANGE.format(parsed.nnodes))
    count = int(most or least)
    is_static = parsed.rdzv_backend == "static"
    if is_static and not parsed.rdzv_endpoint:
        host = parsed.master_addr or ""
        port = int(parsed.master_port or _MASTER_PORT)
    else:
        host, _, given = parsed.rdzv_endpoint.rpartition(":")
        host, port = (host, int(given)) if given.isdigit() else (parsed.rdzv_endpoint, 0)
    if strict and (parsed.rdzv_backend not in ("static", "c10d") or not host):
        raise SettingsError(_ERROR_BACKEND.format(f"{parsed.rdzv_backend} {host}".strip()))
    index = int(parsed.node_rank) if is_static else None
    names = _list_slurm_hosts()
    return Place(
        count,
        index,
        host.strip("[]"),
        _choose_port(port or _RENDEZVOUS_PORT),
        names if len(names) == count else (),
    )


def _find_by_accelerate(arguments: Sequence[str], *, strict: bool) -> Place | None:
    """Return the place by the arguments of ``accelerate launch``, and its file of settings.

    Args:
        arguments: The words after ``launch``.
        strict: Whether a job whose nodes cannot know where to meet is an error.
    """
    # It needs torch, which takes seconds to import.
    try:
        launch: Any = importlib.import_module("accelerate.commands.launch")
        config: Any = importlib.import_module("accelerate.commands.config.config_args")
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        return _find_by_environment(strict=strict)
    place: Place | None = None
    # Accelerate itself reports wrong arguments and files.
    wrong = (SystemExit, OSError, ValueError, TypeError, AttributeError, yaml.YAMLError)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(*wrong):
        parsed = launch.launch_command_parser().parse_args(list(arguments))
        file = parsed.config_file
        has_file = file is not None or (
            os.path.isfile(config.default_config_file) and not parsed.cpu
        )
        settings = vars(config.load_config_from_file(file)) if has_file else {}
        place = _read_accelerate(parsed, settings)
    if place is not None and strict and not place.host:
        raise SettingsError(_ERROR_ACCELERATE.format(place.count))
    return place


def _read_accelerate(parsed: Any, settings: dict[str, Any]) -> Place | None:
    values = {name: getattr(parsed, name) or settings.get(name) for name in _ACCELERATE_OPTIONS}
    count = int(values["num_machines"] or 1)
    has_deepspeed = parsed.use_deepspeed or "DEEPSPEED" in str(settings.get("distributed_type"))
    starter = parsed.deepspeed_multinode_launcher or (settings.get("deepspeed_config") or {}).get(
        "deepspeed_multinode_launcher"
    )
    # By default, DeepSpeed's node 0 starts its peers.
    if count == 1 or (has_deepspeed and starter != "standard"):
        return None
    index = int(values["machine_rank"] or 0) if parsed.rdzv_backend == "static" else None
    port = int(values["main_process_port"] or _MASTER_PORT)
    return Place(count, index, values["main_process_ip"] or "", _choose_port(port))


def _choose_port(launcher_port: int) -> int:
    return launcher_port + (1 if launcher_port < _MAX_PORT else -1)


def _find_by_environment(*, strict: bool) -> Place | None:
    """Return the place by the variables of ``srun``, or of a launcher that numbers its processes.

    Each process that such a launcher starts is a node here, even if it runs one rank.

    Args:
        strict: Whether a job whose nodes cannot know where to meet is an error.
    """
    read = os.environ.get
    names = _list_slurm_hosts()
    for count, index in (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("WORLD_SIZE", "RANK")):
        host = read("MASTER_ADDR") or (names[0] if count.startswith("SLURM") and names else "")
        numbers = [read(name, "") for name in (count, index)]
        if host and all(map(str.isdigit, numbers)) and int(numbers[0]) > 1:
            total = int(numbers[0])
            port = int(read("MASTER_PORT") or _MASTER_PORT)
            listed = names if len(names) == total else ()
            return Place(total, int(numbers[1]), host, _choose_port(port), listed)
    text = _read_slurm_list()
    if strict and text and not names and int(read("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise SettingsError(_ERROR_SLURM.format(text))
    return None


def _read_slurm_list() -> str:
    return os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")


# A name, or a name that ends in numbers and ranges of numbers, as in a[1-2,7].
_SLURM_NAME: Final = r"([^,\[\]]+)(?:\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\])?"


def _list_slurm_hosts() -> list[str]:
    """Return the host names of a Slurm step, such as ``a1 a2`` for ``a[1-2]``.

    The list is empty outside of Slurm, and if names have another form, such as ``r[1-2]n[1-2]``.
    """
    text = _read_slurm_list()
    if not re.fullmatch(f"{_SLURM_NAME}(?:,{_SLURM_NAME})*", text):
        return []
    hosts: list[str] = []
    for name, ranges in re.findall(_SLURM_NAME, text):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            if not part:
                hosts.append(name)
            else:
                numbers = range(int(first), int(last or first) + 1)
                hosts += [f"{name}{number:0{len(first)}}" for number in numbers]
    return hosts
