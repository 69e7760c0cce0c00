"""Sums in two types: what was added is kept in place of the sum, which takes twice as much."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brim
from brim.nn import functional

BLOCKS, ROWS, WIDTH = 4, 24, 16
SUM = ROWS * WIDTH * 4
NARROW = SUM // 2
HOLDS = "brim::add_of_two_types_backward"


class Block(nn.Module):
    """Of a transformer: normalisation first, then work, then a residual sum."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm_1, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm_2, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.norm_1(x)))
        return self.mlp(self.norm_2(x)) + x


def built(training: str = "full") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH))
    for name, parameter in model.named_parameters():
        trains = {"full": True, "BitFit": name.endswith("bias"), "frozen": False}
        parameter.requires_grad_(trains[training])
    return model


def converted(model: nn.Module, recompute: str | None, functions: bool = True) -> nn.Module:
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute=recompute, functions=functions)
    return ours


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, ROWS // 3, WIDTH, requires_grad=True)


def kept_by(model: nn.Module, autocast: bool = True) -> int:
    x = batch()
    with brim.PeakMeter("cpu") as meter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        return meter.left - output.nbytes


def gradients(model: nn.Module, **options: bool) -> list[Tensor]:
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    trained = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, [x, *trained], **options)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


TRAININGS = pytest.mark.parametrize("training", ["full", "BitFit", "frozen"])
LEVELS = pytest.mark.parametrize("level", ["cheap", "products"])


@TRAININGS
@LEVELS
def test_gradients_have_the_same_bits(level: str, training: str) -> None:
    model = built(training)
    assert equal(gradients(converted(model, level)), gradients(model))


@TRAININGS
@LEVELS
def test_every_other_sum_is_kept_in_half_the_bytes(level: str, training: str) -> None:
    model = built(training)
    plain, ours = (kept_by(converted(model, level, functions)) for functions in (False, True))
    # The first sum has nobody before it that knows who keeps the input: BLOCKS of 2 * BLOCKS.
    assert plain - ours == BLOCKS * NARROW


class Residual(nn.Module):
    """One sum per module: each needs that of the module before it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.work = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(self.norm(x))


class Other(Residual):
    """Another class."""


@pytest.mark.parametrize("second", [Residual, Other])
def test_sums_of_several_modules_are_kept_in_half_the_bytes_in_every_call(
    second: type[Residual],
) -> None:
    model = nn.Sequential(*(kind() for _ in range(BLOCKS) for kind in (Residual, second)))
    model.append(nn.LayerNorm(WIDTH))
    plain, ours = (converted(model, "cheap", functions) for functions in (False, True))
    for _ in range(3):
        assert kept_by(plain) - kept_by(ours) == BLOCKS * NARROW
    assert equal(gradients(ours), gradients(model))


def test_sums_hold_an_operand_only_under_autocast() -> None:
    ours = converted(built(), "cheap")
    for _ in range(2):
        assert kept_by(ours, autocast=False) == kept_by(
            converted(built(), "cheap", functions=False), autocast=False
        )
    x = ours[0](batch())
    assert x.grad_fn is not None
    assert x.grad_fn.name() == "brim::add_backward"
    with torch.autocast("cpu", torch.bfloat16):
        y = ours[0](batch())
    assert y.grad_fn is not None
    assert y.grad_fn.name() == HOLDS


def test_blocks_without_recompute_stay_as_they_are() -> None:
    assert not brim.convert(built()).functions
    report = brim.convert(built(), recompute="cheap")
    assert [each.type for each in report.functions] == ["Block"] * BLOCKS


# -- One sum ---------------------------------------------------------------------------------------


def wide_and_narrow() -> tuple[Tensor, Tensor, Tensor]:
    """A sum that a norm keeps, its norm, and a tensor in half the bytes."""
    x = functional.add(batch(), batch())
    normal = functional.layer_norm(x, [WIDTH])
    return x, normal, (normal * 2).bfloat16()


def left_after(make: Callable[[Tensor, Tensor], Tensor]) -> int:
    """What is left of a sum, and of what `make` did with it, when only its last value lives."""
    x, _, narrow = wide_and_narrow()
    with brim.PeakMeter("cpu") as meter:
        added = narrow.clone()
        total = functional.add(x, added)
        assert total.grad_fn is not None
        assert total.grad_fn.name() == HOLDS
        del added
        value = make(total, x)
        own = value.nbytes
        del total
        return meter.left - own


def test_a_norm_asks_for_the_sum() -> None:
    statistics = 2 * 4 * ROWS
    assert left_after(lambda total, _: functional.layer_norm(total, [WIDTH])) == NARROW + statistics


def test_what_was_added_is_not_held_beside_a_sum_that_is_kept() -> None:
    assert left_after(lambda total, _: functional.gelu(total)) == SUM


def test_what_was_added_is_not_held_beside_a_sum_that_is_kept_later() -> None:
    def norm_and_gelu(total: Tensor, _: Tensor) -> Tensor:
        return functional.layer_norm(total, [WIDTH]) + functional.gelu(total)

    statistics = 2 * 4 * ROWS
    assert left_after(norm_and_gelu) == SUM + statistics


@pytest.mark.parametrize("inplace", [False, True])
def test_what_was_added_is_not_held_for_a_sum_that_nobody_asks_for(inplace: bool) -> None:
    assert left_after(lambda total, x: functional.add(total, x, inplace=inplace)) == 0


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_sum_that_can_no_longer_be_asked_for_is_not_relied_on(overwritten: bool) -> None:
    """What an activation knows of it is from before."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(2)
        x, _, narrow = wide_and_narrow()
        total = functional.add(x, torch.randn_like(x) if overwritten else narrow.detach())
        if overwritten:
            functional.layer_norm(total, [WIDTH])  # keeps the sum
        active = functional.relu(total)
        weight = torch.randn(3, WIDTH, requires_grad=True)
        unknown = functional.add(active, x.exp())
        functional.linear(unknown, weight, recompute=recompute)  # asks `active` in vain
        functional.add(total, x, inplace=overwritten)
        output = functional.linear(active, weight, recompute=recompute)
        found.append([*torch.autograd.grad(output.square().sum(), [x, weight])])
    assert equal(*found)


