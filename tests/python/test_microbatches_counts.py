"""Means over labels, class weights or anything that the graph shows: right without a word."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import brim
from brim.nn import functional as own

from .interrupts import Interrupt

WEIGHT = torch.tensor([1.0, 9.0, 1.0, 20.0, 3.0]).double()
IGNORED = -100


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.double()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """11 items of 7 tokens; item i has i labels (mod 8), the first has none."""
    torch.manual_seed(1)
    x, y = torch.randn(11, 7, 6).double(), torch.randint(0, 5, (11, 7))
    for i in range(11):
        y[i, i % 8 :] = IGNORED
    return x, y


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def assert_as_whole(
    loss_fn: Callable[[Any], Any], model: nn.Module, batch: Any, size: int, **options: Any
) -> None:
    result = loss_fn(batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    expected = gradients(model)
    found = brim.Microbatches(loss_fn, model=model, size=size, **options)(batch)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-12)
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def flat(model: Model, part: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(part[0]).flatten(0, 1), part[1].flatten()


def masked(model: Model, part: Any, clamp: bool) -> torch.Tensor:
    losses = functional.cross_entropy(*flat(model, part), reduction="none")
    mask = (part[1].flatten() != IGNORED).to(losses.dtype)
    count = mask.sum().clamp(min=1) if clamp else mask.sum() + 1e-15
    return (losses * mask).sum() / count


def head_loss(model: Model, part: Any, **options: Any) -> torch.Tensor:
    features = model.features(part[0]).flatten(0, 1)
    return own.linear_cross_entropy(
        features, model.head.weight, part[1].flatten(), linear_bias=model.head.bias, **options
    )


def factors(part: Any) -> torch.Tensor:
    return 1 + 9.0 * (part[1] == 2).double()


def weighted(model: Model, part: Any) -> torch.Tensor:
    return model(part[0]).square().mean(2) * factors(part)


LOSSES: dict[str, Callable[[Model, Any], torch.Tensor]] = {
    "cross_entropy": lambda m, p: functional.cross_entropy(*flat(m, p)),
    "class weights": lambda m, p: functional.cross_entropy(*flat(m, p), weight=WEIGHT),
    "smoothed": lambda m, p: functional.cross_entropy(*flat(m, p), label_smoothing=0.1),
    "smoothed, weights": lambda m, p: functional.cross_entropy(
        *flat(m, p), WEIGHT, label_smoothing=0.1
    ),
    "two dimensions": lambda m, p: functional.cross_entropy(
        m(p[0]).transpose(1, 2), p[1], weight=WEIGHT
    ),
    "by factors": lambda m, p: (
        -(-functional.cross_entropy(*flat(m, p)) * 3).view(1).squeeze() / 7 + 0.5
    ),
    "two terms of one count": lambda m, p: (
        functional.cross_entropy(*flat(m, p))
        + functional.cross_entropy(2 * m(p[0]).flatten(0, 1), p[1].flatten())
    ),
    "stacked": lambda m, p: torch.stack([functional.cross_entropy(*flat(m, p))] * 2).mean(),
    "with weight decay": lambda m, p: (
        functional.cross_entropy(*flat(m, p))
        + 0.1 * m.head.weight.square().sum()
        + m.head.bias.abs().mean()
    ),
    "with a term whose count is hidden": lambda m, p: (
        m(p[0]).square().mean() + 1e-3 * m(p[0]).flatten(1).abs().mean(0).sum()
    ),
    "brim's": lambda m, p: own.cross_entropy(*flat(m, p)),
    "brim's, weights": lambda m, p: own.cross_entropy(*flat(m, p), weight=WEIGHT),
    "brim's, smoothed": lambda m, p: own.cross_entropy(*flat(m, p), label_smoothing=0.1),
    "brim's head": head_loss,
    "brim's head, weights": lambda m, p: head_loss(m, p, weight=WEIGHT),
    "masked sum, clamped": lambda m, p: masked(m, p, True),
    "masked sum": lambda m, p: masked(m, p, False),
    "mean of what is chosen": lambda m, p: m(p[0])[p[1] != IGNORED].square().mean(),
    "mse of what is chosen": lambda m, p: functional.mse_loss(
        m(p[0])[p[1] != IGNORED][:, 0], p[1][p[1] != IGNORED].double()
    ),
    "divided before the sum": lambda m, p: (m(p[0]).square().mean((1, 2)) / len(p[0])).sum(),
    "divided before the sum, and another term": lambda m, p: (
        (m(p[0]).square().mean((1, 2)) / len(p[0])).sum() + 0.1 * m(p[0]).abs().mean()
    ),
    "mean over a mean of weights": lambda m, p: weighted(m, p).mean() / factors(p).mean(),
    "its value is 1": lambda m, p: weighted(m, p).mean() / weighted(m, p).mean().detach(),
    "sum over items by hand": lambda m, p: (
        sum(m(x)[0].square().mean() for x in p[0]) / len(p[0])  # type: ignore[return-value]
    ),
}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_mean_by_what_its_graph_shows(kind: str, size: int) -> None:
    model = Model()
    assert_as_whole(lambda part: LOSSES[kind](model, part), model, tokens(), size)


def test_a_mean_of_items_that_are_means_of_labels_is_by_items() -> None:
    model = Model()
    x, y = tokens()

    def loss_fn(part: Any) -> torch.Tensor:
        losses = [functional.cross_entropy(model(a), b) for a, b in zip(*part, strict=True)]
        return sum(losses) / len(losses)  # type: ignore[return-value]

    assert_as_whole(loss_fn, model, (x[1:8], y[1:8]), 3)


def test_labels_that_count_nothing_in_a_whole_part_or_batch() -> None:
    model = Model()
    x, y = torch.randn(16, 6).double(), torch.randint(0, 5, (16,))
    y[8:] = IGNORED
    assert_as_whole(lambda p: functional.cross_entropy(model(p[0]), p[1]), model, (x, y), 4)
    y[:] = IGNORED
    step = brim.Microbatches(
        lambda p: functional.cross_entropy(model(p[0]), p[1]), model=model, size=4
    )
    assert step((x, y)).isnan()  # as torch's
    assert gradients(model) == []


def test_counts_in_half_precision_are_exact() -> None:
    w = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    y = torch.zeros(3000, dtype=torch.long)
    y[1003::2] = IGNORED  # 1251 and then 750, the first of which bfloat16 has not
    x = torch.ones(3000, 1, dtype=torch.bfloat16)
    step = brim.Microbatches(lambda p: functional.cross_entropy(p[0] @ w.T, p[1]), size=1500)
    assert float(step((x, y))) == pytest.approx(0.6931, rel=4e-3)
    assert step._pass.count == 2001


@pytest.mark.parametrize("converted", [False, True])
def test_language_models_of_hugging_face(converted: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if converted:
        brim.convert(model)
    ids = torch.randint(0, 50, (17, 12))
    labels = ids.clone()
    for i in range(17):
        labels[i, 1 + i % 12 :] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    loss = model(**batch).loss
    loss.backward()
    expected = gradients(model)
    found = brim.Microbatches(lambda part: model(**part).loss, model=model, size=5)(batch)
    torch.testing.assert_close(found, loss.detach())
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("factor", [1, 1e-5])
def test_means_over_different_things_are_refused_where_they_differ(factor: float) -> None:
    model = Model()
    x, y = tokens()

    def loss_fn(part: Any) -> torch.Tensor:
        aux = model(part[0])[:, 0, 0].square().mean()
        return functional.cross_entropy(*flat(model, part)) + factor * aux

    step = brim.Microbatches(loss_fn, model=model, size=4)
    with pytest.raises(ValueError, match="sum of means over different things"):
        step((x, y))
    assert gradients(model) == []
    full = y.clamp(min=0)
    assert_as_whole(loss_fn, model, (x, full), 4)
    uneven = full.clone()
    uneven[0] = IGNORED  # after a check that found no difference
    step = brim.Microbatches(loss_fn, model=model, size=4)
    step((x, full))
    model.zero_grad()
    with pytest.raises(ValueError, match="means over different things"):
        step((x, uneven))
    step = brim.Microbatches(loss_fn, model=model, size=4, check=False)
    with pytest.raises(ValueError, match="means over different things"):
        step((x, uneven))


def test_a_wrong_count_is_refused() -> None:
    model = Model()
    step = brim.Microbatches(
        lambda p: (functional.cross_entropy(*flat(model, p)), len(p[0])), model=model, size=4
    )
    with pytest.raises(ValueError, match="by the count that the loss function returns"):
        step(tokens())


# ---- several batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_accumulated_batches_are_means_over_all_of_them(counts: bool, before: bool) -> None:
    model = Model()
    x, y = tokens()

    def loss_fn(part: Any) -> Any:
        loss = functional.cross_entropy(*flat(model, part))
        return (loss, (part[1] != IGNORED).sum()) if counts else loss

    result = loss_fn((x, y))
    loss = result[0] if counts else result
    loss.backward()
    expected = gradients(model)
    if before:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    step = brim.Microbatches(loss_fn, model=model, size=2)
    batches = [(x[a:b], y[a:b]) for a, b in ((0, 1), (1, 6), (6, 11))]  # the first counts nothing
    found = step.accumulate(iter(batches))
    torch.testing.assert_close(found, loss.detach())
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b + before, rtol=1e-9, atol=1e-12)
    step((x, y))  # is as before, not pooled
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_accumulated_sums_and_parameters_that_only_one_batch_reaches() -> None:
    experts = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x = torch.rand(6, 2).double()
    for reduction in ("mean", "sum"):
        step = brim.Microbatches(
            lambda p, r=reduction: getattr((p[0] * experts[int(p[1][0])]).sum(1), r)(),
            reduction=reduction,  # type: ignore[arg-type]
            size=1,
        )
        which = torch.tensor([0, 0, 1, 1, 1, 1])
        loss = step.accumulate([(x[:2], which[:2]), (x[2:], which[2:])])
        per_item = x.sum(1)
        torch.testing.assert_close(loss, getattr(per_item, reduction)())
        for i, part in enumerate((x[:2], x[2:])):
            expected = part.sum(0) / (6 if reduction == "mean" else 1)
            torch.testing.assert_close(experts[i].grad, expected)
            experts[i].grad = None


def test_a_batch_that_fails_undoes_all_accumulated_ones() -> None:
    model = Model()
    model.head.bias.grad = before = torch.ones(5).double()
    x, y = tokens()

    def loss_fn(part: Any) -> torch.Tensor:
        if part[0].sum() == 0:
            raise KeyError("mine")
        return functional.cross_entropy(*flat(model, part))

    step = brim.Microbatches(loss_fn, model=model, size=2)
    with pytest.raises(KeyError):
        step.accumulate([(x, y), (x * 0, y)])
    assert model.head.bias.grad is before
    assert before.equal(torch.ones(5).double())
    assert model.head.weight.grad is None
    with pytest.raises(ValueError, match="1 batch or more"):
        step.accumulate([])
    step((x, y))


# ---- what is returned ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "habit",
    [
        lambda loss: loss.backward(),
        lambda loss: (loss / 4).backward(),
        lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
        lambda loss: loss.float().mean().backward(),
    ],
)
def test_backward_after_a_step_says_that_it_has_run(habit: Callable[[Any], None]) -> None:
    model = nn.Linear(4, 1)
    step = brim.Microbatches(lambda part: model(part).mean(), model=model)
    for loss in (step(torch.rand(4, 4)), step.accumulate([torch.rand(4, 4)])):
        with pytest.raises(RuntimeError, match="has called backward already, on each part"):
            habit(loss)


def test_the_loss_is_a_tensor_as_any_other(tmp_path: Any) -> None:
    w = torch.ones(1, requires_grad=True)
    loss = brim.Microbatches(lambda part: (w * part).mean())(torch.full((4,), 2.0))
    assert isinstance(loss, torch.Tensor)
    assert repr(loss) == "tensor(2.)"
    assert (loss.item(), float(loss), f"{loss:.1f}", loss.numpy()) == (2.0, 2.0, "2.0", 2.0)
    assert not loss.requires_grad
    total = torch.zeros(())
    total += loss
    assert type(total) is torch.Tensor
    assert torch.stack([loss, loss]).tolist() == [2.0, 2.0]
    assert type(pickle.loads(pickle.dumps(loss))) is torch.Tensor
    assert copy.deepcopy(loss) == 2
    torch.save({"loss": loss}, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt", weights_only=True)["loss"] == 2
    (loss * w).backward()  # of something else


# ---- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(at: int, work: Callable[[], Any]) -> bool:
    """Whether `work` was interrupted, before the `at`-th line of brim's Python code."""
    try:
        with Interrupt(at):
            work()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 37])
@pytest.mark.parametrize("pooled", [False, True])
def test_an_interrupt_at_any_line_leaves_nothing(pooled: bool, every: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x, y = torch.rand(6, 3), torch.randint(0, 2, (6,))
    batch, norm = (x, y), cast("nn.BatchNorm1d", model[1])
    state = copy.deepcopy(model.state_dict())

    def make() -> brim.Microbatches:
        return brim.Microbatches(
            lambda p: functional.cross_entropy(model(p[0]), p[1]),
            model=model,
            size=3,
            allow=nn.BatchNorm1d,
        )

    make()(batch)  # imports modules, which may have filters of their own
    filters = list(warnings.filters)
    at = 0
    while True:
        at += every
        step = make()
        model.load_state_dict(state)
        model.zero_grad()
        model[0].bias.grad = before = torch.ones(4)
        work = partial(step.accumulate, [batch]) if pooled else partial(step, batch)
        was = interrupted(at, work)
        assert model.training
        assert norm.training
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert list(warnings.filters) == filters
        if not was:
            break
        done = model[3].bias.grad is not None
        assert done or model[0].bias.grad is before
        assert done or before.equal(torch.ones(4))
        step(batch)  # is usable
        step.accumulate([batch])
    assert at > 100
