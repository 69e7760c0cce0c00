"""What the layers of `brim.nn` keep and cost beside those of `torch.nn`, in one run.

ResNet-50 (torchvision) with several parts frozen, a transformer encoder with LoRA-style adapters
under autocast, and the host time of every layer on a tiny tensor. On an accelerator with the sizes
of the README, on the CPU with small ones. "kept" is what the allocator holds between forward and
backward beyond what it held before, without the input; "peak" is the most during a whole step.

    ./dev bench nn
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import Work, medians, peer, synchronize
from torch import nn
from torch.nn import functional

import brim
from brim.cli.table import print_table

MIB = 1 << 20
Step = Callable[[nn.Module], torch.Tensor]  # the forward pass of one training step


def kept(step: Step, model: nn.Module, device: str) -> int:
    """Bytes that stay between forward and backward."""
    with brim.PeakMeter(device) as meter:
        loss = step(model)
        synchronize(device)
        held = meter.left
    loss.backward()
    return held


def peak(step: Step, model: nn.Module, device: str) -> int:
    """Most bytes during a step, beyond the model and its input."""
    with brim.PeakMeter(device) as meter:
        step(model).backward()
        synchronize(device)
    return meter.peak


def mebibytes(value: int) -> str:
    return f"{value / MIB:.0f}" if value > 20 * MIB else f"{value / MIB:.2f}"


def compare(title: str, model: nn.Module, step: Step, device: str, *, cheap: bool = True) -> None:
    """One table: the model with torch.nn, with brim.nn and, if `cheap`, with recomputation."""
    print(f"\n{title}")
    models = {"torch.nn": model, "brim.nn": copy.deepcopy(model)}
    brim.convert(models["brim.nn"])
    if cheap:
        models["…cheap"] = copy.deepcopy(model)
        brim.convert(models["…cheap"], recompute="cheap")

    def clear() -> None:
        for each in models.values():
            each.zero_grad(set_to_none=True)

    memory = {}
    for name, each in models.items():
        figures = []
        for measure in (kept, kept, peak):  # workspaces of libraries come with the first step
            figures.append(measure(step, each, device))
            clear()
        memory[name] = figures[1:]
    works = {name: lambda each=each: step(each).backward() for name, each in models.items()}
    rounds = 5 if device == "cpu" else 30
    # The first rounds choose algorithms and fill caches.
    times = medians(works, rounds, warmup=2, device=device, after=clear)
    rows = []
    for name, seconds in times.items():
        cells = [name]
        for own, torchs in zip(memory[name], memory["torch.nn"], strict=True):
            cells += [mebibytes(own), f"{own / torchs:.3f}"]
        rows.append([*cells, f"{seconds * 1e3:.2f}", f"{seconds / times['torch.nn']:.3f}"])
    print_table(["layers", "kept MiB", "ratio", "peak MiB", "ratio", "ms", "ratio"], rows)


# -- ResNet-50 --------------------------------------------------------------------------------


def resnets(device: str) -> None:
    torchvision = peer("torchvision")
    if torchvision is None:
        return
    batch, side = (4, 64) if device == "cpu" else (64, 224)
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
    title = "only the first convolution trainable, BatchNorm in eval mode"
    compare(title, model, step, device, cheap=False)
    model = build().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(True)
    title = "convolutions frozen, BatchNorm's weights trainable, eval mode"
    compare(title, model, step, device)
    compare("all trainable, train mode", build().train(), step, device)


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
    n, length, width, depth = (2, 64, 128, 2) if device == "cpu" else (16, 128, 768, 12)
    torch.manual_seed(0)
    data = torch.randn(n, length, width, device=device)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(data).float().square().mean()

    for activation in (nn.ReLU, nn.GELU):
        model = nn.Sequential(*(Block(width, 8, activation) for _ in range(depth))).to(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".down." in name or ".up." in name)
        title = (
            f"transformer encoder, {depth} layers of {width}, {activation.__name__}, adapters of"
            f" rank 8 trainable, {n}x{length} tokens, autocast bfloat16, on {device}"
        )
        compare(title, model, step, device)


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
    head = ["layer", "torch.nn", "brim.nn", "ratio", "frozen: torch", "brim", "ratio"]
    print_table(head, host_time_rows(device))


def host_time_rows(device: str) -> Iterator[list[str]]:
    for make, shape in LAYERS:
        layer = make().to(device)
        name = type(layer).__name__
        name += " inplace" * bool(getattr(layer, "inplace", False)) + " eval" * (not layer.training)
        cells = [name]
        for frozen in (False, True):
            layer.requires_grad_(not frozen)
            ours = copy.deepcopy(layer)
            brim.convert(ours)
            works = {
                "torch": tiny_step(layer, shape, device),
                "brim": tiny_step(ours, shape, device),
            }
            # The device's queue is waited for when the clock has stopped: this is the host's time.
            wait = partial(synchronize, device)
            times = medians(works, 35, calls=30, warmup=5, after=wait)
            cells += [f"{seconds * 1e6:.1f}" for seconds in times.values()]
            cells.append(f"{times['brim'] / times['torch']:.2f}")
        yield cells


def tiny_step(layer: nn.Module, shape: tuple[int, ...], device: str) -> Work:
    x = torch.randn(shape, device=device, requires_grad=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    inplace = getattr(layer, "inplace", False)
    grad = torch.ones_like(layer(x * 1))

    def step() -> None:
        y = layer(x * 1 if inplace else x)
        torch.autograd.grad(y, [x, *parameters], grad)

    return step


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
