"""The style of DCGAN: two wrappers and two optimizers, two backwards of the discriminator per step, and one of the
generator through the discriminator, whose gradients of that are thrown away by the next zero_grad.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

out = Path(sys.argv[1])
nz, ngf, ndf, batch_size = 32, 64, 64, 4


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf * 2, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
netG, netD = DDP(netG), DDP(netD)
criterion = nn.BCELoss()
fixed_noise = torch.randn(8, nz, 1, 1)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

log = {"errD": [], "errG": [], "gradsD": []}
for _ in range(4):
    # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    label = torch.full((batch_size,), 1.0)
    errD_real = criterion(netD(torch.randn(batch_size, 3, 16, 16)), label)
    errD_real.backward()
    fake = netG(torch.randn(batch_size, nz, 1, 1))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optimizerD.step()

    # (2) Update G network: maximize log(D(G(z)))
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    log["errD"].append((errD_real + errD_fake).item())
    log["errG"].append(errG.item())
    log["gradsD"].append(sum(p.grad.norm().item() for p in netD.parameters()))

netG.eval()
with torch.no_grad():
    log["fake"] = netG(fixed_noise).double().sum().item()
if rank == 0:
    out.mkdir(exist_ok=True)
    torch.save(netG.state_dict(), out / "netG_epoch_0.pt")
    torch.save(netD.state_dict(), out / "netD_epoch_0.pt")
dist.barrier()
both = [*netG.parameters(), *netD.parameters()]
log["parameters"] = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in both)).hexdigest()
(out / f"rank{rank}.json").write_text(json.dumps(log))
dist.destroy_process_group()
