"""Fine-tuning with LoRA: adapters by peft in a model of transformers whose own parameters are frozen, Trainer, and
only the adapter is saved.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument(
    "--gradient-checkpointing", action="store_true", help="by reentrant checkpoints"
)
parser.add_argument(
    "--ddp-find-unused-parameters",
    type=json.loads,
    help="true or false; by default the Trainer decides",
)
options = parser.parse_args()
out = options.out
set_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
base = LlamaForCausalLM(config)
weights = {name: value.clone() for name, value in base.state_dict().items()}
model = get_peft_model(
    base, LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
)

tokens = torch.randint(256, (64, 16), generator=torch.Generator().manual_seed(1))
dataset = [{"input_ids": line, "labels": line} for line in tokens]
arguments = TrainingArguments(
    out,
    max_steps=4,
    logging_steps=1,
    learning_rate=1e-2,
    gradient_checkpointing=options.gradient_checkpointing,
    gradient_checkpointing_kwargs={"use_reentrant": True}
    if options.gradient_checkpointing
    else None,
    ddp_find_unused_parameters=options.ddp_find_unused_parameters,
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
trainer.save_model(out / "adapter")

# The adapter, put on the base model it was made for, is the model that was trained.
trainer.accelerator.wait_for_everyone()
base = LlamaForCausalLM(config)
base.load_state_dict(weights)
model.eval()
again = PeftModel.from_pretrained(base, out / "adapter").eval()
with torch.no_grad():
    same = torch.equal(again(tokens[:2]).logits, model(tokens[:2]).logits)

digest = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
).hexdigest()
losses = [
    (entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry
]
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
log = {"losses": losses, "parameters": digest, "trainable": trainable, "loaded_again": same}
(out / f"rank{arguments.process_index}.json").write_text(json.dumps(log))
