"""Microbatches leave the gradients of the whole batch, whatever fails on the way."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import brim

from .microbatches_cases import Net, gradients, same

MIB = 2**20


def close(model: nn.Module, expected: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.allclose(b, 1e-12))
        for a, b in zip(gradients(model), expected, strict=True)
    )


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(10, 6).double(), torch.rand(10).double()


def whole(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor | None]:
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return found


# ---- what the whole batch would have left --------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 5, 9, 10, 11, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_and_loss_are_those_of_the_whole_batch(
    net: Net, data: Any, reduction: Any, size: int | None
) -> None:
    def loss_fn(part: Any) -> torch.Tensor:
        x, y = part
        return mse_loss(net(x), y, reduction=reduction)

    loss = loss_fn(data)
    expected = whole(net, loss)
    step = brim.Microbatches(loss_fn, model=net, reduction=reduction, size=size)
    found = step(data)
    assert not found.requires_grad
    assert found.allclose(loss, 1e-12)
    assert close(net, expected)
    assert step.size == min(size or 10, 10)
    if step.size == 10:
        assert same(gradients(net), expected)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_a_loss_that_counts_for_itself(net: Net, as_tensor: bool, size: int) -> None:
    labels = torch.randint(0, 8, (6, 5))
    labels[0] = labels[1, 2:] = -100  # the first part has nothing to learn, the second little
    x = torch.rand(6, 5, 6).double()

    def logits(x: torch.Tensor) -> torch.Tensor:
        return net.last(net.shared(net.first(x)))  # type: ignore[no-any-return]

    def loss_fn(part: dict[str, torch.Tensor]) -> Any:
        count = (part["labels"] != -100).sum()
        loss = cross_entropy(logits(part["x"]).flatten(0, 1), part["labels"].flatten())
        return loss, count if as_tensor else int(count)

    batch = {"x": x, "labels": labels}
    loss = loss_fn(batch)[0]
    expected = whole(net, loss)
    net.first.weight.grad = before = torch.ones_like(net.first.weight)
    found = brim.Microbatches(loss_fn, model=net, size=size)(batch)
    assert found.allclose(loss, 1e-12)
    assert net.first.weight.grad is before
    before.sub_(1)
    assert all(
        e is None or (p.grad is not None and p.grad.allclose(e, 1e-9, 1e-12))
        for p, e in zip(net.parameters(), expected, strict=True)
    )


def test_nothing_that_counts_leaves_nothing(net: Net, data: Any) -> None:
    step = brim.Microbatches(lambda part: (net(part[0]).mean() * torch.nan, 0), size=3)
    assert step(data).isnan()
    assert gradients(net) == [None] * len(list(net.parameters()))


def test_counts_do_not_overflow_half_precision() -> None:
    w = torch.ones(4, dtype=torch.float16, requires_grad=True)
    x = torch.ones(8, 4, dtype=torch.float16)
    step = brim.Microbatches(lambda part: ((part * w).sum() / len(part), 50_000), size=2)
    loss = step(x)
    assert loss.dtype == torch.float16
    assert w.grad is not None
    assert w.grad.equal(torch.ones_like(w))


@pytest.mark.parametrize("zeros", [False, True])
def test_gradients_of_several_batches_add_up(net: Net, data: Any, zeros: bool) -> None:
    def loss_fn(part: Any) -> torch.Tensor:
        return mse_loss(net(part[0]), part[1])

    other = (data[0][:7] + 1, data[1][:7])
    expected = whole(net, loss_fn(data) + loss_fn(other))
    if zeros:
        loss_fn(data).backward()
        net.zero_grad(set_to_none=False)
    held = net.last.weight.grad
    step = brim.Microbatches(loss_fn, size=3)
    step(data)
    first = net.last.weight.grad
    assert held is None or first is held
    step(other)
    assert net.last.weight.grad is first
    assert close(net, expected)


def test_a_scaler_scales_the_gradients_and_not_the_loss(net: Net, data: Any) -> None:
    def loss_fn(part: Any) -> torch.Tensor:
        return mse_loss(net(part[0]), part[1])

    loss = loss_fn(data)
    expected = [None if g is None else g * 64 for g in whole(net, loss)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64)
    found = brim.Microbatches(loss_fn, scaler=scaler, size=3)(data)
    assert found.allclose(loss, 1e-12)
    assert close(net, expected)
    scaler.unscale_(torch.optim.SGD(net.parameters(), lr=1))
    assert close(net, [None if g is None else g / 64 for g in expected])


def test_parameters_that_only_some_parts_reach() -> None:
    experts = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3)]
    experts[2].grad = before = torch.ones(3, dtype=torch.float64)
    choice = torch.tensor([0, 0, 0, 1, 1, 1])
    x = torch.rand(6, 3).double()

    def loss_fn(part: Any) -> torch.Tensor:
        return torch.stack(
            [(experts[int(i)] * row).sum() for row, i in zip(*part, strict=True)]
        ).mean()

    brim.Microbatches(loss_fn, size=3)((x, choice))
    for i in (0, 1):
        grad = experts[i].grad
        assert grad is not None
        assert grad.allclose(x[3 * i : 3 * i + 3].sum(0) / 6)
    assert experts[2].grad is before
    assert before.equal(torch.ones(3, dtype=torch.float64))


def test_sparse_gradients() -> None:
    table = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    words = torch.tensor([[1, 2], [1, 3], [9, 9]])
    step = brim.Microbatches(lambda part: (table(part) ** 2).mean(), size=2)
    for times in (1, 2):
        step(words)
        assert table.weight.grad is not None
        found = table.weight.grad.to_dense()
        expected = torch.autograd.grad((table(words) ** 2).mean(), table.weight)[0].to_dense()
        assert found.allclose(times * expected)


def test_a_gradient_of_the_batch_itself() -> None:
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    brim.Microbatches(lambda part: (part**2).mean(), size=2)(x)
    assert x.grad is not None
    assert x.grad.allclose(2 * x / 10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(net: Net, data: Any, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def loss_fn(part: Any) -> torch.Tensor:
        hidden = net.first(part[0].requires_grad_(False)).tanh()
        hidden = checkpoint(net.shared, hidden, use_reentrant=reentrant)
        return mse_loss(net.last(hidden).mean(1), part[1])

    expected = whole(net, loss_fn(data))
    assert net.shared.weight.grad is None
    net.shared.weight.grad = before = torch.ones_like(net.shared.weight)
    with brim.testing.inject_oom(at=25):
        brim.Microbatches(loss_fn, model=net, size=3)(data)
    before.sub_(1)
    assert close(net, expected)


# ---- failures ------------------------------------------------------------------------------------


class Step:
    """A step with dropout, and what it leaves."""

    def __init__(self, kind: str, size: int) -> None:
        torch.manual_seed(3)
        self.net = Net(dropout=0.4)
        self.x, self.y = torch.rand(12, 6).double(), torch.rand(12).double()
        if kind == "accumulating":
            self.net.last.weight.grad = torch.rand(8, 8).double()
        if kind == "norm":
            self.net.dropout = nn.Sequential(self.net.dropout, nn.BatchNorm1d(8).double())  # type: ignore[assignment]
        self.kind = kind
        self.step = brim.Microbatches(
            self.loss, model=self.net, size=size, allow=nn.BatchNorm1d, lower=2, check=False
        )

    def loss(self, part: Any) -> Any:
        loss = mse_loss(self.net(part[0]), part[1])
        return (loss, float(part[0][:, 0].sum())) if self.kind == "counting" else loss

    def run(self, fails_at: int = 2**40) -> tuple[list[torch.Tensor | None], int]:
        torch.manual_seed(4)
        with brim.testing.inject_oom(at=fails_at) as injector:
            loss = self.step((self.x, self.y))
        assert injector.failures == (fails_at < 2**40)
        self.allocations = injector.allocations
        left = [loss, *gradients(self.net), *(b.clone() for b in self.net.buffers())]
        return [*left, torch.rand(1)], self.step.size


@pytest.mark.parametrize("kind", ["plain", "accumulating", "counting", "norm"])
def test_exact_after_a_failure_at_each_allocation(kind: str) -> None:
    expected = {size: Step(kind, size).run()[0] for size in (2, 3, 4, 5)}
    without_failure = Step(kind, 5)
    without_failure.run()
    assert without_failure.allocations > 40
    sizes = set()
    for at in range(1, without_failure.allocations + 1):
        found, size = Step(kind, 5).run(fails_at=at)
        sizes.add(size)
        assert same(found, expected[size]), at
    assert sizes & {2, 3, 4}


def test_at_the_floor_the_gradients_are_as_before(net: Net, data: Any) -> None:
    net.last.weight.grad = before = torch.ones_like(net.last.weight)
    step = brim.Microbatches(lambda part: mse_loss(net(part[0]), part[1]), lower=4)
    with (
        brim.testing.inject_oom(at=30, count=10**6),
        pytest.raises(torch.OutOfMemoryError, match="part size = 4"),
    ):
        step(data)
    assert net.last.weight.grad is before
    assert before.equal(torch.ones_like(before))
    assert net.first.weight.grad is None


def test_another_exception_passes_and_leaves_nothing(net: Net, data: Any) -> None:
    calls = 0
    error = KeyError("mine")

    def loss_fn(part: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return mse_loss(net(part[0]), part[1])

    with pytest.raises(KeyError) as caught:
        brim.Microbatches(loss_fn, size=3, check=False)(data)
    assert caught.value is error
    assert gradients(net) == [None] * len(list(net.parameters()))


def test_the_size_is_worked_out_and_remembered() -> None:
    w = torch.ones(256 * 1024 // 4, requires_grad=True)  # 256 KiB

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        return (w * part[:, None]).square().mean()

    step = brim.Microbatches(loss_fn, device="cpu")
    with brim.budget(brim.memory_stats("cpu").allocated + 30 * MIB, "cpu"):
        _, first = step.record(torch.ones(512))
        assert 1 <= sum(not a.fitted for a in first) <= 6  # halving has five
        assert w.grad is not None
        once = w.grad.clone()
        w.grad = None
        for items in (512, 300, 200):
            _, attempts = step.record(torch.ones(items))
            assert [a.fitted for a in attempts] == [True]
            assert w.grad is not None
            assert torch.allclose(w.grad, once)
            w.grad = None
        assert step.size >= 20
    step.clear()
    assert step(torch.ones(4)) == 1


def test_gradients_are_not_copied_while_nothing_fails() -> None:
    weights = [torch.ones(MIB, requires_grad=True) for _ in range(8)]  # 4 MiB each

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w[: len(part)] * part).sum() for w in weights]).sum()

    def by_hand() -> None:
        for part in x.split(4):
            loss_fn(part).backward()

    x = torch.ones(16)
    peaks = []
    for work in (
        by_hand,
        lambda: brim.Microbatches(loss_fn, reduction="sum", size=4, check=False)(x),
    ):
        for weight in weights:
            weight.grad = None
        with brim.PeakMeter("cpu") as meter:
            work()
        peaks.append(meter.peak)
    assert peaks[1] <= peaks[0] + 64 * 1024


def test_sizes_are_kept_across_processes_for_the_same_loss(tmp_path: Any) -> None:
    w = torch.ones(1, requires_grad=True)

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        if len(part) > 6:
            raise torch.OutOfMemoryError("CPU out of memory.")
        return (part * w).mean()

    brim.Microbatches(loss_fn, persist=tmp_path)(torch.ones(40))
    brim.SizeMemory.flush()
    _, attempts = brim.Microbatches(loss_fn, persist=tmp_path).record(torch.ones(40))
    assert attempts[0].size < 40
    other = brim.Microbatches(lambda part: loss_fn(part) * 2, persist=tmp_path)
    assert other.record(torch.ones(40))[1][0].size == 40


@pytest.mark.cuda
def test_on_cuda() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 2048), nn.Dropout(0.0), nn.GELU(), nn.Linear(2048, 8))
    model = model.cuda().double()
    x, y = torch.rand(8192, 256).cuda().double(), torch.randint(0, 8, (8192,)).cuda()

    def loss_fn(part: Any) -> Any:
        return cross_entropy(model(part[0]), part[1]), torch.tensor(len(part[1])).cuda()

    loss = loss_fn((x, y))[0]
    expected = whole(model, loss)
    step = brim.Microbatches(loss_fn, model=model)
    torch.cuda.empty_cache()
    with brim.budget(torch.cuda.memory_reserved() + 200 * MIB, "cuda"):
        for _ in range(3):
            model.zero_grad()
            found, attempts = step.record((x, y))
            assert attempts[-1].fitted
            assert 16 < step.size < 8192
            assert found.allclose(loss)
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert gradient is not None
                assert parameter.grad is not None
                assert parameter.grad.allclose(gradient, 1e-9, 1e-12)
    assert len(attempts) <= 2  # blocks do not pack there: docs/explanation/adapt.md, Limits


def test_it_does_not_run_inside_of_itself_or_beside_itself(net: Net, data: Any) -> None:
    errors = []
    nested = True

    def again() -> None:
        try:
            step(data)
        except RuntimeError as error:
            errors.append(str(error))

    def loss_fn(part: Any) -> torch.Tensor:
        if nested:
            again()
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
        return mse_loss(net(part[0]), part[1])

    step = brim.Microbatches(loss_fn, size=1000)
    step(data)
    assert len(errors) == 2
    assert all("inside of its own loss_fn, or in two threads" in error for error in errors)
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    nested = False
    step(data)
    expected = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))


def test_it_lets_go_of_the_model_and_can_be_collected(net: Net, data: Any) -> None:
    def run_and_forget() -> weakref.ref[nn.Module]:
        model = copy.deepcopy(net)
        loss = lambda part: mse_loss(model(part[0]), part[1])  # noqa: E731
        model.step = brim.Microbatches(loss, model=model, size=4)  # type: ignore[assignment]
        model.step(data)
        return weakref.ref(model)

    gone = run_and_forget()
    gc.collect()
    assert gone() is None


def test_its_text_names_the_loss_and_the_size() -> None:
    model = nn.Linear(2, 1)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return model(part).mean()

    step = brim.Microbatches(loss_of, model=model)
    assert repr(step).endswith("loss_of: not called yet>")
    step(torch.ones(4, 2))
    assert repr(step).endswith("loss_of: parts of 4>")


@pytest.mark.parametrize("members", [16, 17])
def test_each_member_of_a_dictionary_tells_batches_apart(tmp_path: Path, members: int) -> None:
    weight = torch.ones(4, 1, requires_grad=True)

    def loss(part: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(part["0"]) > 4:
            raise torch.OutOfMemoryError
        return (part["0"] @ weight).mean()

    step = brim.Microbatches(loss, persist=tmp_path)
    for length in (4, 64):
        batch = {str(i): torch.ones(8, 4) for i in range(members - 1)}
        step({**batch, "last": torch.ones(8, length)})
    brim.SizeMemory.flush()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len({path.stem for path in files}) > 2
