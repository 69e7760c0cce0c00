"""Every layer of brim.nn beside the one of torch.nn: values, gradients, statistics, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import brim

from .nn_cases import (
    ACTIVATIONS,
    ALL,
    CASES,
    FLOATS,
    FORMATS,
    HALVES,
    ONE_OF_EACH,
    Case,
    compare,
    cotangent_of,
    crutch,
    differences,
    in_layout,
    near,
    pair,
    run,
    same_bits,
)

LAYERS = [
    *(f"{name}{dim}d" for name in ("Conv", "ConvTranspose", "BatchNorm") for dim in (1, 2, 3)),
    *(f"{name}{dim}d" for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool") for dim in (1, 2, 3)),
    *("Linear", "LayerNorm", "RMSNorm", "GroupNorm"),
    *(*ACTIVATIONS, "Dropout"),
]
# torch warns of what padding="same" with an even kernel costs; so may we.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def test_the_cases_cover_every_layer() -> None:
    assert {case.layer for case in CASES} == set(LAYERS)
    assert len({str(case) for case in CASES}) == len(CASES)


def torch_can(case: Case, dtype: torch.dtype) -> bool:
    """Whether torch's own CPU kernels know the type."""
    try:
        run(case.make(nn, dtype), case, case.input(dtype), frozenset(["input"]))
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented for" in str(error):
            return False
        raise
    return True


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Threads cost more than tensors of a hundred numbers; large ones come further down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_nn(case: Case) -> None:
    found = []
    for dtype in FLOATS:
        if not torch_can(case, dtype):
            assert dtype in HALVES
            layer = case.make(brim.nn, dtype)
            with pytest.raises((RuntimeError, NotImplementedError), match="not implemented for"):
                run(layer, case, case.input(dtype), frozenset(["input"]))
            continue
        # How memory lies is the same matter for every type; the kernels of channels_last are not.
        wanted = {torch.float32: FORMATS, torch.bfloat16: FORMATS[:2]}.get(dtype, FORMATS[:1])
        layouts = [layout for layout in case.formats() if layout in wanted]
        found += [f"{dtype}, {what}" for what in compare(case, dtype, layouts=layouts)]
    assert found == []


def test_the_comparison_sees_differences() -> None:
    """What passes everything tests nothing."""
    case = Case("Conv2d", (2, 4, 9, 8), (4, 6, 3))
    ours, torchs = pair(case, torch.float32)
    x = case.input(torch.float32)
    right = run(torchs, case, x, ALL)
    assert list(differences(run(ours, case, x, ALL), right)) == []
    with torch.no_grad():
        ours.bias[0] = torch.nextafter(ours.bias[0], torch.tensor(9.0))
    assert any("output" in what for what in differences(run(ours, case, x, ALL), right, True))
    wrong = run(torchs, case, x, ALL)
    wrong.grads["weight"][0, 0, 0, 0] *= 1 + 1e-3
    wrong.values[0] = wrong.values[0].contiguous(memory_format=torch.channels_last)
    assert [
        what.split(":")[0].split(" has")[0] for what in differences(wrong, right, frozenset())
    ] == [
        "output 0",
        "gradient of weight differs",
    ]
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


# -- Where numbers are special --------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, 6.0, 5.9999, 6.0001, 0.5, torch.nan, torch.inf, -torch.inf, 1e-40]
SPECIAL += [3.0, -3.0, 2.9999, -2.9999, 0.1, 0.10009765625]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("layer", "args", "inplace"),
    [
        *(("ReLU", (), inplace) for inplace in (False, True)),
        *(("ReLU6", (), inplace) for inplace in (False, True)),
        *(("LeakyReLU", (0.1,), inplace) for inplace in (False, True)),
        ("LeakyReLU", (-0.1,), False),  # torch refuses it in place
        *(("Hardtanh", (), inplace) for inplace in (False, True)),
        *(("Hardtanh", (-0.5, 0.5), inplace) for inplace in (False, True)),
        *(
            (name, (), inplace)
            for name in ("SiLU", "ELU", "CELU", "SELU", "Hardsigmoid", "Hardswish")
            for inplace in (False, True)
        ),
        *(
            ("Threshold", args, inplace)
            for args in ((0.1, 0.1), (-1.0, 6.0))
            for inplace in (False, True)
        ),
    ],
)
def test_special_numbers_in_activations(
    layer: str, args: tuple[float, ...], dtype: torch.dtype, inplace: bool
) -> None:
    found = []
    for of in (brim.nn, nn):
        x = torch.tensor(SPECIAL * 11, dtype=dtype, requires_grad=True)
        y = getattr(of, layer)(*args, inplace=inplace)(x.clone())
        # A gradient of NaN or infinity must not leak through a closed gate either.
        cotangent = torch.tensor([2.0, torch.nan, torch.inf], dtype=dtype).repeat(66)[: len(x)]
        found.append((y.detach(), torch.autograd.grad(y, x, cotangent)[0]))
    (ours, our_grad), (torchs, torch_grad) = found
    # Where torch takes the larger of 0 and -0, the machine chooses.
    assert same_bits(ours, torchs, sign_of_zero=layer not in ("ReLU", "ReLU6", "Hardtanh"))
    # torch's kernels of different devices disagree on NaN between two bounds.
    told = ~torchs.isnan() if layer in ("ReLU6", "Hardtanh") else torch.ones_like(torchs).bool()
    assert same_bits(our_grad[told], torch_grad[told])


