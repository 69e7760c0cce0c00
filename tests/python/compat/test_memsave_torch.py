"""The face of memsave_torch: the layers, the functions, and the conversion of a model."""

from __future__ import annotations

import copy
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brim
from brim.compat import memsave_torch
from brim.compat.memsave_torch.nn import convert_to_memory_saving
from brim.compat.memsave_torch.nn import functional as F  # noqa: N812 (as torch's users write it)

IMAGES = (7, 3, 12, 12)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(3, 5), (7, 3)),
    "Linear of sequences": (lambda: nn.Linear(3, 5), (7, 12, 3)),
    "Linear of images": (lambda: nn.Linear(3, 5), (7, 12, 12, 3)),
    "Conv1d": (lambda: nn.Conv1d(3, 5, 3), (7, 3, 12)),
    "Conv2d": (lambda: nn.Conv2d(3, 5, 3), IMAGES),
    "Conv3d": (lambda: nn.Conv3d(3, 5, 3), (2, 3, 8, 8, 8)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 5, 3), (7, 3, 12)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 5, 3), IMAGES),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(3, 5, 3), (2, 3, 8, 8, 8)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMAGES),
    "BatchNorm2d in eval": (lambda: nn.BatchNorm2d(3).eval(), IMAGES),
    "LayerNorm": (lambda: nn.LayerNorm([3, 12, 12]), IMAGES),
    "RMSLayerNorm": (lambda: memsave_torch.nn.RMSLayerNorm(12), IMAGES),
    "Dropout": (lambda: nn.Dropout(0.3), IMAGES),
    "MaxPool2d": (lambda: nn.MaxPool2d(3), IMAGES),
    "ReLU": (lambda: nn.ReLU(), IMAGES),
    # What the original breaks or drops in silence.
    "Conv2d with reflected edges": (
        lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
        IMAGES,
    ),
    "Conv2d same": (lambda: nn.Conv2d(3, 5, 4, padding="same"), IMAGES),
    "BatchNorm2d without statistics": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        IMAGES,
    ),
    "BatchNorm2d without momentum": (lambda: nn.BatchNorm2d(3, momentum=None), IMAGES),
    "BatchNorm2d plain": (lambda: nn.BatchNorm2d(3, affine=False), IMAGES),
    "LayerNorm without bias": (lambda: nn.LayerNorm(12, bias=False), IMAGES),
    "MaxPool2d ceil": (lambda: nn.MaxPool2d(5, ceil_mode=True), IMAGES),
}


