"""`recompute="auto"`: whole blocks of layers run again where nothing else is left to drop."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import brim
from brim.nn._blocks import repeated_blocks

from .test_nn_auto import (
    DEVICES,
    Checkpointed,
    _without_onednn,  # noqa: F401
    drop_all,
    equal,
    needs_cuda,
    peak_of,
    step,
)


@pytest.fixture(autouse=True)
def _nothing_learned() -> Iterator[None]:
    brim.nn.reset_pressure()
    yield
    gc.collect()
    assert brim.nn.pressure().values == 0
    brim.nn.reset_pressure()


class Layer(nn.Module):
    """Attention and an MLP, written as models write them; with what torch alone knows."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        x = x + self.dropout(self.out(self.dropout(weights) @ v))
        x = x + self.down(F.gelu(self.up(torch.sin(x))))
        return x if scale is None else x * scale


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.bn1(self.first(x)))
        return torch.relu(x + self.bn2(self.second(y)))


def transformer(layers: int = 6, dropout: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16, dropout) for _ in range(layers))).train()
    return model, torch.randn(4, 64, 16)


def convolutions() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Bottleneck(8) for _ in range(5))).train(), torch.randn(4, 8, 16, 16)


WORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": transformer,
    "with dropout": lambda: transformer(dropout=0.2),
    "batch norms": convolutions,
}


def converted(model: nn.Module, **options: Any) -> nn.Module:
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute="auto", **options)
    return ours


# -- Which modules ---------------------------------------------------------------------------------


def test_layers_that_a_model_repeats_are_blocks() -> None:
    model, _ = transformer(3)
    report = brim.convert(model, recompute="auto")
    assert [each.name for each in report.blocks] == ["0", "1", "2"]
    assert "3 blocks may run again" in str(report)


def test_of_blocks_inside_of_blocks_the_inner_ones() -> None:
    stages = nn.Sequential(*(nn.Sequential(*(Layer(8) for _ in range(2))) for _ in range(2)))
    assert {type(block) for block in repeated_blocks(stages)} == {Layer}
    assert len(repeated_blocks(stages)) == 4


def test_parts_of_which_each_block_has_one_are_no_blocks() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(8, 8), Layer(8))

    model = nn.Sequential(nn.Sequential(Around(), Around()), nn.Sequential(Around()))
    assert {type(block) for block in repeated_blocks(model)} == {Around}
    assert len(repeated_blocks(model)) == 3


def test_blocks_outside_of_lists_are_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = Bottleneck(4), Bottleneck(4)
            self.middle = nn.ModuleList(Layer(4) for _ in range(2))

    net = Net()
    assert repeated_blocks(net) == {net.down, net.up, *net.middle}
    assert not repeated_blocks(net.down)