def test_a_leaky_relu_in_place_with_a_negative_slope() -> None:
    """torch cannot tell the sign from its output and refuses in backward; bits can."""
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    y = brim.nn.LeakyReLU(-0.5, inplace=True)(x.clone())
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.tensor([1.0, 3.0]))
    assert torch.equal(grad, torch.tensor([-0.5, 1.0]))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("layer", ["MaxPool1d", "MaxPool2d", "MaxPool3d"])
def test_ties_and_special_numbers_in_max_pooling(
    layer: str, dtype: torch.dtype, layout: str
) -> None:
    shape = {"MaxPool1d": (2, 3, 30), "MaxPool2d": (2, 3, 9, 9), "MaxPool3d": (1, 2, 5, 6, 5)}
    dice = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0.0, -0.0, 1.0, 1.0, -torch.inf, torch.inf, torch.nan, 2.0, -1.0])
    for options in ((2,), (3, 2, 1), (3, 1)):
        case = Case(layer, shape[layer], options, {"return_indices": True})
        if layout not in case.formats():
            continue
        ours, torchs = pair(case, dtype)
        places = torch.randint(len(numbers), shape[layer], generator=dice)
        x = in_layout(numbers[places].to(dtype), layout)
        found = list(
            differences(
                run(ours, case, x, frozenset(["input"]), layout),
                run(torchs, case, x, frozenset(["input"]), layout),
            )
        )
        assert found == [], options


def test_a_dropped_infinity_is_zero() -> None:
    """torch multiplies by zero on the CPU and gives NaN there, but not on CUDA."""
    x = torch.full((1000,), torch.inf)
    y = brim.nn.Dropout(0.5)(x.requires_grad_())
    assert set(y.tolist()) == {0.0, torch.inf}


# -- Gradients in other forms ---------------------------------------------------------------------


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_the_gradient_of_a_sum(case: Case) -> None:
    """It arrives as one number with stride zero."""
    ours, torchs = pair(case, torch.float32)
    grads = []
    for layer in (ours, torchs):
        x = case.input(torch.float32).requires_grad_()
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]))
    for a, b in zip(*grads, strict=True):
        assert same_bits(a, b, case.keeps_sign_of_zero) if case.exact(ALL) else near(a, b)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_backward_fills_grad_of_leaves(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    for layer in (ours, torchs):
        for _ in range(3):  # the gradients add up
            torch.manual_seed(0)
            y = layer(case.input(torch.float32).requires_grad_())
            y.backward(cotangent_of(y, "contiguous"))
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert same_bits(a.grad, b.grad) if case.exact(ALL) else near(a.grad, b.grad)


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "case",
    [
        Case("BatchNorm2d", (3, 4, 5, 6), (4,)),
        Case("LayerNorm", (3, 5, 8), (8,)),
        Case("GroupNorm", (3, 6, 5, 4), (2, 6)),
    ],
    ids=str,
)
def test_half_input_with_float32_weights(case: Case, train: bool, dtype: torch.dtype) -> None:
    case = replace(case, train=train)
    ours, torchs = pair(case, torch.float32)
    found = []
    for layout in case.formats():
        x = case.input(dtype, layout)
        for needs in case.needs():
            mine = run(ours, case, x, needs, layout)
            theirs = run(torchs, case, x, needs | crutch(case, x), layout)
            if case.exact(needs):
                found += [(layout, needs, d) for d in differences(mine, theirs)]
                continue
            assert same_bits(mine.values[0], theirs.values[0])
            # torch rounds what it sums for the bias in between, brim does not.
            for name, grad in mine.grads.items():
                if not near(grad, theirs.grads[name], low=dtype):
                    found.append((layout, needs, name))
    assert found == []


# -- Statistics, random numbers -------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_running_statistics_over_several_batches(momentum: float | None) -> None:
    ours, torchs = brim.nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm2d(4, momentum=momentum)
    dice = torch.Generator().manual_seed(0)
    for step in range(6):
        x = torch.randn(3, 4, 5, 6, generator=dice) * (step + 1)
        training = step != 3
        assert same_bits(ours.train(training)(x), torchs.train(training)(x))
        state = ours.state_dict()
        for name, value in torchs.state_dict().items():
            assert same_bits(state[name], value), (step, name)
    assert ours.num_batches_tracked.item() == 5


