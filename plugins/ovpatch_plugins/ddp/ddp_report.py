"""Counters and remarks of the feature for the report, and the messages of its errors.

Every ``apply()`` makes a report, so no function here walks over all objects, which would cost as
much as the rest of ``apply()``. Imported modules, and the classes that FSDP2 derives, show enough.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from ovpatch.hookspecs import FeatureCounters, Level

# --- errors ---

# Scripts search errors for the words of stock PyTorch. So errors that it has as well begin with its
# message, and our names and remedies follow.

# How many names of parameters an error lists.
_MAX_NAMES: Final = 10

_ERROR_UNFINISHED: Final = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
)

_HINT_OUTPUTS: Final = (
    "making sure all `forward` function outputs participate in calculating loss. \nIf you "
    "already have done the above, then the distributed data parallel module wasn't able to "
    "locate the output tensors in the return value of your module's `forward` function. Please "
    "include the loss function and the structure of the return value of `forward` of your module "
    "when reporting this issue (e.g. list, dict, iterable)."
)


def say_unfinished(missing: Mapping[int, str], rank: int, *, searched: bool) -> str:
    """Return the error that parameters got no gradient.

    Args:
        missing: The names of these parameters, by index.
        rank: This rank.
        searched: Whether the reducer searches for unused parameters.
    """
    if searched:
        hint = (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all "
            "`forward` outputs participate in computing loss. You can fix this by "
        )
        remedy = "have all outputs of forward take part in the loss"
    else:
        hint = (
            "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and "
            "by \n"
        )
        remedy = (
            "have all outputs of forward take part in the loss, or, if a forward may leave "
            "parameters out, pass find_unused_parameters=True to DistributedDataParallel"
        )
    return (
        f"{_ERROR_UNFINISHED}This error indicates that your module has parameters that were not "
        f"used in producing loss. {hint}{_HINT_OUTPUTS}{_describe(missing, rank)}\novpatch: these "
        f"parameters got no gradient in the last backward: {_join(list(missing.values()))}; "
        f"{remedy}."
    )


def _describe(missing: Mapping[int, str], rank: int) -> str:
    indices = f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        return (
            f"{indices}\n In addition, you can set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print out information about "
            "which particular parameters did not receive gradient on this rank as part of this "
            "error"
        )
    return f"\nParameters which did not receive grad for rank {rank}: {', '.join(missing.values())}{indices}"


def say_static_graph_lacks(missing: Mapping[int, str], rank: int, *, is_first: bool) -> str:
    """Return the error that parameters of a static graph got too few gradients.

    Args:
        missing: The names of these parameters, by index.
        rank: This rank.
        is_first: Whether this is the first backward, which ends where it passes an output.
    """
    cause = (
        f"the first backward has passed no output of the model; {_REMEDY_FIRST_STATIC}"
        if is_first
        else f"these parameters got fewer gradients than in the first backward: "
        f"{_join(list(missing.values()))}; {_REMEDY_STATIC}"
    )
    return (
        f"{_ERROR_UNFINISHED}This error indicates that your training graph has changed in this "
        "iteration, e.g., one parameter is used in first iteration, but then got unused in the "
        "second iteration. this is not compatible with static_graph set to "
        f"True.{_describe(missing, rank)}\novpatch: {cause}"
    )


_REMEDY_FIRST_STATIC: Final = (
    "compute the first loss from the output of the wrapped model, which must be tensors, lists, "
    "tuples or dicts, because other classes hide tensors; or leave static_graph=True out."
)

_REMEDY_STATIC: Final = (
    "have every forward and loss use the same parameters as the first ones did, or leave "
    "static_graph=True out and, if a forward may leave parameters out, pass "
    "find_unused_parameters=True to DistributedDataParallel."
)


def say_needs_stock(name: str) -> str:
    """Return the error that a method works on the C++ reducer only."""
    return (
        f"ovpatch: {name}() of the reducer or logger inside DistributedDataParallel works on "
        "torch's C++ reducer only. Call the wrapper's own method (register_comm_hook, join, "
        "_set_sparse_metadata), which restores that reducer, or turn the feature off with "
        "OVPATCH_DDP=0."
    )


def say_unknown_to_reducer(name: str) -> str:
    """Return the error that this version of torch reads an attribute that the stubs lack."""
    return (
        f"ovpatch: this version of torch uses {name} of the reducer or logger inside "
        "DistributedDataParallel, which feature 'ddp' does not know. Turn the feature off with "
        "OVPATCH_DDP=0."
    )


CREATE_GRAPH: Final = (
    "Using DistributedDataParallel with create_graph=True is not well-supported. The "
    "higher-order gradient will not be synchronized across ranks, and backpropagation through "
    "all_reduce operations will not occur. If you require DDP to work with higher-order "
    "gradients for your use case, please ping https://github.com/pytorch/pytorch/issues/63929"
)


def _join(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


STATIC_GRAPH_TOO_LATE: Final = (
    "set_static_graph() should be called before training loop starts and after "
    "DistributedDataParallel is constructed."
)

STATIC_GRAPH_UNSYNCHRONISED: Final = (
    "ovpatch: static_graph=True learns the graph from the first backward, which ran without "
    "gradient synchronisation. Run the first backward outside of no_sync(), or pass no "
    "static_graph=True."
)


def say_inside_backward(model: str) -> str:
    """Return the error that a running backward does not allow to restore the stock reducer."""
    return (
        f"ovpatch: the stock reducer of {model} cannot be restored, because a backward that is "
        "still running reduces its gradients. Call ovpatch.revert(), register_comm_hook() or "
        "join() between two steps."
    )


def say_needs_nccl(backend: str) -> str:
    """Return the reason for which the process group's backend cannot follow an option."""
    return f"it needs NCCL, and {backend} reduces the gradients of this process group"


