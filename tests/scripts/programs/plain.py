"""A training loop with DistributedDataParallel as the tutorials teach it, started by torchrun.

Rank 0 writes a checkpoint after each epoch; a program that finds one goes on from there, as after a crash.
"""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(
        nn.Linear(64, 512),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Linear(512, 10),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--resume", type=Path, help="default: the last checkpoint in the output folder"
    )
    parser.add_argument(
        "--crash", action="store_true", help="rank 1 is killed in the second epoch, once"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.out.mkdir(exist_ok=True)

    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=args.epochs * len(loader)
    )
    criterion = nn.CrossEntropyLoss()

    found = sorted(args.out.glob("epoch*.pt"))
    resume = args.resume or (found[-1] if found else None)
    first_epoch = 0
    if resume:
        state = torch.load(resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"]

    losses, norms = [], []
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if (
                args.crash
                and rank == 1
                and epoch == 1
                and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            ):
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"epoch": epoch + 1, **state}, args.out / f"epoch{epoch + 1}.pt")
        dist.barrier()
        print(f"rank {rank}, epoch {epoch}: loss {losses[-1]:.4f}\n", end="")

    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    log = {"losses": losses, "norms": norms, "parameters": digest, "first_epoch": first_epoch}
    (args.out / f"rank{rank}.json").write_text(json.dumps(log))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
