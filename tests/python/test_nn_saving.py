"""brim.saving: every function arrives, everything else is left alone."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.nn import _activation

vision: Any = torch  # functions that torch's stubs do not know
inner: Any = torch._C._nn
Call = Callable[[Tensor], Any]
linear_cross_entropy: Any = getattr(F, "linear_cross_entropy", None)  # from torch 2.13 on


def weight(*sizes: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(sizes).numel()).reshape(sizes)


def of_shape(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, requires_grad=True)


SIGNAL, IMAGE, VOLUME = (2, 4, 9), (2, 4, 9, 9), (2, 4, 5, 6, 7)

CALLS: dict[str, tuple[tuple[int, ...], Call]] = {
    "F.relu": (IMAGE, lambda x: F.relu(x)),
    "F.relu inplace": (IMAGE, lambda x: F.relu(x * 1, inplace=True)),
    "torch.relu": (IMAGE, lambda x: torch.relu(x)),
    "torch.relu_": (IMAGE, lambda x: torch.relu_(x * 1)),
    "Tensor.relu": (IMAGE, lambda x: x.relu()),
    "Tensor.relu_": (IMAGE, lambda x: (x * 1).relu_()),
    "F.relu6": (IMAGE, lambda x: F.relu6(x)),
    "F.relu6 inplace": (IMAGE, lambda x: F.relu6(x * 1, True)),
    "F.leaky_relu": (IMAGE, lambda x: F.leaky_relu(x, negative_slope=0.2)),
    "F.leaky_relu_": (IMAGE, lambda x: F.leaky_relu_(x * 1, 0.2)),
    "F.hardtanh": (IMAGE, lambda x: F.hardtanh(x, -0.5, max_val=0.5)),
    "F.hardtanh_": (IMAGE, lambda x: F.hardtanh_(x * 1, min_val=-0.5)),
    "F.gelu": (IMAGE, lambda x: F.gelu(x, approximate="tanh")),
    "F.silu": (IMAGE, lambda x: F.silu(x)),
    "F.silu inplace": (IMAGE, lambda x: F.silu(x * 1, inplace=True)),
    "F.mish": (IMAGE, lambda x: F.mish(x)),
    "F.hardswish inplace": (IMAGE, lambda x: F.hardswish(x * 1, inplace=True)),
    "F.elu": (IMAGE, lambda x: F.elu(x, 0.5)),
    "F.elu_": (IMAGE, lambda x: F.elu(x * 1, inplace=True)),
    "F.threshold": (IMAGE, lambda x: F.threshold(x, 0.1, 0.7)),
    "F.threshold_": (IMAGE, lambda x: F.threshold(x * 1, 0.1, 0.7, inplace=True)),
    "F.celu": (IMAGE, lambda x: F.celu(x, 0.3)),
    "torch.selu_": (IMAGE, lambda x: torch.selu_(x * 1)),
    "F.pad": (IMAGE, lambda x: F.pad(x, (1, 2, 0, 1), "reflect")),
    "torch.sigmoid": (IMAGE, lambda x: torch.sigmoid(x)),
    "Tensor.tanh": (IMAGE, lambda x: x.tanh()),
    "F.softplus": (IMAGE, lambda x: F.softplus(x, beta=2)),
    "F.prelu": (IMAGE, lambda x: F.prelu(x, weight(4))),
    "F.dropout": (IMAGE, lambda x: F.dropout(x, 0.3)),
    "F.dropout inplace": (IMAGE, lambda x: F.dropout(x * 1, 0.3, inplace=True)),
    "torch.dropout": (IMAGE, lambda x: torch.dropout(x, 0.3, True)),
    "torch.dropout_": (IMAGE, lambda x: torch.dropout_(x * 1, p=0.3, train=True)),
    "F.linear": (IMAGE, lambda x: F.linear(x, weight(3, 9), bias=weight(3))),
    "F.conv1d": (SIGNAL, lambda x: F.conv1d(x, weight(4, 4, 3), padding="same")),
    "F.conv2d": (IMAGE, lambda x: F.conv2d(x, weight(4, 2, 3, 2), stride=2, groups=2)),
    "torch.conv2d": (IMAGE, lambda x: torch.conv2d(x, weight(4, 4, 2, 2), None, [1, 2], [1])),
    "F.conv3d": (VOLUME, lambda x: F.conv3d(x, weight(4, 4, 2, 2, 2), padding="valid")),
    "F.conv_transpose1d": (SIGNAL, lambda x: F.conv_transpose1d(x, weight(4, 4, 3), stride=2)),
    "F.conv_transpose2d": (IMAGE, lambda x: F.conv_transpose2d(x, weight(4, 4, 3, 3))),
    "F.conv_transpose3d": (VOLUME, lambda x: F.conv_transpose3d(x, weight(4, 4, 2, 2, 2))),
    "F.batch_norm": (IMAGE, lambda x: F.batch_norm(x, None, None, training=True)),
    "torch.batch_norm": (
        IMAGE,
        lambda x: torch.batch_norm(x, weight(4), None, None, None, True, 0.1, 1e-5, False),
    ),
    "F.layer_norm": (IMAGE, lambda x: F.layer_norm(x, [9], weight=weight(9))),
    "torch.layer_norm": (IMAGE, lambda x: torch.layer_norm(x, [9, 9])),
    "F.group_norm": (IMAGE, lambda x: F.group_norm(x, 2, bias=weight(4))),
    "torch.group_norm": (IMAGE, lambda x: torch.group_norm(x, 2)),
    "F.rms_norm": (IMAGE, lambda x: F.rms_norm(x, [9], eps=1e-3)),
    "torch.rms_norm": (IMAGE, lambda x: torch.rms_norm(x, [9])),
    "F.max_pool1d": (SIGNAL, lambda x: F.max_pool1d(x, 2)),
    "F.max_pool2d": (IMAGE, lambda x: F.max_pool2d(x, 3, 2, padding=1, ceil_mode=True)),
    "F.max_pool3d": (VOLUME, lambda x: F.max_pool3d(x, (1, 2, 2))),
    "torch.max_pool1d": (SIGNAL, lambda x: torch.max_pool1d(x, 2)),
    "torch.max_pool2d": (IMAGE, lambda x: torch.max_pool2d(x, [2], [])),
    "torch.max_pool3d": (VOLUME, lambda x: vision.max_pool3d(x, 2)),
    "F.max_pool1d indices": (SIGNAL, lambda x: F.max_pool1d(x, 2, return_indices=True)),
    "F.max_pool2d indices": (IMAGE, lambda x: F.max_pool2d(x, 2, return_indices=True)),
    "F.max_pool3d indices": (VOLUME, lambda x: F.max_pool3d(x, 2, return_indices=True)),
    "F.max_pool2d_with_indices": (IMAGE, lambda x: F.max_pool2d_with_indices(x, 2)),
    "F.avg_pool1d": (SIGNAL, lambda x: F.avg_pool1d(x, 2)),
    "F.avg_pool2d": (IMAGE, lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    "F.avg_pool3d": (VOLUME, lambda x: F.avg_pool3d(x, 2, count_include_pad=False)),
    "F.adaptive_avg_pool1d": (SIGNAL, lambda x: F.adaptive_avg_pool1d(x, 3)),
    "F.adaptive_avg_pool2d": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, (None, 2))),
    "F.adaptive_avg_pool3d": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2))),
    "F.cross_entropy": ((3, 5), lambda x: F.cross_entropy(x, torch.tensor([4, 0, 2]))),
    "F.linear_cross_entropy": (
        (3, 5),
        lambda x: linear_cross_entropy(x, weight(7, 5), torch.tensor([4, 0, 2])),
    ),
}  # fmt: skip
if linear_cross_entropy is None:
    del CALLS["F.linear_cross_entropy"]
COMPOSED = {"softsign"}  # torch has no operator for it, so no region sees it
for _name in sorted({*_activation.__all__} - COMPOSED):
    CALLS.setdefault(f"F.{_name}", (IMAGE, getattr(F, _name)))


def first(result: Any) -> Tensor:
    output = result[0] if isinstance(result, tuple) else result
    assert isinstance(output, Tensor)
    return output


def made_by_brim(output: Tensor) -> bool:
    """Whether the last node, or the one before a change of shape, is brim's."""
    node = output.grad_fn
    while node is not None and not node.name().startswith("brim::"):
        if node.name() not in {"SqueezeBackward1", "SqueezeBackward0"}:
            return False
        node = node.next_functions[0][0]
    return node is not None


