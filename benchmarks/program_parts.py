"""What the programs are made of: the list of all, small networks, and the usual training step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[int], object]  # one call with so many items; the caller keeps its result
Make = Callable[[random.Random], Step]

PROGRAMS: dict[str, Make] = {}

VARYING: set[str] = set()
"""Programs whose need varies from call to call: no size is the largest that always fits."""


def program(make: Make) -> Make:
    """Add a program to the list, under the function's name in words."""
    PROGRAMS[make.__name__.replace("_", " ")] = make
    return make


def varying(make: Make) -> Make:
    """As `program`, for those whose need varies."""
    VARYING.add(make.__name__.replace("_", " "))
    return program(make)


def variants(name: str, makes: Iterable[tuple[str, Make]]) -> None:
    """Add programs that differ in one thing."""
    PROGRAMS.update({f"{name}, {variant}": make for variant, make in makes})


def width(rng: random.Random) -> int:
    return rng.choice([24, 32, 48, 64])


def dense(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = ((nn.Linear(a, b), between()) for a, b in itertools.pairwise(widths))
    return nn.Sequential(*itertools.chain(*layers))[:-1]


def mlp(rng: random.Random, outputs: int = 10, depth: int = 3) -> nn.Sequential:
    """A network for rows of 64."""
    return dense(64, *[2 * width(rng)] * depth, outputs)


def conv_net(rng: random.Random, *, norm: bool = False) -> nn.Sequential:
    """A network for images of 3 x 16 x 16."""
    a, b = rng.choice([(8, 16), (4, 8), (6, 12)])
    return nn.Sequential(
        nn.Conv2d(3, a, 3, padding=1),
        nn.BatchNorm2d(a) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(a, b, 3, stride=2, padding=1),
        nn.BatchNorm2d(b) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(0.2) if norm else nn.Identity(),
        nn.Flatten(),
        nn.Linear(64 * b, 10),
    )


def encoder(rng: random.Random, layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(rng.choice([16, 32]), 2, 48, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def rows(n: int) -> torch.Tensor:
    return torch.rand(n, 64)


def images(n: int) -> torch.Tensor:
    return torch.rand(n, 3, 16, 16)


def labels(n: int, *shape: int, classes: int = 10) -> torch.Tensor:
    return torch.randint(classes, (n, *shape))


def classified(net: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """The loss of a batch with random labels."""
    return functional.cross_entropy(net(inputs), labels(len(inputs)))


def surviving(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer whose first step can be repeated: torch leaves half of a parameter's state."""

    class Surviving(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            made = bool(self.state)
            try:
                return super().step(closure)
            except Exception:
                if not made:
                    self.state.clear()
                raise

    return Surviving


Adam = surviving(torch.optim.Adam)


def sgd(*nets: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for net in nets for p in net.parameters()], lr=1e-3)


def adam(*nets: nn.Module) -> torch.optim.Optimizer:
    return Adam([p for net in nets for p in net.parameters()], lr=1e-3)


def training(optimizer: torch.optim.Optimizer, loss_of: Callable[[int], torch.Tensor]) -> Step:
    """The usual step: gradients of the last call are dropped when the call begins."""

    def step(n: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(n)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
