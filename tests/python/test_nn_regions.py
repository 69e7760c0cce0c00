"""Functions that modules call in their forward: redirected there, and nowhere else."""

from __future__ import annotations

import contextlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import brim
from brim import _C

from .nn_modules import Gate, close, nodes_of, run


def test_functions_in_a_forward_are_redirected() -> None:
    module = Gate()
    expected = run(module)
    report = brim.convert(module)
    assert [(each.name, each.type) for each in report.functions] == [("", "Gate")]
    assert "functions redirected in 1 module" in str(report)
    y = module(torch.ones(2, 8), scale=1)
    assert y.grad_fn.next_functions[0][0].name() == "brim::relu_backward"
    close(run(module), expected)
    brim.restore(module)
    assert type(module) is Gate


def test_methods_without_the_module_are_left_alone() -> None:
    class Helps(nn.Module):
        @staticmethod
        def twice(x: Tensor, by: Tensor) -> Tensor:
            return F.relu(x) * by

        @classmethod
        def thrice(cls, x: Tensor) -> Tensor:
            return F.relu(x) * x

        def forward(self, x: Tensor) -> Tensor:
            return self.thrice(self.twice(x, by=x))

    module = Helps()
    expected = run(module)
    brim.convert(module, recompute="cheap")
    close(run(module), expected)


def test_functions_can_be_left_alone() -> None:
    module = Gate()
    assert not brim.convert(module, functions=False).functions
    assert type(module) is Gate
    assert type(module.inner) is brim.nn.Linear


