"""Real models, converted and trained: equal to the unconverted run, and never with more kept."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import brim

Batch = tuple[Any, ...]
Loss = Callable[[nn.Module, int], torch.Tensor]

STEPS = 8  # an error in a gradient or a statistic shows in the next one


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages warn of is not ours
        return pytest.importorskip(name)


@dataclass
class Trained:
    """What a run left."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    kept: int  # bytes between the first forward and its backward


def train(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    prepare: Callable[[nn.Module], None],
    optimizer: str,
    convert: dict[str, Any] | None,
    steps: int = STEPS,
) -> Trained:
    torch.manual_seed(0)
    net = make().train()
    prepare(net)
    if convert is not None:
        report = brim.convert(net, **convert)
        assert report.replaced
    trained = [p for p in net.parameters() if p.requires_grad]
    update = (
        torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(trained, lr=1e-3)
    )
    torch.manual_seed(1)
    losses, kept = [], 0
    for step in range(steps):
        with brim.PeakMeter("cpu") as meter:
            loss = loss_of(net, step)
        if step == 0:
            kept = meter.left
        losses.append(loss.item())
        update.zero_grad()
        loss.backward()
        update.step()
    return Trained(losses, {k: v.clone() for k, v in net.state_dict().items()}, kept)


def check_equal(ours: Trained, torchs: Trained) -> None:
    assert ours.losses == torchs.losses
    assert ours.losses[-1] != ours.losses[0], "something was learned"
    assert list(ours.state) == list(torchs.state)
    for name, value in torchs.state.items():
        assert torch.equal(ours.state[name], value), name
    assert ours.kept <= torchs.kept


def check_near(ours: Trained, torchs: Trained) -> None:
    """Where a gradient passes a frozen convolution, another kernel adds up in another order."""
    torch.testing.assert_close(
        torch.tensor(ours.losses), torch.tensor(torchs.losses), rtol=1e-3, atol=1e-4
    )
    assert ours.losses[0] == torchs.losses[0]
    for name, value in torchs.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=1e-2, atol=1e-3)
    assert ours.kept <= torchs.kept


# -- Images ---------------------------------------------------------------------------------------


def image_loss(side: int, classes: int = 10) -> Loss:
    def loss(net: nn.Module, step: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(2, 3, side, side, generator=dice)
        y = torch.randint(classes, (2,), generator=dice)
        return nn.functional.cross_entropy(net(x), y)

    return loss


def batch_norms(net: nn.Module) -> list[nn.Module]:
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


def all_trainable(net: nn.Module) -> None:
    pass


def frozen_backbone(net: nn.Module) -> None:
    net.requires_grad_(False)
    for layer in batch_norms(net):
        layer.eval()
    net.get_submodule("fc").requires_grad_(True)


def first_and_last_trainable(net: nn.Module) -> None:
    frozen_backbone(net)
    net.get_submodule("conv1").requires_grad_(True)


def norms_trainable(net: nn.Module) -> None:
    frozen_backbone(net)
    for layer in batch_norms(net):
        layer.requires_grad_(True)


def resnet() -> nn.Module:
    made: nn.Module = imported("torchvision").models.resnet18(num_classes=10)
    return made


def test_resnet_all_trainable(held: int) -> None:
    loss = image_loss(32)
    torchs = train(resnet, loss, all_trainable, "sgd", None)
    for recompute, share in ((None, 1.0), ("cheap", 0.75)):
        ours = train(resnet, loss, all_trainable, "sgd", {"recompute": recompute})
        check_equal(ours, torchs)
        assert ours.kept <= share * torchs.kept


def test_resnet_with_a_frozen_backbone(held: int) -> None:
    loss = image_loss(32)
    torchs = train(resnet, loss, frozen_backbone, "sgd", None)
    ours = train(resnet, loss, frozen_backbone, "sgd", {})
    check_equal(ours, torchs)


@pytest.mark.parametrize(
    ("prepare", "share"),
    [(first_and_last_trainable, 0.1), (norms_trainable, 0.6)],
    ids=["first and last", "norms"],
)
def test_resnet_with_gradients_through_frozen_layers(
    prepare: Callable[[nn.Module], None], share: float, held: int
) -> None:
    loss = image_loss(32)
    torchs = train(resnet, loss, prepare, "sgd", None)
    ours = train(resnet, loss, prepare, "sgd", {})
    check_near(ours, torchs)
    assert ours.kept < share * torchs.kept


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_convnext(recompute: str | None, held: int) -> None:
    imported("torchvision")
    convnext = importlib.import_module("torchvision.models.convnext")

    def make() -> nn.Module:
        config = convnext.CNBlockConfig
        blocks = [config(16, 32, 2), config(32, None, 2)]
        made: nn.Module = convnext.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=10)
        return made

    loss = image_loss(32)
    torchs = train(make, loss, all_trainable, "adamw", None)
    ours = train(make, loss, all_trainable, "adamw", {"recompute": recompute})
    check_equal(ours, torchs)
    if recompute == "cheap":
        assert ours.kept < 0.8 * torchs.kept


