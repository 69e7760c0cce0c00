"""Models with linear layers and convolutions that widen, for `test_nn_products.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS, WIDTH = 24, 16


class Residual(nn.Module):
    """A block and its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.block(x)
        return output


class Gated(nn.Module):
    """The MLP of language models."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


class Attention(nn.Module):
    """Attention to itself, with one product for query, key and value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return output


class Halves(nn.Module):
    """The MLP of diffusers' transformers: one product, of which half is the gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.proj(x).chunk(2, dim=-1)
        output: Tensor = self.out(hidden * nn.functional.gelu(gate))
        return output


class Parts(nn.Module):
    """Three parts of one product: of given sizes, or of a dimension of their own."""

    def __init__(self, width: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.sizes = sizes
        self.proj, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        a, b, c = y.split(self.sizes, -1) if self.sizes else y.unflatten(-1, (3, -1)).unbind(-2)
        output: Tensor = self.out(nn.functional.silu(a) * nn.functional.gelu(b) * c)
        return output


class Scaled(nn.Module):
    """ConvNeXt's block after its convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.last = nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.act(self.first(self.norm(x.permute(0, 2, 3, 1)))))
        output: Tensor = y.permute(0, 3, 1, 2) * self.scale
        return output


def mlp(width: int = WIDTH) -> list[nn.Module]:
    return [
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    ]


def bottleneck(width: int = WIDTH) -> nn.Module:
    inner = width // 4
    return nn.Sequential(
        Residual(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        ),
        nn.ReLU(inplace=True),
    )


TOKENS, IMAGES = (3, 8, WIDTH), (2, WIDTH, 6, 6)
PIXELS = 2 * 36
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # name: model, input, numbers that the layers after products do not keep
    "mlp": (lambda: Residual(*mlp()), TOKENS, ROWS * 4 * WIDTH),
    "gated": (
        lambda: Residual(nn.RMSNorm(WIDTH), Gated(WIDTH, 3 * WIDTH)),
        TOKENS,
        2 * ROWS * 3 * WIDTH,
    ),
    "bottleneck": (lambda: nn.Sequential(bottleneck(), bottleneck()), IMAGES, 2 * PIXELS * WIDTH),
    "vit": (
        lambda: nn.Sequential(
            *(
                block
                for _ in range(2)
                for block in (
                    Residual(nn.LayerNorm(WIDTH), Attention(WIDTH)),
                    Residual(*mlp(), nn.Dropout(0.1)),
                )
            )
        ),
        TOKENS,
        2 * ROWS * 4 * WIDTH,
    ),
    "halves": (lambda: Residual(nn.LayerNorm(WIDTH), Halves(WIDTH)), TOKENS, ROWS * 8 * WIDTH),
    "split": (
        lambda: Residual(nn.LayerNorm(WIDTH), Parts(WIDTH, (WIDTH,) * 3)),
        TOKENS,
        ROWS * 3 * WIDTH,
    ),
    "unbound": (lambda: Residual(nn.LayerNorm(WIDTH), Parts(WIDTH)), TOKENS, ROWS * 3 * WIDTH),
    "convnext": (
        lambda: nn.Sequential(
            *(
                Residual(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), Scaled(WIDTH))
                for _ in range(2)
            )
        ),
        IMAGES,
        2 * PIXELS * 4 * WIDTH,
    ),
}
