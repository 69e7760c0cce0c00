"""Losses that need all items at once have the gradients of the whole batch, run in parts."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import brim

from .joint_cases import Clip, Tower, clip, close, encode_with
from .microbatches_cases import gradients, same


@pytest.mark.parametrize("size", [1, 3, 4, 9, 10, 50])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_and_loss_are_those_of_the_whole_batch(size: int, shared: bool) -> None:
    model, batch = clip()
    if shared:
        model[1] = model[0]
    encode = encode_with(model)
    loss = model[2](encode(batch))
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    step = brim.Microbatches(encode=encode, loss=model[2], model=model, size=size)
    for times in (1, 2):  # and added to those that are there
        found = step(batch)
        assert not found.requires_grad
        assert found.allclose(loss, 0, 1e-13)
        assert close(gradients(model), [None if g is None else times * g for g in expected])
    assert step.size == min(size, 10)
    if size >= 10:
        model.zero_grad()
        assert step(batch).equal(loss)
        assert same(gradients(model), expected)


@pytest.mark.parametrize("as_dict", [False, True])
def test_towers_of_their_own_with_different_numbers_of_items(as_dict: bool) -> None:
    model, (x, y) = clip()
    y = torch.rand(31, 6).double()

    def score(pair: Any) -> torch.Tensor:
        a, b = (pair["a"], pair["b"]) if as_dict else pair
        return (model[2].scale * a @ b.T).logsumexp(1).var()

    def named(a: Any, b: Any) -> Any:
        return {"a": a, "b": b} if as_dict else (a, b)

    score(named(model[0](x), model[1](y))).backward()
    expected = gradients(model)
    seen: list[int] = []

    def first(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return model[0](part)  # type: ignore[no-any-return]

    for size in (4, 7, 40):
        model.zero_grad()
        seen.clear()
        step = brim.Microbatches(
            encode=named(first, model[1]), loss=score, model=model, size=size, check=False
        )
        step(named(x, y))
        assert close(gradients(model), expected)
        assert sum(seen) == (10 if size == 40 else 20)
    with pytest.raises(ValueError, match="batch must be a"):
        step((x, y, y))


@dataclasses.dataclass
class Rows:
    rows: dict[str, torch.Tensor]
    mask: torch.Tensor
    kind: str = "late"


def test_nested_outputs_with_masks() -> None:
    model, _ = clip()
    tokens = torch.rand(9, 5, 6).double()
    mask = torch.arange(5) < torch.arange(9)[:, None] % 5 + 1

    def encode(part: Any) -> Rows:
        return Rows({"q": model[0](part[0]), "d": model[1](part[0])}, part[1])

    def late_interaction(out: Rows) -> torch.Tensor:
        assert out.mask.dtype == torch.bool
        assert out.kind == "late"
        assert not out.mask.requires_grad
        scores = torch.einsum("qsh,dth->qdst", out.rows["q"], out.rows["d"])
        scores = scores.masked_fill(~out.mask[None, :, None, :], -1e9).amax(-1).sum(-1)
        return cross_entropy(scores, torch.arange(9))

    late_interaction(encode((tokens, mask))).backward()
    expected = gradients(model)
    model.zero_grad()
    brim.Microbatches(encode=encode, loss=late_interaction, model=model, size=2)((tokens, mask))
    assert close(gradients(model), expected)


def in_parts(batch: Any, size: int) -> list[Any]:
    return [tuple(each[at : at + size] for each in batch) for at in range(0, len(batch[0]), size)]


@pytest.mark.parametrize("noise", [False, True])
def test_dropout_is_the_same_in_both_passes(noise: bool) -> None:
    model, batch = clip()
    model[0], model[1] = Tower(0.4, noise), Tower(0.3)
    encode = encode_with(model)
    seeds = (torch.manual_seed, random.seed, np.random.seed)
    for seed in seeds:
        seed(5)
    outputs = [encode(part) for part in in_parts(batch, 4)]
    loss = model[2](tuple(map(torch.cat, zip(*outputs, strict=True))))
    loss.backward()
    expected, after = gradients(model), (torch.rand(1), random.random(), np.random.rand())
    model.zero_grad()
    for seed in seeds:
        seed(5)
    found = brim.Microbatches(encode=encode, loss=model[2], model=model, size=4)(batch)
    assert found.equal(loss)
    assert close(gradients(model), expected)
    assert (torch.rand(1), random.random(), np.random.rand()) == after


def test_random_numbers_of_the_loss_are_drawn_once() -> None:
    model, batch = clip()

    def loss_fn(pair: Any) -> torch.Tensor:
        return model[2](pair) * torch.rand(1).double().sum()  # type: ignore[no-any-return]

    torch.manual_seed(3)
    loss_fn(encode_with(model)(batch)).backward()
    expected, after = gradients(model), torch.rand(1)
    model.zero_grad()
    step = brim.Microbatches(encode=encode_with(model), loss=loss_fn, model=model, size=3)
    torch.manual_seed(3)
    step(batch)
    assert close(gradients(model), expected)
    assert torch.rand(1).equal(after)


def test_parts_without_a_graph_are_longer_where_nothing_is_drawn() -> None:
    brim.install_cpu_allocator()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]).double()
    x = torch.rand(96, 64).double()
    seen: list[tuple[int, bool]] = []
    draws_at: list[int] = []

    def encode(part: torch.Tensor) -> torch.Tensor:
        seen.append((len(part), torch.is_grad_enabled()))
        scale = 1.0
        if draws_at and float(x[draws_at[0], 0]) in part[:, 0].tolist():
            scale += float(torch.rand(1))
        return net(part) * scale  # type: ignore[no-any-return]

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return rows.softmax(0).square().sum()

    loss(net(x)).backward()
    expected = gradients(net)
    net.zero_grad()
    step = brim.Microbatches(encode=encode, loss=loss, size=4, check=False, device="cpu")
    step(x)
    assert close(gradients(net), expected)
    without = [length for length, graph in seen if not graph]
    assert max(without) >= 12
    assert [length for length, graph in seen if graph] == [4] * 25
    # One item draws, in the midst of a longer part.
    draws_at.append(60)
    seen.clear()
    net.zero_grad()
    torch.manual_seed(1)
    step(x)
    torch.manual_seed(1)
    factor = torch.ones(96, 1).double()
    factor[60:64] += float(torch.rand(1))
    found = gradients(net)
    start = next(at for at in range(57, 61) if _starts_a_part(seen, at))
    factor[:] = 1
    torch.manual_seed(1)
    factor[start : start + 4] += float(torch.rand(1))
    net.zero_grad()
    loss(net(x) * factor).backward()
    assert close(found, gradients(net))


def _starts_a_part(seen: list[tuple[int, bool]], at: int) -> bool:
    """Whether a part of the last pass begins there."""
    begin, starts = 0, set()
    for length in [length for length, graph in seen if graph][1:]:
        starts.add(begin)
        begin += length
    return at in starts


def test_a_frozen_tower_runs_once_and_gets_nothing() -> None:
    model, batch = clip()
    model[1].requires_grad_(False)
    calls: list[bool] = []

    def frozen(part: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return model[1](part)  # type: ignore[no-any-return]

    model[2]((model[0](batch[0]), model[1](batch[1]))).backward()
    expected = gradients(model)
    model.zero_grad()
    brim.Microbatches(encode=(model[0], frozen), loss=model[2], size=3, check=False)(batch)
    assert close(gradients(model), expected)
    assert len(calls) == 4


def test_a_view_of_a_parameter_as_output() -> None:
    table = nn.Parameter(torch.rand(10, 4).double())
    index = torch.arange(10)

    def encode(part: torch.Tensor) -> torch.Tensor:
        return table[int(part[0]) : int(part[-1]) + 1]

    step = brim.Microbatches(encode=encode, loss=lambda rows: (rows @ rows.T).var(), size=4)
    (table @ table.T).var().backward()
    expected = [table.grad]
    table.grad = None
    step(index)
    assert close([table.grad], expected)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_and_a_scaler(outside: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Tower(), Tower(), Clip()]).float()
    batch = (torch.rand(10, 6), torch.rand(10, 6))
    scaler = torch.amp.GradScaler("cpu", init_scale=64)

    def cast(on: bool) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=on)

    def encode(part: Any) -> Any:
        with cast(True):
            return encode_with(model)(part)

    encode = encode_with(model) if outside else encode
    with cast(outside):
        scaler.scale(model[2](encode(batch))).backward()
    expected = gradients(model)
    model.zero_grad()
    step = brim.Microbatches(encode=encode, loss=model[2], model=model, scaler=scaler, size=3)
    with cast(outside):
        found = step(batch)
    assert 0 < float(found) < 10
    for a, b in zip(gradients(model), expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a - b).abs().max() <= 0.02 * b.abs().max() + 1e-4


# ---- errors --------------------------------------------------------------------------------------


def test_wrong_arguments_are_errors_at_once() -> None:
    def one(part: Any) -> Any:
        return part

    for given, error, match in (
        ({}, TypeError, "needs loss_fn, or loss= and encode="),
        ({"loss": one}, ValueError, "loss= needs encode="),
        ({"encode": one}, ValueError, "encode= needs loss="),
        ({"loss_fn": one, "loss": one, "encode": one}, ValueError, "either it, or loss="),
        ({"loss": one, "encode": {}}, ValueError, "one function or more"),
        ({"loss": one, "encode": (one, 3)}, TypeError, "encode must be callable"),
        ({"loss": lambda a, b: a, "encode": one}, TypeError, r"takes \(a, b\)"),
        ({"loss": one, "encode": one, "reduction": "sum"}, ValueError, "reduction"),
        (
            {"loss": one, "encode": one, "ranks": True, "per_rank": True},
            ValueError,
            "per_rank=True cannot",
        ),
    ):
        with pytest.raises(error, match=match):
            brim.Microbatches(**given)  # type: ignore[arg-type]


def test_wrong_results_are_errors_that_say_what() -> None:
    model, (x, _) = clip()
    lengths = iter(range(100))

    def total(rows: Any) -> torch.Tensor:
        return (rows if isinstance(rows, torch.Tensor) else rows[0]).sum()

    def calling_backward(rows: torch.Tensor) -> torch.Tensor:
        rows.sum().backward()
        return rows.var()

    for encode, loss, match in (
        (lambda part: model[0](part).mean(0), total, "first dimension is the items of the part"),
        (lambda part: (model[0](part), model[2].scale), total, "temperature, is the loss's own"),
        (lambda part: None, total, "encode must return a tensor, or several"),
        (lambda part: {1, 2}, total, "encode's result has a set"),
        (model[0], lambda rows: rows, "loss must return one element"),
        (model[0], lambda rows: 3.0, "loss must return a tensor, got float"),
        (model[0], lambda rows: rows.detach().sum(), "does not depend on anything"),
        (lambda part: part, total, "does not depend on anything"),
        (model[0], calling_backward, "called backward itself"),
        (
            lambda part: model[0](part).repeat(1, 1 + next(lengths)),
            total,
            "pad them to one length",
        ),
        (lambda part: (model[0](part), str(next(lengths))), total, "the same structure"),
    ):
        step = brim.Microbatches(encode=encode, loss=loss, size=3, check=False)  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match=match):
            step(x)
        assert gradients(model) == [None] * len(gradients(model))
    step = brim.Microbatches(encode=model[0], loss=total)
    with pytest.raises(ValueError, match="needs all items at once"):
        step.accumulate([x])
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are off"):
        step(x)


def test_outputs_that_depend_on_other_items_are_refused() -> None:
    model, (x, y) = clip()
    for encode, match in (
        (lambda part: model[0](part) @ model[0](part).T, "shape"),
        (lambda part: model[0](part - part.mean(0)), "other values than each alone"),
    ):
        step = brim.Microbatches(encode=encode, loss=lambda rows: rows.var(), size=5)
        with pytest.raises(ValueError, match=match):
            step(x)
        brim.Microbatches(encode=encode, loss=lambda rows: rows.var(), size=5, check=False)(x)
    model[0] = Tower(0.5)  # dropout is no reason
    brim.Microbatches(encode=model[0], loss=lambda rows: rows.var(), size=5)(y)


@pytest.mark.parametrize("foresee", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_size_is_found_under_a_budget(foresee: bool) -> None:
    brim.install_cpu_allocator()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 8))
    x = torch.rand(512, 32)
    step = brim.Microbatches(
        encode=net, loss=lambda rows: (rows @ rows.T).var(), model=net, foresee=foresee
    )
    step(x)
    expected = gradients(net)
    room = brim.memory_stats("cpu").allocated + 6 * 2**20
    with brim.budget(room, device="cpu"):
        for _ in range(3):
            net.zero_grad()
            _, attempts = step.record(x)
    assert 8 < step.size < 512
    assert all(
        a is not None and b is not None and a.allclose(b, 1e-3, 1e-6)
        for a, b in zip(gradients(net), expected, strict=True)
    )
    assert attempts[-1].fitted


@pytest.mark.parametrize("size", [3, 10])
def test_writing_to_a_part_is_an_error(size: int) -> None:
    model, (x, y) = clip()
    encoders = {"a": model[0], "b": lambda part: model[1](part["x"].sub_(0.5))}
    step = brim.Microbatches(
        encode=encoders,
        loss=lambda rows: (rows["a"] @ rows["b"].T).var(),
        size=size,
    )
    with pytest.raises(ValueError, match="writes to its part in place"):
        step({"a": x, "b": {"x": y}})
    assert gradients(model) == [None] * len(gradients(model))


def test_a_check_that_fails_is_told() -> None:
    model, (x, _) = clip()

    def encode(part: torch.Tensor) -> torch.Tensor:
        if len(part) == 1:
            raise KeyError("a lonely item")
        return model[0](part)  # type: ignore[no-any-return]

    step = brim.Microbatches(encode=encode, loss=lambda rows: rows.var(), size=5)
    with pytest.warns(UserWarning, match=r"cannot be checked.*\(KeyError: 'a lonely item'\)"):
        step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)  # once
