"""Train a small GPT of Megatron-Core on Python's own documentation, over tensor, sequence and pipeline parallelism.

    OVPATCH=+megatron torchrun --nproc-per-node 4 examples/train_megatron.py   # gloo on the CPU, NCCL with GPUs
    OVPATCH=+megatron torchrun --nproc-per-node 2 examples/train_megatron.py --pp 1
    OVPATCH=0 torchrun --nproc-per-node 4 examples/train_megatron.py           # stock

It is written as Megatron's own examples are: the local specification, its DistributedDataParallel, its pipeline
schedule. The line of ovpatch after the imports of torch is all that it adds. It needs ``pip install
'.[megatron]'``. The text is ``pydoc_data.topics``, which every Python brings along.
"""

from __future__ import annotations

import argparse
import functools
import pydoc_data.topics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ovpatch; ovpatch.apply()  # fmt: skip

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY = 256  # a token is a byte


class LayerNorm(nn.LayerNorm):
    """A norm of sequence-parallel rows. Megatron has one with Apex or Transformer Engine alone."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron


def answer_for_the_cpu() -> None:
    """Have Megatron work without CUDA, although it requests memory there throughout."""

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def make_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
            return make(
                *args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {})
            )

        return make_on_cpu

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # Megatron makes a device of it
    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def make_model(args: argparse.Namespace) -> Any:
    """Return this rank's stage, in Megatron's DistributedDataParallel."""
    dtype = getattr(torch, args.dtype)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=8,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        sequence_parallel=args.tp > 1,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LayerNorm
    module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            [layer] * (args.layers // args.pp), layer_norm=LayerNorm
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=args.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).to(args.device, dtype)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
    )
    model = DistributedDataParallel(config, ddp_config, module)
    config.no_sync_func = model.no_sync
    return model


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and the next tokens, ``[batch, time]``; each copy of the model gets its own."""
    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.long)
    generator = torch.Generator().manual_seed(
        1000 * args.seed + parallel_state.get_data_parallel_rank()
    )
    while True:
        starts = torch.randint(
            len(text) - args.context - 1, (args.batch_size,), generator=generator
        )
        rows = torch.stack(
            [text[start : start + args.context + 1] for start in starts.tolist()]
        ).to(args.device)
        yield rows[:, :-1], rows[:, 1:]


def forward(
    data: Iterator[tuple[Tensor, Tensor]], model: Any
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Compute this stage of a microbatch; return its output, and how that becomes a loss."""
    tokens, targets = next(data)
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)

    def loss(output: Tensor) -> Any:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # Megatron changes the mean in place

    return model(tokens, positions, mask, labels=targets), loss


def train(args: argparse.Namespace) -> None:
    """Train, and print the loss of each step."""
    torch.manual_seed(args.seed)
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    forward_backward, data = get_forward_backward_func(), batches(args)
    for step in range(args.steps):
        model.zero_grad_buffer()
        losses = forward_backward(
            forward_step_func=forward,
            data_iterator=data,
            model=[model],
            num_microbatches=args.microbatches,
            seq_length=args.context,
            micro_batch_size=args.batch_size,
            forward_only=False,
        )
        for param in model.parameters():
            param.grad = param.main_grad.to(param.dtype)
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        if (
            losses
            and parallel_state.get_tensor_model_parallel_rank()
            == parallel_state.get_data_parallel_rank()
            == 0
        ):
            mean = sum(float(record["loss"]) for record in losses) / len(losses)
            print(f"step {step:3d}  loss {mean:.6f}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args()

    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    else:
        answer_for_the_cpu()
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    # Without dropout one stream of random numbers is enough.
    random.initialize_rng_tracker(inference_rng_tracker=True)
    train(args)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