def test_mobilenet(held: int) -> None:
    """Depthwise convolutions and ReLU6 in place."""
    models = imported("torchvision").models
    loss = image_loss(32)

    def make() -> nn.Module:
        made: nn.Module = models.mobilenet_v2(num_classes=10, width_mult=0.25)
        return made

    check_equal(
        train(make, loss, all_trainable, "sgd", {}, steps=6),
        train(make, loss, all_trainable, "sgd", None, steps=6),
    )


# -- Text -----------------------------------------------------------------------------------------


def bert(attention: str) -> Callable[[], nn.Module]:
    transformers = imported("transformers")

    def make() -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            attn_implementation=attention,
        )
        made: nn.Module = transformers.BertModel(config)
        return made

    return make


def text_loss(net: nn.Module, step: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(step)
    tokens = torch.randint(50, (4, 24), generator=dice)
    mask = torch.ones_like(tokens)
    mask[0, 12:] = 0
    out = net(input_ids=tokens, attention_mask=mask)
    return out.last_hidden_state.square().mean() + out.pooler_output.sum(1).square().mean()


def frozen_encoder(net: nn.Module) -> None:
    """Embeddings and pooler are trained; the gradient passes the encoder."""
    net.get_submodule("encoder").requires_grad_(False)


def only_biases(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_bert_all_trainable(attention: str, recompute: str | None, held: int) -> None:
    make = bert(attention)
    torchs = train(make, text_loss, all_trainable, "adamw", None)
    ours = train(make, text_loss, all_trainable, "adamw", {"recompute": recompute})
    check_equal(ours, torchs)
    assert ours.kept < torchs.kept, "dropout alone saves"


@pytest.mark.parametrize(
    ("prepare", "share"),
    [(frozen_encoder, 0.9), (only_biases, 0.9)],
    ids=["frozen encoder", "only biases"],
)
def test_bert_partly_frozen(prepare: Callable[[nn.Module], None], share: float, held: int) -> None:
    make = bert("sdpa")
    torchs = train(make, text_loss, prepare, "adamw", None)
    ours = train(make, text_loss, prepare, "adamw", {})
    if prepare is only_biases:
        check_near(ours, torchs)
    else:
        check_equal(ours, torchs)
    assert ours.kept < share * torchs.kept


def test_bert_with_its_functions_too(held: int) -> None:
    """Attention calls functions for its dropout, and its activation is a class of its own."""
    make = bert("eager")

    def saving_loss(net: nn.Module, step: int) -> torch.Tensor:
        with brim.saving():
            return text_loss(net, step)

    torchs = train(make, text_loss, frozen_encoder, "adamw", None)
    layers = train(make, text_loss, frozen_encoder, "adamw", {"functions": False})
    everything = train(make, saving_loss, frozen_encoder, "adamw", {})
    check_equal(everything, torchs)
    assert everything.kept < layers.kept < torchs.kept


# -- There and back -------------------------------------------------------------------------------


def test_restore_gives_identical_outputs() -> None:
    torch.manual_seed(0)
    net = resnet().eval()
    x = torch.randn(2, 3, 32, 32)
    before = {name: type(module) for name, module in net.named_modules()}
    expected = net(x)
    brim.convert(net, recompute="cheap")
    assert any(type(m).__module__.startswith("brim") for m in net.modules())
    assert torch.equal(net(x), expected)
    brim.restore(net)
    assert {name: type(module) for name, module in net.named_modules()} == before
    assert torch.equal(net(x), expected)
    assert not any("recompute" in vars(module) for module in net.modules())
