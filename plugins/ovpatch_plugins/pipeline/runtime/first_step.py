"""The first step of a schedule, and torch's inference of shapes, which must end the same on all ranks."""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import gather_values, name_group_ranks
from ovpatch.overlap.comm.lifetimes import group_store, group_timeout_s
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.runtime.stage import Stage
from ovpatch_plugins.pipeline.runtime.step_failures import PipelineRankError, Vote, make_rank_error
from ovpatch_plugins.pipeline.runtime.torch_compat import (
    connects_by_metadata,
    exchanging_metadata,
    forget_initialization,
    keep_metadata,
)

# The longest pause between two reads of the store.
_LONGEST_PAUSE_S: Final = 0.05


class FirstStep:
    """The first step of one pipeline.

    Before a first step torch runs each module once, and from 2.12 on also the loss and a backward. In torch, a
    stage waits for the metadata of the previous stage in a receive. A failed rank would never complete that
    receive, and torch cannot cancel it: it would take the next message of that rank. So the same metadata go
    through the group's store, and a rank that waits for them also reads failures. Before and after the inference
    all ranks meet, also the ranks of other replicas, so that no rank continues into a step that a peer does not
    start.

    Args:
        group: The pipeline's group. All its ranks make this together.
        device: The device on which its stages compute.
        begins_as_stock: Whether a stage of this rank needs stock PyTorch for the step.
        on_host: Whether messages of the group block the host, as on gloo.

    Attributes:
        is_stock: Whether stock PyTorch computes the step, on all ranks; see [Note: first step of a wrapped stage].
        has_begun: Whether the step has begun.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        begins_as_stock: bool,
        on_host: bool,
    ) -> None:
        # Messages of stock PyTorch and of the engine do not match, so all ranks choose the same.
        self.is_stock = any(gather_values(group, "pipeline: first step", begins_as_stock))
        self.has_begun = False
        self._group = group
        self._device = device
        self._on_host = on_host
        self._rank = f"rank {name_group_ranks(group, [group.rank()])}"
        self._vote = Vote(group, "pipeline shapes")
        self._name = f"{self._vote.name}/metadata"
        store = group_store(group)
        assert store is not None, "the process group was destroyed"
        # set() also takes bytes, which its annotation does not allow.
        self._store: Any = store
        # Keys of the metadata that this rank has written.
        self._sent: list[str] = []
        # The number of the inference; each has its own keys.
        self._number = 0

    def infer_shapes(
        self,
        schedule: Any,
        stages: Sequence[Stage],
        check_inputs: Callable[[], object],
        initialize: Callable[[], object],
        end: Callable[[], object] | None,
    ) -> None:
        """Let torch initialize the stages of a schedule.

        Args:
            schedule: The schedule.
            stages: This rank's stages.
            check_inputs: Checks the inputs of the step.
            initialize: Calls torch to initialize the stages.
            end: Called once all ranks have done so; None on all of them, or on none.

        Raises:
            PipelineRankError: Another rank failed. The next step starts over.
            RuntimeError: Another rank did not arrive within the group's timeout.
            Exception: This rank failed.
        """
        restores = [keep_metadata(stage.stage) for stage in stages]
        try:
            self._run(stages, check_inputs, initialize, end)
        except BaseException:
            COUNTERS.failed_steps += 1
            forget_initialization(schedule)
            for stage, restore in zip(stages, restores, strict=True):
                stage.data_parallel.clear()
                restore()
            raise
        # The store has replaced torch's messages, with which some releases connect the ranks of an NCCL group.
        if not self._on_host and any(connects_by_metadata(stage.stage) for stage in stages):
            dist.all_reduce(
                torch.zeros(1, dtype=torch.float32, device=self._device), group=self._group
            )

    def _run(
        self,
        stages: Sequence[Stage],
        check_inputs: Callable[[], object],
        initialize: Callable[[], object],
        end: Callable[[], object] | None,
    ) -> None:
        def infer() -> None:
            with contextlib.ExitStack() as stack:
                for stage in stages:
                    send, receive = (
                        functools.partial(do, stage.stage) for do in (self._send, self._receive)
                    )
                    stack.enter_context(exchanging_metadata(stage.stage, send, receive))
                initialize()

        for stage in stages:
            stage.data_parallel.replicas.finish()
        self._number += 1
        error, failure = self._attempt("before its step", check_inputs)
        if not failure:
            error, failure = self._attempt("during torch's inference of shapes", infer)
        is_well = not failure
        for stage in stages:
            failure = stage.data_parallel.replicas.decide(failure)
        if is_well:
            # Stages without replicas learn of a failure from stages with replicas.
            failure = self._vote.take(failure)
        if end is not None and not failure:
            error, failure = self._attempt("after torch's inference of shapes", end)
        if error is not None:
            raise error
        if failure:
            raise make_rank_error(failure)

    def _attempt(self, where: str, compute: Callable[[], object]) -> tuple[Exception | None, str]:
        """Compute something, and meet all ranks; return this rank's own error, and the failure of any rank."""
        own, failure = None, ""
        try:
            compute()
        except PipelineRankError as error:
            failure = error.failure
        except Exception as error:  # noqa: BLE001 - raised once all ranks know
            own, failure = error, self._describe(where, error)
        except BaseException as error:
            self._vote.leave(self._describe(where, error))
            raise
        if failure:
            return own, self._vote.take(failure)
        failure = self._vote.take("")
        # All ranks have arrived, and no rank will read the metadata again.
        while self._sent:
            self._store.delete_key(self._sent.pop())
        return None, failure

    def _describe(self, where: str, error: BaseException) -> str:
        return f"{self._rank} failed {where}: {type(error).__name__}: {error}"

    # --- messages ---

    def _send(self, stage: Any, metadata: Any, receiver: int) -> None:
        key = self._key(self._group.rank(), stage.stage_index, receiver)
        self._sent.append(key)
        self._store.set(key, pickle.dumps(metadata))

    def _receive(self, stage: Any, sender: int) -> Any:
        rank = stage.stage_index_to_group_rank[sender]
        key = self._key(rank, sender, stage.stage_index)
        limit_s = group_timeout_s(self._group, self._device)
        deadline, pause = time.monotonic() + limit_s, 0.001
        while not self._store.check([key]):
            failure = self._vote.read()
            if failure:
                raise make_rank_error(failure)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"ovpatch: stage {stage.stage_index} waits for the shapes of stage {sender}, "
                    f"which have not come from rank {name_group_ranks(self._group, [rank])} within "
                    f"{limit_s:g} s. Read the output of that rank."
                )
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE_S)
        # Torch pickles the same messages.
        return pickle.loads(self._store.get(key))

    def _key(self, rank: int, sender: int, receiver: int) -> str:
        """Return the key of a stage's metadata, which differs by rank for two pipelines in opposite directions."""
        return f"{self._name}/{self._number}/{rank}/{sender}-{receiver}"
