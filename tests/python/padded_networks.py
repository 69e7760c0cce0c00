"""Small networks whose samples are padded in two sizes, with data sets of such samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Step = Callable[[list[int]], None]


def lengths_of_pairs(generator: torch.Generator, samples: int, noise: float) -> torch.Tensor:
    """Source and target: log-normal, and a ratio that varies."""
    source = (3.0 + 0.5 * torch.randn(samples, generator=generator)).exp().clamp(4, 90)
    ratio = (0.05 + noise * torch.randn(samples, generator=generator)).exp()
    return torch.stack([source, (source * ratio).clamp(4, 90)], 1).long()


def shapes_of_images(generator: torch.Generator, samples: int, scale: float) -> torch.Tensor:
    """Height and width as in COCO: mostly 4:3 and 3:2, two thirds of them landscape."""
    ratios = torch.tensor([4 / 3, 4 / 3, 3 / 2, 16 / 9, 1.0, 1.15, 2.0])
    ratio = ratios[torch.randint(len(ratios), (samples,), generator=generator)]
    ratio = ratio * (0.04 * torch.randn(samples, generator=generator)).exp()
    longer = scale * (1 + 0.25 * torch.randn(samples, generator=generator)).clamp(0.4, 1.4)
    shorter = longer / ratio.clamp(1.0)
    wide = torch.rand(samples, generator=generator) < 0.67
    height, width = torch.where(wide, shorter, longer), torch.where(wide, longer, shorter)
    return torch.stack([height, width], 1).clamp(8).long()


def shapes_of_alignments(generator: torch.Generator, samples: int, deep: float) -> torch.Tensor:
    """Length and depth, which hardly depend on each other."""
    length = (3.0 + 0.45 * torch.randn(samples, generator=generator)).exp().clamp(5, 80)
    depth = (deep + 0.8 * torch.randn(samples, generator=generator)).exp().clamp(1, 64)
    return torch.stack([length, depth], 1).long()


def attention(queries: torch.Tensor, keys: torch.Tensor, heads: int) -> torch.Tensor:
    """Softmax attention that holds its matrix."""
    n, width = len(queries), queries.shape[-1]
    q, k = (x.view(n, -1, heads, width // heads).transpose(1, 2) for x in (queries, keys))
    weights = (q @ k.transpose(2, 3) / (width // heads) ** 0.5).softmax(3)
    return (weights @ k).transpose(1, 2).reshape(n, -1, width)


class EncoderDecoder(torch.nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int, heads: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.encoder = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.decoder = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.out = torch.nn.Linear(width, vocabulary)
        self.heads = heads

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, hidden = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = memory + layer(attention(memory, memory, self.heads)).relu()
        for layer in self.decoder:
            hidden = hidden + attention(hidden, hidden, self.heads)
            hidden = hidden + layer(attention(hidden, memory, self.heads)).relu()
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), target.flatten())


class ImageNet(torch.nn.Module):
    def __init__(self, width: int, layers: int, stride: int) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, width, 3, stride, 1)
        self.body = torch.nn.ModuleList(
            torch.nn.Conv2d(width, width, 3, 1, 1) for _ in range(layers)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images).relu()
        for layer in self.body:
            hidden = hidden + layer(hidden).relu()
        return functional.avg_pool2d(hidden, 2, ceil_mode=True).square().mean()


class PairNet(torch.nn.Module):
    def __init__(self, width: int, layers: int, *, by_row: bool, triangle: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(24, width)
        self.rows = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.pair = torch.nn.Linear(width, 4)
        self.by_row, self.triangle = by_row, triangle

    def forward(self, alignments: torch.Tensor) -> torch.Tensor:
        n, depth, length = alignments.shape
        hidden = self.embed(alignments)
        for layer in self.rows:
            hidden = hidden + layer(hidden).relu()
            if self.by_row:
                rows = hidden.flatten(0, 1)
                hidden = hidden + attention(rows, rows, 1).view(n, depth, length, -1)
        pair = torch.einsum("ndic,ndjc->nijc", hidden, hidden) / depth
        pair = self.pair(pair)
        if self.triangle:
            pair = pair + torch.einsum("nikc,njkc->nijc", pair, pair).tanh()
        return pair.square().mean()


class Program:
    """A random network, its samples and a training step on a batch of their indices."""

    def __init__(self, seed: int, samples: int = 400) -> None:
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.kind = ("translation", "images", "alignments")[seed % 3]
        make: dict[str, Any] = {
            "translation": self._translation,
            "images": self._images,
            "alignments": self._alignments,
        }
        self.model, self.sizes, self._inputs = make[self.kind](dice, generator, samples)
        which = dice.choice([torch.optim.SGD, torch.optim.AdamW])
        self.optimizer = which(self.model.parameters(), lr=1e-4)
        self.in_training = dice.random() < 0.8
        self.room = dice.choice([2, 4, 8]) * 2**20  # bytes

    @staticmethod
    def _translation(dice: random.Random, generator: torch.Generator, samples: int) -> Any:
        net = EncoderDecoder(
            dice.choice([8, 16, 32]),
            dice.choice([1, 2]),
            dice.choice([20, 200]),
            dice.choice([1, 4]),
        )
        sizes = lengths_of_pairs(generator, samples, dice.choice([0.1, 0.3, 0.6]))

        def inputs(n: int, a: int, b: int) -> Any:
            return torch.zeros(n, a, dtype=torch.int64), torch.zeros(n, b, dtype=torch.int64)

        return net, sizes, inputs

    @staticmethod
    def _images(dice: random.Random, generator: torch.Generator, samples: int) -> Any:
        net = ImageNet(dice.choice([2, 4, 8]), dice.choice([1, 2, 3]), dice.choice([1, 2]))
        sizes = shapes_of_images(generator, samples, dice.choice([24, 40]))
        return net, sizes, lambda n, a, b: (torch.zeros(n, 3, a, b),)

    @staticmethod
    def _alignments(dice: random.Random, generator: torch.Generator, samples: int) -> Any:
        net = PairNet(
            dice.choice([4, 8]),
            dice.choice([1, 2]),
            by_row=dice.random() < 0.5,
            triangle=dice.random() < 0.5,
        )
        sizes = shapes_of_alignments(generator, samples, dice.choice([1.0, 2.0]))
        return net, sizes, lambda n, a, b: (torch.zeros(n, b, a, dtype=torch.int64),)

    def step(self, batch: list[int]) -> None:
        """A step on samples that are padded to the longest of each size."""
        longest = self.sizes[batch].amax(0).tolist()
        inputs = self._inputs(len(batch), *longest)
        if not self.in_training:
            with torch.no_grad():
                self.model(*inputs)
            return
        self.optimizer.zero_grad()
        self.model(*inputs).backward()
        self.optimizer.step()
