"""The training steps that bench_estimate.py predicts and measures.

Each entry makes one step on a device: the model, its optimizer and its inputs exist beforehand, and
the function that it returns runs forward, backward and optimizer step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]
Make = Callable[[str], Step]
Loss = Callable[[nn.Module], torch.Tensor]
NewOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def training(
    model: nn.Module, loss: Loss, new_optimizer: NewOptimizer, autocast: torch.dtype | None
) -> Step:
    """Forward, backward and optimizer step of a model that is on its device."""
    optimizer = new_optimizer(model.parameters())
    device = next(model.parameters()).device.type

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
            value = loss(model)
        value.backward()
        optimizer.step()

    return step


def vision(
    name: str,
    batch: int,
    size: int,
    new_optimizer: NewOptimizer,
    autocast: torch.dtype | None = None,
    *,
    channels_last: bool = False,
) -> Make:
    def make(device: str) -> Step:
        import torchvision

        model = getattr(torchvision.models, name)().to(device)
        x = torch.randn(batch, 3, size, size, device=device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        y = torch.randint(1000, (batch,), device=device)
        return training(model, lambda m: functional.cross_entropy(m(x), y), new_optimizer, autocast)

    return make


def language(
    kind: str,
    batch: int,
    length: int,
    new_optimizer: NewOptimizer,
    autocast: torch.dtype | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    **config: Any,
) -> Make:
    def make(device: str) -> Step:
        import transformers

        model_class, config_class, vocabulary = {
            "bert": ("BertForMaskedLM", "BertConfig", 30522),
            "gpt2": ("GPT2LMHeadModel", "GPT2Config", 50257),
            "llama": ("LlamaForCausalLM", "LlamaConfig", 32000),
            "t5": ("T5ForConditionalGeneration", "T5Config", 32128),
        }[kind]
        settings = getattr(transformers, config_class)(**config)
        settings.use_cache = False
        settings.decoder_start_token_id = 0  # of T5
        model = getattr(transformers, model_class)(settings).to(device, dtype)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        return training(
            model, lambda m: m(input_ids=tokens, labels=tokens).loss, new_optimizer, autocast
        )

    return make


class Block(nn.Module):
    """Two convolutions with group norm, and a residual connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        y = self.conv2(functional.silu(self.norm2(y)))
        out: torch.Tensor = y + self.skip(x)
        return out


class UNet(nn.Module):
    """Down, attention in the middle, and up with skip connections."""

    def __init__(self, width: int = 64, checkpointing: bool = False) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.checkpointing = checkpointing
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            Block(a, b) for a, b in zip([width, *widths], widths, strict=False)
        )
        self.middle = nn.MultiheadAttention(widths[-1], 4, batch_first=True)
        self.up = nn.ModuleList(
            Block(2 * b, a) for a, b in zip([width, *widths[:-1]], widths, strict=True)
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for block in self.down:
            x = self.run(block, x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        b, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.middle(tokens, tokens, tokens, need_weights=False)[0]
        x = tokens.transpose(1, 2).reshape(b, c, h, w)
        for block in reversed(self.up):
            x = functional.interpolate(x, scale_factor=2)
            x = self.run(block, torch.cat([x, skips.pop()], dim=1))
        out: torch.Tensor = self.last(x)
        return out


def unet(
    batch: int,
    size: int,
    new_optimizer: NewOptimizer,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Make:
    def make(device: str) -> Step:
        model = UNet(**options).to(device)
        x = torch.randn(batch, 3, size, size, device=device)
        return training(model, lambda m: functional.mse_loss(m(x), x), new_optimizer, autocast)

    return make


def lstm(batch: int, length: int, width: int, new_optimizer: NewOptimizer) -> Make:
    def make(device: str) -> Step:
        class Tagger(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(10_000, width)
                self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
                self.head = nn.Linear(width, 10_000)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.head(self.lstm(self.embed(x))[0])
                return out

        model = Tagger().to(device)
        tokens = torch.randint(10_000, (batch, length), device=device)
        return training(
            model,
            lambda m: functional.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten()),
            new_optimizer,
            None,
        )

    return make


def encoder(batch: int, length: int, width: int, new_optimizer: NewOptimizer) -> Make:
    def make(device: str) -> Step:
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(device)
        x = torch.randn(batch, length, width, device=device)
        return training(model, lambda m: m(x).square().mean(), new_optimizer, None)

    return make


def perceptron(batch: int, width: int, new_optimizer: NewOptimizer) -> Make:
    def make(device: str) -> Step:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(*layers).to(device)
        x = torch.randn(batch, width, device=device)
        return training(model, lambda m: m(x).square().mean(), new_optimizer, None)

    return make


BF16 = torch.bfloat16
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}

STEPS: dict[str, Make] = {
    "MLP, Adam": perceptron(8192, 2048, adam),
    "ResNet-50, SGD": vision("resnet50", 64, 224, sgd),
    "ResNet-50, Adam": vision("resnet50", 64, 224, adam),
    "ResNet-50, momentum, autocast": vision("resnet50", 64, 224, momentum, BF16),
    "ResNet-50, momentum, autocast, channels last": vision(
        "resnet50", 64, 224, momentum, BF16, channels_last=True
    ),
    "ConvNeXt-T, AdamW": vision("convnext_tiny", 32, 224, adamw),
    "ConvNeXt-T, AdamW, autocast": vision("convnext_tiny", 32, 224, adamw, BF16),
    "ViT-B, AdamW": vision("vit_b_16", 32, 224, adamw),
    "ViT-B, AdamW, autocast": vision("vit_b_16", 32, 224, adamw, BF16),
    "MobileNetV3, SGD": vision("mobilenet_v3_large", 64, 224, sgd),
    "MobileNetV3, Adam": vision("mobilenet_v3_large", 64, 224, adam),
    "BERT, AdamW": language("bert", 16, 256, adamw),
    "BERT, AdamW, autocast": language("bert", 16, 256, adamw, BF16),
    "GPT-2, AdamW": language("gpt2", 8, 512, adamw),
    "GPT-2, AdamW, autocast": language("gpt2", 8, 512, adamw, BF16),
    "GPT-2, fused AdamW, checkpointing": language("gpt2", 8, 512, fused_adamw, checkpointing=True),
    "Llama, AdamW": language("llama", 4, 1024, adamw, **LLAMA),
    "Llama bf16, AdamW": language("llama", 4, 1024, adamw, dtype=BF16, **LLAMA),
    "Llama bf16, SGD, checkpointing": language(
        "llama", 4, 1024, sgd, dtype=BF16, checkpointing=True, **LLAMA
    ),
    "T5-small, Adam": language("t5", 8, 256, adam),
    "T5-small, SGD, autocast": language("t5", 8, 256, sgd, BF16),
    "UNet, Adam": unet(8, 128, adam),
    "UNet, Adam, autocast": unet(8, 128, adam, BF16),
    "UNet, SGD, checkpointing": unet(8, 128, sgd, checkpointing=True),
    "LSTM, Adam": lstm(32, 256, 512, adam),
    "TransformerEncoder, SGD": encoder(16, 512, 512, sgd),
}
