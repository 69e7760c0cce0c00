"""Losses that do not follow from their parts are refused, and no others."""

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
        step = brim.Microbatches(
            lambda part: MEANS[kind](net, part), model=net, size=5, check=check
        )
        step(data)
        results.append((gradients(net), torch.get_rng_state()))
        net.zero_grad()
    assert same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert net.training


def views(net: Net, part: Any) -> torch.Tensor:
    return net.first(part[0])  # type: ignore[no-any-return]


def contrastive(net: Net, part: Any) -> torch.Tensor:
    both = torch.cat([views(net, part), net.first(part[0].flip(1))])
    scores = (both @ both.T).fill_diagonal_(-1e9)
    pairs = torch.arange(len(both)).roll(len(part[0]))
    return torch.nn.functional.cross_entropy(scores, pairs)


def dice(net: Net, part: Any) -> torch.Tensor:
    p = net(part[0]).sigmoid()
    return 1 - 2 * (p * part[1]).sum() / (p.sum() + part[1].sum())


def pearson(net: Net, part: Any) -> torch.Tensor:
    both = torch.stack([net(part[0]), part[1]])
    return 1 - (both - both.mean(1, keepdim=True)).prod(0).sum() / both.std(1).prod()


def decay(net: Net) -> torch.Tensor:
    return sum(p.square().sum() for p in net.parameters()) * 1e-1  # type: ignore[return-value]


NO_PARTS: dict[str, Any] = {
    "contrastive": contrastive,
    "root of a mean": lambda net, part: squares(net, part).mean().sqrt(),
    "norm": lambda net, part: net(part[0]).norm(),
    "dice": dice,
    "variance": lambda net, part: views(net, part).var(0, unbiased=False).sum(),
    "variance of one item": lambda net, part: views(net, part).var(0).sum(),
    "max": lambda net, part: squares(net, part).max(),
    "pearson": pearson,
    "weights that sum to 1": lambda net, part: (squares(net, part) * part[1] / part[1].sum()).sum(),
    "two means": lambda net, part: (
        squares(net, part).mean() + net(part[0][part[1] > 0.5]).square().mean()
    ),
    "a small term": lambda net, part: (
        squares(net, part).mean() + 1e-4 * (views(net, part).softmax(1).mean(0) ** 2).sum()
    ),
    "logarithm": lambda net, part: squares(net, part).mean().log(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NO_PARTS)
def test_a_loss_that_has_no_parts_is_refused(data: Any, kind: str, dtype: torch.dtype) -> None:
    net = Net(dropout=0.5).to(dtype)
    data = tuple(each.to(dtype) for each in data)
    step = brim.Microbatches(lambda part: NO_PARTS[kind](net, part), model=net, size=5)
    with pytest.raises(ValueError, match=r"in parts: it does not follow|means over different"):
        step(data)
    assert all(grad is None for grad in gradients(net))
    assert net.training


def test_a_sum_with_weight_decay_is_refused_and_a_mean_with_it_is_right(data: Any) -> None:
    net = Net()
    step = brim.Microbatches(
        lambda part: squares(net, part).sum() + decay(net), model=net, size=3, reduction="sum"
    )
    with pytest.raises(ValueError, match="does not follow from the losses of parts"):
        step(data)

    def mean(part: Any) -> torch.Tensor:
        return squares(net, part).mean() + decay(net)

    loss = mean(data)
    expected = torch.autograd.grad(loss, net.last.weight)[0]
    found = brim.Microbatches(mean, model=net, size=4)(data)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(net.last.weight.grad, expected)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_in_low_precision_are_no_false_alarms(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(8)]
    deep = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)).to(dtype)
    x, y = torch.randn(7, 32).to(dtype), torch.randn(7, 1).to(dtype)
    brim.Microbatches(lambda p: mse_loss(deep(p[0]), p[1]), model=deep, size=size)((x, y))


def test_a_loss_that_draws_random_numbers_is_no_false_alarm(data: Any) -> None:
    net = Net()

    def noisy(part: Any) -> torch.Tensor:
        return mse_loss(net(part[0] + torch.randn_like(part[0])), part[1])

    brim.Microbatches(noisy, model=net, size=3)(data)

    def root(part: Any) -> torch.Tensor:
        return noisy(part).sqrt()

    with pytest.warns(UserWarning, match="could not be checked: it is random"):
        brim.Microbatches(root, model=net, size=3)(data)


def test_a_model_that_has_a_loss_in_training_mode_only_is_checked(data: Any) -> None:
    net = Net()

    def loss_fn(part: Any) -> torch.Tensor:
        if not net.training:
            raise RuntimeError("no loss in eval mode")
        return squares(net, part).mean().sqrt()

    with pytest.raises(ValueError, match="does not follow"):
        brim.Microbatches(loss_fn, model=net, size=3)(data)
    assert net.training


def test_a_model_that_cannot_take_one_item_is_checked(data: Any) -> None:
    net = Net()

    def loss_fn(part: Any) -> torch.Tensor:
        if len(part[0]) == 1:
            raise RuntimeError("one item")
        return squares(net, part).mean().sqrt()

    with pytest.raises(ValueError, match=r"that of 4 items .* those of their halves"):
        brim.Microbatches(loss_fn, model=net, size=5)(data)


def test_items_that_are_alike_decide_nothing_and_later_ones_do(data: Any) -> None:
    net = Net()
    step = brim.Microbatches(lambda part: squares(net, part).mean().sqrt(), model=net, size=5)
    step((torch.ones(10, 6).double(), torch.zeros(10).double()))
    with pytest.raises(ValueError, match="does not follow"):
        step(data)


def test_items_are_compared_once_or_where_they_differ_more(data: Any) -> None:
    net, calls = Net(), []

    def loss_fn(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return squares(net, part).mean()

    step = brim.Microbatches(loss_fn, model=net, size=4)
    step((data[0][:3], data[1][:3]))  # is not split
    assert calls == [3]
    step(data)
    compared = calls[1:-3]
    assert calls[-3:] == [4, 4, 2]
    assert compared == [2, 1, 1] * (len(compared) // 3)
    assert 1 <= len(compared) // 3 <= 3
    calls.clear()
    step(data)
    assert calls == [4, 4, 2]


def test_check_false_trusts_the_loss(data: Any) -> None:
    net, calls = Net(), []

    def loss_fn(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return squares(net, part).mean().sqrt()

    brim.Microbatches(loss_fn, model=net, size=4, check=False)(data)
    assert calls == [4, 4, 2]
    with pytest.raises(TypeError, match="check"):
        brim.Microbatches(loss_fn, check=1)  # type: ignore[arg-type]


def test_ranks_that_may_wait_are_not_checked(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, calls = Net(), []

    def loss_fn(part: Any) -> torch.Tensor:
        calls.append(len(part[0]))
        return squares(net, part).sum()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    brim.Microbatches(loss_fn, model=net, size=4)(data)
    assert calls == [4, 4, 2]  # else a rank that splits would wait for one that does not
    monkeypatch.undo()
    with pytest.raises(ValueError, match="returns a sum"):  # parts have no collectives here
        brim.Microbatches(loss_fn, model=net, size=4, ranks=True)(data)


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
