"""Trains a Llama from random weights with the Trainer of transformers, with its defaults where no option changes them.

torchrun --nproc-per-node 2 benchmarks/programs/trainer_llama.py --size tiny
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from step_times import StepTimes, add_options
from torch.distributed.fsdp import FSDPModule
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LLAMA = {
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "1.2b": {**LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    "3.2b": {**LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
}


class Tokens(torch.utils.data.Dataset):
    """Random sequences."""

    def __init__(self, count: int, length: int, vocabulary: int):
        self.tokens = torch.randint(
            vocabulary, (count, length), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Clock(TrainerCallback):
    """Calls ``end_step()`` after each optimizer step."""

    def __init__(self, times: StepTimes, is_fsdp2: bool):
        self.times = times
        self.is_fsdp2 = is_fsdp2

    def on_step_end(self, *_args, model=None, **_kwargs) -> None:
        """Note the end of a step."""
        # accelerate ignores the switch on a CPU and on a single rank.
        if self.is_fsdp2 and not any(isinstance(module, FSDPModule) for module in model.modules()):
            raise RuntimeError("the Trainer did not turn FSDP2 on. Run it on several GPUs.")
        self.times.end_step()


def main(args: argparse.Namespace) -> None:
    """Train."""
    times = StepTimes(args)
    cuda = torch.cuda.is_available()
    # The Trainer sets the device and joins the process group when its arguments are made.
    more = {"torch_compile": True, "torch_compile_backend": args.compile} if args.compile else {}
    if args.fsdp2:
        more |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    if args.best:
        more |= {"ddp_find_unused_parameters": False}
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=times.total_steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        bf16=cuda,
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not cuda,
        **more,
    )
    set_seed(0)
    config = LlamaConfig(**CONFIGS[args.size], max_position_embeddings=max(args.length, 64))
    torch.set_default_dtype(getattr(torch, args.weights))
    with torch.device(arguments.device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    data = Tokens(1024, args.length, config.vocab_size)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[Clock(times, args.fsdp2)]
    )
    if args.best:
        # The arguments have no option for this setting of DistributedDataParallel.
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=CONFIGS, default="1.2b")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a microbatch on a rank")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches of a step")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--compile", metavar="BACKEND", default="", help="torch_compile=True with this backend"
    )
    parser.add_argument("--fsdp2", action="store_true", help="FSDP2, as the Trainer turns it on")
    add_options(parser)
    main(parser.parse_args())
