"""One stage of a rank: its forward, its backward in one or two halves, and its reduction.

The engine only calls methods of torch's stages that have kept name and meaning from 2.11 to 2.15. The module
:mod:`~ovpatch_plugins.pipeline.runtime.torch_compat` has the differences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ovpatch.overlap.comm.backward_waits import BACKWARD_WAITS
from ovpatch_plugins.pipeline.pipeline_counters import StageReport
from ovpatch_plugins.pipeline.runtime.deferred_linears import DeferredLinears
from ovpatch_plugins.pipeline.runtime.pipeline_shape import StageInfo
from ovpatch_plugins.pipeline.runtime.stage_buffers import StageBuffers
from ovpatch_plugins.pipeline.runtime.stage_replicas import (
    FullyShardedGradients,
    LocalGradients,
    is_fsdp2,
    make_data_parallel,
)
from ovpatch_plugins.pipeline.runtime.torch_compat import (
    clear_states,
    find_output_nodes,
    setting_attributes,
)


@dataclass(frozen=True)
class StageOptions:
    """The options of a stage, and its role in the schedule.

    Attributes:
        delay_wgrad_compute: The option.
        is_fused: The option ``gradient_accumulation_fusion``.
        varies: The option ``variable_seq_lengths``.
        sends: Whether the stage sends an input gradient to another rank.
        splits: Whether the schedule has Ws for it.
        is_reduced: Whether the order reduces and scales its gradients. If not, the script does both.
    """

    delay_wgrad_compute: str
    is_fused: bool = False
    varies: bool = False
    sends: bool = False
    splits: bool = False
    is_reduced: bool = True


class Stage:
    """A stage under the engine.

    Args:
        info: The stage in its pipeline. All replicas of the stage make this object together.
        options: Its options.

    Attributes:
        stage: The stage of ``torch.distributed.pipelining``.
        first_input: The microbatch of the step that is number 0 of the stage.
        buffers: The tensors of its messages.
        data_parallel: Its data parallelism.
        is_fully_sharded: Whether the module is in FSDP2.
        objection: The reason for which its weight gradients are not deferred, or "".
        queue: Its deferred weight gradients; None if they are not deferred.
        report: Its part of the report.
    """

    def __init__(self, info: StageInfo, options: StageOptions) -> None:
        self.stage = info.stage
        self.first_input = info.first_input
        self.buffers = StageBuffers(info.stage, varies=options.varies)
        self.data_parallel = make_data_parallel(info.stage.submod)
        self.is_fully_sharded = isinstance(self.data_parallel, FullyShardedGradients)
        self.objection = ""
        self.queue: DeferredLinears | None = None
        self.report = StageReport()
        self._options = options
        # Fused GEMMs bypass the gradients that data parallelism reads.
        self._is_fused = options.is_fused and type(self.data_parallel) is LocalGradients
        # The queues that were made, by whether they also defer linears of other features.
        self._queues: dict[bool, DeferredLinears] = {}
        # - State of a step
        self._backwards = 0
        # Handles of all-gathers that the next computation waits for.
        self._unshards: list[Any] = []
        # Whether gradients in FSDP2 are reduced at the end of this step.
        self._finalizes = True
        self._should_reshard = True
        # The scale of a reduction that has started; None if none has.
        self._reducing: int | None = None
        self.set_splits(options.splits)
        if info.replicas is not None:
            self.data_parallel.add_replicas(info.replicas)

    def set_splits(self, splits: bool) -> None:
        """Choose from the next step on whether weight gradients are deferred.

        Args:
            splits: Whether the order has Ws for the stage.
        """
        delay = self._options.delay_wgrad_compute
        self.objection = self.data_parallel.objection
        self.queue = None
        if delay == "off":
            self.objection = "delay_wgrad_compute is off"
        elif delay == "auto" and not (self._options.sends or splits) and not self.objection:
            self.objection = "no rank waits for the stage's input gradient"
        self.report.objection = self.objection
        if not self.objection:
            takes_foreign = splits or delay == "on"
            if takes_foreign not in self._queues:
                self._queues[takes_foreign] = DeferredLinears(
                    self.stage.submod,
                    self.report,
                    takes_foreign=takes_foreign,
                    is_fused=self._is_fused,
                )
            self.queue = self._queues[takes_foreign]

    # --- a step ---

    def start_step(self, *, finalizes: bool) -> None:
        """Start a step, in which the stage's linears defer.

        Args:
            finalizes: Whether gradients in FSDP2 are reduced at its end. If not, parameters stay unsharded.
        """
        self._backwards = 0
        self._finalizes = finalizes
        self._should_reshard = True
        if self.queue is not None:
            self.queue.start_step()

    def end_step(self) -> None:
        """Restore the forward of the stage's linears."""
        if self.queue is not None:
            self.queue.uninstall()

    def forward(self, microbatch: int, args: Any, kwargs: Any, keep_output: bool) -> Any:
        """Compute F and return the module's output."""
        if self.queue is not None and not self.queue.is_graph_known:
            self.queue.start_forward(microbatch)
        if not self.buffers.varies:
            return self.stage.forward_one_chunk(
                microbatch, args, kwargs, save_forward_output=keep_output
            )
        with self._unchecked():
            output = self.stage.forward_one_chunk(
                microbatch, args, kwargs, save_forward_output=keep_output
            )
        self.buffers.keep_output_sizes(microbatch, output)
        return output

    def recompute_ahead(self, microbatch: int) -> None:
        """Launch the part of B that needs no output gradient, while that gradient is in flight."""
        if BACKWARD_WAITS.launch_before is not None:
            if self.queue is not None:
                self.queue.start_recomputation(microbatch)
            BACKWARD_WAITS.launch_before(find_output_nodes(self.stage, microbatch))

    def backward(self, microbatch: int, loss: Any, microbatches: int) -> bool:
        """Compute B, or the full backward; return whether weight gradients are left.

        Args:
            microbatch: Its index.
            loss: The microbatch's loss on the last stage; None on other stages.
            microbatches: Number of microbatches in the step.
        """
        self._backwards += 1
        queue = self.queue
        with self._unchecked() if self.buffers.varies else contextlib.nullcontext():
            if queue is None or not queue.defers:
                is_last = self._backwards == microbatches
                self.stage.backward_one_chunk(
                    microbatch, loss=loss, full_backward=True, last_backward=is_last
                )
                return False
            with queue.recording(microbatch):
                self.stage.backward_one_chunk(
                    microbatch, loss=loss, full_backward=True, last_backward=False
                )
        return True

    def finish_backward(self, microbatch: int, check_peers: Callable[[], None]) -> None:
        """End a microbatch's B, whose input gradient has been sent.

        Args:
            microbatch: Its index.
            check_peers: Raises if the received message may be the zeros of a failed rank.
        """
        del check_peers
        self.buffers.drop(microbatch)

    def weight_grads(self, microbatch: int) -> int:
        """Compute W; return the number of weight gradients."""
        assert self.queue is not None
        before = self.queue.computed
        if self.data_parallel.wraps_weight_grads:
            self.data_parallel.computing_weight_grads(self.queue.compute, microbatch)
        else:
            self.queue.compute(microbatch)
        return self.queue.computed - before

    def reduce(self, scale: int, *, by_perform: bool, waits: bool) -> None:
        """Reduce and scale the step's gradients.

        Args:
            scale: The divisor of the gradients.
            by_perform: Whether stock PyTorch calls ``perform_reduce_grad`` here, which handles FSDP2, or only
                ``scale_grads``.
            waits: Whether to wait for the reduction in FSDP2, or to leave the wait to :meth:`finish_reduce`.
        """
        # DistributedDataParallel reduces in the last backward, with or without REDUCE_GRAD.
        if self.data_parallel.wraps_weight_grads and self.queue is not None and self.queue.defers:
            self.data_parallel.reduce()
        if not self._options.is_reduced:
            return
        if not by_perform:
            self.stage.scale_grads(scale)
        elif self.is_fully_sharded and not self._finalizes:
            self._should_reshard = False
        elif self.is_fully_sharded and not waits:
            self.stage.start_gradient_reduction()
            self._reducing = scale
        else:
            self.stage.perform_reduce_grad(scale)

    def finish_reduce(self) -> None:
        """Wait for a reduction that :meth:`reduce` has started without a wait."""
        if self._reducing is not None:
            scale = self._reducing
            self._reducing = None
            self.stage.wait_for_gradient_reduction(scale)

    def clear(self) -> None:
        """Drop the remains of an interrupted step."""
        if self.queue is not None:
            self.queue.uninstall()
            self.queue.clear()
        clear_states(self.stage)
        self.data_parallel.clear()
        self.buffers.drop_all()
        self._unshards.clear()
        self._reducing = None

    def _unchecked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which torch does not compare shapes with the first step's.

        Torch 2.11 always compares them; later versions do so for debugging.
        """
        checks = [
            name
            for name in ("_validate_fwd_input", "_validate_fwd_outputs")
            if hasattr(self.stage, name)
        ]
        changed: dict[str, Any] = dict.fromkeys(checks, _check_nothing)
        if hasattr(self.stage, "_runtime_validate"):
            changed["_runtime_validate"] = False
        return setting_attributes(self.stage, changed)

    # --- parameters in FSDP2 ---

    def start_unshard(self) -> None:
        """Start to gather the parameters."""
        for module in self._list_fsdp_modules():
            self._unshards.append(module.unshard(async_op=True))

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are gathered."""
        while self._unshards:
            handle = self._unshards.pop(0)
            if handle is not None:
                handle.wait()

    def reshard(self) -> None:
        """Free the gathered parameters, unless they stay for the next step."""
        for module in self._list_fsdp_modules() if self._should_reshard else ():
            module.reshard()

    def _list_fsdp_modules(self) -> list[Any]:
        return (
            [module for module in self.stage.submod.modules() if is_fsdp2(module)]
            if self.is_fully_sharded
            else []
        )

    @property
    def reduces_in_backward(self) -> bool:
        """True if the step's last backward reduces gradients, because weight gradients are not deferred."""
        return self.data_parallel.reduces_in_backward and not (
            self.queue is not None and self.queue.defers
        )

    @property
    def reduces_after_backward(self) -> bool:
        """True if gradients are reduced after the last weight gradients."""
        # Gradients in FSDP2 may stay unreduced until a later step.
        waits = self.is_fully_sharded and not (self._finalizes and self._options.is_reduced)
        return self.data_parallel.has_replicas and not self.reduces_in_backward and not waits


def _check_nothing(*_args: Any) -> None:
    """Replace a check of shapes."""
