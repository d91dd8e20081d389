"""The Trainer of transformers with its defaults, as its documentation shows it; the model is built from a config.

AdamW (fused), clipping, unused parameters searched, a checkpoint and an evaluation every other step.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from torch._dynamo.utils import get_compilation_metrics
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Lines(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.tokens = torch.randint(256, (count, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def out_of_memory(grad):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class SmallDevice(GPT2LMHeadModel):
    """Backward of its second batch, if that has 8 lines, does not fit; gradients of the last layers are there then."""

    batches = 0

    def forward(
        self, input_ids=None, labels=None, **kwargs
    ):  # the Trainer feeds what the signature names
        outputs = super().forward(input_ids, labels=labels, output_hidden_states=True, **kwargs)
        if self.training:
            self.batches += 1
            if self.batches == 2 and len(input_ids) == 8:
                outputs.hidden_states[1].register_hook(out_of_memory)
        return outputs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--auto-find-batch-size", action="store_true", help="the first attempt runs out of memory"
    )
    parser.add_argument(
        "--torch-compile", action="store_true", help="a Llama, which makes modules in its forward"
    )
    options = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=16,
        n_embd=128,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    compiled = {}
    model = (SmallDevice if options.auto_find_batch_size else GPT2LMHeadModel)(config)
    if options.torch_compile:
        # Llama slices its list of layers, and so makes modules in each forward.
        small = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=16, **small))
        compiled = {"torch_compile": True, "torch_compile_backend": "eager", "bf16": True}
    arguments = TrainingArguments(
        output_dir=options.out,
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        gradient_checkpointing=options.gradient_checkpointing,
        auto_find_batch_size=options.auto_find_batch_size,
        report_to="none",
        use_cpu=True,
        **compiled,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Lines(160, 1), eval_dataset=Lines(16, 2)
    )
    trainer.train(resume_from_checkpoint=options.resume)

    # What the trainer measured in seconds is not the same twice.
    seconds = ("_runtime", "_per_second", "_time")
    log = [
        {k: v for k, v in entry.items() if not k.endswith(seconds)}
        for entry in trainer.state.log_history
    ]
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    frames = [
        [metric.co_name, metric.recompile_reason is not None]
        for metric in get_compilation_metrics()
    ]
    result = {
        "log": log,
        "parameters": digest,
        "batch_size": trainer._train_batch_size,
        "frames": frames,
    }
    (options.out / f"rank{arguments.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
