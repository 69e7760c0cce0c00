"""Modules that call functions in each way that code can: brim's run there, without a mode."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import brim

from .nn_modules import nodes_of

DEPTHS: list[int] = []
SLOPE = 0.1
RELU = nn.ReLU()


class Plain(nn.Module):
    """Names a function in each way that code can."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 4)
        self.act = ""

    def forward(self, x: Tensor, *, keep: float = 0.75) -> Tensor:
        DEPTHS.append(torch._C._len_torch_function_stack())
        x = F.relu(self.bn(self.conv(x)), inplace=True)
        x = nn.functional.leaky_relu(torch.nn.functional.max_pool2d(x, 2), SLOPE)
        x = dropout(torch.flatten(x, 2).mean(2), 1 - keep, self.training)
        return torch.sigmoid(self.last(self.chosen(x)))

    def chosen(self, x: Tensor) -> Tensor:
        return F.relu(x) if self.act != F.relu else F.relu6(input=x)


def helped(x: Tensor) -> Tensor:
    return F.relu(x)


class WithLayer(nn.Module):
    """Is no activation, which would be replaced as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class ByGlobals(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x)) + globals().get("SLOPE", 100)


class ByModule(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(RELU(self.layer(x)))


class ByMethod(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.layer(x)).relu()


class ByHelper(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return helped(F.relu6(self.layer(x)))


class ByProduct(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x)) * x


class ByIdentity(WithLayer):
    """`is` would tell brim's function from torch's."""

    def forward(self, x: Tensor, act: Any = F.relu) -> Tensor:
        return F.relu(self.layer(x)) if act is F.relu else x


class ByBase(ByHelper):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(super().forward(x))


class ByChild(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.child(x))


def gradients(model: nn.Module, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    y = (call or model)(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, *model.parameters()])]


def equal(mine: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, mine, other))


def converted(recompute: str | None = None) -> tuple[Plain, list[Tensor]]:
    torch.manual_seed(0)
    model = Plain()
    expected = gradients(model)
    assert "functions redirected in 1 module" in str(brim.convert(model, recompute=recompute))
    return model, expected


@pytest.mark.parametrize("recompute", [None, "cheap", "products"])
def test_functions_that_code_calls_are_brims_without_a_mode(recompute: str | None) -> None:
    model, expected = converted(recompute)
    DEPTHS.clear()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(gradients(each), expected)
        names = nodes_of(each(torch.ones(2, 2, 8, 8)))
        wanted = "relu max_pool leaky_relu dropout sigmoid linear conv batch_norm".split()  # noqa: SIM905
        assert {f"brim::{name}_backward" for name in wanted} <= names
    assert {*DEPTHS} == {0}
    assert type(brim.restore(model)) is Plain
    assert equal(gradients(model), expected)


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_a_checkpoint_runs_the_same_code_again(recompute: str | None) -> None:
    model, expected = converted(recompute)
    assert equal(gradients(model, lambda x: checkpoint(model, x, use_reentrant=False)), expected)


def test_names_are_looked_up_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = converted()
    model.eval()
    x = torch.randn(2, 2, 8, 8)
    before = model(x)
    monkeypatch.setitem(globals(), "SLOPE", 100.0)
    monkeypatch.setitem(globals(), "dropout", lambda x, *_: x + 1)  # also a function of another
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: -x)
    mine = model(x)
    assert not torch.equal(mine, before)
    assert torch.equal(mine, brim.restore(model)(x))
    monkeypatch.delitem(globals(), "SLOPE")
    brim.convert(model)
    with pytest.raises(NameError, match="SLOPE"):
        model(x)


def test_functions_are_equal_to_torchs() -> None:
    model, _ = converted()
    model.act = F.relu  # type: ignore[assignment]
    x = torch.full((1, 4), 9.0)
    assert model.chosen(x).max() == 6


def test_what_does_not_fit_gets_torchs_functions() -> None:
    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *call: Any) -> Any:
            return func.__name__

    model, _ = converted()
    assert model.chosen(torch.tensor([-1, 2])).tolist() == [0, 2]
    assert model.chosen(torch.ones(2).as_subclass(Named)) == "relu"
    named = ByChild(nn.Linear(4, 4))
    brim.convert(named)
    graph = torch.fx.symbolic_trace(named).graph
    assert graph.find_nodes(op="call_function", target=F.relu6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*deprecated")
def test_compiled_and_traced_programs_have_torchs_functions() -> None:
    model, _ = converted()
    model.eval()
    x = torch.randn(2, 2, 8, 8)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), expected)
    assert "brim::" not in str(traced.inlined_graph)


@pytest.mark.parametrize(
    "make",
    [
        *(ByMethod, ByHelper, ByProduct, ByIdentity, ByBase, ByGlobals, ByModule),
        lambda: ByChild(ByHelper()),
        lambda: ByChild(weight_norm(nn.Linear(4, 4))),
    ],
    ids=[
        "method",
        "helper",
        "product",
        "identity",
        "base",
        "globals",
        "module",
        "child",
        "parametrized",
    ],
)
def test_what_code_does_not_name_arrives_too(make: Callable[[], nn.Module]) -> None:
    model = make()
    brim.convert(model)
    x = torch.randn(3, 4, requires_grad=True)
    mine = model(x)
    assert any(node.startswith("brim::") for node in nodes_of(mine))
    assert torch.equal(mine, brim.restore(model)(x))
