"""The style of torchvision's references and of timm: channels_last, averages of the weights that are copied before the
wrapper (timm) and after it (torchvision), zero_grad between forward and backward, metrics reduced over ranks,
inference_mode through the wrapper, print muted on all ranks but the first, state dicts taken on all and written on one.

On CUDA over NCCL where there are GPUs, else on the CPU over gloo.
"""

import argparse
import builtins
import copy
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNorm(nn.Sequential):
    def __init__(self, inp, out, stride=2):
        super().__init__(
            nn.Conv2d(inp, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class ConvNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            ConvNorm(3, 32), ConvNorm(32, 128), ConvNorm(128, 256), ConvNorm(256, 256, 1)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(256, num_classes)

    def forward(self, x):
        return self.fc(self.dropout(torch.flatten(self.avgpool(self.features(x)), 1)))


class ModelEma:
    """timm's: a deep copy of the model, of whose state dict every value is averaged."""

    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    args.rank, args.gpu = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    args.device = torch.device("cuda", args.gpu) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl" if cuda else "gloo", init_method="env://")
    dist.barrier()
    setup_for_distributed(args.rank == 0)


def load_data(size, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 16, 16, generator=generator)
    dataset = TensorDataset(images, torch.randint(10, (size,), generator=generator))
    sampler = DistributedSampler(dataset, shuffle=seed == 0)
    return DataLoader(dataset, batch_size=8, sampler=sampler), sampler


def train_one_epoch(model, criterion, optimizer, loader, args, averages, scaler):
    model.train()
    losses, norms = [], []
    for i, (image, target) in enumerate(loader):
        image, target = (
            image.to(args.device, memory_format=torch.channels_last),
            target.to(args.device),
        )
        with torch.autocast(args.device.type, enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
        before_wrap, after_wrap = averages
        before_wrap.update(model.module)
        if i % 2 == 0:
            after_wrap.update_parameters(model)
        losses.append(loss.item())
    return losses, norms


def evaluate(model, criterion, loader, device):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for image, target in loader:
            image, target = image.to(device, memory_format=torch.channels_last), target.to(device)
            output = model(image)
            totals[0] += criterion(output, target)
            totals[1] += (output.argmax(1) == target).sum()
            totals[2] += len(target)
    dist.barrier()
    dist.all_reduce(totals)
    return totals.tolist()


def main(args):
    init_distributed_mode(args)
    print(args)
    if args.use_deterministic_algorithms:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.rank)
    loader, sampler = load_data(64, 0)
    loader_test, _ = load_data(32, 1)
    model = ConvNet().to(args.device, memory_format=torch.channels_last)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    norm_classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
    norms = [p for m in model.modules() if isinstance(m, norm_classes) for p in m.parameters()]
    others = [
        p
        for m in model.modules()
        if not isinstance(m, norm_classes)
        for p in m.parameters(recurse=False)
    ]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(args.device.type) if args.amp else None
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warmup, cosine], milestones=[1]
    )

    ema_before = ModelEma(model, decay=0.9)
    model = nn.parallel.DistributedDataParallel(
        model, device_ids=[args.gpu] if args.device.type == "cuda" else None
    )
    model_without_ddp = model.module
    ema = AveragedModel(model_without_ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    log = {"losses": [], "norms": [], "test": [], "ema": []}
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses, norms = train_one_epoch(
            model, criterion, optimizer, loader, args, (ema_before, ema), scaler
        )
        lr_scheduler.step()
        log["losses"] += losses
        log["norms"] += norms
        log["test"].append(evaluate(model, criterion, loader_test, args.device))
        log["ema"].append(
            [evaluate(m, criterion, loader_test, args.device) for m in (ema_before.module, ema)]
        )
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "wrapper": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "model_ema": ema.state_dict(),
            "ema_before": ema_before.module.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }
        if args.rank == 0:
            args.output_dir.mkdir(exist_ok=True)
            torch.save(checkpoint, args.output_dir / f"model_{epoch}.pt")
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, lr {lr_scheduler.get_last_lr()}")
    dist.barrier()
    digest = hashlib.sha256(
        b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    )
    log |= {"parameters": digest.hexdigest(), "device": args.device.type}
    (args.output_dir / f"rank{args.rank}.json").write_text(json.dumps(log))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--use-deterministic-algorithms", action="store_true")
    main(parser.parse_args())
