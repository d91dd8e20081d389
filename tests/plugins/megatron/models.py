"""Small models of Megatron-Core that run on CPU ranks, and the groups that they need."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ovpatch

SEQUENCE, BATCH, VOCABULARY = 8, 2, 32

# The configuration of a GPT whose layers Megatron recomputes.
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def features(patched: bool) -> contextlib.AbstractContextManager[Any]:
    return ovpatch.applied("megatron") if patched else contextlib.nullcontext()


class _OneStream:
    """Random numbers of one stream; Megatron's own tracker needs CUDA."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a factory that makes tensors for ``cuda`` on the CPU."""

    @functools.wraps(make)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

    return make_on_cpu


def first_steps_that_count() -> int:
    """Return the number of first steps that Megatron reduces at their end to count gradients: 1, or 0 before 0.16."""
    return int(tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 16))


# The sizes of the existing groups.
_sizes: dict[str, int] = {}


@contextlib.contextmanager
def parallel(tp: int = 1, pp: int = 1, **sizes: int) -> Iterator[Any]:
    """Make Megatron's groups over all ranks, with CPU as its device; yield ``parallel_state``.

    Inside of another call with the same sizes, its groups are used: Megatron makes a dozen groups, which takes a third
    of the time of a small case.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    wanted = {"tp": tp, "pp": pp} | sizes
    if _sizes == wanted:
        yield parallel_state
        return
    assert not _sizes, "groups of other sizes are in use"
    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        # Megatron synchronizes after messages.
        mock.patch.object(torch.cuda, "synchronize"),
        # Megatron moves tied weights to CUDA.
        mock.patch.object(Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER", _OneStream()),
        mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        # Recomputation reads the random states of CUDA.
        mock.patch.object(random, "_get_all_rng_states", return_value=()),
        mock.patch.object(random, "_set_all_rng_states"),
    ):
        for name in ("empty", "tensor", "zeros"):
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **sizes
        )
        _sizes.update(wanted)
        try:
            yield parallel_state
        finally:
            _sizes.clear()
            parallel_state.destroy_model_parallel()


def transformer_config(**changes: Any) -> Any:
    """Return the configuration of a small transformer on CPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**given | changes)


class Norm(nn.LayerNorm):
    """A norm of sequence-parallel rows; Megatron's own norm takes such rows only if Apex is installed."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel


def gpt(config: Any, **changes: Any) -> Any:
    """Return a GPT of the local specification, with equal weights for equal seeds."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.manual_seed(1)
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = config.num_layers // config.pipeline_model_parallel_size
    given = {
        "transformer_layer_spec": TransformerBlockSubmodules(
            layer_specs=[layer] * layers, layer_norm=Norm
        ),
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "share_embeddings_and_output_weights": False,
    }
    return GPTModel(config=config, **given | changes)


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, positions and a causal mask; the same on all ranks of a model."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return tokens, positions, mask


def train_gpt(
    *,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
    prepare: str = "",
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Train a GPT whose tensors are parallel over all ranks; return each step's output, gradients and parameters.

    Args:
        steps: The number of steps.
        dtype: The dtype of parameters. In float64, SGD trains on the logits, because Megatron's loss is float32.
        prepare: The name of a function of this module that is called with the model.
        config: Changes of the configuration.
        changes: Changes of the model's arguments.
    """
    found = []
    with parallel(tp=dist.get_world_size()):
        made = transformer_config(
            tensor_model_parallel_size=dist.get_world_size(),
            sequence_parallel=True,
            params_dtype=dtype,
            **config or {},
        )
        model = gpt(made, **changes).to(dtype)
        if prepare:
            globals()[prepare](model)
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        wide = dtype is torch.float64
        optimizer = (torch.optim.SGD if wide else torch.optim.AdamW)(trained.values(), lr=1e-2)
        for step in range(steps):
            tokens, positions, mask = batch(step)
            out = model(tokens, positions, mask, labels=None if wide else tokens.roll(-1, 1))
            (out.square().mean() if wide else out.mean()).backward()
            for param in trained.values():
                if (main_grad := getattr(param, "main_grad", None)) is not None:
                    param.grad = main_grad.to(dtype)
            found.append(
                {
                    "out": out.detach().clone(),
                    "grads": {name: param.grad.clone() for name, param in trained.items()},
                }
            )
            optimizer.step()
            optimizer.zero_grad()
            for param in trained.values():
                if (main_grad := getattr(param, "main_grad", None)) is not None:
                    main_grad.zero_()
            found[-1]["params"] = {
                name: param.detach().clone() for name, param in model.named_parameters()
            }
    return found


def freeze_linears(model: nn.Module) -> None:
    """Freeze the linears of each layer, as a low-rank adapter does."""
    for name, param in model.named_parameters():
        param.requires_grad = "linear_" not in name


class Kernels:
    """Replacements of Apex's kernels, which need CUDA."""

    calls = 0

    @classmethod
    def wgrad_gemm_accum_fp32(cls, x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        cls.calls += 1
        main_grad.addmm_(grad.t().float(), x.float())


def fuse_gradients(model: nn.Module) -> None:
    """Give each linear's weight a ``main_grad``, the dummy on which Megatron's hook relies, and Apex's kernels."""
    from megatron.core.tensor_parallel import layers

    # This is Megatron's name for the kernels.
    layers.fused_weight_gradient_mlp_cuda = Kernels
    for module in model.modules():
        if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
            module.gradient_accumulation_fusion = True
            module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
            module.weight.grad_added_to_main_grad = False


class Paths(nn.Module):
    """Three weights of one size, used in the given order, which determines the order of autograd."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(2)
        for name in "abc":
            setattr(self, name, nn.Linear(16, 16, bias=False))
        self.order = order
        # Whether the backward fails after the backward of the last weight.
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            if self.fails and name == self.order[-1]:
                x.register_hook(lambda grad: 1 // 0)
            x = torch.tanh(getattr(self, name)(x))
        return x


def wrapped(module: nn.Module, **options: Any) -> Any:
    """Return a module in Megatron's DistributedDataParallel, each parameter in its own bucket."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    given = {"overlap_grad_reduce": True, "bucket_size": 1, "check_for_nan_in_grad": False}
    return DistributedDataParallel(
        transformer_config(), DistributedDataParallelConfig(**given | options), module
    )


def rows(step: int, rank: int) -> Tensor:
    """Return the input of a rank in a step."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * rank + step))


def distributed_optimizer(model: Any) -> Any:
    """Return Megatron's distributed optimizer of a model, which reads the names of the parameters' types on CUDA."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    overlaps, dtype = model.ddp_config.overlap_param_gather, next(model.parameters()).dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=overlaps,
        clip_grad=0.0,
    )
    stock = Tensor.type
    kind = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}[
        dtype
    ]
    with mock.patch.object(Tensor, "type", lambda tensor, *to: stock(tensor, *to) if to else kind):
        return get_megatron_optimizer(config, [model])