def test_one_product_is_no_block() -> None:
    class Small(nn.Sequential):
        pass

    model = nn.Sequential(*(Small(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert not repeated_blocks(model)


def test_blocks_can_be_named() -> None:
    model, _ = transformer(3)
    assert [b.name for b in brim.convert(model, recompute="auto", blocks=["0", "2"]).blocks] == [
        "0",
        "2",
    ]
    assert not brim.convert(model, recompute="auto", blocks=()).blocks
    assert len(brim.convert(model, recompute="auto", blocks=Layer).blocks) == 3
    assert not brim.convert(model, recompute="cheap").blocks
    assert not any("_brim_block" in vars(module) for module in model.modules())


def test_wrong_blocks_are_refused() -> None:
    model, _ = transformer(1)
    with pytest.raises(ValueError, match='blocks is for recompute="auto", got recompute=None'):
        brim.convert(model, blocks=Layer)
    with pytest.raises(ValueError, match="matches no name"):
        brim.convert(model, recompute="auto", blocks="nowhere")
    with pytest.raises(TypeError, match="blocks must be a type of module"):
        brim.convert(model, recompute="auto", blocks=3)  # type: ignore[arg-type]


def test_restore_copies_and_pickles() -> None:
    model, x = transformer(3)
    ours = converted(model)
    expected = step(ours, x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert equal(step(other, x, drop_all), expected)
    assert brim.nn.pressure().blocks == 6
    brim.restore(ours)
    assert type(ours[0]) is Layer
    assert not any("_brim" in name for module in ours.modules() for name in vars(module))


# -- The same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("functions", [False, True], ids=["layers", "functions"])
@pytest.mark.parametrize("name", WORKS)
def test_gradients_and_statistics_are_the_same(name: str, functions: bool, autocast: bool) -> None:
    model, x = WORKS[name]()
    kept = converted(model, functions=functions, blocks=())
    expected = step(kept, x, autocast=autocast)
    random_after = torch.get_rng_state()
    ours = converted(model, functions=functions)
    assert equal(step(ours, x, drop_all, autocast), expected)
    assert brim.nn.pressure().blocks == len(model)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), random_after)
    assert equal(list(ours.buffers()), list(kept.buffers()))
    assert equal(step(ours, x, autocast=autocast), step(kept, x, autocast=autocast))


@pytest.mark.parametrize("name", WORKS)
def test_a_step_settles_under_a_budget_that_needs_blocks(name: str) -> None:
    model, x = WORKS[name]()
    plain, ours = converted(model, blocks=()), converted(model)
    expected = step(plain, x)
    plain.zero_grad(set_to_none=True)
    whole = peak_of(lambda: step(plain, x))
    plain.zero_grad(set_to_none=True)
    gc.collect()
    share = 0.65 if name == "batch norms" else 0.45
    with brim.budget(brim.memory_stats("cpu").allocated + int(share * whole), "cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            step(plain, x)
        gc.collect()
        for turn in range(6):
            before = brim.nn.pressure()
            assert equal(step(ours, x), expected)
            after = brim.nn.pressure()
            if turn >= 3:
                assert after.requests == before.requests
                assert after.blocks > before.blocks


def test_what_a_block_is_given_may_change_afterwards() -> None:
    class Dense(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.mix = nn.Linear(width, 8)
            self.out = nn.Linear(8, 8)

        def forward(self, features: list[Tensor]) -> Tensor:
            return torch.tanh(self.out(torch.sigmoid(self.mix(torch.cat(features, -1)))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Dense(8 * (i + 1)) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            features = [x]
            for layer in self.layers:
                features.append(layer(features))
            return torch.cat(features, -1)

    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 8)
    expected = step(converted(model, blocks=()), x)
    assert equal(step(converted(model), x, drop_all), expected)
    assert brim.nn.pressure().blocks == 4


def test_a_tensor_that_is_given_twice_is_one() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.out = nn.Linear(16, 16)

        def forward(self, query: Tensor, others: dict[str, Tensor]) -> Tensor:
            # Other products where these are one tensor.
            mixed = self.attention(query, others["key"], others["value"], need_weights=False)[0]
            return torch.sin(self.out(mixed))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attends() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, {"key": x, "value": x})
            return x

    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8, 16, requires_grad=True).tanh()
    expected = step(converted(model, blocks=()), x)
    assert equal(step(converted(model), x, drop_all), expected)
    assert brim.nn.pressure().blocks == 3


def test_a_block_that_writes_to_its_input_is_kept() -> None:
    class Writes(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x.add_(1), scale)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), *(Writes(16) for _ in range(3)))
    x = torch.randn(4, 8, 16)
    expected = step(converted(model, blocks=()), x)
    assert equal(step(converted(model), x, drop_all), expected)
    assert brim.nn.pressure().blocks == 0


def test_a_block_with_state_of_its_own_is_kept() -> None:
    model = nn.Sequential(*(Layer(16) for _ in range(3)))
    for layer in model:
        torch.nn.utils.spectral_norm(layer.up)
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16)
    kept, ours = converted(model, blocks=()), converted(model)
    assert equal(step(ours, x, drop_all), step(kept, x))
    assert brim.nn.pressure().blocks == 0


