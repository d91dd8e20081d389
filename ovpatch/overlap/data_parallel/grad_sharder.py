"""The interface by which another feature shards the gradients of a reducer, and its registration.

A reducer makes one :class:`GradSharder` per model. The base class shards nothing;
``dist_optimizer`` registers a factory of sharders that reduce-scatter gradients into shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ovpatch.overlap.comm.host_barrier import HostBarrier
    from ovpatch.overlap.comm.hosts import HostLayout
    from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
    from ovpatch.overlap.data_parallel.grad_sync import GradSync


class GradSharder:
    """Shards the gradients of one model; the base class shards none.

    The methods follow the order in which a step calls them. A reducer skips the calls of a step
    unless :attr:`is_active` is true.

    Attributes:
        is_active: Whether gradients may be sharded at all.
        has_lazy_grads: Whether a ``p.grad`` may be lazy.
        sharded: The parameters, by index, whose gradients are reduce-scattered now. The same on all
            ranks.
        max_inflight_bytes: Limit of the bytes of full gradients that are in reduction at one time.
        identity: Name of the model, the same on all ranks and unique in the process group.
        host_barrier: The barrier at which hosts meet for the collectives; None if hosts do not run
            ahead of their devices.
        is_local: Whether gradients were added that no collective has reduced, as under
            ``no_sync()``.
        is_replaced: Whether the parameters have another sharder.
        shards_by_host: Whether each host has all shards; see :class:`.HostCollectives`.
    """

    # Most models have a sharder of the base class. These values are the same for all of them.
    is_active = False
    has_lazy_grads = False
    sharded: frozenset[int] = frozenset()
    max_inflight_bytes = math.inf
    host_barrier: HostBarrier | None = None
    shards_by_host = False

    def __init__(self) -> None:
        # An optimizer may step before the first forward, so the reducer sets the name as soon as it
        # knows it.
        self.identity = ""
        # The next reduced backward reduces local gradients as well, and resets this.
        self.is_local = False
        # Hooks and optimizers may still hold a replaced sharder, and must not act for it.
        self.is_replaced = False

    def bind(self, reducer: object, group: dist.ProcessGroup) -> None:
        """Belong to a reducer; called again when its communicator changes.

        Args:
            reducer: The reducer, which holds the sharder; held weakly.
            group: The communicator that the reducer uses.
        """

    # ---------------------------------------------------------------- before a forward

    def apply_flags(self, sums: Sequence[int]) -> list[int] | None:
        """Let the flags of all ranks take effect, which may change :attr:`sharded`.

        Args:
            sums: The flags of :meth:`get_flags`, summed over the ranks; empty if no sum takes
                effect.

        Returns:
            The parameters for which the reducer must call :meth:`before_accumulate`; None if
            :attr:`sharded` is the same as before.
        """
        del sums
        return None

    def make_bucket(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        dtype: torch.dtype | None,
    ) -> GradBucket | None:
        """Return the bucket of parameters some of which are sharded; None for an ordinary bucket.

        Args:
            indices: Index of each parameter in the order of the full model.
            params: The parameters, in the same order.
            dtype: The dtype of the sum. Default: that of the parameters.
        """
        del indices, params, dtype
        return None

    # ---------------------------------------------------------------- in a backward

    def on_backward_start(self, *, staged: bool, counts: Sequence[int] | None) -> None:
        """Prepare for a backward that is reduced.

        No gradient is complete, and no collective of the backward has started.

        Args:
            staged: Whether each gradient is copied when it is complete.
            counts: How often a static graph adds to each parameter; None if that is unknown.
        """

    def before_accumulate(self, index: int) -> None:
        """Prepare a gradient to which the engine is about to add.

        Called only while :attr:`has_lazy_grads` is true.
        """

    def before_first_collective(self) -> None:
        """Prepare for the first collective of the backward, and arrive at the host barrier."""

    def get_flags(self) -> list[int]:
        """Return the flags of this rank; their number is the same on all ranks."""
        return []

    # ---------------------------------------------------------------- at the end of a backward

    def wait_for_grads(self, sync: GradSync) -> None:
        """Wait for all collectives of a backward."""
        sync.wait()

    def fill_shared_grads(self) -> None:
        """Write full gradients into memory that other tensors share.

        The reducer calls this when it has written all other gradients.
        """

    # ---------------------------------------------------------------- the end

    def detach(self) -> None:
        """Make every ``p.grad`` full, and stop sharding for good; all ranks call this."""


class GradSharderFactory(Protocol):
    """A function that makes the sharder of a model."""

    def __call__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        sparse: Collection[int],
        in_fp32: bool,
        sums_in_fp32: bool,
        layout: HostLayout | None,
    ) -> GradSharder:
        """Return a new sharder.

        Args:
            params: The parameters, the same on all ranks, in registration order.
            names: Their fully qualified names.
            group: The process group over which gradients are reduced.
            sparse: The parameters, by index, whose gradients are sparse.
            in_fp32: Whether low-precision gradients are averaged in fp32.
            sums_in_fp32: Whether they are added up in fp32 over several microbatches.
            layout: The hosts of the group; None if its ranks have not compared them.
        """


class ShardingChoice(Protocol):
    """A function that chooses the models with a sharder that shards."""

    def __call__(
        self,
        module: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        sparse: Collection[int],
        together: bool,
    ) -> bool:
        """Return whether to shard a model that is being wrapped, the same on all ranks.

        Args:
            module: The model.
            params: Its parameters, the same on all ranks, in registration order.
            group: The process group over which gradients are reduced.
            sparse: The parameters, by index, whose gradients are sparse.
            together: Whether all ranks call this now, so that they can agree.
        """


class _Registration:
    """The factory in use, the choice of its models, and terms that are the same on all ranks."""

    # None if no feature shards gradients.
    factory: GradSharderFactory | None = None
    # None if the factory shards all models.
    choice: ShardingChoice | None = None
    # Ranks compare these when they wrap a model, because other settings would give other
    # collectives.
    terms: Mapping[str, Any] = {}


def register_grad_sharder(
    factory: GradSharderFactory, terms: Mapping[str, Any], choice: ShardingChoice | None = None
) -> None:
    """Use the sharders of a factory for the models that are wrapped afterwards.

    Args:
        factory: Makes the sharders.
        terms: The settings that must be the same on all ranks, JSON values by name.
        choice: Chooses the models. Default: all models.
    """
    _Registration.factory = factory
    _Registration.choice = choice
    _Registration.terms = terms


def unregister_grad_sharder() -> None:
    """Keep full gradients in the models that are wrapped afterwards."""
    _Registration.factory = None
    _Registration.choice = None
    _Registration.terms = {}


def get_registered_terms() -> Mapping[str, Any]:
    """Return the terms of the registered factory; empty without a factory."""
    return _Registration.terms


def is_chosen(
    module: torch.nn.Module,
    params: Sequence[torch.nn.Parameter],
    group: dist.ProcessGroup,
    *,
    sparse: Collection[int],
    together: bool,
) -> bool:
    """Return whether a model that is being wrapped may be sharded; see :class:`ShardingChoice`."""
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
    layout: HostLayout | None,
) -> GradSharder:
    """Return a new sharder of the registered factory, or without one a sharder that shards nothing.

    :class:`GradSharderFactory` describes the arguments.
    """
    factory = _Registration.factory
    if factory is None:
        return GradSharder()
    return factory(
        params,
        names,
        group,
        sparse=sparse,
        in_fp32=in_fp32,
        sums_in_fp32=sums_in_fp32,
        layout=layout,
    )
