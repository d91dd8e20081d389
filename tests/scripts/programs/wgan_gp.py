"""The style of WGAN-GP: a critic that is called three times before one backward, the third time for a penalty on its
own gradient, which is differentiated again.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.nn.parallel import DistributedDataParallel as DDP

out = Path(sys.argv[1])
latent_dim, lambda_gp, n_critic, batch_size = 32, 10.0, 2, 16


def mlp(inp, *sizes):
    layers = []
    for size in sizes:
        layers += [nn.Linear(inp, size), nn.LeakyReLU(0.2)]
        inp = size
    return nn.Sequential(*layers[:-1])


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1)
    interpolates = (alpha * real_samples + (1 - alpha) * fake_samples).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
generator = DDP(mlp(latent_dim, 512, 512, 64))
discriminator = DDP(mlp(64, 512, 512, 1))
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))

log = {"d_loss": [], "g_loss": [], "penalty": []}
for i in range(6):
    real = torch.randn(batch_size, 64)
    optimizer_D.zero_grad()
    fake = generator(torch.randn(batch_size, latent_dim)).detach()
    penalty = compute_gradient_penalty(discriminator, real, fake)
    d_loss = -discriminator(real).mean() + discriminator(fake).mean() + lambda_gp * penalty
    d_loss.backward()
    optimizer_D.step()
    log["d_loss"].append(d_loss.item())
    log["penalty"].append(penalty.item())
    if i % n_critic == 0:
        optimizer_G.zero_grad()
        g_loss = -discriminator(generator(torch.randn(batch_size, latent_dim))).mean()
        g_loss.backward()
        optimizer_G.step()
        log["g_loss"].append(g_loss.item())

out.mkdir(exist_ok=True)
both = [*generator.parameters(), *discriminator.parameters()]
log["parameters"] = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in both)).hexdigest()
(out / f"rank{rank}.json").write_text(json.dumps(log))
dist.destroy_process_group()
