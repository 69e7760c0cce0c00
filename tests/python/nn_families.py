"""Small models of the families that people fine-tune, each with a loss."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

Loss = Callable[[nn.Module, int], torch.Tensor]
Family = tuple[Callable[[], nn.Module], Loss]


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages warn of is not ours
        return pytest.importorskip(name)


# -- Text ------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def text_model(model: str, config: str, **options: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def tokens(step: int, rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(step))


def language_loss(net: nn.Module, step: int) -> torch.Tensor:
    ids = tokens(step)
    loss: torch.Tensor = net(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def class_loss(net: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = net(input_ids=tokens(step), labels=torch.tensor([0, 1])).loss
    return loss


def decoder(name: str, config: str | None = None, **options: Any) -> Family:
    config = config or f"{name}Config"
    given = SMALL | TOKENS | {"num_key_value_heads": 2} | options
    return lambda: text_model(f"{name}ForCausalLM", config, **given), language_loss


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61} | TOKENS
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 61,
    "decoder_start_token_id": 0,
}

TEXT: Mapping[str, Family] = {
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral"),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3", head_dim=8),
    "gemma": decoder("Gemma", head_dim=8),
    "gemma2": decoder("Gemma2", head_dim=8),
    "gemma3": decoder("Gemma3", "Gemma3TextConfig", head_dim=8),
    "phi3": decoder("Phi3"),
    "gpt2": (lambda: text_model("GPT2LMHeadModel", "GPT2Config", **GPT2), language_loss),
    "t5": (
        lambda: text_model(
            "T5ForConditionalGeneration", "T5Config", **T5, feed_forward_proj="gated-gelu"
        ),
        language_loss,
    ),
    "t5 relu": (
        lambda: text_model("T5ForConditionalGeneration", "T5Config", **T5),
        language_loss,
    ),
    "bert": (
        lambda: text_model("BertForSequenceClassification", "BertConfig", **SMALL),
        class_loss,
    ),
}

# -- Images ----------------------------------------------------------------------------------------


def image_loss(side: int, classes: int = 10) -> Loss:
    def loss(net: nn.Module, step: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(2, 3, side, side, generator=dice)
        y = torch.randint(classes, (2,), generator=dice)
        out = net(x)
        return nn.functional.cross_entropy(getattr(out, "logits", out), y)

    return loss


def timm_model(name: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = imported("timm").create_model(name, num_classes=10, **options)
    return made


def vision_model(name: str, **options: Any) -> nn.Module:
    made: nn.Module = getattr(imported("torchvision").models, name)(num_classes=10, **options)
    return made


def vision_convnext() -> nn.Module:
    imported("torchvision")
    convnext = importlib.import_module("torchvision.models.convnext")
    blocks = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)]
    made: nn.Module = convnext.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=10)
    return made


def unet() -> nn.Module:
    made: nn.Module = imported("diffusers").UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return made


def noise_loss(net: nn.Module, step: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(step)
    x = torch.randn(2, 4, 8, 8, generator=dice)
    context = torch.randn(2, 5, 16, generator=dice)
    out = net(x, torch.tensor([1, 500]), encoder_hidden_states=context).sample
    return nn.functional.mse_loss(out, x)


VIT = {"image_size": 32, "patch_size": 8, "num_labels": 10}
IMAGES: Mapping[str, Family] = {
    "vit": (
        lambda: text_model("ViTForImageClassification", "ViTConfig", **SMALL, **VIT),
        image_loss(32),
    ),
    "timm vit": (
        lambda: timm_model(
            "vit_tiny_patch16_224",
            img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, init_values=0.1,
        ),
        image_loss(32),
    ),
    "timm convnext": (
        lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
        image_loss(32),
    ),
    "timm efficientnet": (lambda: timm_model("tinynet_e"), image_loss(32)),
    "timm resnet": (lambda: timm_model("seresnet18", channels=(16, 16, 32, 32)), image_loss(32)),
    "convnext": (vision_convnext, image_loss(32)),
    "efficientnet": (lambda: vision_model("efficientnet_b0"), image_loss(32)),
    "resnet": (lambda: vision_model("resnet18"), image_loss(32)),
    "unet": (unet, noise_loss),
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {**TEXT, **IMAGES}
