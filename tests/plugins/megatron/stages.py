"""Train a stage of a GPT by Megatron's own pipeline schedule on CPU ranks, in stock Megatron and patched."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ovpatch
from ovpatch.insight.equality import Verdict
from tests.plugins.megatron import models
from tests.plugins.megatron.models import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    distributed_optimizer,
    gpt,
    parallel,
    transformer_config,
)
from tests.support.equality import compare


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        tp: Ranks that share each layer.
        pp: Stages; the remaining ranks are replicas.
        microbatches: Their number in a step.
        steps: The number of steps.
        dtype: The dtype of parameters.
        config: Changes of Megatron's configuration.
        model: Changes of the model's arguments.
        ddp: Options of Megatron's DistributedDataParallel, which wraps the stages; None if they are not wrapped.
        given: More arguments of the schedule.
        prepare: The name of a function of this module that is called with the stage.
        lengths: Sequence lengths of the microbatches, in turns.
        grad_sync: Whether gradients are reduced by ``grad_sync_func``.
        per_token: Whether the loss is divided by the number of tokens of the full step.
        sharded: Whether Megatron's distributed optimizer steps, and gathers parameters after its step.
        evaluates: Whether a forward without backward comes before each step.
        nests: Whether a forward without backward runs in each step, before gradients are finalized.
        growth: The number of microbatches that each step adds to the number of the step before.
        fails: Whether the end of the first step raises an error.
    """

    tp: int = 1
    pp: int = 2
    microbatches: int = 3
    steps: int = 2
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] | None = field(
        default_factory=lambda: {"overlap_grad_reduce": True, "bucket_size": 2000}
    )
    given: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""
    lengths: tuple[int, ...] = (SEQUENCE,)
    grad_sync: bool = False
    per_token: bool = False
    sharded: bool = False
    evaluates: bool = False
    nests: bool = False
    growth: int = 0
    fails: bool = False

    def count_microbatches(self, step: int) -> int:
        """Return the number of microbatches in a step."""
        return self.microbatches + step * self.growth


def _data(case: Case, step: int, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    for number in range(case.count_microbatches(case.steps)):
        length = case.lengths[number % len(case.lengths)]
        rows = torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator)
        yield rows[:, :-1], rows[:, 1:]


def _make_forward(case: Case) -> Any:
    def forward(data: Any, model: Any) -> Any:
        tokens, targets = next(data)
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        out = model(tokens, torch.arange(length).expand_as(tokens), mask, labels=targets)

        def loss(output: Tensor) -> Any:
            total = output.float().sum() if case.per_token else output.float().mean()
            seen = {"loss": total.detach().clone()}
            return (
                (total, torch.tensor(output.numel(), dtype=torch.int), seen)
                if case.per_token
                else (total, seen)
            )

        return out, loss

    return forward


def train(case: Case) -> list[dict[str, Any]]:
    """Return each step's losses, gradients and parameters of this rank's stage."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found = []
    with parallel(tp=case.tp, pp=case.pp) as state, contextlib.ExitStack() as stack:
        config = transformer_config(
            num_layers=case.pp,
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            sequence_parallel=case.tp > 1,
            params_dtype=case.dtype,
            calculate_per_token_loss=case.per_token,
            **{"batch_p2p_comm": False} | case.config,
        )
        config.pipeline_dtype = case.dtype
        if config.gradient_accumulation_fusion:
            _give_kernels(stack)
        first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
        module = gpt(config, pre_process=first, post_process=last, **case.model).to(case.dtype)
        if case.prepare:
            globals()[case.prepare](module)
        model: Any = module
        if case.ddp is not None:
            sharded = (
                {"use_distributed_optimizer": True, "overlap_param_gather": True}
                if case.sharded
                else {}
            )
            options = {"check_for_nan_in_grad": False} | case.ddp | sharded
            model = DistributedDataParallel(
                config, DistributedDataParallelConfig(**options), module
            )
            config.no_sync_func = model.no_sync
            config.finalize_model_grads_func = finalize_model_grads
            if case.grad_sync:
                config.grad_sync_func = model.start_grad_sync
        trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
        optimizer = (
            distributed_optimizer(model)
            if case.sharded
            else torch.optim.AdamW(trained.values(), lr=1e-2)
        )
        run = get_forward_backward_func()
        given = {
            "forward_step_func": _make_forward(case),
            "model": [model],
            "seq_length": SEQUENCE,
            "micro_batch_size": BATCH,
        } | case.given
        nested: list[Any] = []

        def evaluate_and_finalize(*args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                data = _data(case, 70, state.get_data_parallel_rank())
                nested.append(run(data_iterator=data, forward_only=True, **given))
            finalize_model_grads(*args, **kwargs)

        if case.nests:
            config.finalize_model_grads_func = evaluate_and_finalize
        for step in range(case.steps):
            row: dict[str, Any] = {}
            given["num_microbatches"] = case.count_microbatches(step)
            if case.evaluates:
                with torch.no_grad():
                    data = _data(case, 50 + step, state.get_data_parallel_rank())
                    row["evaluated"] = run(data_iterator=data, forward_only=True, **given)
            if case.ddp is not None:
                model.zero_grad_buffer()
            data = _data(case, step, state.get_data_parallel_rank())
            if case.fails and step == 0:
                failing = mock.patch.object(
                    config, "finalize_model_grads_func", side_effect=ZeroDivisionError
                )
                with failing, contextlib.suppress(ZeroDivisionError):
                    run(data_iterator=data, forward_only=False, **given)
                # A started reduction must end, or the next step would find it.
                model.finish_grad_sync()
                optimizer.zero_grad()
                continue
            row["losses"] = run(data_iterator=data, forward_only=False, **given)
            row["nested"] = [nested.pop()] if case.nests else []
            for param in () if case.sharded else trained.values():
                if hasattr(param, "main_grad"):
                    param.grad = param.main_grad.to(param.dtype)
            grads = {name: param.grad for name, param in trained.items() if param.grad is not None}
            row["grads"] = {name: grad.clone() for name, grad in grads.items()}
            row["main_grads"] = {
                name: param.main_grad.clone()
                for name, param in trained.items()
                if hasattr(param, "main_grad")
            }
            optimizer.step()
            optimizer.zero_grad()
            # Without the sync, Megatron shows stale values.
            if case.sharded:
                model.start_param_sync(force_sync=True)
            row["params"] = {
                name: param.detach().clone() for name, param in module.named_parameters()
            }
            found.append(row)
    return found


def _give_kernels(stack: contextlib.ExitStack) -> None:
    """Give Megatron kernels that add to ``main_grad``, because its own kernels are Apex's and need CUDA."""
    from megatron.core.tensor_parallel import layers

    stack.enter_context(mock.patch.object(layers, "_grad_accum_fusion_available", True))
    stack.enter_context(
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", models.Kernels, create=True)
    )
    stack.enter_context(
        mock.patch.dict(sys.modules, {"fused_weight_gradient_mlp_cuda": models.Kernels})
    )


