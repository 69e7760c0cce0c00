"""The models of `bench_nn.py`: real shapes on an accelerator, small ones on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TRAININGS = ("full", "LoRA q,v", "LoRA all-linear", "BitFit", "first layer", "norms", "adapters")
PRECISIONS = ("float32", "autocast", "bf16")

Forward = Callable[[nn.Module], Tensor]  # the forward pass of a training step, with its loss


@dataclass
class Case:
    """A model and its training step.

    Attributes:
        model: in the precision asked for, with what is not trained frozen.
        forward: computes the loss.
        blocks: the classes of the blocks that checkpointing runs again.
    """

    model: nn.Module
    forward: Forward
    blocks: Sequence[str]


@dataclass
class Setting:
    """What to build.

    Attributes:
        device: where.
        training: one of `TRAININGS`.
        precision: one of `PRECISIONS`.
        scale: times the usual batch size.
    """

    device: str
    training: str
    precision: str
    scale: float = 1

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def batch(self, small: int, usual: int) -> int:
        return max(1, round(self.scale * (small if self.small else usual)))

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "autocast"):
            yield

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device(self.device):  # random numbers of a large model take long on a CPU
            return make().to(self.dtype).train()

    def ids(self, most: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(most, shape, device=self.device)


@dataclass
class Model:
    """How to build a model.

    Attributes:
        make: builds it for a setting.
        adapters: the names of the layers that get adapters, per kind of LoRA.
        trainings: how it can be trained beside that.
        head: what BitFit trains beside the biases.
    """

    make: Callable[[Setting], Case]
    adapters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    head: str = "head"
    trainings: Sequence[str] = ("full", "BitFit")

    def build(self, setting: Setting) -> Case:
        torch.manual_seed(0)
        case = self.make(setting)
        model, training = case.model, setting.training
        if training == "BitFit":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("bias") or self.head in name)
        elif training == "first layer":
            model.eval().requires_grad_(False)
            next(model.parameters()).requires_grad_(True)
        elif training == "norms":
            model.eval().requires_grad_(False)
            for module in model.modules():
                module.requires_grad_("Norm" in type(module).__name__)
        elif training.startswith("LoRA"):
            import peft

            names = list(self.adapters[training])
            config = peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=names)
            case.model = peft.get_peft_model(model, config).train()
        return case


def squared_output(
    setting: Setting, make: Callable[[], nn.Module], shape: tuple[int, ...], *blocks: str
) -> Case:
    """A model of random numbers whose loss is the mean square of its output."""
    data = torch.randn(shape, device=setting.device, dtype=setting.dtype)

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return model(data).float().square().mean()

    return Case(setting.build(make), forward, blocks)


# -- Images ----------------------------------------------------------------------------------------


def images(setting: Setting, make: Callable[[], nn.Module], side: int, *blocks: str) -> Case:
    batch = setting.batch(4, 64)
    data = torch.randn(batch, 3, side, side, device=setting.device, dtype=setting.dtype)
    target = setting.ids(1000, (batch,))

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return functional.cross_entropy(model(data).float(), target)

    return Case(setting.build(make), forward, blocks)


def torchvision_model(name: str, *blocks: str, **options: Any) -> Callable[[Setting], Case]:
    def make(setting: Setting) -> Case:
        from torchvision import models

        model = partial(getattr(models, name), **options)
        return images(setting, model, 64 if setting.small else 224, *blocks)

    return make


def vit(setting: Setting) -> Case:
    from torchvision.models import VisionTransformer

    shape = (64, 8, 4, 3, 192, 768) if setting.small else (224, 16, 12, 12, 768, 3072)
    return images(setting, lambda: VisionTransformer(*shape), shape[0], "EncoderBlock")


# -- Text ------------------------------------------------------------------------------------------


def bert(setting: Setting) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig()
    if setting.small:
        config = BertConfig(
            hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768
        )
    ids = setting.ids(config.vocab_size, (setting.batch(4, 32), 64 if setting.small else 128))
    target = setting.ids(2, ids.shape[:1])

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return model(input_ids=ids, labels=target).loss

    make = setting.build(lambda: BertForSequenceClassification(config))
    return Case(make, forward, ["BertLayer"])


def language_model(
    setting: Setting, make: Callable[[], nn.Module], shape: tuple[int, int], block: str
) -> Case:
    model: Any = setting.build(make)
    ids = setting.ids(model.config.vocab_size, shape)

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    return Case(model, forward, [block])


def gpt2(setting: Setting) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=192, n_layer=4, n_head=6) if setting.small else GPT2Config()
    shape = (setting.batch(1, 8), 128 if setting.small else 512)
    return language_model(setting, lambda: GPT2LMHeadModel(config), shape, "GPT2Block")


def llama(setting: Setting) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256 if setting.small else 2048,
        intermediate_size=896 if setting.small else 8192,
        num_hidden_layers=4 if setting.small else 16,
        num_attention_heads=4 if setting.small else 32,
        num_key_value_heads=2 if setting.small else 8,
        vocab_size=8016 if setting.small else 128256,
        tie_word_embeddings=True,
    )
    shape = (setting.batch(1, 4), 256 if setting.small else 1024)
    return language_model(setting, lambda: LlamaForCausalLM(config), shape, "LlamaDecoderLayer")


# -- A transformer encoder with adapters written by hand -----------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer beside a trainable one of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


class AdaptedBlock(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query, self.value = Adapted(width, 8), Adapted(width, 8)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.after_attention = nn.Dropout(0.1)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            activation(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        y = self.before_attention(x)
        q, k, v = (
            layer(y).view(n, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = (
            functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(n, length, width)
        )
        x = x + self.after_attention(self.out(mixed))
        return x + self.feed_forward(x)


def encoder(activation: type[nn.Module]) -> Callable[[Setting], Case]:
    def make(setting: Setting) -> Case:
        length, width, depth = (64, 128, 2) if setting.small else (128, 768, 12)
        blocks = (AdaptedBlock(width, 8, activation) for _ in range(depth))
        shape = (setting.batch(2, 16), length, width)
        case = squared_output(setting, lambda: nn.Sequential(*blocks), shape, "AdaptedBlock")
        for name, parameter in case.model.named_parameters():
            parameter.requires_grad_(".down." in name or ".up." in name)
        return case

    return make


# -- A UNet such as that of Stable Diffusion -------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two convolutions, each behind GroupNorm and SiLU, with the time added in between."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class Attention(nn.Module):
    """Attention to the input itself or to a context."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            each.view(n, -1, 4, width // 4).transpose(1, 2)
            for each in (self.q(x), self.k(context), self.v(context))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(mixed.reshape(n, length, width))