def test_an_argument_that_brim_does_not_know_keeps_the_block() -> None:
    class Cache:
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, scale=self.scale)
            return x

        scale: Any = None

    class Odd(Layer):
        def forward(self, x: Tensor, scale: Any = None) -> Tensor:
            return super().forward(x)

    model = Net()
    model.layers = nn.ModuleList(Odd(16) for _ in range(2))
    model.scale = Cache()
    x = torch.randn(4, 8, 16)
    ours = converted(model)
    expected = step(ours, x)
    assert equal(step(ours, x, drop_all), expected)
    assert brim.nn.pressure().blocks == 0


def test_the_mode_of_the_forward_counts() -> None:
    model, x = transformer(dropout=0.3)
    ours = converted(model)
    expected = step(converted(model, blocks=()), x)

    def evaluate_and_drop() -> None:
        ours.eval()
        drop_all()

    assert equal(step(ours, x, evaluate_and_drop), expected)
    assert not any(module.training for module in ours.modules())
    assert brim.nn.pressure().blocks == 6


def test_a_weight_that_changed_raises() -> None:
    model, x = transformer(3)
    ours = converted(model)

    def change() -> None:
        drop_all()
        with torch.no_grad():
            ours[1].up.bias.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(ours, x, change)


def test_a_block_that_differs_when_it_runs_again_raises() -> None:
    class Fickle(Layer):
        calls = 0

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            Fickle.calls += 1
            return super().forward(x if Fickle.calls <= 3 else torch.exp(x[:, :3]))

    torch.manual_seed(0)
    ours = converted(nn.Sequential(*(Fickle(16) for _ in range(3))))
    with pytest.raises(RuntimeError, match="kept other tensors than before"):
        step(ours, torch.randn(4, 8, 16), drop_all)


def test_attributes_that_a_forward_sets_hold_no_second_graph() -> None:
    class Tells(Layer):
        seen: Tensor

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            self.seen = torch.exp(x)
            return super().forward(self.seen)

    torch.manual_seed(0)
    ours = converted(nn.Sequential(*(Tells(16) for _ in range(3))))
    seen: list[Tensor] = []

    def drop() -> None:
        seen.extend(layer.seen for layer in ours)
        drop_all()

    step(ours, torch.randn(4, 8, 16) / 99, drop)
    assert brim.nn.pressure().blocks == 3
    assert all(layer.seen is tensor for layer, tensor in zip(ours, seen, strict=True))
    for layer in ours:
        del layer.seen


def test_modules_that_lead_back_to_themselves_hold_no_second_graph() -> None:
    class Cycle(Layer):
        def __init__(self) -> None:
            super().__init__(16)
            self.sine, self.log = self.of, list[Tensor]()  # its own method

        def of(self, x: Tensor) -> Tensor:
            self.seen = torch.sin(x)
            self.log.append(self.seen)
            return self.seen

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(self.sine(x), scale)

    torch.manual_seed(0)
    ours, x = converted(nn.Sequential(*(Cycle() for _ in range(3)))), torch.randn(4, 8, 16)

    def held() -> int:
        step(ours, x, drop_all)
        for layer in ours:
            layer.log.clear()
            del layer.seen
        ours.zero_grad()
        return brim.memory_stats("cpu").allocated

    gc.collect()
    gc.disable()
    try:
        assert held() == held()
    finally:
        gc.enable()
    assert brim.nn.pressure().blocks == 6


