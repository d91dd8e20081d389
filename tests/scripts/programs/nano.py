"""The style of nanoGPT: settings as globals that the command line overrides, the optimizer before torch.compile before
the wrapper, gradient accumulation by toggling an attribute of the wrapper, evaluation and saving on rank 0 alone,
resuming before the wrapper exists, the process group destroyed at the end.
"""

import hashlib
import json
import os
import sys
from ast import literal_eval

import torch
import torch._dynamo.utils
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = sys.argv[1]
init_from = "scratch"  # or 'resume'
resume_file = ""
compile_model = ""  # a backend of torch.compile, '' is off
compile_wrapper = ""  # the same, around the wrapper instead of inside
max_iters, eval_interval, eval_iters = 4, 2, 2
gradient_accumulation_steps = 2
batch_size, block_size, vocab_size, n_embd = 4, 16, 96, 192
weight_decay, learning_rate, grad_clip = 0.1, 1e-3, 1.0
config_keys = [
    k
    for k, v in globals().items()
    if not k.startswith("_") and isinstance(v, (int, float, bool, str))
]
for arg in sys.argv[2:]:
    key, _, val = arg.removeprefix("--").partition("=")
    assert key in config_keys, f"unknown key {key}"
    globals()[key] = val if isinstance(globals()[key], str) else literal_eval(val)
model_args = {"block_size": block_size, "vocab_size": vocab_size, "n_embd": n_embd}


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.block = nn.TransformerEncoderLayer(
            n_embd, 4, 4 * n_embd, dropout=0.1, batch_first=True, norm_first=True
        )
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.lm_head(self.ln_f(self.block(x, src_mask=mask, is_causal=True)))
        loss = (
            F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
            if targets is not None
            else None
        )
        return logits, loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": nodecay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + ddp_rank)
data = torch.randint(vocab_size, (4096,), generator=torch.Generator().manual_seed(5))


def get_batch(split):
    half = data[:2048] if split == "train" else data[2048:]
    ix = torch.randint(len(half) - block_size, (batch_size,))
    x = torch.stack([half[i : i + block_size] for i in ix])
    y = torch.stack([half[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


iter_num = 0
model = GPT()
if init_from == "resume":
    checkpoint = torch.load(resume_file, map_location="cpu")
    assert checkpoint["model_args"] == model_args
    state_dict = checkpoint["model"]
    unwanted_prefix = "_orig_mod."
    for k in list(state_dict):
        if k.startswith(unwanted_prefix):
            state_dict[k[len(unwanted_prefix) :]] = state_dict.pop(k)
    model.load_state_dict(state_dict)
    iter_num = checkpoint["iter_num"]
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers()
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
if compile_model:
    model = torch.compile(model, backend=compile_model)
model = DDP(model)
if compile_wrapper:
    model = torch.compile(model, backend=compile_wrapper)
raw_model = model.module


@torch.no_grad()
def estimate_loss():
    result = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        result[split] = losses.mean().item()
    model.train()
    return result


log = {"losses": [], "norms": [], "eval": [], "first": iter_num}
X, Y = get_batch("train")
while iter_num < max_iters:
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate * (iter_num + 1) / max_iters
    if iter_num % eval_interval == 0 and master_process:
        log["eval"].append(estimate_loss())
        checkpoint = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
            "model_args": model_args,
        }
        torch.save(checkpoint, os.path.join(out_dir, f"ckpt{iter_num}.pt"))
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    log["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip).item())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    log["losses"].append(loss.item() * gradient_accumulation_steps)
    iter_num += 1

torch.distributed.barrier()
log["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
log["parameters"] = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
).hexdigest()
with open(os.path.join(out_dir, f"rank{ddp_rank}.json"), "w") as file:
    json.dump(log, file)
destroy_process_group()
