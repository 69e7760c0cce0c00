"""What the layers of `brim.nn` keep and cost beside those of `torch.nn`, in one run.

ResNet-50 (torchvision) with several parts frozen, a transformer encoder with LoRA-style adapters
under autocast, and the host time of every layer on a tiny tensor. On an accelerator with the sizes
of the README, on the CPU with small ones. "kept" is what the allocator holds between forward and
backward beyond what it held before, without the input; "peak" the most during a whole step; times
are medians of steps that alternate, as ratios to torch.nn.

    ./dev bench nn
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import peers
import torch
from torch import nn
from torch.nn import functional

import brim
from brim.cli.table import Table

MIB = 1 << 20


@dataclass
class Subject:
    """A model with what one training step does to it."""

    name: str
    model: nn.Module
    step: Callable[[nn.Module], torch.Tensor]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def kept(subject: Subject, device: str) -> int:
    """Bytes that stay between forward and backward."""
    with brim.PeakMeter(device) as meter:
        loss = subject.step(subject.model)
        synchronize(device)
        held = meter.left
    loss.backward()
    subject.model.zero_grad(set_to_none=True)
    return held


def peak(subject: Subject, device: str) -> int:
    """Most bytes during a step, beyond the model and its input."""
    with brim.PeakMeter(device) as meter:
        subject.step(subject.model).backward()
        synchronize(device)
    subject.model.zero_grad(set_to_none=True)
    return meter.peak


def seconds(subjects: Sequence[Subject], device: str, rounds: int) -> list[float]:
    """Median seconds of a step of each, taken in turns."""
    times: list[list[float]] = [[] for _ in subjects]
    for turn in range(rounds + 2):
        for subject, collected in zip(subjects, times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            subject.step(subject.model).backward()
            synchronize(device)
            if turn >= 2:  # the first ones choose algorithms and fill caches
                collected.append(time.perf_counter() - start)
            subject.model.zero_grad(set_to_none=True)
    return [statistics.median(collected) for collected in times]


def compare(title: str, subjects: Sequence[Subject], device: str, rounds: int) -> None:
    """One table; the first subject is what the ratios are to."""
    print(f"\n{title}")
    rows = []
    for subject in subjects:
        kept(subject, device)  # workspaces of libraries come with the first step
        rows.append((kept(subject, device), peak(subject, device)))
    times = seconds(subjects, device, rounds)
    table = Table("layers", "kept MiB", "ratio", "peak MiB", "ratio", "ms", "ratio")
    for subject, (held, most), taken in zip(subjects, rows, times, strict=True):
        table.add(
            subject.name,
            f"{held / MIB:.0f}" if held > 20 * MIB else f"{held / MIB:.2f}",
            f"{held / rows[0][0]:.3f}",
            f"{most / MIB:.0f}" if most > 20 * MIB else f"{most / MIB:.2f}",
            f"{most / rows[0][1]:.3f}",
            f"{taken * 1e3:.2f}",
            f"{taken / times[0]:.3f}",
        )


def variants(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], *, cheap: bool
) -> list[Subject]:
    """The model with torch.nn, with brim.nn, and with recomputation where asked for."""
    subjects = [Subject("torch.nn", model, step)]
    for name, recompute in (("brim.nn", None), ("…cheap", "cheap")):
        if recompute is None or cheap:
            converted = copy.deepcopy(model)
            brim.convert(converted, recompute=recompute)
            subjects.append(Subject(name, converted, step))
    return subjects


# -- ResNet-50 --------------------------------------------------------------------------------


def resnets(device: str) -> None:
    torchvision = peers.find("torchvision")
    if torchvision is None:
        return
    batch, side, rounds = (4, 64, 5) if device == "cpu" else (64, 224, 30)
    torch.manual_seed(0)
    data = torch.randn(batch, 3, side, side, device=device)
    target = torch.randint(1000, (batch,), device=device)

    def step(model: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(model(data), target)

    def build() -> nn.Module:
        return torchvision.models.resnet50().to(device)

    print(f"\nResNet-50, batch {batch}, {side}x{side}, float32, on {device}")
    model = build().eval().requires_grad_(False)
    model.conv1.weight.requires_grad_(True)
    compare(
        "only the first convolution trainable, BatchNorm in eval mode",
        variants(model, step, cheap=False),
        device,
        rounds,
    )
    model = build().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(True)
    compare(
        "convolutions frozen, BatchNorm's weights trainable, eval mode",
        variants(model, step, cheap=True),
        device,
        rounds,
    )
    compare(
        "all trainable, train mode", variants(build().train(), step, cheap=True), device, rounds
    )


# -- A transformer encoder with adapters ------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer beside a trainable one of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query, self.value = Adapted(width, 8), Adapted(width, 8)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.after_attention = nn.Dropout(0.1)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            activation(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        y = self.before_attention(x)
        q, k, v = (
            layer(y).view(n, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = (
            functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(n, length, width)
        )
        x = x + self.after_attention(self.out(mixed))
        return x + self.feed_forward(x)


def adapters(device: str) -> None:
    n, length, width, depth, rounds = (
        (2, 64, 128, 2, 5) if device == "cpu" else (16, 128, 768, 12, 30)
    )
    torch.manual_seed(0)
    data = torch.randn(n, length, width, device=device)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(data).float().square().mean()

    for activation in (nn.ReLU, nn.GELU):
        model = nn.Sequential(*(Block(width, 8, activation) for _ in range(depth))).to(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".down." in name or ".up." in name)
        compare(
            f"transformer encoder, {depth} layers of {width}, {activation.__name__}, adapters of"
            f" rank 8 trainable, {n}x{length} tokens, autocast bfloat16, on {device}",
            variants(model, step, cheap=True),
            device,
            rounds,
        )


# -- Host time --------------------------------------------------------------------------------

LAYERS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Linear(4, 4), (2, 4)),
    (lambda: nn.Conv1d(2, 2, 3), (1, 2, 5)),
    (lambda: nn.Conv2d(2, 2, 3), (1, 2, 5, 5)),
    (lambda: nn.Conv3d(2, 2, 1), (1, 2, 3, 3, 3)),
    (lambda: nn.ConvTranspose2d(2, 2, 3), (1, 2, 5, 5)),
    (lambda: nn.BatchNorm2d(2), (2, 2, 3, 3)),
    (lambda: nn.BatchNorm2d(2).eval(), (2, 2, 3, 3)),
    (lambda: nn.LayerNorm(4), (2, 4)),
    (lambda: nn.RMSNorm(4), (2, 4)),
    (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    (nn.ReLU, (2, 4)),
    (lambda: nn.ReLU(inplace=True), (2, 4)),
    (nn.ReLU6, (2, 4)),
    (nn.LeakyReLU, (2, 4)),
    (nn.Hardtanh, (2, 4)),
    (nn.GELU, (2, 4)),
    (nn.SiLU, (2, 4)),
    (nn.Dropout, (2, 4)),
    (lambda: nn.MaxPool2d(2), (1, 2, 4, 4)),
    (lambda: nn.AvgPool2d(2), (1, 2, 4, 4)),
    (lambda: nn.AdaptiveAvgPool2d(2), (1, 2, 4, 4)),
)


def host_times(device: str) -> None:
    print(f"\nhost time of forward + backward on a tiny tensor, on {device} (µs, medians)")
    table = Table("layer", "torch.nn", "brim.nn", "ratio", "frozen: torch", "brim", "ratio")
    for make, shape in LAYERS:
        layer = make().to(device)
        name = type(layer).__name__
        name += " inplace" * bool(getattr(layer, "inplace", False)) + " eval" * (not layer.training)
        cells = [name]
        for frozen in (False, True):
            pair = (
                layer.requires_grad_(not frozen),
                copy.deepcopy(layer).requires_grad_(not frozen),
            )
            brim.convert(pair[1])
            ours, theirs = [], []
            for _ in range(40):
                theirs.append(microseconds(pair[0], shape, device))
                ours.append(microseconds(pair[1], shape, device))
            both = statistics.median(theirs[5:]), statistics.median(ours[5:])
            cells += [f"{both[0]:.1f}", f"{both[1]:.1f}", f"{both[1] / both[0]:.2f}"]
        table.add(*cells)


def microseconds(layer: nn.Module, shape: tuple[int, ...], device: str, count: int = 30) -> float:
    x = torch.randn(shape, device=device, requires_grad=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    inplace = getattr(layer, "inplace", False)
    grad = torch.ones_like(layer(x * 1))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        y = layer(x * 1 if inplace else x)
        torch.autograd.grad(y, [x, *parameters], grad)
    taken = time.perf_counter() - start
    synchronize(device)
    return taken / count * 1e6


def main() -> None:
    devices = ["cpu"]
    if torch.accelerator.is_available():
        devices.insert(0, torch.accelerator.current_accelerator().type)
    for device in devices:
        host_times(device)
        adapters(device)
        resnets(device)


if __name__ == "__main__":
    main()