class Scales(Layer):
    """By a number, a list and a tensor of its own, which each call changes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0
        self.seen: list[int] = []
        self.last: Tensor = torch.ones(width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        x = super().forward(x * self.calls * len(self.seen) * torch.sigmoid(self.last))
        self.last = x.mean((0, 1))
        return x


def test_the_attributes_of_the_forward_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scales(16) for _ in range(3)))
    x = torch.randn(4, 8, 16)
    kept, ours = converted(model, blocks=()), converted(model)
    for _ in range(3):
        brim.nn.reset_pressure()
        with torch.no_grad():
            for net in (kept, ours):
                for layer in net:
                    layer.last = layer.last.detach()
        assert equal(step(ours, x, drop_all), step(kept, x))
        assert brim.nn.pressure().blocks == 3
    for one, other in zip(ours, kept, strict=True):
        assert (one.calls, one.seen) == (other.calls, other.seen)
        assert torch.equal(one.last, other.last)


def test_the_parameters_and_children_of_the_forward_count() -> None:
    model, x = transformer(3)
    given = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}

    def swapped(net: nn.Module, drops: bool) -> list[Tensor]:
        own = list(net.parameters())
        loss = torch.func.functional_call(net, given, (x,)).square().mean()
        loss = loss + net(x).square().mean()
        for layer in net:  # type: ignore[attr-defined]
            layer.up = nn.Linear(16, 64)
            layer.out.weight = nn.Parameter(torch.zeros(16, 16))
        if drops:
            drop_all()
        return list(torch.autograd.grad(loss, [*given.values(), *own]))

    assert equal(swapped(converted(model), True), swapped(converted(model, blocks=()), False))
    assert brim.nn.pressure().blocks == 6


def test_the_hooks_of_the_forward_count() -> None:
    model, x = transformer(3)

    def gradients(ours: nn.Module, drop: Callable[[], None]) -> list[Tensor]:
        once = [layer.up.register_forward_pre_hook(lambda _, given: given[0] * 2) for layer in ours]
        loss = ours(x).square().sum()
        for handle in once:
            handle.remove()
        for layer in ours:
            layer.down.register_forward_pre_hook(lambda _, given: given[0] * 3)
        drop()
        loss.backward()
        return [each.grad for each in ours.parameters() if each.grad is not None]

    expected = gradients(converted(model, blocks=()), lambda: None)
    assert equal(gradients(converted(model), drop_all), expected)
    assert brim.nn.pressure().blocks == 3


def test_statistics_that_a_forward_reads_keep_the_block() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(16))
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean((0, 1)), 0.5)
            return self.second(torch.tanh(self.first(x - self.running_mean)))

    torch.manual_seed(0)
    model = nn.Sequential(*(Running() for _ in range(3)))
    x = torch.randn(4, 8, 16)
    kept, ours = converted(model, blocks=()), converted(model)
    assert equal(step(ours, x, drop_all), step(kept, x))
    assert equal(list(ours.buffers()), list(kept.buffers()))
    assert brim.nn.pressure().blocks == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_parts_that_cannot_be_copied_or_run_alone_keep_the_block() -> None:
    class Outer(Layer):
        def __init__(self, part: nn.Module) -> None:
            super().__init__(16)
            self.part = part

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(self.part(x))

    class Slotted(nn.Module):
        __slots__ = ("factor",)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    x = torch.randn(4, 8, 16)
    slotted = Slotted()
    slotted.factor = 3
    for part in (torch.jit.script(nn.Tanh()), nn.SyncBatchNorm(8).eval(), slotted):
        ours = nn.Sequential(*(Outer(part) for _ in range(2)))
        brim.convert(ours, recompute="auto")
        step(ours, x, drop_all)
        assert brim.nn.pressure().blocks == 0


def test_bound_methods_and_lists_of_children_are_those_of_the_copy() -> None:
    class Chooses(Bottleneck):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.work = self.run
            self.order = [self.bn1, (self.bn2,)]

        def run(self, x: Tensor) -> Tensor:
            return self.order[1][0](torch.tanh(self.order[0](self.first(x))))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.second(self.work(x)))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Chooses(8) for _ in range(3))).train()

    kept, ours = made(), made()
    brim.convert(kept, recompute="auto", blocks=())
    brim.convert(ours, recompute="auto")
    x = torch.randn(4, 8, 16, 16)
    assert equal(step(ours, x, drop_all), step(kept, x))
    assert brim.nn.pressure().blocks == 3
    assert equal(list(ours.buffers()), list(kept.buffers()))


def test_a_backward_inside_keeps_the_block() -> None:
    class Forces(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            place = x.detach().requires_grad_()
            energy = super().forward(place).square().sum()
            force = torch.autograd.grad(energy, place, create_graph=True)[0]
            return super().forward(x) + force

    torch.manual_seed(0)
    model = nn.Sequential(*(Forces(16) for _ in range(2)))
    x = torch.randn(4, 8, 16)
    assert equal(step(converted(model), x, drop_all), step(converted(model, blocks=()), x))
    assert brim.nn.pressure().blocks == 0


def test_a_plan_leaves_blocks_whose_inputs_are_written_to_afterwards() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 64)
            self.down = nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.sin(self.up(x + 1)))

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Part() for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
                x += first(x)
                x = second(x)
            return x

    torch.manual_seed(0)
    model, x = Adds(), torch.randn(256, 16)
    plain, ours = converted(model, blocks=()), converted(model)
    expected = step(plain, x)
    whole = peak_of(lambda: step(plain, x))
    plain.zero_grad(set_to_none=True)
    gc.collect()
    with brim.budget(brim.memory_stats("cpu").allocated + int(0.8 * whole), "cpu"):
        for _ in range(24):
            assert equal(step(ours, x), expected)
    assert brim.nn.pressure().blocks > 0


def test_a_forward_may_catch_errors() -> None:
    class Careful(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            try:
                return super().forward(x)
            except RuntimeError:
                return torch.exp(super().forward(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Careful(16) for _ in range(2)))
    x = torch.randn(4, 8, 16)
    assert equal(step(converted(model), x, drop_all), step(converted(model, blocks=()), x))
    assert brim.nn.pressure().blocks == 2


# -- Nothing is left behind ------------------------------------------------------------------------


def test_graphs_without_a_backward_end() -> None:
    """The fixture checks that no value is left."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            for layer in self.layers:
                x += layer(x + 1)  # leads back to the layer's input
                x.mul_(layer(x))
            return x

    class Tells(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            self.seen = super().forward(x)  # the module holds the graph
            return self.seen

    x = torch.randn(2, 4, 16)
    for model in (Adds(), nn.Sequential(*(Tells(16) for _ in range(3)))):
        converted(model)(x)


# -- Graphs ----------------------------------------------------------------------------------------


def test_backward_twice_and_double_backward() -> None:
    model, x = transformer(3)
    ours, kept = converted(model), converted(model, blocks=())

    def twice(net: nn.Module, drops: bool) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        loss = net(leaf).square().mean()
        if drops:
            drop_all()
        first = torch.autograd.grad(loss, leaf, retain_graph=True)
        second = torch.autograd.grad(loss, leaf, create_graph=True)
        return [*first, *second, *torch.autograd.grad(second[0].square().sum(), leaf)]

    assert equal(twice(ours, True), twice(kept, False))
    assert brim.nn.pressure().blocks == 3


def test_a_value_written_to_raises_as_torch_does() -> None:
    class Leaks(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
            made = torch.exp(x)
            return super().forward(made), made

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Leaks(16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, made = layer(x)
                made.detach().mul_(2)
            return x

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(converted(Net()), torch.randn(2, 4, 16) / 99)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_and_inside(reentrant: bool) -> None:
    model, x = transformer(4, dropout=0.2)
    around = Checkpointed(model, reentrant)
    expected = step(converted(around, blocks=()), x)
    assert equal(step(converted(around), x, drop_all), expected)
    if not reentrant:
        assert brim.nn.pressure().blocks == 0


def test_hooks_of_the_program_are_left_alone() -> None:
    model, x = transformer(2)
    ours = converted(model)
    expected = step(ours, x)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert equal(step(ours, x, drop_all), expected)
    assert seen
    assert brim.nn.pressure().blocks == 0
    seen.clear()


def test_compiled_and_functional_code_is_left_alone() -> None:
    model, x = transformer(2)
    ours = converted(model)
    parameters = dict(ours.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(ours, given, (x,))
        return result.square().mean()

    gradients = torch.func.grad(loss)(parameters)
    ours.zero_grad()
    ours(x).square().mean().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad)
    exported = torch.export.export(copy.deepcopy(ours), (x,))
    torch.testing.assert_close(exported.module()(x), ours(x))


def test_threads() -> None:
    model, x = transformer(3)
    ours = [converted(model) for _ in range(3)]
    expected = step(converted(model, blocks=()), x)
    together = threading.Barrier(len(ours), action=drop_all)  # a budget is that of all threads
    found: list[Tensor | None] = []

    def work(own: nn.Module) -> None:
        for _ in range(3):
            leaf = x.detach().requires_grad_()
            loss = own(leaf).float().square().mean()
            together.wait()
            loss.backward()
            found.append(leaf.grad)

    threads = [threading.Thread(target=work, args=(own,)) for own in ours]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert all(gradient is not None and torch.equal(gradient, expected[1]) for gradient in found)
    assert brim.nn.pressure().blocks >= 9


@DEVICES
@pytest.mark.usefixtures("_without_onednn")
def test_every_allocation_of_a_step_may_fail(device: str) -> None:
    model, x = transformer(3, dropout=0.1)
    ours, x = converted(model).to(device), x[:, :8].to(device)
    expected = step(ours, x)
    with brim.testing.inject_oom(at=1 << 40, device=device) as counting:
        step(ours, x)
    served = 0
    for at in range(1, counting.allocations + 1):
        brim.nn.reset_pressure()
        with brim.testing.inject_oom(at=at, device=device):
            try:
                assert equal(step(ours, x), expected)
                served += 1
            except torch.OutOfMemoryError:
                assert brim.nn.pressure().requests == 0  # there was nothing to drop
        gc.collect()
    assert served > counting.allocations // 2


def test_accumulated_gradients_and_interleaved_graphs() -> None:
    model, x = transformer(3, dropout=0.2)
    kept, ours = converted(model, blocks=()), converted(model)

    def run(net: nn.Module, drops: bool) -> list[Tensor]:
        net.zero_grad()
        torch.manual_seed(3)
        losses = [net(x * scale).square().mean() for scale in (1.0, 2.0)]
        if drops:
            drop_all()
        for loss in losses:
            loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    assert equal(run(ours, True), run(kept, False))
    assert brim.nn.pressure().blocks == 6


def test_where_there_is_room_blocks_are_not_held() -> None:
    """That takes time. With less room they are again, and where something is larger."""
    model, x = transformer(3)
    ours = converted(model)
    held = [kept_by(ours, x) for _ in range(3)]
    assert held[0] > held[1] == held[2]
    assert kept_by(ours, x[:3]) == kept_by(ours, x[:, :5]) == held[1]
    assert kept_by(ours, torch.cat([x, x])) == held[0]
    assert kept_by(ours, torch.cat([x[:1], x[:1]], dim=1)) == held[0]
    whole = peak_of(lambda: step(ours, x))
    ours.zero_grad(set_to_none=True)
    gc.collect()
    with brim.budget(brim.memory_stats("cpu").allocated + int(1.1 * whole), "cpu"):
        assert kept_by(ours, x) == held[0]
    with brim.budget(brim.memory_stats("cpu").allocated + int(1.5 * whole), "cpu"):
        assert [kept_by(ours, x) for _ in range(2)] == held[:2]
        assert kept_by(ours, x[:3]) > held[1]  # what follows may be more than after `x`


class PostNorm(nn.Module):
    """What attention gives is kept by torch, and by the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(attended))
        return self.second(x + self.down(F.gelu(self.up(x))))


@pytest.mark.parametrize("share", [0.8, 0.7])
def test_a_settled_step_gives_up_no_value_that_frees_nothing(share: float) -> None:
    """Its bytes would count as given up, and more would have to go for them."""
    torch.manual_seed(0)
    ours, x = converted(nn.Sequential(*(PostNorm() for _ in range(6)))), torch.randn(8, 128, 32)
    for _ in range(2):
        step(ours, x)
    whole = peak_of(lambda: step(ours, x))
    ours.zero_grad(set_to_none=True)
    gc.collect()
    with brim.budget(brim.memory_stats("cpu").allocated + int(share * whole), "cpu"):
        for _ in range(12):  # blocks are held at first
            step(ours, x)
            ours.zero_grad(set_to_none=True)
        before = brim.nn.pressure()
        peak = peak_of(lambda: step(ours, x))
        after = brim.nn.pressure()
    assert after.blocks == before.blocks
    assert after.dropped == before.dropped, "it has settled"
    largest = 64 * x.nbytes // 32
    assert after.foreseen_bytes - before.foreseen_bytes <= whole - peak + largest


def test_the_time_of_blocks_is_told() -> None:
    model, x = transformer(4)
    ours = converted(model)
    begin = time.perf_counter()
    step(ours, x, drop_all)
    assert 0 < brim.nn.pressure().seconds < time.perf_counter() - begin


def test_blocks_that_take_less_time_per_byte_go_in_later_steps() -> None:
    """The oldest ones are slow, and would go first."""
    runs: list[bool] = []
    clock = brim._C.ClockByHand()

    class Waiting(nn.Module):
        def __init__(self, slow: bool) -> None:
            super().__init__()
            self.first, self.second, self.slow = nn.Linear(64, 64), nn.Linear(64, 64), slow

        def forward(self, x: Tensor) -> Tensor:
            runs.append(self.slow)
            clock.advance(1e-6 + 0.01 * self.slow)
            return x + self.second(torch.sin(torch.cos(torch.sin(self.first(x)))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow = nn.ModuleList(Waiting(True) for _ in range(4))
            self.fast = nn.ModuleList(Waiting(False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.slow:
                x = block(x)
            x = x[:-8]  # equal bytes would be equal layers
            for block in self.fast:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = converted(Model()), torch.randn(512, 64)
    with clock:
        whole = peak_of(lambda: step(model, x))
    model.zero_grad(set_to_none=True)
    slow_again = []
    limit = brim.memory_stats("cpu").allocated + int(0.8 * whole)
    with brim.budget(limit, "cpu"), clock:
        for _ in range(4):
            runs.clear()
            step(model, x)
            assert len(runs) > 8
            slow_again.append(sum(runs) - 4)
            model.zero_grad(set_to_none=True)
    assert slow_again[0] > 0
    assert slow_again[-1] == 0


def test_under_pressure_blocks_are_held_in_every_step() -> None:
    """What a step needed that did without values says nothing of what it would have needed."""
    model, _ = transformer(8)
    x = torch.randn(64, 64, 16)
    ours = converted(model)
    whole = peak_of(lambda: step(converted(model, blocks=()), x))
    gc.collect()
    held = []
    with brim.budget(brim.memory_stats("cpu").allocated + int(0.5 * whole), "cpu"):
        for _ in range(4):
            before = brim.nn.pressure().blocks
            step(ours, x)
            held.append(brim.nn.pressure().blocks - before)
    assert min(held) > 0


def test_where_single_values_suffice_blocks_are_not_held() -> None:
    """Until these do not: then blocks are held again, and go."""
    model, _ = transformer(6)
    x = torch.randn(16, 32, 16)
    ours, kept = converted(model), converted(model, blocks=())
    expected = step(kept, x)
    whole = peak_of(lambda: step(kept, x))
    gc.collect()
    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + int(0.9 * whole), "cpu"):
        assert kept_by(ours, x) > 2 * kept_by(kept, x)
        for _ in range(8):
            step(ours, x)
        assert kept_by(ours, x) <= kept_by(kept, x)
        assert equal(expected, step(ours, x))
        assert brim.nn.pressure().dropped > 0
    with brim.budget(held + int(0.5 * whole), "cpu"):
        assert equal(expected, step(ours, x))
    assert brim.nn.pressure().blocks > 0


def kept_by(model: nn.Module, x: Tensor) -> int:
    """How many values could be given up between forward and backward."""
    counts: list[int] = []
    step(model, x, lambda: counts.append(brim.nn.pressure().values))
    return counts[0]


def test_nothing_is_held_longer_than_without() -> None:
    model, x = transformer(6)
    ours, kept = converted(model), converted(model, blocks=())
    for net in (ours, kept):
        step(net, x)
    brim.nn.reset_pressure()
    assert peak_of(lambda: step(ours, x)) <= 1.02 * peak_of(lambda: step(kept, x))


# -- On a GPU --------------------------------------------------------------------------------------


def drop_all_on_cuda() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")


@needs_cuda
@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["transformer", "with dropout"])
def test_cuda_gives_the_same_bits(name: str, low: bool) -> None:
    model, x = WORKS[name]()
    model, x = model.cuda(), x.cuda()
    expected = step(converted(model, blocks=()), x, autocast=low)
    random_after = torch.cuda.get_rng_state()
    ours = converted(model)
    assert equal(step(ours, x, drop_all_on_cuda, low), expected)
    assert brim.nn.pressure().blocks == 6
    assert torch.equal(torch.cuda.get_rng_state(), random_after)


@needs_cuda
def test_cuda_random_lengths_under_a_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(128, 0.1) for _ in range(8))).cuda().train()
    kept, ours = converted(model, blocks=()), converted(model)
    longest = torch.randn(2, 1024, 128, device="cuda")
    with brim.PeakMeter("cuda") as meter:
        step(kept, longest, autocast=True)
    kept.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    lengths = [int(torch.randint(64, 1025, (), generator=generator)) for _ in range(24)]
    expected = [step(kept, longest[:, :length], autocast=True)[:2] for length in lengths]
    gc.collect()
    brim.release_cached("cuda")
    limit = brim.memory_stats("cuda").allocated + meter.peak // 2
    with brim.budget(limit, "cuda"):
        for length, want in zip(lengths, expected, strict=True):
            assert equal(step(ours, longest[:, :length], autocast=True)[:2], want)
    assert brim.nn.pressure().blocks > 0


@needs_cuda
def test_cuda_tells_the_time_and_records_a_step() -> None:
    model, x = transformer()
    ours, x = converted(model).cuda(), x.cuda()
    step(ours, x, drop_all_on_cuda)
    torch.cuda.synchronize()
    assert 0 < brim.nn.pressure().seconds < 10
    brim.nn.reset_pressure()  # and what was learned: else nothing is dropped, for nothing is kept
    begin = time.perf_counter()
    moments = brim.nn.record_pressure(step, ours, x, drop_all_on_cuda, device="cuda").moments
    torch.cuda.synchronize()
    assert 0 < brim.nn.pressure().seconds < time.perf_counter() - begin
    dropped = sum(moment.dropped for moment in moments)
    assert 0 < dropped <= sum(moment.again for moment in moments)
    assert moments[-1].given_up == 0


@needs_cuda
def test_a_captured_step_holds_no_blocks() -> None:
    model, x = transformer(2)
    ours, x = converted(model).cuda(), x.cuda().requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            ours.zero_grad(set_to_none=True)
            ours(x).square().mean().backward()
    torch.cuda.synchronize()
    expected = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    ours.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    brim.nn.reset_pressure()
    with torch.cuda.graph(graph):
        ours(x).square().mean().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    for parameter, want in zip(ours.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, want)
    del graph