def defer_output_layer(module: nn.Module) -> None:
    """Have the output layer alone defer, because Megatron's other linears have no buffers for it."""
    from megatron.core.tensor_parallel import layers

    for part in module.modules():
        if (
            isinstance(part, layers.ColumnParallelLinear)
            and part.embedding_activation_buffer is None
        ):
            part.config = copy.copy(part.config)
            part.config.defer_embedding_wgrad_compute = False


def read_elsewhere(module: nn.Module) -> None:
    """Have each layer read the weight of one of its linears again."""
    for layer in module.decoder.layers:
        linear = layer.mlp.linear_fc1

        def add(_module: Any, args: Any, out: Any, linear: Any = linear) -> Any:
            return out[0] + torch.nn.functional.linear(args[0], linear.weight), out[1]

        linear.register_forward_hook(add)


def read_elsewhere_later(module: nn.Module) -> None:
    """Read the weights of a stage's layer more than once, from the second microbatch of the second step on."""
    (layer,) = module.decoder.layers
    attention, mlp = layer.self_attention, layer.mlp
    microbatches: list[bool] = []

    def count(*_: Any) -> None:
        microbatches.append(len(microbatches) > 3)

    def add_before(_module: Any, args: Any) -> Any:
        return (args[0] + mlp.linear_fc2.weight.sum(), *args[1:]) if microbatches[-1] else None

    def add_after(_module: Any, args: Any, out: Any) -> Any:
        return (
            (out[0] + nn.functional.linear(args[0], mlp.linear_fc1.weight), out[1])
            if microbatches[-1]
            else None
        )

    def add_again(linear: Any, args: Any, out: Any) -> Any:
        return (out[0] + linear.forward(2 * args[0])[0], out[1]) if microbatches[-1] else None

    def add_at_end(_module: Any, _args: Any, out: Any) -> Any:
        return out + attention.linear_proj.weight.square().sum() if microbatches[-1] else None

    module.register_forward_pre_hook(count)
    mlp.linear_fc2.register_forward_pre_hook(add_before)
    mlp.linear_fc1.register_forward_hook(add_after)
    attention.linear_qkv.register_forward_hook(add_again)
    module.register_forward_hook(add_at_end)


def run_both(cases: dict[str, Case], schedules: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Return for each case and schedule the differences from Megatron's run, the counters, and the remarks."""
    found: dict[str, Any] = {}
    for (tp, pp), own in itertools.groupby(cases.items(), lambda item: (item[1].tp, item[1].pp)):
        with parallel(tp=tp, pp=pp):
            found |= _run_on_the_same_groups(dict(own), schedules, options)
    assert dist.is_initialized()
    return found


def _run_on_the_same_groups(
    cases: dict[str, Case], schedules: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any]:
    from ovpatch_plugins.megatron.megatron_report import COUNTERS

    stock = {name: train(case) for name, case in cases.items()}
    found: dict[str, Any] = {}
    for schedule in schedules:
        with ovpatch.applied(
            "megatron", options={"megatron": {"pipeline_schedule": schedule} | options}
        ):
            for name, case in cases.items():
                before = COUNTERS.as_dict()
                rows = compare(stock[name], train(case)).rows
                assert len(rows) > 10, "something is compared"
                found[f"{name}, {schedule}"] = (
                    [row.name for row in rows if row.verdict is not Verdict.BITWISE],
                    {key: value - before[key] for key, value in COUNTERS.as_dict().items()},
                    list(ovpatch.report()["megatron"].remarks),
                )
    return found
