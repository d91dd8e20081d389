"""Trains an image classifier in the style of torchvision's references: SGD, label smoothing, metrics in every step.

torchrun --nproc-per-node 2 benchmarks/programs/vision.py --model tiny --batch 4 --image 32
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import vision_models
from step_times import StepTimes, add_options
from torch import nn

try:
    from torchvision import models
except ImportError:
    models = vision_models

MODELS = {
    "tiny": lambda: vision_models.ResNet((1, 1, 1, 1), 8, 10),
    "resnet50": models.resnet50,
    "vit_l_16": models.vit_l_16,
}


def main(args: argparse.Namespace) -> None:
    """Train."""
    times = StepTimes(args)
    cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method="env://")
    dist.barrier(device_ids=[local_rank] if cuda else None)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = MODELS[args.model]().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        fused=True if args.best else None,
    )
    scaler = torch.amp.GradScaler(device.type) if args.amp else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    fastest = {"gradient_as_bucket_view": True, "static_graph": True} if args.best else {}
    model = nn.parallel.DistributedDataParallel(
        model, device_ids=[local_rank] if cuda else None, **fastest
    )
    trained = torch.compile(model, backend=args.compile) if args.compile else model

    torch.manual_seed(1 + dist.get_rank())
    images = torch.randn(args.batch, 3, args.image, args.image)
    labels = torch.randint(10, (args.batch,))
    if cuda:
        images, labels = images.pin_memory(), labels.pin_memory()
    model.train()
    for step in times.steps():
        image, target = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.float16, enabled=scaler is not None):
            output = trained(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        # The references' MetricLogger reads both in every step.
        last_loss, accuracy = loss.item(), (output.argmax(1) == target).float().mean().item()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(
                f"step {step}: loss {last_loss:.4f}, accuracy {accuracy:.2f}\n", end="", flush=True
            )
    scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch", type=int, default=32, help="images on a rank")
    parser.add_argument("--image", type=int, default=224, help="width and height of an image")
    parser.add_argument("--amp", action="store_true", help="autocast to float16, with a GradScaler")
    parser.add_argument(
        "--compile", metavar="BACKEND", default="", help="a backend of torch.compile"
    )
    add_options(parser)
    main(parser.parse_args())
