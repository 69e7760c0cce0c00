"""A sum that is declared a mean is found, and the reverse; none is taken for the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import brim

from .microbatches_cases import Net, gradients, same


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(10, 6).double(), torch.rand(10).double()


def squares(net: Net, part: Any) -> torch.Tensor:
    return (net(part[0]) - part[1]) ** 2  # type: ignore[no-any-return]


SUMS: dict[str, Any] = {
    "sum": lambda net, part: squares(net, part).sum(),
    "over a constant": lambda net, part: squares(net, part).sum() / 64,
    "of two terms": lambda net, part: squares(net, part).sum() + 0.1 * net(part[0]).exp().sum(),
    "torch's loss": lambda net, part: mse_loss(net(part[0]), part[1], reduction="sum"),
    "brim's loss": lambda net, part: brim.nn.functional.cross_entropy(
        net(part[0])[:, None] * torch.ones(3).double(), part[1].long(), reduction="sum"
    ),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_that_is_declared_a_mean_is_an_error(data: Any, kind: str) -> None:
    net = Net(dropout=0.5)
    step = brim.Microbatches(lambda part: SUMS[kind](net, part), model=net, size=3)
    with pytest.raises(ValueError, match=r'returns a sum.*pass reduction="sum"'):
        step(data)
    assert all(grad is None for grad in gradients(net))


MEANS: dict[str, Any] = {
    "sum by the length": lambda net, part: squares(net, part).sum() / len(part[0]),
    "sum of means": lambda net, part: torch.stack([squares(net, part)] * 2, 1).mean(0).sum(),
    "normalised weights": lambda net, part: (
        squares(net, part) * torch.full((len(part[0]),), 1 / len(part[0])).double()
    ).sum(),
    "the first two do not count": lambda net, part: (
        (squares(net, part) * (part[1] > 0)).sum() / (part[1] > 0).sum().clamp(min=1)
    ),
    "random": lambda net, part: squares(net, part).sum() * torch.rand(()) * 3 / len(part[0]),
    "fails with two items": lambda net, part: squares(net, part).sum() / len(part[0][2:]),
}


@pytest.mark.parametrize(
    "mean",
    [
        lambda net, part: squares(net, part).mean(),
        lambda net, part: mse_loss(net(part[0]), part[1]),
        lambda net, part: squares(net, part).mean() + 0.1 * net(part[0]).exp().mean(),
    ],
)
def test_a_mean_that_is_declared_a_sum_is_an_error(data: Any, mean: Any) -> None:
    net = Net(dropout=0.5)
    step = brim.Microbatches(lambda part: mean(net, part), model=net, size=3, reduction="sum")
    with pytest.raises(ValueError, match=r'returns a mean.*pass reduction="mean"'):
        step(data)
    assert all(grad is None for grad in gradients(net))


@pytest.mark.parametrize(
    "total",
    [
        lambda net, part: squares(net, part).mean() * len(part[0]),
        lambda net, part: squares(net, part)[:, None].expand(-1, 4).mean(1).sum(),
    ],
)
def test_no_sum_is_taken_for_a_mean(data: Any, total: Any) -> None:
    net = Net()
    whole = torch.autograd.grad(total(net, data), net.last.weight)[0]
    brim.Microbatches(lambda part: total(net, part), model=net, size=3, reduction="sum")(data)
    torch.testing.assert_close(net.last.weight.grad, whole)


@pytest.mark.parametrize("kind", MEANS)
def test_no_mean_is_taken_for_a_sum(data: Any, kind: str) -> None:
    net = Net(dropout=0.5)
    data[1][:2] = -1
    results = []
    for check in (True, False):
        torch.manual_seed(2)
        step = brim.Microbatches(lambda part: MEANS[kind](net, part), model=net, size=5)
        if not check:
            step._check = None
        step(data)
        results.append((gradients(net), torch.get_rng_state()))
        net.zero_grad()
    assert same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert net.training


def contrastive(net: Net, part: Any) -> torch.Tensor:
    views = torch.cat([net.first(part[0]), net.first(part[0].flip(1))])
    scores = (views @ views.T).fill_diagonal_(-1e9)
    pairs = torch.arange(len(views)).roll(len(part[0]))
    return torch.nn.functional.cross_entropy(scores, pairs)


def test_a_loss_that_compares_items_is_warned_of(data: Any) -> None:
    net = Net()
    step = brim.Microbatches(lambda part: contrastive(net, part), model=net, size=5)
    with pytest.warns(UserWarning, match="no mean over the items .* as a contrastive loss does"):
        step(data)
    step(data)  # only once


def test_a_square_matrix_alone_is_no_comparison(data: Any) -> None:
    net, calls = Net(), []
    square = torch.nn.Linear(6, 6).double()

    def loss_fn(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return net(square(part[0]).tanh()).square().mean()

    brim.Microbatches(loss_fn, model=net, size=6)(data)  # 6 items of 6 numbers
    assert calls == [6, 4, 2, 2, 4, 4]


def test_the_check_for_a_sum_runs_once_and_only_for_what_ends_in_one(data: Any) -> None:
    net, calls = Net(), []

    def loss_fn(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return squares(net, part).mean()

    step = brim.Microbatches(loss_fn, model=net, size=4)
    step(data)
    assert calls == [4, 4, 2]

    def by_length(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return squares(net, part).sum() / len(part[0])

    calls.clear()
    step = brim.Microbatches(by_length, model=net, size=4)
    step((data[0][:3], data[1][:3]))  # is not split
    step(data)
    step(data)
    assert calls == [3, 4, 4, 2, 2, 2, 4, 4, 4, 4, 2]


def test_a_job_of_several_ranks_is_not_checked_for_a_sum(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, calls = Net(), []

    def loss_fn(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return squares(net, part).sum()

    brim.Microbatches(loss_fn, model=net, size=4, ranks=True)(data)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    brim.Microbatches(loss_fn, model=net, size=4)(data)
    assert calls == [4, 4, 2] * 2  # else a rank that splits would wait for one that does not


class Counting(torch.nn.Module):
    """A layer with a buffer that is written to and one that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.last: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(6).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.last = x.detach().mean(0)
        return x


@pytest.mark.parametrize("given", [True, False])
def test_the_check_leaves_buffers_and_the_batch_as_they_are(data: Any, given: bool) -> None:
    net, counting = Net(), Counting()
    model = torch.nn.Sequential(counting, net)

    def loss_fn(part: Any) -> torch.Tensor:
        error = (model(part[0]) - part[1]).square().sum() / len(part[0])
        with torch.no_grad():
            part[1].mul_(2)
        return error

    doubled = data[1] * 2
    step = brim.Microbatches(loss_fn, model=model if given else None, size=5)
    step(data)
    assert counting.seen == 10
    assert torch.equal(counting.last, data[0][5:].mean(0))
    assert torch.equal(data[1], doubled)


def test_a_batch_that_decides_nothing_is_followed_by_others(data: Any) -> None:
    net = Net()
    step = brim.Microbatches(lambda part: (squares(net, part) * part[2]).sum(), model=net, size=3)
    step((*data, torch.zeros(10).double()))
    with pytest.raises(ValueError, match="returns a sum"):
        step((*data, torch.ones(10).double()))