# --- counters and remarks ---


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        models: Models that use the reducer of ovpatch.
        stock_models: Models that fell back to the stock reducer.
        backwards: Backward passes whose gradients were reduced.
        collectives: Gradient buckets that were all-reduced.
        collectives_in_backward: Gradient buckets whose all-reduce started while other gradients
            were still to come.
        bytes_reduced: Size of all reduced buckets, in bytes.
        recovered: Backward passes that an exception ended and whose collectives were completed
            later.
        saved_bytes: Memory of the buckets of the stock reducer that the models do without; in a
            merged report, the largest of a rank, in bytes.
    """

    models: int = 0
    stock_models: int = 0
    backwards: int = 0
    collectives: int = 0
    collectives_in_backward: int = 0
    bytes_reduced: int = 0
    recovered: int = 0
    saved_bytes: Level = 0


COUNTERS = Counters()


_FSDP2: Final = "FSDP2 (fully_shard)"

# Only scripts that train with these engines import them, because each needs its own installation.
_ENGINES: Final = {
    "deepspeed.runtime.engine": "DeepSpeed",
    "megatron.core.distributed": "Megatron-Core",
}

# Other libraries import these modules as well, whether or not a script uses them.
_AMBIGUOUS_MODULES: Final = ("torch.distributed.fsdp", "torch.distributed.tensor")


def describe_other_reducers() -> str:
    """Return the libraries that reduce gradients instead of this feature; "" if none is known."""
    used = [name for module, name in _ENGINES.items() if module in sys.modules]
    if _shards_modules():
        used.append(_FSDP2)
    if used:
        return f"gradients are left to {' and '.join(used)}: no model is wrapped in DistributedDataParallel"
    if any(module in sys.modules for module in _AMBIGUOUS_MODULES):
        return (
            "no model was wrapped in DistributedDataParallel; FSDP, tensor parallelism and other "
            "engines reduce gradients themselves"
        )
    return ""


def _shards_modules() -> bool:
    """Return whether FSDP2 has sharded a module."""
    # FSDP2 derives a class from the class of each module that it shards.
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not isinstance(base, type):
        return False
    return any(issubclass(derived, nn.Module) for derived in _list_subclasses(base))


def _list_subclasses(base: type[Any]) -> list[type[Any]]:
    direct = base.__subclasses__()
    return direct + [derived for cls in direct for derived in _list_subclasses(cls)]


_log = logging.getLogger("ovpatch.ddp")

#: The remarks of the report, each once, in order of time.
REMARKS: Final[list[str]] = []


def remark(text: str) -> None:
    """Add a remark to the report and, the first time, to the log as a warning."""
    if text not in REMARKS:
        REMARKS.append(text)
        _log.warning("%s", text)


def note(text: str) -> None:
    """Add a remark to the report and, the first time, to the log."""
    if text not in REMARKS:
        REMARKS.append(text)
        _log.info("%s", text)


@functools.cache
def warn_of_create_graph() -> None:
    """Log once, as stock PyTorch does, that higher-order gradients are not reduced."""
    _log.warning("%s", CREATE_GRAPH)
