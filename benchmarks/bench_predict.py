"""How well seven probes predict the memory of shapes that were not measured.

For a transformer layer over (n, length) and a small CNN over (n, side), training steps with and
without an optimizer: the error of `brim.MemoryModel` on held-out shapes, beside that of a sum over
samples (a cost per sample, whatever it is batched with), fitted to the same probes. On the CPU and,
if there is one, on a GPU. The columns are absolute errors of the predicted peak.

    ./dev bench predict
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from results import Table
from torch import nn

import brim

Step = Callable[[int, int], None]
Shape = tuple[int, int]


def step_of(net: nn.Module, optimize: bool, make: Callable[[int, int], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3) if optimize else None

    def step(n: int, size: int) -> None:
        net(make(n, size)).sum().backward()
        if optimizer is not None:
            optimizer.step()
        net.zero_grad(set_to_none=True)

    return step


def transformer(device: str, optimize: bool) -> Step:
    width = 64 if device == "cpu" else 256
    net = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, device=device)
    return step_of(net, optimize, lambda n, length: torch.randn(n, length, width, device=device))


def cnn(device: str, optimize: bool) -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).to(device)
    return step_of(net, optimize, lambda n, side: torch.randn(n, 3, side, side, device=device))


def held_out(
    ns: list[int], sizes: list[int], most: int, seen: set[Shape], count: int
) -> list[Shape]:
    dice = random.Random(11)
    shapes: list[Shape] = []
    while len(shapes) < count:
        # Evenly on a logarithmic scale, so that small shapes are tried as often as large ones.
        n = round(ns[0] * (ns[-1] / ns[0]) ** dice.random())
        size = round(sizes[0] * (sizes[-1] / sizes[0]) ** dice.random())
        if n * size <= most and (n, size) not in seen and (n, size) not in shapes:
            shapes.append((n, size))
    return shapes


def sum_over_samples(model: brim.MemoryModel) -> Callable[[int, int], float]:
    """n times the cost of one sample, a parabola in its length through the same probes."""
    lengths = [sample.length for sample in model.samples]
    costs = [sample.peak / sample.n for sample in model.samples]
    parabola = brim.PolynomialRegression(2).fit(lengths, costs)
    return lambda n, length: n * float(parabola.predict(length))


def cells(step: Step, ns: list[int], sizes: list[int], most: int, device: str) -> list[str]:
    begin = time.perf_counter()
    candidates = [(n, size) for n in ns for size in sizes if n * size <= most]
    model = brim.MemoryModel.probe(step, candidates, device, restore=False)
    seconds = time.perf_counter() - begin
    seen = {(int(sample.n), int(sample.length)) for sample in model.samples}
    shapes = held_out(ns, sizes, most, seen, 40)
    peaks = brim.collect_peaks(lambda shape: step(*shape), shapes, device).peaks
    cells = [str(len(model.samples)), f"{seconds:.1f} s"]
    for predict in (model.peak, sum_over_samples(model)):
        errors = [abs(predict(*s) / peak - 1) for s, peak in zip(shapes, peaks, strict=True)]
        cells += [f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]
    safe = sum(model.safe_peak(*s) >= peak for s, peak in zip(shapes, peaks, strict=True))
    return [*cells, f"{model.margin:.1%}", f"{safe} of {len(shapes)}"]


def main() -> None:
    torch.manual_seed(0)
    head = ["training step", "probes", "took", "median", "worst", "sum's median", "sum's worst"]
    head += ["margin", "within it"]
    title = "Error of brim.MemoryModel, and of a sum over samples, on shapes that were not measured"
    ns = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    lengths = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    sides = [32, 40, 48, 64, 96, 128]
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        longest, widest = (512, 128) if device == "cuda" else (128, 48)
        table = Table(title, head, device=device, width=34)
        for optimize in (False, True):
            kind = f"{device}, {'AdamW' if optimize else 'no optimizer'}"
            step = transformer(device, optimize)
            table.row(f"transformer, {kind}", *cells(step, ns, lengths, 64 * longest, device))
            step = cnn(device, optimize)
            table.row(f"small CNN, {kind}", *cells(step, ns[3:], sides, 64 * widest, device))


if __name__ == "__main__":
    main()
