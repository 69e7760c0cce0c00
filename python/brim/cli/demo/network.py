"""The network of the demo: a small residual one for images."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions and a connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, and what the convolutions make of it."""
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(x + self.norm2(self.conv2(y)))  # type: ignore[no-any-return]


def network(device: torch.device) -> nn.Sequential:
    """Three blocks between a first convolution and a classifier of ten classes."""
    blocks = [Block(16) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *blocks, *head).to(device)


def images(count: int, device: torch.device) -> torch.Tensor:
    """Some images of noise."""
    return torch.rand(count, 3, 32, 32, device=device)
