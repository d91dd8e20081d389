"""What the feature did in this process, what the report says of it, and the texts of its errors.

Every ``apply()`` makes a report, so nothing here walks over all objects, which would cost as much as the rest of
``apply()``: imported modules, and the classes that FSDP2 makes of those it shards, show enough.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from ovpatch.hookspecs import FeatureCounters

# --- texts of errors ---


_SHOWN = 10


_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one. "

_USES_OUTPUTS = (
    "making sure all `forward` function outputs participate in calculating loss. \nIf you already have done the above, "
    "then the distributed data parallel module wasn't able to locate the output tensors in the return value of your "
    "module's `forward` function. Please include the loss function and the structure of the return value of `forward` "
    "of your module when reporting this issue (e.g. list, dict, iterable)."
)


def say_unfinished(missing: Mapping[int, str], rank: int, *, searched: bool) -> str:
    """Say which parameters got no gradient, first in stock's words, which scripts look for.

    Args:
        missing: Their names by index.
        rank: This rank.
        searched: Whether unused parameters are searched for.
    """
    if searched:
        hint = (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            "participate in computing loss. You can fix this by "
        )
        remedy = "have all outputs of forward take part in the loss"
    else:
        hint = (
            "You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` "
            "to `torch.nn.parallel.DistributedDataParallel`, and by \n"
        )
        remedy = (
            "have all outputs of forward take part in the loss, or, if a forward may leave parameters out, pass "
            "find_unused_parameters=True to DistributedDataParallel"
        )
    return (
        f"{_UNFINISHED}This error indicates that your module has parameters that were not used in producing loss. "
        f"{hint}{_USES_OUTPUTS}{_which(missing, rank)}\novpatch: these parameters got no gradient in the last "
        f"backward: {_listed(list(missing.values()))}; {remedy}."
    )


def _which(missing: Mapping[int, str], rank: int) -> str:
    indices = f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        return (
            f"{indices}\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
            "DETAIL to print out information about which particular parameters did not receive gradient on this rank "
            "as part of this error"
        )
    return f"\nParameters which did not receive grad for rank {rank}: {', '.join(missing.values())}{indices}"


def say_static_graph_lacks(missing: Mapping[int, str], rank: int) -> str:
    """Say which parameters of a static graph got fewer gradients than in its first backward; in stock's words first.

    Args:
        missing: Their names by index.
        rank: This rank.
    """
    return (
        f"{_UNFINISHED}This error indicates that your training graph has changed in this iteration, e.g., one "
        "parameter is used in first iteration, but then got unused in the second iteration. this is not compatible "
        f"with static_graph set to True.{_which(missing, rank)}\novpatch: these parameters got fewer gradients than in "
        f"the first backward: {_listed(list(missing.values()))}; {_NOT_STATIC}"
    )


_NOT_STATIC = (
    "have every forward and loss use the same parameters as the first ones did, or leave static_graph=True out and, if "
    "a forward may leave parameters out, pass find_unused_parameters=True to DistributedDataParallel."
)


def say_needs_stock(name: str) -> str:
    """Say that a method works on the C++ reducer only."""
    return (
        f"ovpatch: {name}() of the reducer or logger inside DistributedDataParallel works on torch's C++ reducer only. "
        "Call the wrapper's own method (register_comm_hook, join, _set_sparse_metadata), which brings that reducer "
        "back, or turn the feature off with OVPATCH_DDP=0."
    )


def say_unknown_to_reducer(name: str) -> str:
    """Say that this version of torch uses something of the reducer or logger that ours lacks."""
    return (
        f"ovpatch: this version of torch uses {name} of the reducer or logger inside DistributedDataParallel, which "
        "feature 'ddp' does not know. Turn the feature off with OVPATCH_DDP=0."
    )


CREATE_GRAPH = (
    "Using DistributedDataParallel with create_graph=True is not well-supported. The higher-order gradient will not be "
    "synchronized across ranks, and backpropagation through all_reduce operations will not occur. If you require DDP "
    "to work with higher-order gradients for your use case, please ping https://github.com/pytorch/pytorch/issues/63929"
)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


STATIC_GRAPH_TOO_LATE = (
    "set_static_graph() should be called before training loop starts and after DistributedDataParallel is constructed."
)

STATIC_GRAPH_UNSYNCHRONISED = (
    "ovpatch: static_graph=True learns the graph from the first backward, which ran without gradient synchronisation. "
    "Run the first backward outside of no_sync(), or pass no static_graph=True."
)

def say_inside_backward(model: str) -> str:
    """Say that the stock reducer was asked for while gradients are being reduced."""
    return (
        f"ovpatch: a backward that is still running reduces the gradients of {model}, which therefore cannot get its "
        "stock reducer back now. Call ovpatch.revert(), register_comm_hook() or join() between two steps."
    )


def say_needs_nccl(backend: str) -> str:
    """Return the reason why the process group's backend cannot follow an option."""
    return f"it needs NCCL, and {backend} reduces the gradients of this process group"


# --- counters and remarks ---


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        models: Models whose gradients our reducer took over.
        stock_models: Models that fell back to the stock reducer.
        backwards: Backward passes whose gradients were reduced.
        collectives: Gradient buckets that were all-reduced.
        collectives_in_backward: Those of them that were launched while backward was still computing.
        bytes_reduced: Size of all reduced buckets, in bytes.
        recovered: Backward passes that an exception cut short and whose collectives were completed later.
    """

    models: int = 0
    stock_models: int = 0
    backwards: int = 0
    collectives: int = 0
    collectives_in_backward: int = 0
    bytes_reduced: int = 0
    recovered: int = 0


COUNTERS = Counters()


_FSDP2 = "FSDP2 (fully_shard)"

# Imported only by scripts that train with them: they need an installation of their own.
_ENGINES = {"deepspeed.runtime.engine": "DeepSpeed", "megatron.core.distributed": "Megatron-Core"}

# Imported by other libraries, too, whether or not a model is made parallel by them.
_PERHAPS = ("torch.distributed.fsdp", "torch.distributed.tensor")


def describe_other_reducers() -> str:
    """Return what reduces gradients in place of this feature, or "" if nothing is known to."""
    used = [called for module, called in _ENGINES.items() if module in sys.modules]
    if _shards_modules():
        used.append(_FSDP2)
    if used:
        return f"gradients are left to {' and '.join(used)}: no model is wrapped in DistributedDataParallel"
    if any(module in sys.modules for module in _PERHAPS):
        return (
            "no model was wrapped in DistributedDataParallel; FSDP, tensor parallelism and engines of their own reduce "
            "gradients themselves"
        )
    return ""


def _shards_modules() -> bool:
    """Return whether FSDP2 has sharded a module: it makes a class of its own of each class of modules."""
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return isinstance(base, type) and any(issubclass(made, nn.Module) for made in _descendants(base))


def _descendants(base: type[Any]) -> list[type[Any]]:
    direct = base.__subclasses__()
    return direct + [below for cls in direct for below in _descendants(cls)]


_log = logging.getLogger("ovpatch.ddp")

REMARKS: Final[list[str]] = []
"""What the report says besides the counters: each text once, in order of time."""


def remark(text: str) -> None:
    """Add a text to the report and, the first time, to the log."""
    if text not in REMARKS:
        REMARKS.append(text)
        _log.warning("%s", text)


@functools.cache
def warn_of_create_graph() -> None:
    """Log once, as stock does, that higher-order gradients are not reduced."""
    _log.warning("%s", CREATE_GRAPH)
