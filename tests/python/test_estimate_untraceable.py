"""brim.estimate where a function moves or casts, and where it cannot be traced."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import brim


def line_of(fn: Callable[..., Any], offset: int) -> str:
    return rf"test_estimate_untraceable\.py:{fn.__code__.co_firstlineno + offset}: "


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 256))


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "to(dtype)": lambda model: model.to(torch.float64),
    "to(the same)": lambda model: model.to("cpu", torch.float32),
    "requires_grad_": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changes_its_type_is_followed_and_put_back(name: str) -> None:
    brim.install_cpu_allocator()
    model, x = network(), torch.randn(512, 256)
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())

    def work() -> None:
        changed = CHANGES[name](model)
        changed(x.to(next(changed.parameters()).dtype))

    predicted = brim.estimate(work, device="cpu")
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(parameters)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    with brim.PeakMeter("cpu") as meter:
        work()
    assert predicted.peak == pytest.approx(meter.peak, rel=0.01)


def test_modules_that_move_to_the_device_count_there() -> None:
    model, x = network(), torch.randn(512, 256)

    def work() -> torch.Tensor:
        out: torch.Tensor = model.cuda()(x.to("cuda"))
        return out

    predicted = brim.estimate(work, device="cuda", capacity="1GiB")
    assert predicted.held_before > 4 * 2 * 256 * 256
    assert all(p.device.type == "cpu" for p in model.parameters())


def branches(x: torch.Tensor) -> None:
    if x.sum() > 0:
        x.mul_(2)


def pads(x: torch.Tensor) -> Any:
    return torch.bincount(x.argsort())


def counts(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(x.argmax()))


def leaves_torch(x: torch.Tensor) -> Any:
    return (x * 2).numpy()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (branches, r"torch\.where"),
        (pads, "shape"),
        (counts, "value"),
        (leaves_torch, "cannot be traced"),
    ],
)
def test_what_needs_values_is_an_error_that_names_the_line(
    fn: Callable[..., Any], reason: str, device: str
) -> None:
    with pytest.raises(brim.EstimateError, match=line_of(fn, 1) + f".*{reason}"):
        brim.estimate(fn, torch.ones(4), device=device, capacity="1GiB")


def test_the_functions_own_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"must have same reduction dim|cannot be multiplied"):
        brim.estimate(lambda: torch.ones(2, 3) @ torch.ones(2, 3), device="cpu")


def test_a_size_from_a_tensors_value_is_named() -> None:
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum())]

    expected = line_of(cut, 1) + "the code depends on a tensor's value"
    with pytest.raises(brim.EstimateError, match=expected):
        brim.estimate(cut, torch.rand(8), device="cpu")


def test_work_in_another_thread_is_refused() -> None:
    x = torch.zeros(1000)

    def double() -> torch.Tensor:
        return x * 2

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is there before the call

        def in_pool() -> torch.Tensor:
            return pool.submit(double).result().exp()

        def fails_without_it() -> None:
            pool.submit(double).result()
            raise KeyError("no result")

        for work in (in_pool, fails_without_it):
            with pytest.raises(brim.EstimateError, match=line_of(double, 1) + "runs in another"):
                brim.estimate(work, device="cpu")
    assert type(x) is torch.Tensor
    assert brim.estimate(double, device="cpu").peak == 4000


def test_a_thread_that_the_call_starts_is_named() -> None:
    def work() -> None:
        thread = threading.Thread(target=torch.zeros, args=(1000,))
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="starts a thread at test_estimate_untraceable"):
        brim.estimate(work, device="cpu")
    work()  # without a warning


def test_batches_of_a_loader_are_an_error_that_says_what_to_do() -> None:
    data = torch.utils.data.DataLoader(torch.rand(8, 2), batch_size=2)
    batches = iter(data)

    def epoch() -> None:
        for batch in data:
            batch.exp()

    def one() -> None:
        next(batches).exp()

    for device in ("cpu", "cuda"):
        with pytest.raises(brim.EstimateError, match=line_of(epoch, 1) + ".*next.iter.loader"):
            brim.estimate(epoch, device=device)
        with pytest.raises(brim.EstimateError, match=line_of(one, 1) + ".*DataLoader"):
            brim.estimate(one, device=device)
    assert len(list(batches)) == 4  # none was taken


@pytest.mark.parametrize("steps_before", [0, 1])
def test_sparse_gradients_are_an_error_that_says_what_to_do(steps_before: int) -> None:
    layer = nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        layer(torch.zeros(4, dtype=torch.long)).sum().backward()
        optimizer.step()

    for _ in range(steps_before):
        layer(torch.zeros(4, dtype=torch.long)).sum().backward()
    gradient = layer.weight.grad
    with pytest.raises(brim.EstimateError, match=line_of(step, 2) + "sparse .*sparse=False"):
        brim.estimate(step, device="cpu")
    assert layer.weight.grad is gradient
    assert brim.estimate(lambda: layer(torch.zeros(4, dtype=torch.long)), device="cpu").peak == 160


def test_a_lazy_module_is_an_error_and_stays_as_it_is() -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    with pytest.raises(brim.EstimateError, match=r"0\.weight of Sequential has no shape yet"):
        brim.estimate(lambda n: net(torch.randn(n, 4)), 4, device="cpu")
    assert type(net[0]) is nn.LazyLinear
    assert net(torch.randn(2, 4)).shape == (2, 8)
    assert brim.estimate(lambda n: net(torch.randn(n, 4)), 4, device="cpu").peak > 0
