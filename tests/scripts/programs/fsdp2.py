"""FSDP2, and the replicate() of the same make that torchtitan uses: applied to each layer and then to the root, the
optimizer works on DTensors, gradients are accumulated by a switch of its own, rank 0 saves whole tensors.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def train(parallelize):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(64, 128),
        *[nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)],
        nn.Linear(128, 64),
    )
    for layer in model:
        parallelize(layer, mesh=mesh)
    parallelize(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(rank + 1)
    log = {"losses": [], "norms": []}
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        tokens = torch.randint(64, (4, 17))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        log["losses"].append(loss.item())
        if step % 2 == 1:
            log["norms"].append(
                nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
            )
            optimizer.step()
            optimizer.zero_grad()
    return log, {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


out.mkdir(exist_ok=True)
logs = {}
for parallelize in (fully_shard, replicate):
    logs[parallelize.__name__], state = train(parallelize)
    if rank == 0:
        torch.save(state, out / f"{parallelize.__name__}.pt")
(out / f"rank{rank}.json").write_text(json.dumps(logs))
dist.barrier()
dist.destroy_process_group()
