"""How a gradient reducer lets another feature shard gradients: an interface, and its registration.

A reducer makes one :class:`GradSharder` per model. The base class shards nothing; ``dist_optimizer`` registers a
factory for one that reduce-scatters gradients into shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
    from ovpatch.overlap.data_parallel.grad_sync import GradSync


class GradSharder:
    """Shards the gradients of one model; this one shards none.

    The methods stand in the order in which a step calls them. A reducer skips those from :meth:`update_sharded` to
    :meth:`get_flags` where :attr:`is_active` is false.

    Attributes:
        is_active: Whether gradients may be sharded at all.
        sharded: The parameters, by index, whose gradients are reduce-scattered now. The same on all ranks.
        max_inflight_bytes: How many bytes of full gradients may be under reduction at a time.
        identity: Name of the model, the same on all ranks and unique in the process group.
        local: Whether gradients were added that are not reduced, as under ``no_sync()``.
        has_lazy_grads: Whether a ``p.grad`` may be lazy.
    """

    is_active = has_lazy_grads = False
    sharded: frozenset[int] = frozenset()
    max_inflight_bytes = math.inf

    def __init__(self) -> None:
        self.identity = ""
        self.local = False

    def bind(self, reducer: object, group: dist.ProcessGroup) -> None:
        """Belong to a reducer; called again when its communicator changes.

        Args:
            reducer: The reducer, which holds the sharder; held weakly.
            group: The communicator that the reducer uses.
        """

    # ---------------------------------------------------------------- before a forward

    def update_sharded(self, sums: Sequence[int]) -> bool:
        """Let the flags of all ranks take effect; return whether :attr:`sharded` has changed.

        Args:
            sums: The flags of :meth:`get_flags`, summed over the ranks; empty if there are none to take effect.
        """
        del sums
        return False

    def make_bucket(
        self, indices: Sequence[int], params: Sequence[torch.nn.Parameter], dtype: torch.dtype | None
    ) -> GradBucket | None:
        """Return the bucket for parameters if one or more of them are sharded; None for an ordinary bucket.

        Args:
            indices: Index of each parameter in the order of the whole model.
            params: The parameters, in the same order.
            dtype: What the sum is computed in; the parameters' own dtype by default.
        """
        del indices, params, dtype
        return None

    def watched_params(self) -> list[int]:
        """Return the parameters for which :meth:`before_accumulate` is to be called."""
        return []

    # ---------------------------------------------------------------- in a backward

    def on_backward_start(self, *, staged: bool, counts: Sequence[int] | None) -> None:
        """A backward that is reduced begins; no gradient is complete, and no collective has been started.

        Args:
            staged: Whether each gradient is copied when it is complete.
            counts: How often a static graph adds to each parameter; None if that is not known.
        """

    def before_accumulate(self, index: int) -> None:
        """The engine is about to add to the gradient of a parameter; called while :attr:`has_lazy_grads`."""

    def before_first_collective(self) -> None:
        """The backward is about to start its first collective."""

    def finish_host_barrier(self) -> None:
        """A stream, or the host, is about to wait for a collective; called before each wait."""

    def wait_for_hosts(self) -> None:
        """Have the host wait for those of the other ranks before a collective that blocks it."""

    def get_flags(self) -> list[int]:
        """Return what this rank tells the others; the same number of flags on all ranks."""
        return []

    # ---------------------------------------------------------------- at the end of a backward

    def wait_for_grads(self, sync: GradSync) -> None:
        """Wait for all collectives of a backward."""
        sync.wait()

    def fill_shared_grads(self) -> None:
        """Write full gradients into memory that other tensors share; all buckets have been unpacked."""

    # ---------------------------------------------------------------- the end

    def retire(self) -> None:
        """Stop sharding, since another sharder takes the model over."""

    def restore_grads(self) -> None:
        """Make every ``p.grad`` a full gradient, and stop sharding for good; all ranks call this."""


class GradSharderFactory(Protocol):
    """Makes the sharder of a model."""

    def __call__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        sparse: Collection[int],
        in_fp32: bool,
        sums_in_fp32: bool,
    ) -> GradSharder:
        """Return a new sharder.

        Args:
            params: The parameters, the same on all ranks, in registration order.
            names: Their fully qualified names.
            group: The process group over which gradients are reduced.
            sparse: The parameters, by index, whose gradients are sparse.
            in_fp32: Whether gradients of half precision are averaged in fp32.
            sums_in_fp32: Whether they are added up in fp32 over several microbatches.
        """


class ShardingChoice(Protocol):
    """Chooses which models get a sharder that shards."""

    def __call__(
        self,
        module: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        sparse: Collection[int],
        together: bool,
    ) -> bool:
        """Return whether a model that is being wrapped is to be sharded, the same on all ranks.

        Args:
            module: The model.
            params: Its parameters, the same on all ranks, in registration order.
            group: The process group over which gradients are reduced.
            sparse: The parameters, by index, whose gradients are sparse.
            together: Whether all ranks call this now, so that they can agree.
        """


class _Registration:
    """The factory in use, which models it is for, and the terms of its feature, which are the same on all ranks."""

    factory: GradSharderFactory | None = None
    choice: ShardingChoice | None = None
    terms: Mapping[str, Any] = {}


def register_grad_sharder(
    factory: GradSharderFactory, terms: Mapping[str, Any], choice: ShardingChoice | None = None
) -> None:
    """Have models that are wrapped from now on use the sharders of a factory.

    Args:
        factory: Makes them.
        terms: What has to be the same on all ranks, JSON values by name.
        choice: Chooses the models; all of them by default.
    """
    _Registration.factory, _Registration.choice, _Registration.terms = factory, choice, terms


def unregister_grad_sharder() -> None:
    """Have models that are wrapped from now on keep full gradients."""
    _Registration.factory, _Registration.choice, _Registration.terms = None, None, {}


def get_registered_terms() -> Mapping[str, Any]:
    """Return the terms of the registered factory; empty if there is none."""
    return _Registration.terms


def is_chosen(
    module: torch.nn.Module,
    params: Sequence[torch.nn.Parameter],
    group: dist.ProcessGroup,
    *,
    sparse: Collection[int],
    together: bool,
) -> bool:
    """Return whether a model that is being wrapped may have a sharder that shards; see :class:`ShardingChoice`."""
    choice = _Registration.choice
    return choice is None or choice(module, params, group, sparse=sparse, together=together)


def make_grad_sharder(
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    group: dist.ProcessGroup,
    *,
    sparse: Collection[int],
    in_fp32: bool,
    sums_in_fp32: bool,
) -> GradSharder:
    """Return a new sharder of the registered factory, else one that shards nothing; see :class:`GradSharderFactory`."""
    factory = _Registration.factory
    if factory is None:
        return GradSharder()
    return factory(params, names, group, sparse=sparse, in_fp32=in_fp32, sums_in_fp32=sums_in_fp32)
