"""brim.convert and brim.restore: what changes, what stays, and what is reported."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import brim
from brim.compat import memsave_torch
from brim.nn.convert import COUNTERPARTS

from .nn_cases import ACTIVATIONS, REQUIRED

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Linear": (4, 4),
    "LayerNorm": (4,),
    "RMSNorm": (4,),
    "GroupNorm": (2, 4),
    **REQUIRED,
    **{f"Conv{n}d": (4, 4, 3) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (4, 4, 3) for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": (4,) for n in (1, 2, 3)},
    **{f"{kind}Pool{n}d": (2,) for kind in ("Max", "Avg", "AdaptiveAvg") for n in (1, 2, 3)},
}
LAYERS = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Linear",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    *ACTIVATIONS,
    "Dropout",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
]


def make(name: str) -> nn.Module:
    layer: nn.Module = getattr(nn, name)(*ARGUMENTS.get(name, ()))
    return layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = nn.ReLU()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.act(self.conv(x)).mean((2, 3)))
        return result


def test_every_layer_of_the_list_has_a_counterpart() -> None:
    assert {kind.__name__ for kind in COUNTERPARTS} == set(LAYERS)
    for original, own in COUNTERPARTS.items():
        assert issubclass(own, original)
        assert own.__name__ == original.__name__
        assert getattr(brim.nn, own.__name__) is own


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_changes_its_class_and_nothing_else(name: str) -> None:
    layer = make(name)
    before = dict(layer.__dict__)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    text = repr(layer)
    report = brim.convert(layer)
    assert type(layer) is getattr(brim.nn, name)
    assert [(each.name, each.type) for each in report.replaced] == [("", name)]
    assert repr(layer) == f"brim.nn.{text}"
    assert layer.__dict__ == before
    assert layer.state_dict().keys() == state.keys()
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in state.items())
    assert brim.restore(layer) is layer
    assert type(layer) is getattr(nn, name)


@pytest.mark.parametrize("name", LAYERS)
def test_the_constructor_and_the_state_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    own = getattr(brim.nn, name)(*ARGUMENTS.get(name, ()))
    torch.manual_seed(0)
    original = make(name)
    assert repr(own) == f"brim.nn.{original!r}"
    for mine, other in zip(own.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, other)
    original.load_state_dict(own.state_dict())
    own.load_state_dict(original.state_dict())
    again = pickle.loads(pickle.dumps(own))
    assert type(again) is type(own)
    assert type(copy.deepcopy(own)) is type(own)


def test_objects_hooks_flags_and_parameters_stay() -> None:
    model = Block()
    model.conv.weight.requires_grad_(False)
    model.act.eval()
    seen: list[str] = []
    model.conv.register_forward_hook(lambda *_: seen.append("forward"))
    model.conv.register_full_backward_hook(lambda *_: seen.append("backward"))
    objects = list(model.modules())
    parameters = list(model.parameters())
    brim.convert(model)
    assert [id(module) for module in model.modules()] == [id(module) for module in objects]
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert not model.conv.weight.requires_grad
    assert not model.act.training
    assert model.conv.training
    model(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


def test_values_and_gradients_stay() -> None:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(2, 3, 8, 8)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    brim.convert(model)
    model(x).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_twice_is_once() -> None:
    model = Block()
    first = brim.convert(model)
    classes = [type(module) for module in model.modules()]
    second = brim.convert(model)
    assert [type(module) for module in model.modules()] == classes
    assert len(first.replaced) == 3
    assert not second.replaced
    assert {each.reason for each in second.kept} == {"brim's already"}


def test_a_shared_layer_is_one_layer_with_two_names() -> None:
    act = nn.ReLU()
    model = nn.Sequential(act, nn.Linear(2, 2), act)
    report = brim.convert(model)
    assert model[0] is model[2]
    assert type(act) is brim.nn.ReLU
    assert [each.names for each in report.replaced] == [("0", "2"), ("1",)]
    assert brim.convert(model, only="2").kept[0].names == ("0", "2")


class MyLinear(nn.Linear):
    pass


class MyOwn(brim.nn.Linear):
    pass


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: MyOwn(2, 2), "brim's already"),
        (lambda: memsave_torch.nn.MemSaveLinear(2, 2), "brim's already"),
        (lambda: memsave_torch.nn.MemSaveRMSLayerNorm(2), "brim's already"),
        (parametrized, "it is parametrized"),
        (lambda: nn.LazyLinear(2), "it is lazy: run the model once before"),
        (lambda: nn.Tanhshrink(), "brim has no counterpart"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "its parameters are complex"),
    ],
    ids=[
        "own",
        "compat",
        "compat alone",
        "parametrized",
        "lazy",
        "unknown",
        "complex",
    ],
)
def test_what_cannot_be_replaced_is_kept_and_named(
    make: Callable[[], nn.Module], reason: str
) -> None:
    model = nn.Sequential(make())
    kind = type(model[0])
    report = brim.convert(model)
    assert type(model[0]) is kind
    assert [each.reason for each in report.kept if each.name == "0"] == [reason]
    assert not [each for each in report.replaced if each.name == "0"]


def test_a_parametrized_layer_still_computes() -> None:
    model = nn.Sequential(parametrized(), nn.ReLU()).eval()
    x = torch.randn(3, 2)
    expected = model(x)
    brim.convert(model)
    assert torch.equal(model(x), expected)


def test_a_layer_of_brim_can_be_parametrized_later() -> None:
    layer = brim.nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None  # type: ignore[union-attr]


def replaced(**choice: Any) -> set[str]:
    model = nn.Sequential(Block(), Block(), nn.ReLU())
    return {each.name for each in brim.convert(model, **choice).replaced}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"only": nn.ReLU}, {"0.act", "1.act", "2"}),
        ({"only": (nn.ReLU, nn.Linear)}, {"0.act", "1.act", "2", "0.last", "1.last"}),
        ({"only": "0.*"}, {"0.conv", "0.act", "0.last"}),
        ({"only": "0"}, {"0.conv", "0.act", "0.last"}),
        ({"only": ["*.conv", nn.Linear]}, {"0.conv", "1.conv", "0.last", "1.last"}),
        ({"only": lambda name, module: name.endswith("act")}, {"0.act", "1.act"}),
        ({"skip": Block}, {"2"}),
        ({"skip": ["0", "*.last"]}, {"1.conv", "1.act", "2"}),
        ({"skip": lambda name, module: isinstance(module, nn.Conv2d)},
         {"0.act", "0.last", "1.act", "1.last", "2"}),
        ({"only": nn.ReLU, "skip": "1"}, {"0.act", "2"}),
        ({"only": []}, set()),
    ],
)  # fmt: skip
def test_only_and_skip(choice: dict[str, Any], names: set[str]) -> None:
    assert replaced(**choice) == names


def test_what_was_not_chosen_is_reported() -> None:
    report = brim.convert(Block(), only=nn.ReLU, skip="act")
    assert {each.name: each.reason for each in report.kept} == {
        "conv": "not chosen by only",
        "act": "left out by skip",
        "last": "not chosen by only",
    }


@pytest.mark.parametrize(
    ("choice", "error", "text"),
    [
        ({"only": "nothing.*"}, ValueError, "only: the pattern 'nothing.*' matches no name"),
        ({"skip": ["act", "ac"]}, ValueError, "skip: the pattern 'ac' matches no name"),
        ({"only": 3}, TypeError, "only must be a type of module"),
        ({"skip": [3]}, TypeError, "skip must be a type of module"),
        ({"only": int}, TypeError, "only must be a type of module"),
        ({"only": nn.ReLU()}, TypeError, "only must be a type of module"),
        (
            {"recompute": "all"},
            ValueError,
            'recompute must be None, "cheap", "products" or "auto", got \'all\'',
        ),
        ({"recompute": True}, ValueError, "recompute must be"),
        ({"functions": "no"}, TypeError, "functions must be True or False, got 'no'"),
    ],
)
def test_a_wrong_choice_is_an_error_and_changes_nothing(
    choice: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = Block()
    with pytest.raises(error) as caught:
        brim.convert(model, **choice)
    assert text in str(caught.value)
    assert type(model.conv) is nn.Conv2d
    assert type(model.act) is nn.ReLU


@pytest.mark.parametrize("function", [brim.convert, brim.restore])
def test_only_modules(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"torch.nn.Module, got a tensor of shape \[2\]$"):
        brim.audit(torch.ones(2), nn.ReLU())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass its inputs, .* forward of ReLU takes \(input"):
        brim.audit(nn.ReLU())
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got \[\]"):
        function([])


def test_recompute_is_set_and_restored() -> None:
    model = Block()
    brim.convert(model, recompute="cheap", skip="last")
    assert model.conv.recompute is True
    assert model.last.__dict__.get("recompute") is None
    assert model.act.recompute is True
    brim.convert(model, recompute="cheap")
    assert model.last.recompute is True
    brim.restore(model)
    assert not any("recompute" in module.__dict__ for module in model.modules())
    brim.convert(model)
    assert model.conv.recompute is False


RECOMPUTES = ["Linear", *(name for name in ACTIVATIONS if name != "PReLU")] + [
    f"Conv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3)
]


@pytest.mark.parametrize("name", LAYERS)
def test_recompute_is_an_attribute_of_what_can_ask(name: str) -> None:
    layer = make(name)
    brim.convert(layer, recompute="cheap")
    assert ("recompute" in layer.__dict__) == (name in RECOMPUTES)
    assert getattr(layer, "recompute", None) is (True if name in RECOMPUTES else None)
    brim.restore(layer)
    assert "recompute" not in layer.__dict__
    assert not hasattr(layer, "recompute")


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "PReLU"])
def test_an_activation_that_recomputes_keeps_a_copy_of_the_weights_before_it(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8), make(name), nn.AvgPool2d(2))
    x = torch.randn(4, 8, 16, 16)
    grads = []
    for options in ({}, {"recompute": "cheap"}):
        brim.convert(model, **options)
        kept = brim.audit(model, x).to_dict()["layers"][1]["brim"]
        assert (kept == 2 * 8 * 4) == bool(options)  # of weight and bias, which may change
        given = x.clone().requires_grad_()
        model(given).square().sum().backward()
        grads.append([given.grad, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    brim.restore(model)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_recompute_reaches_classes_that_derive_from_brims() -> None:
    model = nn.Sequential(MyOwn(2, 2), memsave_torch.nn.MemSaveReLU())
    brim.convert(model, recompute="cheap")
    assert [layer.recompute for layer in model] == [True, True]
    brim.restore(model)
    assert [type(layer) for layer in model] == [MyOwn, memsave_torch.nn.MemSaveReLU]
    assert [layer.recompute for layer in model] == [False, False]


def test_a_model_that_holds_itself_is_converted() -> None:
    model = Block()
    model.conv.parent = model
    model.again = nn.Sequential(model, model.act)
    report = brim.convert(model, recompute="cheap")
    assert {each.name: each.names for each in report.replaced} == {
        "conv": ("conv",),
        "act": ("act", "again.1"),
        "last": ("last",),
    }
    assert brim.restore(model) is model
    assert type(model.conv) is nn.Conv2d
    assert brim.audit(model, torch.randn(2, 3, 8, 8)).torch_nn > 0


def test_restore_leaves_others_alone() -> None:
    class Own(brim.nn.Linear):
        pass

    model = nn.Sequential(Own(2, 2), nn.Tanhshrink(), brim.nn.ReLU())
    brim.restore(model)
    assert [type(module) for module in model] == [Own, nn.Tanhshrink, nn.ReLU]


def test_wrapped_models_are_converted_inside() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = Wrapper(Block())
    assert {each.name for each in brim.convert(model).replaced} == {
        "module.conv",
        "module.act",
        "module.last",
    }


def test_a_model_traced_by_fx_is_converted_afterwards() -> None:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    traced = torch.fx.symbolic_trace(model)
    assert {each.name for each in brim.convert(traced).replaced} == {"conv", "act", "last"}
    result = traced(x)
    assert torch.equal(result, expected)
    assert result.grad_fn.name().startswith("brim::")


def test_attention_keeps_working() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    expected = model(x)
    report = brim.convert(model)
    assert "self_attn.out_proj" in {each.name for each in report.replaced}
    torch.testing.assert_close(model(x), expected)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_the_report_as_text() -> None:
    report = brim.convert(nn.Sequential(nn.ReLU(), nn.Tanhshrink(), nn.Softmin()))
    assert str(report).splitlines() == [
        "1 layer replaced, 2 kept as they are",
        "",
        "layer  type        kept because",
        "-" * 42,
        "1      Tanhshrink  brim has no counterpart",
        "2      Softmin     brim has no counterpart",
    ]
    assert str(brim.convert(nn.Tanhshrink())).splitlines()[-1].startswith("(model)")


# ---------------------------------------------------------------- guides in place


@pytest.mark.parametrize(
    "use",
    [
        lambda report: report(torch.ones(2)),
        lambda report: report.parameters(),
        lambda report: report.to("cpu"),
        lambda report: report.train(),
        lambda report: report.encoder,
    ],
)
def test_a_report_that_is_used_as_a_model_says_what_it_is(use: Any) -> None:
    report = brim.convert(nn.Sequential(nn.ReLU()))
    with pytest.raises((TypeError, AttributeError), match=r"not `model = brim.convert\(model\)`"):
        use(report)
    assert copy.deepcopy(report) == pickle.loads(pickle.dumps(report)) == report
    assert repr(report) == "<ConversionReport: 1 layer replaced, 0 kept as they are>"


def test_a_printed_model_shows_what_was_converted() -> None:
    class Own(nn.ReLU): ...

    class Derived(brim.nn.ReLU): ...

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanhshrink(), Own(), Derived())
    before = repr(model)
    brim.convert(model)
    assert repr(model).splitlines() == [
        "Sequential(",
        "  (0): brim.nn.Linear(in_features=2, out_features=2, bias=True)",
        "  (1): Tanhshrink()",
        "  (2): Own<brim>()",
        "  (3): Derived()",
        ")",
    ]
    assert model[2]._get_name() == "Own"  # which libraries look up
    assert repr(brim.restore(model)) == before


def test_the_report_tells_what_would_save_more() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    assert 'recompute="cheap" saves most' in str(brim.convert(model))
    assert brim.convert(model, recompute="cheap").hint == ""
    model[1].requires_grad_(False)
    report = brim.convert(model)
    assert report.hint.startswith("hint: 1 BatchNorm layer with frozen weights, but in training")
    assert str(report).endswith(report.hint)
    model[1].eval()
    assert brim.convert(model).hint == ""
