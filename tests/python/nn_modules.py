"""Modules as people write them, which `brim.convert` recognises, and how tests run them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn


class MyLinear(nn.Linear):
    """Computes what its base does."""

    def extra_repr(self) -> str:
        return "mine"


class MyConv(nn.Conv2d):
    pass


class OtherLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class ExactGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = F.gelu

    def forward(self, input: Tensor) -> Tensor:
        return self.act(input)


class NewGelu(nn.Module):
    """As GPT-2 writes it."""

    def forward(self, x: Tensor) -> Tensor:
        scale = math.sqrt(2.0 / math.pi)
        return 0.5 * x * (1.0 + torch.tanh(scale * (x + 0.044715 * torch.pow(x, 3.0))))


class AlmostGelu(nn.Module):
    """Computes what brim has no function for, of its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.1)))


class Noisy(nn.Module):
    """Depends on more than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sigmoid(x) if self.training else torch.tanh(x)


class GatedMlp(nn.Module):
    """As Llama, Mistral, Qwen and Gemma write it."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), act or Swish()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMlp(nn.Module):
    """As Phi3 and GLM write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)
        self.activation_fn = nn.GELU(approximate="tanh")

    def forward(self, hidden_states: Tensor) -> Tensor:
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class TransposedLinear(nn.Module):
    """As Hugging Face's Conv1D."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class LlamaNorm(nn.Module):
    """As Llama, Mistral, Qwen and most others write it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaNorm(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5Norm(LlamaNorm):
    """Rounds to the weight's type instead of the input's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class PlainNorm(GemmaNorm):
    """Calculates in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight


class BareNorm(nn.Module):
    eps: float

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class MeanNorm(LlamaNorm):
    """Has the names of an RMSNorm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.mean(-1, keepdim=True)
        square = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states - mean) * torch.rsqrt(square + self.variance_epsilon)


NORMS = [LlamaNorm, GemmaNorm, T5Norm, PlainNorm, BareNorm]


class ChannelNorm(nn.LayerNorm):
    """As the LayerNorm2d of timm and torchvision."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class NormAct(nn.GroupNorm):
    """As timm's GroupNormAct."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__(groups, channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)
        self._fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        return self.act(x)


class Gate(nn.Module):
    """Calls functions, beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.relu(self.inner(x)) * scale


KNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: MyLinear(8, 8), "Linear"),
    "activation": (Swish, "silu"),
    "activation in an attribute": (ExactGelu, "gelu"),
    "activation written out": (NewGelu, "new_gelu"),
    "unknown activation": (AlmostGelu, "a function that runs again"),
    "transposed linear": (lambda: TransposedLinear(8, 8), "Linear"),
    **{kind.__name__: (kind, "RMSNorm") for kind in NORMS},
}


def run(module: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    x = torch.linspace(-2, 2, 48).reshape(6, 8) if x is None else x
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    grads = [each.grad for each in (x, *module.parameters())]
    module.zero_grad()
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def close(mine: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def nodes_of(result: Tensor) -> set[str]:
    """The names of the nodes of its graph."""
    names: set[str] = set()
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [after for after, _ in node.next_functions if after is not None]
    return names