def test_containers_get_no_region() -> None:
    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.gate = Gate()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            batch, width = x.shape
            return self.relu(self.gate(x.reshape(batch * 2, width // 2 * 2))) * self.scale * 3.0

    model = nn.Sequential(Container())
    assert [each.name for each in brim.convert(model).functions] == ["0.gate"]


def test_recompute_reaches_the_functions() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.gelu(self.norm(x)))

    torch.manual_seed(0)
    model = Block()
    x = torch.randn(64, 8)
    expected = run(model, x)
    brim.convert(model)
    without = brim.audit(model, x).brim
    brim.convert(model, recompute="cheap")
    copies = 2 * 8 * 4  # of the norm's weight and bias
    assert brim.audit(model, x).brim + 2 * 64 * 8 * 4 <= without + copies
    close(run(model, x), expected)


def test_the_region_ends_with_the_forward_even_by_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.relu(x)
            raise ZeroDivisionError

    module = Fails()
    brim.convert(module)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        module(x)
    assert not F.relu(x).grad_fn.name().startswith("brim::")


def test_an_interrupt_ends_the_region() -> None:
    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Sequential(Stops())

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.inside(x))

    block, x = Block(), torch.ones(2, 8, requires_grad=True)
    before = _C.region_state()
    for choice in ({}, {"skip": "inside.0"}):  # what is left out leaves the region around it
        brim.convert(block, **choice)
        with pytest.raises(KeyboardInterrupt):
            block(x)
        assert _C.region_state() == before
        assert F.relu(x).grad_fn.name() == "ReluBackward0"


def test_no_python_runs_between_a_module_and_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for what is redirected nor for the rest: all is decided in C++."""
    block, x = Reaches(), torch.randn(4, 8, requires_grad=True)
    brim.convert(block, recompute="cheap")
    block(x)
    called: list[str] = []
    package = str(Path(brim.__file__).parent)

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package) and called:
            called.append(frame.f_code.co_qualname)

    class Mark(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            called.append("begin")
            return x

    block.mark = Mark()
    sys.setprofile(note)
    try:
        block(x)
    finally:
        sys.setprofile(None)
    assert called == ["begin"]


class Reaches(nn.Module):
    """Calls operators in each way that code can, and some that brim leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Identity()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mark(x)
        x = helped(x) * torch.sigmoid(x) + F.linear(x, self.weight)
        x += x.relu()
        return x.transpose(0, 1).softmax(0).view(-1).cumsum(0)


def helped(x: Tensor) -> Tensor:
    return F.relu6(x).mul(x)


@pytest.mark.parametrize("recompute", [None, "cheap", "products"])
def test_operators_arrive_by_any_name(recompute: str | None) -> None:
    torch.manual_seed(0)
    model, x = Reaches(), torch.randn(4, 8)
    expected = run(model, x)
    brim.convert(model, recompute=recompute)
    close(run(model, x), expected)
    wanted = ["hardtanh", "sigmoid", "linear", "relu", "mul", *(["add"] if recompute else [])]
    names = nodes_of(model(x.clone().requires_grad_()))
    assert {f"brim::{name}_backward" for name in wanted} <= names


def test_larger_functions_of_torch_are_reached() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(3, 2, 8)
    mask = torch.zeros(2, 3, dtype=torch.bool)

    def step() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        y, weights = model(x, x, x, key_padding_mask=mask)  # asks for the weights
        return (y, weights, *torch.autograd.grad(y.sum(), [*model.parameters()]))

    expected = step()
    brim.convert(model)
    close(step(), expected)
    assert {"brim::linear_backward", "brim::dropout_backward"} <= nodes_of(model(x, x, x)[0])


def test_without_gradients_torchs_own_run() -> None:
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    model = Reaches()
    brim.convert(model)
    with torch.no_grad(), Counts():
        model(torch.ones(2, 8))
    assert not any("brim" in name for name in names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, by torch itself
def test_forward_mode_and_vmap_get_torchs_own() -> None:
    torch.manual_seed(0)
    model, x = Reaches(), torch.randn(4, 8)
    grad = torch.func.grad(lambda x: model(x).sum())
    expected = (
        torch.func.jvp(model, (x,), (x,))[1],
        torch.func.vmap(model)(x[None]),
        grad(x),
        torch.func.vmap(grad)(x[None]),
    )
    brim.convert(model)
    close(torch.func.jvp(model, (x,), (x,))[1:], expected[:1])
    close((torch.func.vmap(model)(x[None]), grad(x), torch.func.vmap(grad)(x[None])), expected[1:])


def test_sums_are_redirected_in_the_region_around_also_below_a_module_between() -> None:
    """A region of sums alone is not worth it, but in another one they let layers ask."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.other(x)

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums = Sums()

        def forward(self, x: Tensor) -> Tensor:
            return self.sums(x).transpose(0, 1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.between = Between()

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.between(x))

    model, x = Outer(), torch.ones(2, 8, requires_grad=True)
    brim.convert(model, recompute="cheap")
    sums: list[str] = []
    model.between.sums.register_forward_hook(lambda *call: sums.append(call[2].grad_fn.name()))
    for _ in range(3):
        model(x)
    assert sums == ["brim::add_backward"] * 3


def test_what_left_a_region_can_become_one() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sum()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.inner(x))

    model = Outer()
    assert [each.name for each in brim.convert(model).functions] == [""]
    assert [each.name for each in brim.convert(model, recompute="cheap").functions] == ["inner"]


class Hidden(nn.Module):
    """Calls a function where `convert` does not see it, for long inputs only."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return _dropped(x) if len(x) > 2 else x.transpose(0, 1), None


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(Hidden())
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return F.relu(checkpoint(self.inside, x, use_reentrant=False)[0])
        return F.relu(self.inside(x)[0])


def inner_node(result: Tensor) -> str:
    assert result.grad_fn is not None
    return str(result.grad_fn.next_functions[0][0].name())  # type: ignore[union-attr]


@pytest.mark.parametrize("first", ["frozen", "checkpoint inside"])
def test_a_call_in_which_nothing_is_redirected_teaches_nothing(first: str) -> None:
    block, x = Around(), torch.ones(4, 4)
    brim.convert(block)
    block.checkpoints = first == "checkpoint inside"
    block(x.requires_grad_(first != "frozen"))
    block.checkpoints = False
    for _ in range(2):
        assert inner_node(block(x.requires_grad_())) == "brim::dropout_backward"


def test_a_checkpoint_runs_again_as_before_what_has_left_in_between() -> None:
    block, x = Around(), torch.ones(4, 4, requires_grad=True)
    brim.convert(block)
    result = checkpoint(block, x, use_reentrant=False)
    block(x[:2])  # nothing to redirect
    result.sum().backward()
    assert x.grad is not None


def test_containers_may_contain_themselves() -> None:
    block = Around()
    block.inside.append(block.inside)
    report = brim.convert(block)
    assert [each.name for each in report.functions] == [""]


def test_products_alone_are_redirected_only_to_run_again() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    module = Products()
    x = torch.ones(3, requires_grad=True)
    names = []
    for recompute in (None, "cheap"):
        brim.convert(module, recompute=recompute)
        module(x)
        names.append(module(x).grad_fn.name())
    assert names == ["MulBackward0", "brim::mul_backward"]


class Branches(nn.Module):
    """Keeps less through its region if the first branch is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        return F.relu(self.a(x)).sum(0) + self.b(x).sum(0)


class Gated(nn.Module):
    """A product keeps the output of the ReLU."""

    def __init__(self, function: bool = False, gate_first: bool = False) -> None:
        super().__init__()
        self.c, self.d, self.relu = nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU()
        self.function, self.gate_first = function, gate_first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.c(x)) if self.function else self.relu(self.c(x))
        gate = torch.sigmoid(self.d(x))
        return torch.mul(gate, y) if self.gate_first else y * gate


def kept(model: nn.Module, x: Tensor) -> int:
    with brim.PeakMeter("cpu") as meter:
        y = model(x)  # noqa: F841  its graph is what is measured
        return meter.left


def test_a_region_counts_again_when_something_is_unfrozen() -> None:
    x = torch.randn(256, 64)
    early, late = Branches(), nn.Sequential(Branches())
    late[0].a.requires_grad_(False)
    for model in (early, late):
        brim.convert(model)
    for _ in range(2):
        expected = kept(early, x)
        assert kept(late, x) <= expected
    late[0].a.requires_grad_(True)
    assert [kept(late, x) for _ in range(3)] == [expected] * 3
    late[0].a.requires_grad_(False)
    assert kept(late, x) < expected


@pytest.mark.parametrize("give", ["positional", "keyword", "nested"])
def test_a_region_counts_again_when_an_input_needs_a_gradient(give: str) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(64, 64)

        def forward(self, x: Tensor, other: Any = None) -> Tensor:
            given = other["those"][0] if isinstance(other, dict) else other
            return F.relu(x if given is None else given).sum(0) + self.last(x.detach()).sum(0)

    def call(needs: bool) -> int:
        x = torch.randn(256, 64)
        more = torch.randn(256, 64).requires_grad_(needs)
        with brim.PeakMeter("cpu") as meter:
            if give == "positional":
                y = model(more)
            elif give == "keyword":
                y = model(x, other=more)
            else:
                y = model(x, {"those": [more]})
            left = meter.left
        return left if y.requires_grad else 0

    model = Takes()
    brim.convert(model)
    for needs in (False, False, True, True):
        found = call(needs)
    assert found < 256 * 64 * 4 / 8 + 1024


@pytest.mark.parametrize("trained", ["all", "first", "gate"])
@pytest.mark.parametrize("level", [None, "cheap", "products"])
def test_a_relu_before_a_product_keeps_no_more_than_torchs(level: str | None, trained: str) -> None:
    x = torch.randn(64, 64)
    for function, gate_first in [(False, False), (True, False), (False, True)]:
        torchs, ours = (nn.Sequential(*[Gated(function, gate_first)] * 2) for _ in range(2))
        for model in (torchs, ours):
            for each in model:
                each.c.requires_grad_(trained != "gate")
                each.d.requires_grad_(trained != "first")
        brim.convert(ours, recompute=level)
        most = kept(torchs, x)
        assert max(kept(ours, x) for _ in range(3)) <= most
    # What was frozen in the first calls is trained later.
    for model in (torchs, ours):
        model.requires_grad_(True)
    assert kept(ours, x) <= kept(torchs, x)


class Halves(nn.Module):
    """The same work by a child that is left out and by one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out, self.other = Gate(), Gate()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.relu(x) * 1.0, self.left_out(x), self.other(x)


def names_of(model: nn.Module) -> list[str]:
    results = model(torch.ones(2, 8, requires_grad=True))
    return [y.grad_fn.next_functions[0][0].name() for y in results]


@pytest.mark.parametrize(
    "choice",
    [{"skip": "left_out"}, {"only": lambda name, module: not name.startswith("left_out")}],
    ids=["skip", "only"],
)
def test_a_region_does_not_reach_into_what_is_left_out(choice: dict[str, Any]) -> None:
    model = Halves()
    brim.convert(model, **choice)
    assert type(model.left_out) is Gate
    assert names_of(model) == ["brim::relu_backward", "ReluBackward0", "brim::relu_backward"]
    other = pickle.loads(pickle.dumps(model))
    assert names_of(other) == names_of(model)
    with brim.saving():  # a region of the user's own counts everywhere
        assert names_of(model) == ["brim::relu_backward"] * 3
    brim.convert(model)
    assert names_of(model) == ["brim::relu_backward"] * 3
    brim.convert(other, skip=Gate)
    brim.restore(other)
    assert not other.left_out._forward_hooks
    assert not other.left_out._forward_pre_hooks
    assert not other.left_out._forward_hooks_always_called


def test_an_error_in_what_is_left_out_ends_nothing_around_it() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Fails()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ZeroDivisionError):
                self.inner(x)
            return F.relu(x)

    model = Catches()
    brim.convert(model, skip="inner")
    x = torch.ones(3, requires_grad=True)
    assert model(x).grad_fn.name() == "brim::relu_backward"


# -- Checkpoints -----------------------------------------------------------------------------------


class Product(nn.Module):
    """Two factors of one shape: a checkpoint that mixed them up would not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(x)


class InHelper(Product):
    def forward(self, x: Tensor) -> Tensor:
        return multiplied(self.first(x), self.second(x))


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return a * b


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(checkpoint(self.block, x, use_reentrant=False))


@pytest.mark.parametrize("recompute", [None, "cheap"])
@pytest.mark.parametrize("block", [Product, InHelper])
def test_a_checkpoint_runs_the_same_functions_again(block: Any, recompute: str | None) -> None:
    torch.manual_seed(0)
    model = Checkpointed(block())
    x = torch.randn(4, 8, requires_grad=True)
    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), wanted)
    brim.convert(model, recompute=recompute)
    for _ in range(3):  # the first call decides whether a region is worth it
        close(torch.autograd.grad(model(x).sum(), wanted), expected)
    with brim.saving(recompute=recompute):
        y = checkpoint(lambda z: z * z.exp(), x, use_reentrant=False)
    close(torch.autograd.grad(y.sum(), [x]), [(x.exp() * (1 + x)).detach()])
