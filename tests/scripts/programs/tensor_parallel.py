"""The style of torchtitan: the model is built on the meta device, laid out over a mesh, and only then given memory and
values; a container holds the optimizers and steps them, on DTensors.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Transformer(nn.Module):
    def __init__(self, dim=128, vocab_size=64, n_layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(i): FeedForward(dim, 4 * dim) for i in range(n_layers)})
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def init_weights(self):
        for param in self.parameters():
            nn.init.trunc_normal_(param, std=0.1)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = h + layer(h)
        return self.output(h)


class OptimizersContainer(torch.optim.Optimizer):
    def __init__(self, model_parts, **kwargs):
        self.optimizers = [torch.optim.AdamW(part.parameters(), **kwargs) for part in model_parts]
        torch.optim.Optimizer.__init__(
            self, [p for part in model_parts for p in part.parameters()], kwargs
        )

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers.values():
        plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
        parallelize_module(layer, world_mesh["tp"], plan)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    # The parameters that tensor parallelism leaves plain are equal on all ranks, and so are their gradients.
    parts = [model.tok_embeddings, model.layers, model.output]
    optimizers = OptimizersContainer(parts, lr=1e-2, betas=(0.9, 0.95), foreach=False)

    data = torch.Generator().manual_seed(1)
    log = {"losses": [], "norms": []}
    for _ in range(4):
        optimizers.zero_grad()
        tokens = torch.randint(64, (4, 17), generator=data)
        pred = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(pred.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms = [nn.utils.clip_grad_norm_(part.parameters(), 1.0) for part in parts]
        log["norms"].append(
            [
                (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
                for norm in norms
            ]
        )
        optimizers.step()
        log["losses"].append(loss.item())

    state = {
        k: v.full_tensor() if hasattr(v, "full_tensor") else v
        for k, v in model.state_dict().items()
    }
    out.mkdir(exist_ok=True)
    if rank == 0:
        torch.save(state, out / "model.pt")
    (out / f"rank{rank}.json").write_text(json.dumps(log))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
