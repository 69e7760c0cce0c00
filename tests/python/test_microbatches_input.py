"""What Microbatches takes: kinds of batches, losses and arguments, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import brim

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "set"


X = torch.arange(5.0)
NUMPY_X = X.numpy() if hasattr(X, "numpy") else None
BATCHES: dict[str, tuple[Any, Callable[[Any], torch.Tensor]]] = {
    "tensor": (X, lambda b: b),
    "tuple": ((X, 7), lambda b: b[0]),
    "list of a data loader": ([X, X], lambda b: b[1]),
    "namedtuple": (Pair(X, None), lambda b: b.x),
    "dict": ({"x": X, "kind": "text"}, lambda b: b["x"]),
    "ordered dict": (OrderedDict(x=X), lambda b: b["x"]),
    "user dict": (UserDict(x=X), lambda b: b["x"]),
    "nested": ({"a": [(X, {"b": X})], "scale": torch.tensor(2.0)}, lambda b: b["a"][0][1]["b"]),
    "dataclass": (Sample(X), lambda b: b.x),
    "labels as a list": ({"x": X, "y": [0, 1, 2, 3, 4]}, lambda b: torch.tensor(b["y"]).float()),
    "texts as a tuple": ((X, ("a", "b", "c", "d", "e")), lambda b: b[0][: len(b[1])]),
    "numpy": ((X, NUMPY_X), lambda b: torch.from_numpy(b[1])),
    "packed": (
        pack_sequence([X[i : i + 1 + i % 2] for i in range(4)] + [X[4:]], enforce_sorted=False),
        lambda b: pad_packed_sequence(b)[0][0],
    ),
    "nested tensor": (
        torch.nested.nested_tensor([X[i : i + 1] for i in range(5)], layout=torch.jagged),
        lambda b: b.values(),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", BATCHES)
def test_kinds_of_batches(kind: str) -> None:
    batch, x_of = BATCHES[kind]
    seen = []
    w = torch.ones(1, requires_grad=True)

    def loss_fn(part: Any) -> torch.Tensor:
        assert type(part) is type(batch)
        seen.append(x_of(part).clone())
        return (w * x_of(part)).mean()

    loss = brim.Microbatches(loss_fn, size=2)(batch)
    assert [len(x) for x in seen[-3:]] == [2, 2, 1]
    assert torch.cat(seen[-3:]).equal(X)
    assert loss == 2
    assert w.grad == 2


def test_batches_along_another_dimension() -> None:
    w = torch.ones(3, requires_grad=True)
    x = torch.rand(3, 5)
    for dim in (1, -1):
        w.grad = None
        brim.Microbatches(lambda p: (w[:, None] * p).sum(0).mean(), size=2, dim=dim)(x)
        assert w.grad is not None
        assert w.grad.allclose(x.mean(1))


def test_samples_and_other_batches() -> None:
    w = torch.ones(1, requires_grad=True)
    samples = [torch.full((n + 1,), float(n)) for n in range(5)]

    def loss_fn(part: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * sample).mean() for sample in part]).mean()

    assert brim.Microbatches(loss_fn, split="slice", size=2)(samples) == 2

    class Graphs:
        def __init__(self, samples: list[torch.Tensor]) -> None:
            self.samples = samples

    assert w.grad == 2
    step = brim.Microbatches(
        lambda graphs: loss_fn(graphs.samples),
        split=lambda graphs, start, stop: Graphs(graphs.samples[start:stop]),
        length=lambda graphs: len(graphs.samples),
        size=2,
    )
    assert step(Graphs(samples)) == 2
    assert w.grad == 4


def test_layers_that_see_the_whole_batch_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3)), nn.LayerNorm(3))

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        return model(part).mean()  # type: ignore[no-any-return]

    step = brim.Microbatches(loss_fn, model=model)
    with pytest.raises(ValueError, match=r"1\.0 \(BatchNorm1d\)"):
        step(torch.rand(4, 3))
    model.eval()
    step(torch.rand(4, 3))
    model.train()
    with pytest.raises(ValueError, match="allow=BatchNorm1d"):
        step(torch.rand(4, 3))
    brim.Microbatches(loss_fn, model=model, allow=nn.BatchNorm1d)(torch.rand(4, 3))
    later = nn.Sequential(nn.Linear(3, 3))
    step = brim.Microbatches(lambda part: later(part).mean(), model=later)
    later.append(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\)"):
        step(torch.rand(4, 3))
    alone = nn.BatchNorm1d(3, track_running_stats=False).eval()
    with pytest.raises(ValueError, match=r"model \(BatchNorm1d\)"):
        brim.Microbatches(lambda part: alone(part).mean(), model=alone)(torch.rand(4, 3))


def mean(part: Any) -> torch.Tensor:
    return torch.ones((), requires_grad=True).mean()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"loss_fn": 3}, TypeError, "loss_fn must be callable, got 3"),
        ({"model": 3}, TypeError, "model must be"),
        ({"reduction": "max"}, ValueError, "reduction must be 'mean' or 'sum', got 'max'"),
        ({"size": 0}, ValueError, "size must be at least 1"),
        ({"dim": 0.5}, TypeError, "dim must be an int"),
        ({"split": 3}, TypeError, "split must be callable"),
        ({"length": len}, ValueError, "pass split= too"),
        ({"scaler": 3}, TypeError, "scaler must have"),
        ({"colour": 3}, TypeError, "unknown option.*colour"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        brim.Microbatches(**{"loss_fn": mean, **arguments})


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        ((torch.ones(3), torch.ones(4)), ValueError, r"batch\[0\] 3, batch\[1\] 4"),
        ({"x": torch.ones(3), "y": [1, 2]}, ValueError, r"batch\['x'\] 3, batch\['y'\] 2"),
        (torch.ones(()), ValueError, "nothing that could be cut"),
        (torch.ones(0, 3), ValueError, "length of the batch must be at least 1"),
        (object(), TypeError, "batch is a object.*split="),
        ((torch.ones(3), {"a": object()}), TypeError, r"batch\[1\]\['a'\] is a object"),
        (torch.eye(3).to_sparse(), TypeError, "sparse"),
        ([], ValueError, "nothing"),
    ],
)
def test_wrong_batches(batch: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        brim.Microbatches(mean)(batch)


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (3.0, TypeError, "must return a tensor or"),
        ((torch.ones((), requires_grad=True), "many"), TypeError, "must be a number, got 'many'"),
        ((torch.ones((), requires_grad=True), torch.ones(3, 2)), TypeError, r"tensor of shape \[3"),
        ((torch.ones((), requires_grad=True), -1), ValueError, "0 or more, got -1"),
        ((torch.ones((), requires_grad=True), float("nan")), ValueError, "0 or more"),
        (torch.ones(2, requires_grad=True), ValueError, r"one element, .*got shape \[2\]"),
        (torch.ones(()), ValueError, "does not depend on anything that needs a gradient"),
    ],
)
def test_wrong_losses(loss: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        brim.Microbatches(lambda part: loss)(torch.ones(3))


def test_counts_for_some_parts_only_or_with_a_sum() -> None:
    w = torch.ones(1, requires_grad=True)

    def loss_fn(part: torch.Tensor) -> Any:
        return (w * part).sum() if part[0] == 2 else ((w * part).sum(), 1)

    with pytest.raises(ValueError, match="some parts only"):
        brim.Microbatches(loss_fn, size=2, check=False)(torch.arange(6))
    with pytest.raises(ValueError, match='reduction "mean"'):
        brim.Microbatches(loss_fn, size=2, reduction="sum", check=False)(torch.arange(6))


def test_a_wrong_loss_function_is_named_when_it_is_given() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"loss_fn must be a function .* got a module Linear: pass"):
        brim.Microbatches(model)
    assert brim.Microbatches(lambda part: model(part).sum(), model).size == 0
    with torch.no_grad(), pytest.raises(ValueError, match=r"gradients are off, as by no_grad"):
        brim.Microbatches(lambda part: model(part).sum(), model)(torch.ones(3, 4))
    with pytest.raises(TypeError, match=r"one argument.*<lambda> takes \(x, y\): .*`x, y = part`"):
        brim.Microbatches(lambda x, y: model(x).sum(), model=model)  # type: ignore[call-arg, arg-type]


def test_a_batch_in_two_arguments_is_told() -> None:
    step = brim.Microbatches(mean)
    with pytest.raises(TypeError, match=r"one argument, got 2: pass a tuple, as step\(\(x, y\)\)"):
        step(X, X)  # type: ignore[arg-type]


def test_type_errors_of_the_loss_function_pass() -> None:
    def loss_fn(part: Any) -> Any:
        return len(part, 3)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"^len\(\) takes exactly one argument \(2 given\)$"):
        brim.Microbatches(loss_fn)(X)


@pytest.mark.parametrize("named", [True, False])
def test_a_loss_function_that_calls_backward_is_told(named: bool) -> None:
    model = nn.Linear(1, 1)

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        loss = model(part[:, None]).square().mean()
        loss.backward(retain_graph=named)
        return loss

    match = "called backward itself" if named else "must not call backward itself"
    with pytest.raises((ValueError, RuntimeError), match=match):
        brim.Microbatches(loss_fn, model=model if named else None)(X)


def test_batch_normalisation_that_only_the_loss_function_reaches_is_refused_in_parts() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 4)

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        return net(part).square().mean()  # type: ignore[no-any-return]

    brim.Microbatches(loss_fn)(x)
    with pytest.raises(ValueError, match=r"see the whole batch.* 1 \(BatchNorm1d\)"):
        brim.Microbatches(loss_fn, size=4)(x)
    brim.Microbatches(loss_fn, size=4, allow=nn.BatchNorm1d)(x)
    net.eval()
    brim.Microbatches(loss_fn, size=4)(x)


def test_an_estimate_of_a_call_is_refused() -> None:
    model = nn.Linear(4, 1)
    step = brim.Microbatches(lambda part: model(part).square().mean(), model=model)
    with pytest.raises(TypeError, match="Microbatches finds its size by running"):
        brim.estimate(step, torch.ones(16, 4), device="cpu")
    assert type(model.weight) is nn.Parameter
    step(torch.ones(16, 4))
    assert model.weight.grad is not None