def test_a_sum_is_kept_whose_operands_nobody_keeps() -> None:
    x = functional.add(batch(), batch())
    total = functional.add(x, (x * 2).bfloat16())
    assert total.grad_fn is not None
    assert total.grad_fn.name() == "brim::add_backward"


@pytest.mark.parametrize("narrow_first", [False, True])
def test_the_sum_can_be_asked_for_in_either_order(narrow_first: bool) -> None:
    found = []
    for own in (torch.add, functional.add):
        x = batch()
        wide = functional.add(x, x)
        narrow = (functional.layer_norm(wide, [WIDTH]) * 2).bfloat16()
        total = own(narrow, wide) if narrow_first else own(wide, narrow)
        loss = functional.layer_norm(total, [WIDTH]).pow(3).sum()
        found.append([*torch.autograd.grad(loss, x)])
    assert equal(*found)


def test_a_part_of_a_larger_tensor_is_not_held() -> None:
    x, _, narrow = wide_and_narrow()
    part = torch.cat([narrow, narrow])[:3]
    total = functional.add(x, part)
    assert total.grad_fn is not None
    assert total.grad_fn.name() == "brim::add_backward"


def test_what_was_written_to_before_is_not_relied_on() -> None:
    x, _, narrow = wide_and_narrow()
    narrow = narrow.clone()
    total = functional.add(x, narrow)
    expected = torch.autograd.grad(
        torch.layer_norm(total, [WIDTH]).pow(3).sum(), x, retain_graph=True
    )
    with torch.no_grad():
        narrow.zero_()
    found = torch.autograd.grad(functional.layer_norm(total, [WIDTH]).pow(3).sum(), x)
    assert equal([*found], [*expected])


def test_hooks_see_what_torch_keeps() -> None:
    seen: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    x, _, narrow = wide_and_narrow()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.add(x, narrow)
    assert not seen


def test_second_derivatives_and_second_backwards() -> None:
    found = []
    for net in (built(), converted(built(), "products")):
        x = batch()
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net.eval()(x).square().mean()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again.square().sum(), x)
        found.append([*first, again.detach(), *second])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)
