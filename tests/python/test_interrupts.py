"""Ctrl-C at any line of any public call leaves nothing on, open or locked, and the next call works.

The default run interrupts each call in a few places, spread over its lines; the slow one in more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    bucket_stream,
    pack_stream,
)

from .interrupts import Case, Interrupt, interrupted, random_state, state_of_module

CASES: dict[str, Callable[[], Case]] = {}
LENGTHS = [3, 9, 4, 7, 1, 8, 2, 6, 5, 9]


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class Block(nn.Module):
    """A layer of each kind: converted, recognised, left as it is, and functions in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.drop = nn.SELU(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.relu(self.norm(self.first(x)))
        return self.drop(self.second(hidden)) * torch.sigmoid(hidden)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(4, 1))


# -- Adaptive calls --------------------------------------------------------------------------------


@case
def batch() -> Case:
    return Case(brim.batch(8, device="cpu")(lambda size: torch.ones(size).sum().item()))


@case
def batch_that_fails_first() -> Case:
    @brim.batch(8, device="cpu", remember="none")
    def work(size: int) -> int:
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return size

    return Case(work)


@case
def range_of_parts() -> Case:
    work = brim.range(4, device="cpu", collect=True)(lambda start, end: end - start)
    return Case(lambda: work(0, 10), sum)


@case
def chunked() -> Case:
    work = brim.chunked(4, device="cpu", collect=True)(lambda part, start, end: part.sum().item())
    given = torch.arange(10.0)
    return Case(lambda: work(given), sum)


def training(**options: Any) -> Case:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    state = {name: value.clone() for name, value in net.state_dict().items()}

    @brim.maximize("size", device="cpu", **options)
    def step(size: int) -> list[list[float]]:
        torch.manual_seed(0)
        optimizer.zero_grad()
        net(torch.ones(size, 4)).sum().backward()
        optimizer.step()
        return [each.tolist() for each in net.parameters()]

    def call() -> Any:
        net.load_state_dict(state)
        return step(4)

    return Case(call)


@case
def maximize() -> Case:
    return training()


@case
def maximize_with_observer() -> Case:
    return training(observer=lambda attempt: None)


@case
def maximize_that_records() -> Case:
    work = brim.maximize("size", device="cpu")(lambda size: size)
    return Case(lambda: work.record(4)[0])


@case
def maximize_that_restores() -> Case:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    tries: list[int] = []

    @brim.maximize("size", device="cpu", restore=[net, optimizer], remember="none")
    def step(size: int) -> int:
        tries.append(size)
        optimizer.zero_grad()
        net(torch.ones(size, 4)).sum().backward()
        optimizer.step()
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return size

    return Case(lambda: step(4))


@case
def run_batch() -> Case:
    return Case(lambda: brim.run_batch(8, lambda size: size, device="cpu"))


@case
def run_range() -> Case:
    work = functools.partial(brim.run_range, 0, 10, 4, device="cpu", collect=True)
    return Case(lambda: work(lambda start, end: end - start), sum)


@case
def run_chunked() -> Case:
    given = torch.arange(10.0)
    work = functools.partial(brim.run_chunked, given, 4, device="cpu", collect=True)
    return Case(lambda: work(lambda part, start, end: part.sum().item()), sum)


# -- Memory ----------------------------------------------------------------------------------------


@case
def budget() -> Case:
    def call() -> int:
        with brim.budget("1GiB", device="cpu") as limited:
            return limited.limit

    return Case(call)


@case
def budget_of_a_function() -> Case:
    return Case(brim.budget("1GiB", device="cpu")(lambda: torch.ones(8).sum().item()))


@case
def meters_and_injectors() -> Case:
    def call() -> int:
        with brim.PeakMeter("cpu") as meter, brim.testing.inject_oom(at=100):
            torch.zeros(256)
        return meter.peak

    return Case(call)


@case
def collect_peaks() -> Case:
    return Case(
        lambda: brim.collect_peaks(torch.zeros, [64, 128], device="cpu"),
        lambda found: [each.peak - each.start for each in found],
    )


def net_and_random(net: nn.Module) -> Callable[[], dict[str, Any]]:
    return lambda: {**state_of_module(net), **random_state()}


@case
def probe() -> Case:
    net = model()

    def work(size: int) -> None:
        net(torch.rand(size, 4)).sum().backward()

    def call() -> Any:
        return brim.MemoryModel.probe(work, [2, 1000, 9000], device="cpu", progress=False)

    return Case(call, lambda found: sorted(each.n for each in found.samples), net_and_random(net))


@case
def fit_of_models() -> Case:
    def call() -> Any:
        points = brim.PolynomialRegression(1).fit([1, 2, 3], [3, 5, 7])
        found = brim.MemoryModel().fit([1, 2, 3], [30, 50, 70])
        return round(points.predict(4)), round(found.peak(4))

    return Case(call)


@case
def fit_of_a_sampler() -> Case:
    net = nn.Linear(4, 4)
    samples = [torch.ones(length, 4) for length in LENGTHS]

    def work(batch: list[torch.Tensor]) -> None:
        net(nn.utils.rnn.pad_sequence(batch, batch_first=True)).sum().backward()

    def call() -> Any:
        held = brim.memory_stats("cpu").allocated
        return PackedBatchSampler.fit(
            samples, work, LENGTHS, held + 4000, "cpu", progress=False, probes=3
        )

    return Case(call, lambda made: sorted(itertools.chain(*made)), net_and_random(net))


# -- Layers ----------------------------------------------------------------------------------------