def test_dropout_draws_the_random_numbers_of_torch() -> None:
    x = torch.randn(1000, requires_grad=True)
    for inplace in (False, True):
        after = []
        for layer in (brim.nn.Dropout(0.3, inplace), nn.Dropout(0.3, inplace)):
            torch.manual_seed(7)
            first, second = layer(x.clone()), layer(x.clone())
            assert not torch.equal(first, second)
            after.append((first, second, torch.rand(3)))
        for a, b in zip(*after, strict=True):
            assert torch.equal(a, b)


def test_dropout_draws_the_same_with_and_without_gradients() -> None:
    x = torch.randn(1000)
    layer = brim.nn.Dropout(0.3)
    torch.manual_seed(7)
    with_gradients = layer(x.clone().requires_grad_())
    torch.manual_seed(7)
    assert torch.equal(layer(x), with_gradients)


def test_dropout_keeps_the_share_it_should() -> None:
    torch.manual_seed(0)
    x = torch.ones(100_000, requires_grad=True)
    for p in (0.1, 0.5, 0.75):
        y = brim.nn.Dropout(p)(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y.detach(), grad), "the gradient passes where the value did"
        assert abs((y == 0).double().mean().item() - p) < 0.01
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}


# -- Large tensors: several threads, several blocks of the kernels --------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("ReLU", (3, 7, 211, 33)),
        Case("Hardtanh", (3, 7, 211, 33), (), {"inplace": True}),
        Case("LeakyReLU", (146_191,)),
        Case("Dropout", (3, 7, 211, 33), (0.2,)),
        Case("MaxPool2d", (4, 17, 57, 63), (3, 2, 1)),
        Case("MaxPool3d", (2, 5, 13, 19, 21), (3, 2, 1)),
        Case("AvgPool2d", (4, 17, 57, 63), (3, 2, 1)),
        Case("AdaptiveAvgPool2d", (4, 17, 57, 63), (7,)),
        Case("BatchNorm2d", (4, 17, 57, 63), (17,), train=False),
        Case("BatchNorm2d", (4, 17, 57, 63), (17,)),
        Case("RMSNorm", (3, 401, 129), (129,)),
        Case("LayerNorm", (3, 401, 129), (129,)),
        Case("Conv2d", (2, 16, 27, 33), (16, 8, 3, 1, 1)),
        Case("Linear", (3, 401, 129), (129, 65)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_large_inputs(case: Case, dtype: torch.dtype) -> None:
    layouts = ["channels_last"] if len(case.shape) in (4, 5) else []
    assert compare(case, dtype, layouts=["contiguous", *layouts]) == []


@pytest.mark.parametrize("as_type", [tuple, list])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_one_number_in_a_sequence_is_for_all_dimensions(
    kind: str, dimensions: int, as_type: type
) -> None:
    x = torch.randn(2, 3, *[9] * dimensions)
    options = {"kernel_size": 3, "stride": 2, "padding": 1}
    one = {name: as_type([number]) for name, number in options.items()}
    name = f"{kind}_pool{dimensions}d"
    own, torchs = getattr(brim.nn.functional, name), getattr(nn.functional, name)
    assert torch.equal(own(x, **one), torchs(x, **one))
    assert torch.equal(own(x, **one), own(x, **options))
    assert torch.equal(own(x, (3,), ()), own(x, 3))  # without a stride, as torch passes it on
    layer = f"{kind.capitalize()}Pool{dimensions}d"
    mine, theirs = (getattr(family, layer)((3,))(x) for family in (brim.nn, nn))
    assert torch.equal(mine, theirs)
    if kind == "max":
        assert torch.equal(own(x, 3, dilation=(2,)), torchs(x, 3, dilation=2))


# -- Corners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["ReLU", "ReLU6", "Hardtanh"])
def test_the_gradient_passes_at_nan_wherever_it_lies(layer: str) -> None:
    """As of torch's kernels one by one; those for many elements at once differ for Hardtanh."""
    for size in (1, 3, 64, 1000):
        x = torch.full((size,), float("nan"), requires_grad=True)
        getattr(brim.nn, layer)()(x).backward(torch.ones(size))
        assert x.grad is not None
        assert x.grad.eq(1).all()
        one = torch.full((1,), float("nan"), requires_grad=True)
        getattr(nn, layer)()(one).backward(torch.ones(1))
        assert torch.equal(one.grad, x.grad[:1])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("layer", ["Conv2d", "ConvTranspose2d"])
def test_a_convolution_without_input_channels_trains(layer: str) -> None:
    results = []
    for of in (nn, brim.nn):
        net = getattr(of, layer)(0, 4, 3)
        try:
            x = torch.randn(2, 0, 5, 5, requires_grad=True)
            output = net(x)
            output.sum().backward()
            results.append((output.shape, x.grad.shape, net.weight.grad, net.bias.grad))
        except RuntimeError as error:
            results.append(str(error))  # type: ignore[arg-type]
    assert str(results[0]) == str(results[1])
