"""Training steps of many kinds of networks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from program_parts import (
    Make,
    Step,
    adam,
    classified,
    conv_net,
    dense,
    encoder,
    images,
    labels,
    program,
    rows,
    sgd,
    training,
    variants,
    varying,
    width,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@program
def convolutions(rng: random.Random) -> Step:
    net = conv_net(rng)
    return training(sgd(net), lambda n: classified(net, images(n)))


@program
def batch_norm_and_dropout(rng: random.Random) -> Step:
    net = conv_net(rng, norm=True)

    def batch(n: int) -> torch.Tensor:
        return images(max(n, 2))  # batch statistics need two

    return training(adam(net), lambda n: classified(net, batch(n)))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.second(functional.relu(self.norm(self.first(x)))))


@program
def residual_blocks_channels_last(rng: random.Random) -> Step:
    blocks = [Block(8) for _ in range(rng.choice([2, 3]))]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nn.Sequential(net, nn.Linear(8, 10)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(n: int) -> torch.Tensor:
        return images(n).contiguous(memory_format=torch.channels_last)

    return training(sgd(net), lambda n: classified(net, batch(n)))


class UNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, channels, 3, padding=1)
        self.deep = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.last = nn.Conv2d(2 * channels, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = functional.relu(self.down(x))
        up = self.up(functional.relu(self.deep(down)))
        return self.last(torch.cat([down, up], 1))  # type: ignore[no-any-return]


@program
def unet_with_dice_loss(rng: random.Random) -> Step:
    net = UNet(rng.choice([4, 8]))

    def loss_of(n: int) -> torch.Tensor:
        x = images(n)
        found, wanted = net(x).sigmoid(), (x > 0.5).float()
        return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())

    return training(adam(net), loss_of)


@program
def convolutions_3d(rng: random.Random) -> Step:
    net = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten())
    net.append(nn.Linear(4 * 3**3, 10))
    return training(sgd(net), lambda n: classified(net, torch.rand(n, 1, 8, 8, 8)))


@program
def temporal_convolutions(rng: random.Random) -> Step:
    layers = [nn.Conv1d(16, 16, 3, padding=d, dilation=d, groups=16) for d in (1, 2, 4)]
    net = nn.Sequential(*layers, nn.GELU(), nn.Flatten(), nn.Linear(16 * 32, 10))
    return training(adam(net), lambda n: classified(net, torch.rand(n, 16, 32)))


@program
def transformer_encoder(rng: random.Random) -> Step:
    net = encoder(rng)
    features = net.layers[0].linear1.in_features
    return training(adam(net), lambda n: net(torch.rand(n, 12, features)).square().mean())


class Language(nn.Module):
    """Tokens in, scores of a vocabulary out."""

    def __init__(self, vocabulary: int, features: int, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.body = body
        self.head = nn.Linear(features, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.body(self.embedding(tokens))
        return self.head(out[0] if isinstance(out, tuple) else out)  # type: ignore[no-any-return]


def _language(vocabulary: int, length: int, body: Callable[[random.Random], nn.Module]) -> Make:
    def make(rng: random.Random) -> Step:
        net = Language(vocabulary, 32, body(rng))

        def loss_of(n: int) -> torch.Tensor:
            tokens = labels(n, length + 1, classes=vocabulary)
            return functional.cross_entropy(
                net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )

        return training(adam(net), loss_of)

    return make


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        heads = (p.unflatten(-1, (4, 8)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


variants(
    "language model",
    [
        ("attention", _language(100, 16, lambda rng: nn.Sequential(Causal(), Causal()))),
        ("large vocabulary", _language(3000, 8, lambda rng: Causal())),
        ("LSTM", _language(50, 12, lambda rng: nn.LSTM(32, 32, rng.choice([1, 2])))),
        ("GRU", _language(50, 12, lambda rng: nn.GRU(32, 16, bidirectional=True))),
    ],
)


@program
def packed_rnn(rng: random.Random) -> Step:
    net, head = nn.LSTM(16, width(rng), batch_first=True), nn.LazyLinear(10)
    head(torch.zeros(1, net.hidden_size))

    def loss_of(n: int) -> torch.Tensor:
        lengths = torch.tensor([1 + (7 * i) % 20 for i in range(n)])
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.rand(n, 20, 16), lengths, batch_first=True, enforce_sorted=False
        )
        return classified(head, net(packed)[1][0][-1])

    return training(adam(net, head), loss_of)


@program
def connectionist_temporal_classification(rng: random.Random) -> Step:
    net = nn.Linear(16, 30)

    def loss_of(n: int) -> torch.Tensor:
        scores = net(torch.rand(24, n, 16)).log_softmax(-1)
        lengths = torch.full((n,), 24), torch.full((n,), 6)
        return functional.ctc_loss(scores, 1 + labels(n, 6, classes=29), *lengths)

    return training(sgd(net), loss_of)


@program
def embedding_bags_sparse(rng: random.Random) -> Step:
    bags, head = nn.EmbeddingBag(5000, 16, sparse=True), dense(16, 64, 10)
    optimizer = sgd(head)
    optimizer.add_param_group({"params": list(bags.parameters())})

    def loss_of(n: int) -> torch.Tensor:
        return classified(head, bags(labels(n, 20, classes=5000)))

    return training(optimizer, loss_of)


@varying
def mixture_of_experts(rng: random.Random) -> Step:
    gate, head = nn.Linear(64, 4), nn.Linear(64, 10)
    experts = nn.ModuleList(dense(64, 128, 64) for _ in range(4))

    def loss_of(n: int) -> torch.Tensor:
        x = rows(n)
        choice = gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            chosen = choice == i
            out[chosen] = expert(x[chosen])
        return classified(head, out)

    return training(adam(gate, experts, head), loss_of)


def _checkpointed(run: Callable[[nn.Sequential, torch.Tensor], torch.Tensor]) -> Make:
    def make(rng: random.Random) -> Step:
        blocks = (dense(64, 4 * width(rng), 64) for _ in range(4))
        net, head = nn.Sequential(*blocks), nn.Linear(64, 10)
        return training(
            sgd(net, head), lambda n: classified(head, run(net, rows(n).requires_grad_()))
        )

    return make


def _each(net: nn.Sequential, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    for block in net:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


variants(
    "checkpoint",
    [
        ("each block", _checkpointed(partial(_each, reentrant=False))),
        ("each block, reentrant", _checkpointed(partial(_each, reentrant=True))),
        (
            "sequential",
            _checkpointed(lambda net, x: checkpoint_sequential(net, 2, x, use_reentrant=False)),
        ),
        (
            "all at once",
            _checkpointed(lambda net, x: checkpoint(net, x, use_reentrant=False)),
        ),
    ],
)
