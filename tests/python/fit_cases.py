"""Random small networks, data sets and budgets, for the samplers' `fit`. A seed decides a case."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import brim
from brim.data import PackedBatchSampler, SizeAwareBatchSampler

VOCABULARY = 50
Step = Callable[[Any], None]


class Padded(nn.Module):
    """Tokens (n, length) to a loss: a body, then a loss for each token or for each sample."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        width = dice.choice([8, 16, 32, 48])
        self.embedding = nn.Embedding(dice.choice([VOCABULARY, 5000]), width)
        self.kind = dice.choice(
            ["mlp", "none", "attention", "transformer", "lstm", "gru", "conv", "valid conv"]
        )
        self.body: nn.Module = {
            "mlp": lambda: nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            ),
            "none": nn.Identity,
            "attention": lambda: nn.Linear(width, 3 * width),
            "transformer": lambda: nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=dice.choice([0.0, 0.1]), batch_first=True
            ),
            "lstm": lambda: nn.LSTM(width, width, batch_first=True),
            "gru": lambda: nn.GRU(width, 2 * width, batch_first=True),
            "conv": lambda: nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.ReLU()),
            "valid conv": lambda: nn.Sequential(nn.Conv1d(width, width, 3), nn.MaxPool1d(2)),
        }[self.kind]()
        inner = 2 * width if self.kind == "gru" else width
        self.pooled = self.kind == "valid conv" or dice.random() < 0.5
        wide = dice.choice([1, 256, 1024]) if self.pooled else 1
        classes = dice.choice([10, VOCABULARY, 500])
        self.head: nn.Module = nn.Linear(inner, classes)
        if wide > 1:
            self.head = nn.Sequential(nn.Linear(inner, wide), nn.ReLU(), nn.Linear(wide, classes))
        self.each_token = not self.pooled or dice.random() < 0.3

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        if "conv" in self.kind:
            hidden = self.body(hidden.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "attention":
            query, key, value = self.body(hidden).chunk(3, -1)
            hidden = hidden + (query @ key.transpose(1, 2)).softmax(-1) @ value
        else:
            hidden = self.body(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        out = self.head(hidden.mean(1) if self.pooled else hidden)
        if self.each_token and self.pooled:
            out = out[:, None].expand(-1, tokens.shape[1], -1)
        target = torch.zeros(out.shape[:-1], dtype=torch.long).flatten()
        return functional.cross_entropy(out.reshape(-1, out.shape[-1]), target)


class Laid(nn.Module):
    """A list of samples, laid one after the other, to a loss."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        width = dice.choice([8, 16, 32])
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.kind = dice.choice(["mlp", "attention inside", "attention over all", "pooled"])
        out = 3 * width if "attention" in self.kind else dice.choice([10, 100])
        self.layer = nn.Linear(width, out)

    def forward(self, samples: list[torch.Tensor]) -> torch.Tensor:
        hidden = self.embedding(torch.cat(samples))
        lengths = [len(sample) for sample in samples]
        if self.kind == "mlp":
            return self.layer(hidden).relu().square().mean()  # type: ignore[no-any-return]
        if self.kind == "pooled":
            pooled = torch.stack([part.mean(0) for part in hidden.split(lengths)])
            return self.layer(pooled).square().mean()  # type: ignore[no-any-return]
        parts = [hidden] if self.kind == "attention over all" else hidden.split(lengths)
        total = hidden.new_zeros(())
        for part in parts:
            query, key, value = self.layer(part).chunk(3, -1)
            total = total + ((query @ key.T).softmax(-1) @ value).square().mean()
        return total


def lengths_of(dice: random.Random, count: int) -> torch.Tensor:
    """Lengths of samples, distributed in one of several ways."""
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    low, high = dice.choice([(4, 64), (8, 128), (8, 256), (30, 100), (5, 200)])
    normal = torch.randn(count, generator=generator)
    uniform = torch.rand(count, generator=generator)
    kind = dice.choice(["lognormal", "uniform", "two", "tail", "one", "few"])
    middle = math.sqrt(low * high)
    return (
        {
            "lognormal": (normal * 0.7).exp() * middle,
            "uniform": low + uniform * (high - low),
            "two": torch.where(uniform < 0.8, middle / 2 + normal, high * 0.9 + normal),
            "tail": low * (1 - uniform).pow(-0.8),
            "one": torch.full((count,), middle),
            "few": torch.tensor([low, middle, high])[(uniform * 3).long()],
        }[kind]
        .long()
        .clamp(low, high)
    )


def step_of(dice: random.Random, net: nn.Module) -> Step:
    """A training step, with one of several optimizers, that drops gradients first or last."""
    parameters = list(net.parameters())
    optimizer: torch.optim.Optimizer | None = {
        "none": lambda: None,
        "sgd": lambda: torch.optim.SGD(parameters, 1e-3),
        "momentum": lambda: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, 1e-4),
        "adamw": lambda: torch.optim.AdamW(parameters, 1e-4, foreach=False),
        "foreach": lambda: torch.optim.AdamW(parameters, 1e-4, foreach=True),
    }[dice.choice(["none", "sgd", "momentum", "adam", "adamw", "foreach"])]()
    first = dice.random() < 0.5

    def step(batch: Any) -> None:
        if first:
            net.zero_grad(set_to_none=True)
        net(batch).backward()
        if optimizer is not None:
            optimizer.step()
        if not first:
            net.zero_grad(set_to_none=True)

    return step


class Outcome(NamedTuple):
    """What came of a case. Bytes are those above what was held before it began."""

    name: str
    largest: float  # peak of the batch that needed most, as a share of the budget
    mean: float  # mean peak of all batches, as a share of the budget
    batches: int
    left_out: int
    runs: int  # of the work, during fit


def run_case(seed: int, cost: str | None = None) -> Outcome:
    """Fit a sampler to a random case and train for an epoch, measuring each batch."""
    dice = random.Random(seed)
    gc.collect()
    brim.install_cpu_allocator()
    held = brim.memory_stats("cpu").allocated
    torch.manual_seed(seed)
    cost = dice.choice(["padded", "padded", "padded", "sum"]) if cost is None else cost
    lengths = lengths_of(dice, dice.choice([100, 300]))
    texts = [torch.randint(0, VOCABULARY, (int(length),)) for length in lengths]
    net: nn.Module = Padded(dice) if cost == "padded" else Laid(dice)
    step = step_of(dice, net)

    def collate(samples: list[torch.Tensor]) -> Any:
        return pad_sequence(samples, batch_first=True) if cost == "padded" else samples

    def peak_of(indices: list[int]) -> int:
        with brim.PeakMeter("cpu") as meter:
            step(collate([texts[index] for index in indices]))
        return meter.start + meter.peak - held

    # Room for the longest, and for up to a tenth of the samples.
    order = lengths.argsort().tolist()
    peak_of(order[-1:])
    alone, many = peak_of(order[-1:]), peak_of(order[-len(order) // 4 :][: len(order) // 10])
    room = max(alone * dice.uniform(1.02, 1.2), alone + (many - alone) * dice.uniform(0.1, 1))
    budget = held + int(room)
    runs = 0

    def work(batch: Any) -> None:
        nonlocal runs
        runs += 1
        step(batch)

    options: dict[str, Any] = {"cost": cost, "collate_fn": collate}
    way = dice.choice(["packed", "packed and shuffled", "shuffled", "sorted"])
    if way in ("packed and shuffled", "shuffled"):
        options |= {"shuffle": True, "seed": 1 + seed}
    if way == "sorted":
        options["sampler"] = order
    fitted: Any = PackedBatchSampler if "packed" in way else SizeAwareBatchSampler
    sampler = fitted.fit(texts, work, lengths, budget, "cpu", **options)
    peaks = [peak_of(batch) for batch in sampler]
    return Outcome(
        f"{seed}: {cost}, {net.kind}, {way}, {room / 2**20:.2f} MiB",
        max(peaks) / room,
        sum(peaks) / len(peaks) / room,
        len(peaks),
        len(texts) - sampler.report().batched,
        runs,
    )
