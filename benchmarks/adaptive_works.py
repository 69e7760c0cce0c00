"""Works of many kinds whose memory grows with a size: for the benchmark and the test of the search.

Each is made for a device and takes a size. Bytes are small, so that the CPU runs them quickly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import brim

Run = Callable[[int], object]
Make = Callable[[torch.device], Run]

MIB = 2**20


def _tensors(*kib: float, square: float = 0, constant: float = 0, padding: int = 1) -> Make:
    """Tensors of `kib` KiB per item, all held; then one that grows with the square."""

    def make(device: torch.device) -> Run:
        def run(size: int) -> None:
            size = -(-size // padding) * padding
            counts = [constant * MIB, *(k * 1024 * size for k in kib), square * 1024 * size**2]
            # Held by the list until the end.
            _ = [torch.empty(int(c), dtype=torch.uint8, device=device) for c in counts if c]

        return run

    return make


def _freed(*kib: float) -> Make:
    """Tensors of which only two are alive at a time."""

    def make(device: torch.device) -> Run:
        def run(size: int) -> None:
            last = torch.empty(0, device=device)
            for k in kib:
                now = torch.empty(int(k * 1024 * size), dtype=torch.uint8, device=device)
                last = now  # noqa: F841

        return run

    return make


def _in_parts(items: int, kib: float, kept: float, *, together: bool = False) -> Make:
    """Goes through items in parts, and keeps `kept` KiB per item; `together`: once more at the end.

    The need is not monotone: it falls where there is one part less.
    """

    def make(device: torch.device) -> Run:
        def bytes_of(kib: float, count: int) -> torch.Tensor:
            return torch.empty(int(kib * 1024 * count), dtype=torch.uint8, device=device)

        def run(size: int) -> object:
            results = []
            for start in range(0, items, size):
                count = min(size, items - start)
                _ = bytes_of(kib, count)
                results.append(bytes_of(kept, count))
            return torch.cat(results) if together else results

        return run

    return make


def _operation(operation: Callable[[torch.Tensor], object], *shape: int) -> Make:
    def make(device: torch.device) -> Run:
        return lambda size: operation(torch.rand(size, *shape, device=device))

    return make


def _training(
    model: Callable[[], nn.Module],
    *shape: int,
    optimizer: type[torch.optim.Optimizer] | None = None,
    keep_gradients: bool = False,
) -> Make:
    """A training step. With `keep_gradients` the next one frees them when it begins."""

    def make(device: torch.device) -> Run:
        torch.manual_seed(0)
        net = model().to(device)
        steps = optimizer(net.parameters(), lr=1e-4) if optimizer else None  # type: ignore[call-arg]

        def run(size: int) -> None:
            net.zero_grad()  # also what a try that failed has left
            out = net(torch.rand(size, *shape, device=device))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            if steps:
                steps.step()
            if not keep_gradients:
                net.zero_grad()

        run(1)  # the optimizer's state
        return run

    return make


def _mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


def _wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32768), nn.ReLU())  # 8 MiB of gradients


def _cnn() -> nn.Module:
    widths = itertools.pairwise([3, 16, 32, 32])
    layers = ((nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths)
    return nn.Sequential(*itertools.chain(*layers))


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


def _attention(mask: torch.Tensor | None) -> Callable[[torch.Tensor], object]:
    def run(x: torch.Tensor) -> object:
        there = None if mask is None else mask.to(x.device)
        return functional.scaled_dot_product_attention(x, x, x, there)

    return run


def _knn(x: torch.Tensor) -> object:
    return torch.cdist(x, torch.rand(2048, 16, device=x.device)).topk(3, largest=False)


WORKS: dict[str, Make] = {
    "one tensor": _tensors(40),
    **{f"{k} equal tensors": _tensors(*[40 / k] * k) for k in (2, 3, 5, 10, 20, 50)},
    "tensors, growing": _tensors(*(2.0**i / 8 for i in range(8))),
    "tensors, shrinking": _tensors(*(2.0**-i * 16 for i in range(8))),
    "tensors, random": _tensors(3, 17, 1, 9, 22, 5, 2, 14),
    "tensors, freed": _freed(8, 20, 4, 30, 12, 16),
    **{
        f"constant {percent} %": _tensors(*[(100 - percent) / 10] * 4, constant=0.64 * percent)
        for percent in (25, 50, 75, 90, 95)
    },
    "square": _tensors(square=0.05),
    "linear and square": _tensors(8, square=0.05),
    "padded to 64": _tensors(2, 1, 0.5, padding=64),
    "in parts, few results": _in_parts(20000, 32, 0.1),
    "in parts, results kept": _in_parts(8000, 32, 2),
    "in parts, concatenated": _in_parts(8000, 32, 2, together=True),
    "kNN": _operation(_knn, 16),
    "sort": _operation(torch.sort, 1024),
    "topk": _operation(lambda x: x.topk(3), 1024),
    "fft": _operation(torch.fft.fft, 1024),
    "softmax": _operation(lambda x: torch.softmax(x * 2, -1).log(), 1024),
    "einsum": _operation(lambda x: torch.einsum("bij,bkj->bik", x, x), 32, 32),
    "convolution": _operation(
        lambda x: functional.conv2d(x, torch.rand(16, 3, 3, 3, device=x.device)), 3, 32, 32
    ),
    "attention": _operation(_attention(None), 4, 64, 16),
    "attention, masked": _operation(_attention(torch.ones(64, 64, dtype=torch.bool)), 4, 64, 16),
    "training, MLP": _training(_mlp, 256),
    "training, MLP, Adam": _training(_mlp, 256, optimizer=torch.optim.Adam),
    "training, CNN": _training(_cnn, 3, 32, 32),
    "training, LSTM": _training(lambda: nn.LSTM(64, 64, 2, batch_first=True), 16, 64),
    "training, transformer": _training(_encoder, 32, 64),
    **{
        f"zero_grad first, {name}": _training(
            model, *shape, optimizer=torch.optim.Adam, keep_gradients=True
        )
        for name, model, shape in (
            ("MLP", _wide_mlp, (64,)),
            ("CNN", _cnn, (3, 32, 32)),
            ("transformer", _encoder, (32, 64)),
        )
    },
}


def largest_that_fits(run: Run, most: int, device: torch.device, calls: int = 1) -> int:
    """The largest size, at most about `most`, that fits in this many calls.

    An accelerator's cache may be in the way of the next call.
    """

    def fits(size: int) -> bool:
        try:
            for _ in range(calls):
                run(size)
        except torch.OutOfMemoryError:
            return False
        finally:
            brim.release_cached(device)
        return True

    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
