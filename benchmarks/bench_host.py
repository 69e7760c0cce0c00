"""The host's time of a step of small networks: brim's beside torch's, on tensors of a few elements.

Where an accelerator waits for the host, this time is the step's. The networks call functions and
operators between their layers. Each figure is a ratio to torch's time for forward and backward; the
ways take turns.

    ./dev bench host                       all networks, on the CPU
    ./dev bench host -- BERT --profile     where the time of "cheap" goes, in Python
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from harness import Work, medians
from results import Panel, Table
from torch import nn

import brim

WAYS: Mapping[str, str | None] = {
    "brim": None,
    "cheap": "cheap",
    "products": "products",
    "auto": "auto",
}


class SqueezeExcite(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = torch.sigmoid(self.up(F.relu(self.down(scale))))
        return x * scale


class Residual(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        y = self.last(self.second(y))
        y += x
        return F.relu(y)


class Inverted(nn.Module):
    """A block of EfficientNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, 16, 1), nn.BatchNorm2d(16), nn.SiLU())
        self.deep = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU()
        )
        self.excite = SqueezeExcite(16)
        self.project = nn.Sequential(nn.Conv2d(16, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.project(self.excite(self.deep(self.expand(x))))
        y += x
        return y


class Scaled(nn.Module):
    """A block of ConvNeXt, with LayerScale."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(self.act(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Diffusion(nn.Module):
    """A block of a U-Net for diffusion, with GroupNorm and SiLU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.last = nn.GroupNorm(2, width), nn.GroupNorm(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(F.silu(self.norm(x)))
        y = self.second(F.silu(self.last(y)))
        return x + y


class Window(nn.Module):
    """A block of Swin: attention written out, and an MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(2, 4, 4))
        self.up, self.act, self.down = nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        weights = (q * (c // 2) ** -0.5) @ k.transpose(-2, -1) + self.bias
        y = weights.softmax(-1) @ v
        y = self.proj(y.transpose(1, 2).reshape(b, n, c))
        return F.dropout(y, 0.1, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(torch.roll(self.norm(x), 1, 1))
        y: torch.Tensor = self.down(self.act(self.up(self.norm2(x))))
        return x + y


def images(make: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    return make(), lambda model: model(x).sum()


def tokens(make: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    x = torch.randn(2, 4, 8, requires_grad=True)
    return make(), lambda model: model(x).sum()


def language(kind: str, options: Mapping[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=32, **options)
    head = "ForMaskedLM" if kind == "Bert" else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind + head)(config)
    ids = torch.randint(0, 32, (1, 6))
    return model, lambda model: model(input_ids=ids, labels=ids).loss


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
NETWORKS: Mapping[str, Callable[[], Any]] = {
    "squeeze-excite": lambda: images(SqueezeExcite),
    "residual block": lambda: images(Residual),
    "EfficientNet's block": lambda: images(Inverted),
    "ConvNeXt's block": lambda: images(Scaled),
    "U-Net's block": lambda: images(Diffusion),
    "Swin's block": lambda: tokens(Window),
    "BERT": lambda: language("Bert", SMALL | {"num_attention_heads": 2}),
    "GPT-2": lambda: language("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "Llama": lambda: language("Llama", SMALL | {"num_attention_heads": 2}),
}


def steps(name: str) -> dict[str, Work]:
    torch.manual_seed(0)
    model, forward = NETWORKS[name]()
    models = {"torch": model.train()}
    for way, recompute in WAYS.items():
        models[way] = copy.deepcopy(model)
        brim.convert(models[way], recompute=recompute)

    def step(model: nn.Module) -> None:
        forward(model).backward()
        model.zero_grad(set_to_none=True)

    return {way: lambda model=model: step(model) for way, model in models.items()}


def profile(name: str, way: str) -> None:
    work = steps(name)[way]
    for _ in range(10):
        work()
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(100):
            work()
    print(f'\n{name}, "{way}"')
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", nargs="*", help="parts of their names; default: all")
    parser.add_argument("--profile", nargs="?", const="cheap", choices=["torch", *WAYS])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of the frameworks
    torch.set_num_threads(1)
    parts = [part.lower() for part in options.networks or [""]]
    names = [name for name in NETWORKS if any(part in name.lower() for part in parts)]
    if options.profile:
        for name in names:
            profile(name, options.profile)
        return
    title = "Host time of forward and backward, of torch's"
    panels = [Panel("time, of torch's", list(WAYS), baseline=1)]
    table = Table(title, ("network", "torch, µs", *WAYS), width=22, panels=panels)
    for name in names:
        times = medians(steps(name), options.rounds, calls=10, warmup=3, clock=time.process_time)
        ratios = [f"{times[way] / times['torch']:.2f}" for way in WAYS]
        table.row(name, f"{times['torch'] * 1e6:.0f}", *ratios)


if __name__ == "__main__":
    main()