@case
def audit() -> Case:
    net, x = model(), torch.ones(3, 4)
    call = functools.partial(brim.audit, net, x, progress=False)
    return Case(call, str, net_and_random(net))


@case
def audit_of_a_converted_model() -> Case:
    net, x = model(), torch.ones(3, 4)
    brim.convert(net, skip="0.second", recompute="cheap")
    call = functools.partial(brim.audit, net, x, progress=False)
    return Case(call, str, net_and_random(net))


@case
def assert_saved() -> Case:
    net, x = model(), torch.ones(3, 4)
    return Case(lambda: brim.assert_saved(net, x, at_most="1MiB"), leaves=net_and_random(net))


@case
def convert_and_restore() -> Case:
    net = model()

    plain = state_of_module(net)
    brim.convert(net, recompute="cheap", skip="0.second")
    converted = [type(each) for each in net.modules()]
    brim.restore(net)

    def leaves() -> dict[str, Any]:
        now = [type(each) for each in net.modules()]
        assert now == converted or state_of_module(net) == plain, "half converted"
        return state_of_module(brim.restore(net))

    def call() -> str:
        report = str(brim.convert(net, recompute="cheap", skip="0.second"))
        brim.restore(net)
        return report

    return Case(call, leaves=leaves)


def gradients(net: nn.Module) -> Any:
    torch.manual_seed(0)
    net.zero_grad()
    net(torch.ones(3, 4, requires_grad=True)).sum().backward()
    return [each.grad.tolist() for each in net.parameters() if each.grad is not None]


@case
def step_of_a_converted_model() -> Case:
    net = model()
    brim.convert(net, skip="0.second")
    return Case(lambda: gradients(net))


@case
def saving() -> Case:
    net = model()

    def call() -> Any:
        with brim.saving("cheap"):
            return gradients(net)

    return Case(call)


# -- Samplers and streams --------------------------------------------------------------------------


def epoch_of(sampler: Any) -> Case:
    def call() -> list[Any]:
        sampler.set_epoch(0)
        return list(sampler)

    return Case(call)


@case
def packed() -> Case:
    return epoch_of(PackedBatchSampler(LENGTHS, 18, cost="padded", seed=1))


@case
def size_aware() -> Case:
    return epoch_of(SizeAwareBatchSampler(range(len(LENGTHS)), LENGTHS, 18))


@case
def bucketed() -> Case:
    return epoch_of(BucketBatchSampler(LENGTHS, [0, 5, 10], max_total_size=18, seed=1))


@case
def packed_stream() -> Case:
    stream = pack_stream(LENGTHS, 18, sizeof=lambda length: length)
    return Case(lambda: list(stream))


@case
def bucketed_stream() -> Case:
    stream = bucket_stream(LENGTHS, [0, 5, 10], 18, sizeof=lambda length: length)
    return Case(lambda: list(stream))


# -- Calls that other changes mend -----------------------------------------------------------------


@case
def microbatches() -> Case:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    step = brim.Microbatches(lambda part: net(part).square().mean(), model=net, device="cpu")
    x = torch.arange(24.0).reshape(6, 4)

    def call() -> Any:
        net.zero_grad()
        loss = step(x)
        return loss.item(), [each.grad.tolist() for each in net.parameters()]

    return Case(call)


@case
def estimate() -> Case:
    net, x = model(), torch.ones(3, 4)
    call = functools.partial(brim.estimate, lambda: net(x).sum().backward(), device="cpu")
    return Case(call, lambda found: found.peak, net_and_random(net))


@case
def largest_size() -> Case:
    net = nn.Linear(4, 4)

    def work(size: int) -> None:
        net(torch.ones(size, 4)).sum().backward()

    call = functools.partial(brim.largest_size, work, "size", "1MiB", device="cpu", upper=64)
    return Case(functools.partial(call, progress=False), leaves=net_and_random(net))


@case
def maximize_that_foresees() -> Case:
    net = nn.Linear(4, 4)

    @brim.maximize("size", device="cpu", foresee=True, remember="none")
    def work(size: int) -> float:
        return net(torch.ones(size, 4)).sum().item()

    return Case(lambda: work(8), leaves=net_and_random(net))


# -- The test --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    brim.install_cpu_allocator()
    with brim._C.Undoing() as undo:  # what one case leaves must not fail the next
        undo.callback(functools.partial(torch.set_rng_state, torch.get_rng_state()))
        yield


def lines_of(made: Case) -> tuple[Interrupt, Any]:
    """The lines of a call, once what is learned or cached by the first is there."""
    made.call()
    with Interrupt() as counted:
        result = made.result(made.call())
    return counted, result


def some(numbers: Sequence[int], count: int) -> list[int]:
    """So many of them, spread evenly, the first and the last included."""
    if len(numbers) <= count:
        return list(numbers)
    return [numbers[i * (len(numbers) - 1) // (count - 1)] for i in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_leaves_nothing_behind(name: str) -> None:
    made = CASES[name]()
    lines, expected = lines_of(made)
    spread = some(range(1, lines.lines + 1), 3)
    for at in sorted({*spread, *some(lines.critical, 8)}):
        interrupted(made, at)
        assert made.result(made.call()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_in_many_places_leaves_nothing_behind(name: str) -> None:
    made = CASES[name]()
    lines, expected = lines_of(made)
    # Some calls run a thousand lines, and take a second: all of them would take an hour.
    for at in sorted({*some(range(1, lines.lines + 1), 60), *some(lines.critical, 60)}):
        interrupted(made, at)
        assert made.result(made.call()) == expected