def run(layer: nn.Module, x: Tensor, cotangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The output and, where a cotangent is given, the input's gradient."""
    torch.manual_seed(3)
    y = layer(x)
    if cotangent is not None:
        y.backward(cotangent)
    return y.detach(), x.grad


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")  # once, from torch
@pytest.mark.parametrize("weights_train", [True, False])
@pytest.mark.parametrize("input_trains", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_converted_layer_has_the_values_and_gradients_of_its_original(
    case: str, input_trains: bool, weights_train: bool
) -> None:
    make, shape = CASES[case]
    layer = make().requires_grad_(weights_train)
    saving = convert_to_memory_saving(layer, clone_params=True)
    assert type(saving).__name__.startswith("MemSave")
    x = torch.randn(shape)
    shape_of_output = copy.deepcopy(layer)(x).shape
    trains = input_trains or (weights_train and any(True for _ in layer.parameters()))
    cotangent = torch.randn(shape_of_output) if trains else None
    expected = run(layer, x.clone().requires_grad_(input_trains), cotangent)
    actual = run(saving, x.clone().requires_grad_(input_trains), cotangent)
    torch.testing.assert_close(actual, expected)
    parameters, buffers = dict(saving.named_parameters()), dict(saving.named_buffers())
    for name, parameter in layer.named_parameters():
        assert parameters[name].requires_grad == parameter.requires_grad
        torch.testing.assert_close(parameters[name].grad, parameter.grad)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(buffers[name], buffer)


def test_dropout_of_every_share_scales_its_gradient() -> None:
    for p in (0.0, 0.1, 0.9):
        x = torch.ones(1000, requires_grad=True)
        y = F.dropoutMemSave(x, p, True)
        y.sum().backward()
        assert torch.equal(y, x.grad), p  # ones: what came through is what goes back
    assert torch.equal(F.dropoutMemSave(x, 0.5, False), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pooling_works_in_other_types(dtype: torch.dtype) -> None:
    x = torch.randn(IMAGES, dtype=dtype, requires_grad=True)
    values, indices = F.maxpool2dMemSave(x, 3, ceil_mode=True, return_indices=True)
    expected = nn.functional.max_pool2d(x, 3, ceil_mode=True, return_indices=True)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])
    F.maxpool2dMemSave(x, 2).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_relu_of_minus_infinity_is_zero() -> None:
    assert F.reluMemSave(torch.tensor([-torch.inf, 1.0])).tolist() == [0.0, 1.0]


def test_functions_are_those_of_torch() -> None:
    x, weight, bias = torch.randn(IMAGES), torch.randn(4, 3, 3, 3), torch.randn(4)
    expected = nn.functional.conv2d(x, weight, bias, 2, 1, 1, 1)
    assert torch.equal(F.conv2dMemSave(x, weight, bias, 2, 1, 1, 1), expected)
    assert torch.equal(
        F.convMemSave(x, weight, bias, [2, 2], [1, 1], [1, 1], 1, False, [0, 0]), expected
    )
    back = torch.randn(3, 4, 3, 3)
    expected = nn.functional.conv_transpose2d(x, back, bias, 2, 1, 1, 1, 2)
    assert torch.equal(F.conv_transpose2dMemSave(x, back, bias, 2, 1, 1, 2, 1), expected)
    assert torch.equal(
        F.convMemSave(x, back, bias, [2, 2], [1, 1], [2, 2], 1, True, [1, 1]), expected
    )
    with pytest.raises(ValueError, match="weight must have 3, 4 or 5 dimensions, got 2"):
        F.convMemSave(x, weight[0, 0], None, 1, 0, 1, 1, False, 0)
    assert torch.equal(F.linearMemSave(x, torch.ones(2, 12)), x @ torch.ones(12, 2))
    torch.testing.assert_close(F.layer_normMemSave(x, [12]), nn.functional.layer_norm(x, [12]))
    mean, variance = torch.rand(3), torch.rand(3)
    torch.testing.assert_close(
        F.batch_normMemSave(x, mean, variance), nn.functional.batch_norm(x, mean, variance)
    )


def rms_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference: as T5 in transformers does it."""
    normalised = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalised = normalised.to(weight.dtype)
    return weight * normalised


@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("input_type", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_values_and_the_type_of_its_formula(
    input_type: torch.dtype, weight_type: torch.dtype
) -> None:
    x, weight = torch.randn(4, 16, dtype=input_type), torch.rand(16).to(weight_type)
    expected = rms_by_hand(x, weight, 1e-6)
    actual = F.rms_normMemSave(x, weight, 1e-6)
    torch.testing.assert_close(actual, expected)
    plain = memsave_torch.nn.RMSLayerNorm(16)
    plain.weight.data = weight
    torch.testing.assert_close(plain(x), expected)


# ---------------------------------------------------------------- models


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.5)),
        nn.Flatten(),
        nn.Linear(100, 2),
    )


def test_flags_choose_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    original = model()
    saving = convert_to_memory_saving(original, linear=False, dropout=False, verbose=True)
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "replaced 0",
        "replaced 1",
        "replaced 2",
        "replaced 3.0",
    ]
    assert type(saving[5]) is nn.Linear
    assert type(saving[3][1]) is nn.Dropout
    assert [type(layer) for layer in original] == [type(layer) for layer in model()]
    transposed = nn.Sequential(nn.ConvTranspose1d(2, 2, 1), nn.ConvTranspose3d(2, 2, 1))
    saving = convert_to_memory_saving(transposed, conv1d=False)
    assert type(saving[0]) is nn.ConvTranspose1d
    assert type(saving[1]) is memsave_torch.nn.MemSaveConvTranspose3d
    norms = nn.Sequential(nn.LayerNorm(2), memsave_torch.nn.RMSLayerNorm(2))
    saving = convert_to_memory_saving(norms, layernorm=False)
    assert [type(layer) for layer in saving] == [type(layer) for layer in norms]


def test_parameters_are_shared_unless_they_are_to_be_cloned() -> None:
    original = model()
    original[0].requires_grad_(False)
    shared = convert_to_memory_saving(original)
    cloned = convert_to_memory_saving(original, clone_params=True)
    for name, tensor in original.state_dict(keep_vars=True).items():
        assert shared.state_dict(keep_vars=True)[name] is tensor
        copied = cloned.state_dict(keep_vars=True)[name]
        assert copied is not tensor
        assert torch.equal(copied, tensor)
        assert copied.requires_grad == tensor.requires_grad, "frozen stays frozen"
        assert copied.data_ptr() != tensor.data_ptr()
    assert list(shared.state_dict()) == list(original.state_dict())


def test_hooks_sharing_and_the_training_flag_survive() -> None:
    linear = nn.Linear(4, 4)
    original = nn.Sequential(linear, nn.ReLU(), linear).eval()
    seen: list[str] = []
    linear.register_forward_hook(lambda *_: seen.append("called"))
    saving = convert_to_memory_saving(original)
    assert saving[0] is saving[2]
    assert not saving[1].training
    saving(torch.ones(1, 4))
    assert seen == ["called", "called"]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_what_is_not_exactly_a_layer_of_torch_is_left_alone() -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    original = nn.Sequential(Doubled(4, 4), parametrized, nn.LazyLinear(4), nn.Tanh())
    saving = convert_to_memory_saving(original)
    assert [type(layer) for layer in saving] == [type(layer) for layer in original]
    complex_layer = convert_to_memory_saving(nn.Linear(2, 2, dtype=torch.complex64))
    assert type(complex_layer) is nn.Linear
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got 3"):
        convert_to_memory_saving(3)  # type: ignore[type-var]


def test_an_all_trainable_model_keeps_no_more_than_torch() -> None:
    x = torch.randn(4, 3, 12, 12)

    def kept(network: nn.Module) -> int:
        with brim.PeakMeter("cpu") as meter:
            y = network(x)
        del y
        return meter.left

    torch.manual_seed(0)
    original = model()
    saving = convert_to_memory_saving(original)
    kept(original)  # what is made once
    assert kept(saving) <= kept(original)
    original.requires_grad_(False).eval()
    head = original[5].requires_grad_(True)
    assert saving[5].weight is head.weight
    assert kept(saving.eval()) <= kept(original)


def test_a_converted_model_trains_as_the_original() -> None:
    torch.manual_seed(0)
    original = model()
    saving = convert_to_memory_saving(original, clone_params=True)
    results = []
    for network in (original, saving):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        for _ in range(3):
            loss = network(torch.randn(4, 3, 12, 12)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append(network.state_dict())
    torch.testing.assert_close(results[1], results[0])


# ---------------------------------------------------------------- names


NAMES = {
    "Conv1d": "from_nn_Conv1d",
    "Conv2d": "from_nn_Conv2d",
    "Conv3d": "from_nn_Conv3d",
    "ConvTranspose1d": "from_nn_ConvTranspose1d",
    "ConvTranspose2d": "from_nn_ConvTranspose2d",
    "ConvTranspose3d": "from_nn_ConvTranspose3d",
    "Linear": "from_nn_Linear",
    "BatchNorm2d": "from_nn_BatchNorm2d",
    "LayerNorm": "from_nn_LayerNorm",
    "MaxPool2d": "from_nn_MaxPool2d",
    "ReLU": "from_nn_ReLU",
    "Dropout": "from_nn_dropout",
}


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_is_made_from_its_original(name: str) -> None:
    make, shape = CASES[name]
    layer = make().eval()
    cls = getattr(memsave_torch.nn, f"MemSave{name}")
    assert issubclass(cls, getattr(nn, name))
    assert inspect.signature(cls) == inspect.signature(getattr(nn, name))
    made = getattr(cls, NAMES[name])(layer)
    assert type(made) is cls
    assert not made.training
    for key, tensor in layer.state_dict(keep_vars=True).items():
        assert made.state_dict(keep_vars=True)[key] is tensor
    x = torch.randn(shape)
    torch.testing.assert_close(made(x), layer(x))
    for key in layer._parameters:
        made._parameters[key] = None
        assert layer._parameters[key] is not None, "each has a dictionary of its own"
    with pytest.raises(TypeError, match=f"must be a torch.nn.{name}, got Identity"):
        getattr(cls, NAMES[name])(nn.Identity())


def test_arguments_have_the_originals_names() -> None:
    layer = nn.BatchNorm2d(2)
    make = memsave_torch.nn.MemSaveBatchNorm2d.from_nn_BatchNorm2d
    assert make(bn2d=layer).weight is layer.weight
    assert list(inspect.signature(make).parameters) == ["bn2d"]
    with pytest.raises(TypeError, match="bn2d"):
        make(layer=layer)
    parameters = inspect.signature(F.conv_transpose2dMemSave).parameters
    assert list(parameters)[-2:] == ["dilation", "groups"]
    assert F.reluMemSave(x=torch.ones(1)) == 1


def test_layers_that_cannot_be_adopted_say_why() -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="linear is parametrized"):
        memsave_torch.nn.MemSaveLinear.from_nn_Linear(parametrized)
    with pytest.raises(ValueError, match="linear is lazy"):
        memsave_torch.nn.MemSaveLinear.from_nn_Linear(nn.LazyLinear(4))


def test_an_rms_norm_is_made_from_any_that_has_its_numbers() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.variance_epsilon = 0.25

    other = Other()
    made = memsave_torch.nn.MemSaveRMSLayerNorm.from_existing(other)
    assert made.weight is other.weight
    x = torch.randn(2, 8)
    torch.testing.assert_close(made(x), rms_by_hand(x, other.weight, 0.25))
    with pytest.raises(TypeError, match="ln must have a number `eps`"):
        memsave_torch.nn.MemSaveRMSLayerNorm.from_existing(nn.Linear(2, 2))


def test_module_tree_and_defaults_are_the_originals() -> None:
    root = "brim.compat.memsave_torch"
    for module, name in {
        "nn.BatchNorm": "MemSaveBatchNorm2d",
        "nn.Conv1d": "MemSaveConv1d",
        "nn.ConvTranspose3d": "MemSaveConvTranspose3d",
        "nn.Dropout": "MemSaveDropout",
        "nn.LayerNorm": "MemSaveRMSLayerNorm",
        "nn.Linear": "MemSaveLinear",
        "nn.MaxPool": "MemSaveMaxPool2d",
        "nn.ReLU": "MemSaveReLU",
        "nn.functional.BatchNorm": "batch_normMemSave",
        "nn.functional.Conv": "conv3dMemSave",
        "nn.functional.ConvTranspose": "conv_transpose1dMemSave",
        "nn.functional.Dropout": "dropoutMemSave",
        "nn.functional.LayerNorm": "rms_normMemSave",
        "nn.functional.Linear": "linearMemSave",
        "nn.functional.MaxPool": "maxpool2dMemSave",
        "nn.functional.ReLU": "reluMemSave",
    }.items():
        assert hasattr(importlib.import_module(f"{root}.{module}"), name)
        assert hasattr(memsave_torch.nn if name.startswith("MemSave") else F, name)
    parameters = inspect.signature(convert_to_memory_saving).parameters
    assert [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "model",
        "linear",
        "conv2d",
        "conv1d",
        "conv3d",
        "batchnorm2d",
        "relu",
        "maxpool2d",
        "dropout",
        "verbose",
        "clone_params",
    ]
    assert parameters["verbose"].default is False
    assert parameters["clone_params"].default is False
    assert all(parameters[name].default is True for name in ("linear", "conv1d", "layernorm"))


def test_rms_norm_has_the_arguments_and_the_default_of_the_original() -> None:
    x, weight = torch.randn(4, 16) * 1e-3, torch.rand(16)
    assert list(inspect.signature(F.rms_normMemSave).parameters) == ["input", "weight", "eps"]
    torch.testing.assert_close(
        F.rms_normMemSave(input=x, weight=weight), rms_by_hand(x, weight, 1e-5)
    )


@pytest.mark.parametrize("clone_params", [False, True])
def test_recursive_setattr_sets_a_module_by_its_qualified_name(clone_params: bool) -> None:
    root = nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU())
    linear = nn.Linear(2, 2)
    linear.weight.requires_grad_(False)
    weight, bias = linear.weight, linear.bias
    memsave_torch.nn.recursive_setattr(root, "0.1", linear, clone_params)
    assert root[0][1] is linear
    assert isinstance(root[0][0], nn.ReLU)
    assert (linear.weight is weight) is not clone_params
    assert (linear.bias is bias) is not clone_params
    assert torch.equal(linear.weight, weight)
    assert torch.equal(linear.bias, bias)
    assert not linear.weight.requires_grad
    assert linear.bias.requires_grad
    memsave_torch.nn.recursive_setattr(root, "1", nn.Tanh(), False)
    assert isinstance(root[1], nn.Tanh)
    with pytest.raises(AttributeError):
        memsave_torch.nn.recursive_setattr(root, "7.0", nn.Tanh(), False)


@pytest.mark.parametrize("imported", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_transformers_imported_says_whether_it_was_there_before(imported: bool) -> None:
    program = "import sys, types\n"
    program += "sys.modules['transformers'] = types.ModuleType('transformers')\n" * imported
    program += "from brim.compat.memsave_torch import nn; print(nn.transformers_imported)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(imported)