@pytest.mark.parametrize("name", CALLS)
def test_arrives_with_the_same_value_and_gradient(name: str) -> None:
    sizes, call = CALLS[name]
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        x = of_shape(*sizes)
        if inside:
            with brim.saving():
                result = call(x)
        else:
            result = call(x)
        assert made_by_brim(first(result)) == inside, first(result).grad_fn
        (first(result) * torch.rand_like(first(result))).sum().backward()
        results.append((result, x.grad))
    expected, own = results
    torch.testing.assert_close(own[1], expected[1])
    if isinstance(expected[0], tuple):
        assert torch.equal(own[0][1], expected[0][1])
    torch.testing.assert_close(first(own[0]), first(expected[0]))


def test_the_list_above_has_every_function() -> None:
    called = {name.split()[0].removeprefix("F.") for name in CALLS if name.startswith("F.")}
    assert {n for n in brim.nn.functional.__all__ if hasattr(F, n)} - COMPOSED <= called


def test_what_torch_composes_is_not_taken_for_a_call_of_brims() -> None:
    class Composed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softsign(x)

    assert not brim.convert(Composed()).functions


def test_layers_of_torch_arrive_too() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    for layer in model:
        with brim.saving():
            assert made_by_brim(layer(of_shape(*IMAGE))), layer


