"""ResNet-50 and ViT-L/16 with the shapes of torchvision's, for machines without torchvision, and smaller ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of a block."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    """A ResNet of bottlenecks.

    Args:
        layers: The number of bottlenecks of each stage.
        width: The width of the first stage.
        num_classes: The number of classes.
    """

    def __init__(self, layers: tuple[int, ...], width: int = 64, num_classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for stage, count in enumerate(layers):
            for block in range(count):
                stages.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
                inputs = 4 * (width << stage)
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        return self.fc(self.stages(x).mean((2, 3)))


class VisionTransformer(nn.Module):
    """A ViT with a class token."""

    def __init__(
        self, layers: int, heads: int, width: int, image: int, patch: int, num_classes: int = 1000
    ):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            block, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding
        return self.head(self.encoder(x)[:, 0])


def resnet50() -> ResNet:
    """Return ResNet-50."""
    return ResNet((3, 4, 6, 3))


def vit_l_16() -> VisionTransformer:
    """Return ViT-L/16 for images of 224 x 224."""
    return VisionTransformer(24, 16, 1024, 224, 16)
