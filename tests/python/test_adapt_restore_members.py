"""`restore=` where a failed attempt exchanged what a module or an optimizer consists of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim


class Averages(nn.Module):
    """Assigns a new buffer, parameter and part at each call, as running averages often are."""

    mean: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.zeros(1, 3).expand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        self.mask[0] += 1
        self.layer.weight = nn.Parameter(self.layer.weight + 1)
        self.more = nn.Linear(3, 3)
        return self.layer(x)  # type: ignore[no-any-return]


def run_once_failed(kind: str, work: Callable[[], object], restore: Any) -> None:
    """Runs an adaptive call whose first attempt does the work, fails, and is undone."""
    attempts = []

    def attempt(*size: Any) -> None:
        attempts.append(size)
        if len(attempts) == 1:
            work()
            raise torch.OutOfMemoryError("CPU out of memory")

    options: Any = {"restore": restore, "strategy": "halving", "remember": "none"}
    if kind == "batch":
        brim.run_batch(4, attempt, **options)
    elif kind == "range":
        brim.run_range(0, 4, 4, attempt, **options)
    elif kind == "chunked":
        brim.run_chunked(torch.zeros(4), 4, attempt, **options)
    else:

        @brim.maximize("size", **options)
        def maximized(size: int) -> None:
            attempt(size)

        maximized(size=4)
    assert len(attempts) > 1


KINDS = ["batch", "maximize", "range", "chunked"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_was_assigned_is_put_back(kind: str) -> None:
    model = Averages()
    before = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}

    def work() -> None:
        model(torch.ones(4, 3)).sum().backward()

    run_once_failed(kind, work, model)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, (tensor, values) in before.items():
        assert after[name] is tensor, name
        assert torch.equal(tensor, values), name
        assert tensor.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_was_emptied_is_filled_again(kind: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    group, before = optimizer.param_groups[0], copy.deepcopy(optimizer.state_dict())

    def work() -> None:
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        optimizer.param_groups.clear()
        optimizer.state.clear()

    run_once_failed(kind, work, [model, optimizer])
    assert optimizer.param_groups[0] is group
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert str(after["state"]) == str(before["state"])


def test_what_is_not_initialised_yet_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    run_once_failed("batch", lambda: model(torch.ones(4, 2)), model)
    assert model[1].num_features == 2


@pytest.mark.parametrize("make", [iter, lambda items: (item for item in items)])
def test_an_iterator_that_a_failed_attempt_took_from_is_named(make: Callable[..., Any]) -> None:
    @brim.batch(4, strategy="halving", remember="none")
    def work(size: int, samples: Any) -> list[int]:
        taken = list(samples)
        if size > 2:
            raise torch.OutOfMemoryError("CPU out of memory")
        return taken

    with pytest.warns(UserWarning, match="may have taken from samples, an iterator"):
        assert work(samples=make([1, 2])) == []
    assert work(samples=[1, 2]) == [1, 2]


def test_an_iterator_does_not_hide_a_later_change_in_place() -> None:
    @brim.batch(4, strategy="halving", remember="none")
    def work(size: int, samples: Any, out: torch.Tensor) -> None:
        if not isinstance(samples, list):
            list(samples)
        else:
            out.add_(1)
        if size > 2:
            raise torch.OutOfMemoryError("CPU out of memory")

    with pytest.warns(UserWarning, match="may have taken from samples, an iterator"):
        work(samples=iter([1, 2]), out=torch.zeros(2))
    with pytest.warns(UserWarning, match="had already changed out in place"):
        work(samples=[1, 2], out=torch.zeros(2))
