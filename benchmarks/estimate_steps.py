"""The training steps that bench_estimate.py predicts and measures, on the models of bench_nn.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from nn_models import (
    MODELS,
    PRECISIONS,
    Case,
    Model,
    Setting,
    language_model,
    squared_output,
    torchvision_model,
)
from nn_ways import checkpointed
from torch import Tensor, nn
from torch.nn import functional

Step = Callable[[], object]

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}


def t5(setting: Setting) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(decoder_start_token_id=0)
    shape = (setting.batch(1, 8), 256)
    return language_model(setting, lambda: T5ForConditionalGeneration(config), shape, "T5Block")


def mlp(setting: Setting) -> Case:
    layers = (nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6))
    return squared_output(setting, lambda: nn.Sequential(*layers), (setting.batch(64, 8192), 2048))


def transformer_encoder(setting: Setting) -> Case:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    return squared_output(setting, make, (setting.batch(1, 16), 512, 512))


class Tagger(nn.Module):
    """An LSTM that predicts a word at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, 512)
        self.lstm = nn.LSTM(512, 512, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 10_000)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


def lstm(setting: Setting) -> Case:
    words = setting.ids(10_000, (setting.batch(1, 32), 256))

    def forward(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    return Case(setting.build(Tagger), forward, [])


OTHER_MODELS = {
    "MLP": Model(mlp),
    "MobileNetV3": Model(torchvision_model("mobilenet_v3_large")),
    "T5-small": Model(t5),
    "LSTM": Model(lstm),
    "TransformerEncoder": Model(transformer_encoder),
}

STEPS = (
    "MLP, Adam",
    "ResNet-50, SGD",
    "ResNet-50, Adam",
    "ResNet-50, momentum, autocast",
    "ResNet-50, momentum, autocast, channels last",
    "ConvNeXt-T, AdamW",
    "ConvNeXt-T, AdamW, autocast",
    "ViT-B, AdamW",
    "ViT-B, AdamW, autocast",
    "MobileNetV3, SGD",
    "MobileNetV3, Adam",
    "BERT, AdamW",
    "BERT, AdamW, autocast",
    "GPT-2, AdamW",
    "GPT-2, AdamW, autocast",
    "GPT-2, fused AdamW, checkpointing",
    "Llama, AdamW",
    "Llama, AdamW, bf16",
    "Llama, SGD, bf16, checkpointing",
    "T5-small, Adam",
    "T5-small, SGD, autocast",
    "UNet, Adam",
    "UNet, Adam, autocast",
    "UNet, SGD, checkpointing",
    "LSTM, Adam",
    "TransformerEncoder, SGD",
)
"""Model, optimizer, and what differs from float32, the usual memory format and no checkpoints."""


def make_step(name: str, device: str) -> Step:
    """A step that runs forward, backward and optimizer; its model and its inputs are there."""
    model_name, optimizer_name, *options = name.split(", ")
    precision = next((option for option in options if option in PRECISIONS), "float32")
    case = {**MODELS, **OTHER_MODELS}[model_name].build(Setting(device, "full", precision))
    model, forward = case.model, case.forward
    if "channels last" in options:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if "checkpointing" in options:
        checkpointed(model, case.blocks)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(model).backward()
        optimizer.step()

    return step
