"""Many models of transformers and timm: all convert, compute the same, and keep no more."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_families import SMALL, TOKENS, Family, imported, language_loss, text_model, timm_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DECODERS = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Phi",
    "Phi3",
    "Olmo",
    "Olmo2",
    "Cohere",
    "Granite",
    "StableLm",
    "GPTNeoX",
    "Starcoder2",
    "Glm",
    "Glm4",
    "Helium",
    "Nemotron",
    "SmolLM3",
    "Exaone4",
    "Arcee",
    "MiniMax",
    "Mixtral",
    "Ernie4_5",
    "SeedOss",
    "Bloom",
    "OPT",
    "Falcon",
    "GPTJ",
    "Mamba",
    "Persimmon",
]
ACTIVATIONS = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu"]

TIMM = [
    "resnet18",
    "resnet50",
    "resnext26ts",
    "seresnet18",
    "skresnet18",
    "resnest14d",
    "resnetv2_50",
    "ecaresnet26t",
    "efficientnet_b0",
    "efficientnetv2_rw_t",
    "tf_efficientnet_lite0",
    "mobilenetv2_050",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small",
    "mnasnet_small",
    "fbnetc_100",
    "ghostnet_050",
    "hardcorenas_a",
    "convnext_atto",
    "convnextv2_atto",
    "regnetx_002",
    "regnety_002",
    "nfnet_l0",
    "dm_nfnet_f0",
    "densenet121",
    "dla34",
    "vovnet39a",
    "hrnet_w18_small",
    "cspresnet50",
    "repvgg_a0",
    "edgenext_xx_small",
    "mobilevit_xxs",
    "mixer_s32_224",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "pit_ti_224",
    "poolformer_s12",
    "xception41",
    "inception_v3",
    "tnt_s_patch16_224",
]


def check(make: Any, loss_of: Any, where: str) -> None:
    """Loss and gradients, and what is kept."""
    torch.manual_seed(0)
    net = make().train()
    figures = []
    for recompute in ("torch", None, "cheap"):
        if recompute != "torch":
            brim.convert(net, recompute=recompute)
        net.zero_grad()
        torch.manual_seed(1)
        with brim.PeakMeter("cpu") as meter:
            loss = loss_of(net, 0)
        kept = meter.left
        loss.backward()
        grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        figures.append((recompute, kept, loss.item(), grads))
    _, torchs, expected, gradients = figures[0]
    for recompute, kept, value, grads in figures[1:]:
        assert kept <= torchs, f"{where}, {recompute}: {kept} instead of {torchs}"
        assert value == pytest.approx(expected, rel=1e-4), where
        assert grads.keys() == gradients.keys(), where
        for name, grad in gradients.items():
            size = grad.norm().item() + 1e-6
            off = (grads[name] - grad).norm().item() / size
            assert off < 1e-3, f"{where}, {recompute}: the gradient of {name} is off by {off:.1e}"
    brim.restore(net)


def random_decoder(name: str) -> Family:
    dice = random.Random(name)
    heads = dice.choice([2, 4])
    head_dim = dice.choice([8, 16])
    options = SMALL | TOKENS | {
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "intermediate_size": dice.choice([24, 40, 64]),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([1, heads]),
        "hidden_act": dice.choice(ACTIVATIONS),
        "attention_dropout": dice.choice([0.0, 0.1]),
        "tie_word_embeddings": dice.choice([True, False]),
        "attn_implementation": "eager" if name == "Gemma2" else dice.choice(["sdpa", "eager"]),
        "rotary_dim": 8,  # of GPTJ
    }  # fmt: skip
    if name == "Falcon":
        del options["head_dim"]
    return lambda: text_model(f"{name}ForCausalLM", f"{name}Config", **options), language_loss


@pytest.mark.parametrize("name", DECODERS)
def test_transformers(name: str, held: int) -> None:
    transformers = imported("transformers")
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    check(*random_decoder(name), name)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, held: int) -> None:
    timm = imported("timm")
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    side = 96 if name == "inception_v3" else 64
    fixed = "patch" in name or name.startswith(("mixer", "pit"))
    options: dict[str, Any] = {"img_size": 64} if fixed and "mixer" not in name else {}
    if "mixer" in name or name.startswith("pit"):
        options, side = {}, 224
    if "patch14" in name:
        options, side = {"img_size": 56}, 56

    def loss_of(net: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(step))
        out = net(x)
        out = out[0] if isinstance(out, tuple) else out
        return out.float().square().mean()

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return timm_model(name, **options)

    check(make, loss_of, name)