class GatedGelu(nn.Module):
    """The feed-forward network's first half."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * out)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * functional.gelu(gate)


class TransformerBlock(nn.Module):
    """Attention to itself, attention to the context, and a feed-forward network."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.proj_in, self.proj_out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attn1, self.attn2 = Attention(width, width), Attention(width, context)
        self.ff = nn.Sequential(GatedGelu(width, 4 * width), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norm1(y)
        y = y + self.attn1(normed, normed)
        y = y + self.attn2(self.norm2(y), context)
        y = y + self.ff(self.norm3(y))
        return x + self.proj_out(y.transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """Two levels down, two up, with skips."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(4, width, 3, padding=1)
        self.down1, self.mix1 = ResidualBlock(width, width, time), TransformerBlock(width, context)
        self.downsample = nn.Conv2d(width, width, 3, 2, 1)
        self.down2 = ResidualBlock(width, 2 * width, time)
        self.mix2 = TransformerBlock(2 * width, context)
        self.middle = ResidualBlock(2 * width, 2 * width, time)
        self.up2 = ResidualBlock(4 * width, 2 * width, time)
        self.upsample = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up1 = ResidualBlock(2 * width, width, time)
        self.mix3 = TransformerBlock(width, context)
        self.norm, self.conv_out = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        time = self.time(time)
        first = self.mix1(self.down1(self.conv_in(x), time), context)
        second = self.mix2(self.down2(self.downsample(first), time), context)
        y = self.up2(torch.cat([self.middle(second, time), second], 1), time)
        y = self.upsample(functional.interpolate(y, scale_factor=2.0))
        y = self.mix3(self.up1(torch.cat([y, first], 1), time), context)
        return self.conv_out(functional.silu(self.norm(y)))


def unet(setting: Setting) -> Case:
    n = setting.batch(2, 4)
    width, side = (32, 32) if setting.small else (320, 64)
    options: Any = {"device": setting.device, "dtype": setting.dtype}
    noisy, time = torch.randn(n, 4, side, side, **options), torch.randn(n, width, **options)
    context = torch.randn(n, 77, 768, **options)

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return functional.mse_loss(model(noisy, time, context).float(), noisy.float())

    model = setting.build(lambda: UNet(width, 768))
    return Case(model, forward, ["ResidualBlock", "TransformerBlock"])


# -- Rows ------------------------------------------------------------------------------------------

_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

MODELS: Mapping[str, Model] = {
    "ResNet-50": Model(
        torchvision_model("resnet50", "Bottleneck"),
        head="fc",
        trainings=("full", "BitFit", "first layer", "norms"),
    ),
    "ConvNeXt-T": Model(torchvision_model("convnext_tiny", "CNBlock"), head="classifier"),
    "EfficientNet-B0": Model(torchvision_model("efficientnet_b0", "MBConv"), head="classifier"),
    "GoogLeNet": Model(
        torchvision_model("googlenet", "Inception", aux_logits=False, init_weights=False), head="fc"
    ),
    "ShuffleNet": Model(torchvision_model("shufflenet_v2_x1_0", "InvertedResidual"), head="fc"),
    "ViT-B": Model(vit),
    "BERT": Model(
        bert,
        {
            "LoRA q,v": ("query", "value"),
            "LoRA all-linear": ("query", "key", "value", "dense"),
        },
        head="classifier",
    ),
    "GPT-2": Model(
        gpt2, {"LoRA q,v": ("c_attn",), "LoRA all-linear": ("c_attn", "c_proj", "c_fc")}
    ),
    "Llama": Model(llama, {"LoRA q,v": ("q_proj", "v_proj"), "LoRA all-linear": _LLAMA}),
    "UNet": Model(
        unet,
        {
            "LoRA q,v": ("q", "v"),
            "LoRA all-linear": ("q", "k", "v", "out", "ff.0.proj", "ff.1"),
        },
        head="conv_out",
    ),
    "Encoder ReLU": Model(encoder(nn.ReLU), trainings=["adapters"]),
    "Encoder GELU": Model(encoder(nn.GELU), trainings=["adapters"]),
}

ROWS: Sequence[tuple[str, str, str]] = [
    (model, training, precision)
    for model, how in MODELS.items()
    for training in TRAININGS
    if training in (*how.trainings, *how.adapters)
    for precision in PRECISIONS
]
"""All rows: model, training, precision."""

USUAL = {
    *(("ResNet-50", each, "float32") for each in ("first layer", "norms")),
    *(("ResNet-50", "full", each) for each in ("float32", "autocast")),
    *(("ConvNeXt-T", "full", each) for each in ("float32", "autocast")),
    *((each, "full", "float32") for each in ("EfficientNet-B0", "GoogLeNet", "ShuffleNet")),
    *(("ViT-B", each, "autocast") for each in ("full", "BitFit")),
    *(("BERT", each, "autocast") for each in ("full", "BitFit")),
    ("GPT-2", "full", "autocast"),
    *(("Llama", each, "bf16") for each in ("full", "LoRA q,v", "LoRA all-linear")),
    *(("UNet", "full", each) for each in ("float32", "autocast")),
    *((f"Encoder {each}", "adapters", "autocast") for each in ("ReLU", "GELU")),
}
"""The rows of a run that names none."""

QUICK = {
    ("ResNet-50", "full", "autocast"),
    ("ConvNeXt-T", "full", "float32"),
    ("EfficientNet-B0", "full", "float32"),
    ("ViT-B", "full", "autocast"),
    ("BERT", "full", "autocast"),
    ("GPT-2", "full", "autocast"),
    *(("Llama", each, "bf16") for each in ("full", "LoRA all-linear")),
    ("UNet", "full", "autocast"),
}
"""The rows of a run of a few minutes."""