def test_outside_nothing_changes() -> None:
    with brim.saving():
        pass
    assert not made_by_brim(F.relu(of_shape(3)))


def test_regions_nest_and_can_be_entered_again() -> None:
    region = brim.saving()
    with region:
        with region, brim.saving():
            assert made_by_brim(F.relu(of_shape(3)))
        assert made_by_brim(F.relu(of_shape(3)))
    assert not made_by_brim(F.relu(of_shape(3)))


def test_a_region_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), brim.saving():
        raise KeyError
    assert not made_by_brim(F.relu(of_shape(3)))


def test_a_region_belongs_to_its_thread() -> None:
    seen: list[bool] = []
    with brim.saving():
        thread = threading.Thread(target=lambda: seen.append(made_by_brim(F.relu(of_shape(3)))))
        thread.start()
        thread.join()
    assert seen == [False]


def test_as_a_decorator() -> None:
    @brim.saving()
    def work(x: Tensor, depth: int = 2) -> Tensor:
        """Words."""
        return F.relu(x) if depth == 0 else work(x, depth - 1)

    assert work.__name__ == "work"
    assert work.__doc__ == "Words."
    assert made_by_brim(work(of_shape(3)))
    assert not made_by_brim(F.relu(of_shape(3)))


def test_functions_that_run_in_parts_are_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    async def asynchronous() -> AsyncIterator[int]:
        yield 1

    for function in (generator, coroutine, asynchronous):
        with pytest.raises(TypeError, match=rf"cannot decorate .*{function.__name__}"):
            brim.saving()(function)


class Other(Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([-1, 2]),
        torch.tensor([-1.0, 2.0]).as_subclass(Other),
        torch.tensor([-1.0, 0.0, 2.0]).to_sparse(),
    ],
    ids=["whole numbers", "subclass", "sparse"],
)
def test_what_does_not_fit_is_left_to_torch(x: Tensor) -> None:
    with brim.saving():
        result = torch.relu(x)
    assert type(result) is type(x)
    assert result.layout == x.layout
    assert result.dtype == x.dtype
    assert torch.equal(result.to_dense(), torch.relu(x).to_dense())


def test_complex_numbers_are_left_to_torch() -> None:
    x = torch.randn(2, 4, dtype=torch.complex64, requires_grad=True)
    with brim.saving():
        result = F.linear(x, torch.ones(3, 4, dtype=torch.complex64))
    torch.testing.assert_close(result, F.linear(x, torch.ones(3, 4, dtype=torch.complex64)))
    assert not made_by_brim(result)


def test_other_functions_are_left_alone() -> None:
    x = of_shape(3)
    with brim.saving():
        result = torch.tanh(x).exp()
    assert torch.equal(result, torch.tanh(x).exp())


def test_arguments_that_torch_refuses_are_refused() -> None:
    with brim.saving():
        with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
            F.dropout(of_shape(3), 1.5)
        with pytest.raises(TypeError):
            F.relu(of_shape(3), nothing=1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.batch_norm(of_shape(1, 4), None, None, training=True)


def test_with_another_mode_around() -> None:
    names: list[str] = []

    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Log(), brim.saving():
        assert made_by_brim(F.relu(of_shape(3)))
    assert any("relu" in name for name in names)


@pytest.mark.parametrize("inside", [False, True])
def test_under_compile_nothing_fails(inside: bool) -> None:
    def work(x: Tensor) -> Tensor:
        if not inside:
            return F.max_pool2d(F.relu(x), 2)
        with brim.saving():
            return F.max_pool2d(F.relu(x), 2)

    compiled = torch.compile(work, backend="aot_eager")
    x, y = of_shape(*IMAGE), of_shape(*IMAGE)
    work(x).sum().backward()
    if inside:
        compiled(y).sum().backward()
    else:
        with brim.saving():
            compiled(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_inside_of_a_checkpointed_function() -> None:
    layer = nn.Linear(8, 8)

    @brim.saving()
    def part(x: Tensor) -> Tensor:
        return F.relu(layer(F.relu(x)))

    x = of_shape(4, 8)
    y: Any = checkpoint(part, x, use_reentrant=False)
    assert made_by_brim(y)
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    F.relu(layer(F.relu(expected))).sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]
