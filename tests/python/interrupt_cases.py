"""The public calls that interrupts are tried at; `@case` makes one."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import brim
from brim.compat import memsave_torch
from brim.compat.bionemo import size_aware_batching as bionemo
from brim.compat.bionemo.size_aware_batching import memory_model, sampler, utils
from brim.compat.toma import simple, toma
from brim.compat.torch_max_mem import infer_maximum_batch_size, maximize_memory_utilization
from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    PackedCollator,
    Shards,
    SizeAwareBatchSampler,
    SplitDocuments,
    balance,
    bucket_stream,
    create_buckets,
    even,
    flops,
    least_padding_boundaries,
    mix,
    pack_stream,
    size_aware_batching,
)

from .interrupts import Case, random_state, state_of_module

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


# -- Parts and traces ------------------------------------------------------------------------------


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


@case
def microbatches_that_shrink() -> Case:
    net, x = nn.Linear(4, 4).double(), torch.rand(6, 4, dtype=torch.float64)
    wants = {"most": 2}

    def loss(part: torch.Tensor) -> torch.Tensor:
        if len(part) > wants["most"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return net(part).square().mean()

    def call() -> Any:
        net.zero_grad()
        step = brim.Microbatches(loss, model=net, device="cpu")
        return step(x).item(), [each.grad.tolist() for each in net.parameters()], step.size

    return Case(call)


@case
def microbatches_of_several() -> Case:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.arange(24.0).reshape(6, 4)
    step = brim.Microbatches(lambda part: net(part).square().mean(), model=net, device="cpu")

    def call() -> Any:
        net.zero_grad()
        loss = step.accumulate([x, x[:2]])
        return loss.item(), step.record(x)[0].item(), [g.grad.tolist() for g in net.parameters()]

    return Case(call)


@case
def microbatches_of_a_loss_of_all() -> Case:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.rand(6, 4)
    step = brim.Microbatches(encode=net, loss=torch.var, model=net, size=4, device="cpu")

    def call() -> Any:
        net.zero_grad()
        torch.manual_seed(0)
        return step(x).item(), [each.grad.tolist() for each in net.parameters()]

    return Case(call)


@case
def microbatches_of_packed() -> Case:
    torch.manual_seed(0)
    embed = nn.Embedding(20, 4)
    batch = PackedCollator()([[1, 2, 3], [4, 5], [6]])
    step = brim.Microbatches(
        lambda part: embed(part["input_ids"]).square().mean(), model=embed, size=2, check=False
    )

    def call() -> Any:
        embed.zero_grad()
        return step(batch).item(), embed.weight.grad.tolist()

    return Case(call)


@case
def microbatches_that_foresee() -> Case:
    net, x = nn.Linear(4, 4), torch.rand(6, 4)
    options: dict[str, Any] = {"model": net, "device": "cpu", "foresee": True, "check": False}

    def call() -> Any:
        net.zero_grad()
        return brim.Microbatches(lambda part: net(part).square().mean(), **options)(x).item()

    return Case(call)


@case
def maximize_of_several() -> Case:
    """Decorated anew in each call, with keys; the first size does not fit."""

    def work(rows: int, columns: int, name: str) -> tuple[int, int]:
        if rows * columns > 9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return rows, columns

    options: dict[str, Any] = {"device": "cpu", "keys": ("name",), "q": {"rows": 2}}
    return Case(lambda: brim.maximize("rows", "columns", **options)(work)(8, 8, "any"))


@case
def sizes_in_files() -> Case:
    folder = tempfile.TemporaryDirectory()

    def work(size: int) -> int:
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return size

    options: dict[str, Any] = {"device": "cpu", "strategy": "halving", "persist": folder.name}

    def call() -> Any:
        made = brim.batch(8, **options)(work)
        found = made()
        made.clear()
        brim.SizeMemory.flush()
        return found

    made = Case(call)
    weakref.finalize(made, folder.cleanup)
    return made


# -- Memory that ran out ---------------------------------------------------------------------------


def too_much() -> torch.Tensor:
    return torch.zeros(1 << 20)


def told_by(told: Any, work: Callable[[], object]) -> str:
    with contextlib.suppress(torch.OutOfMemoryError):
        work()
    return str(told.explanation.cause)


@case
def explain_a_block() -> Case:
    def call() -> str:
        told = brim.explain(device="cpu")

        def work() -> None:
            with brim.budget("1MiB", device="cpu"), told, brim.explain(device="cpu"), told:
                too_much()

        with contextlib.suppress(AttributeError):  # the inner one explains
            told_by(told, work)
        with told:
            return str(torch.ones(2).sum().item())

    return Case(call)


@case
def explain_an_error() -> Case:
    def call() -> str:
        told = brim.explain(device="cpu")

        def work() -> None:
            with brim.budget("1MiB", device="cpu"), told:
                too_much()

        return told_by(told, work)

    return Case(call)


@case
def explain_a_decorated_call() -> Case:
    net = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> None:
        net(x).sum().backward()

    def call() -> str:
        told = brim.explain(device="cpu")

        def work() -> None:
            with brim.budget(brim.memory_stats("cpu").allocated + 200, device="cpu"):
                told(step)(torch.ones(4, 8))

        return told_by(told, work)

    return Case(call, leaves=net_and_random(net))


@case
def explain_a_function() -> Case:
    net, x = nn.Linear(8, 8), torch.ones(4, 8)

    def step(x: torch.Tensor) -> None:
        net(x).sum().backward()

    call = functools.partial(brim.explain, step, x, device="cpu", capacity=200)
    return Case(call, lambda told: [one.name for one in told.remedies], net_and_random(net))


# -- More of memory --------------------------------------------------------------------------------


@case
def looks_at_memory() -> Case:
    def call() -> Any:
        brim.reset_peak("cpu")
        brim.release_cached("cpu")
        brim.install_cpu_allocator()
        told = brim.classify_error(torch.OutOfMemoryError("CUDA out of memory."))
        sizes = [brim.parse_bytes(brim.format_bytes(1 << 20)), brim.parse_bytes("50%", of=8)]
        with brim.budget("1GiB", device="cpu") as limited:
            return sizes, bool(told), limited.limit, brim.default_device()

    return Case(call)


@case
def nested_budgets() -> Case:
    @brim.maximize("size", device="cpu", remember="none")
    def work(size: int) -> int:
        return torch.empty(size * 1000).numel()

    def call() -> int:
        free = brim.memory_stats("cpu").allocated
        with brim.budget("1GiB", device="cpu"), brim.budget(free + 20_000, device="cpu"):
            return work(8)

    return Case(call)


@case
def injected() -> Case:
    @brim.maximize("size", device="cpu", remember="none")
    def work(size: int) -> int:
        return torch.empty(size * 1000).numel()

    def call() -> int:
        with brim.testing.inject_oom(at=1) as injector:
            work(8)
        return injector.failures

    return Case(call)


@case
def record_pressure() -> Case:
    torch.manual_seed(0)
    net, x = model(), torch.ones(64, 4)
    brim.convert(net, recompute="auto")

    def call() -> Any:
        brim.nn.reset_pressure()
        record = brim.nn.record_pressure(lambda: net(x).sum().backward(), device="cpu")
        return len(record.moments) > 1, str(brim.nn.pressure())

    return Case(call)


# -- More of layers --------------------------------------------------------------------------------


@case
def saving_as_decorator() -> Case:
    net = model()
    return Case(brim.saving("auto")(lambda: gradients(net)))


def converted(**options: Any) -> Case:
    def call() -> Any:
        net = model()
        report = brim.convert(net, **options)
        return str(report), gradients(net)

    return Case(call)


@case
def convert_products() -> Case:
    return converted(recompute="products")


@case
def convert_auto() -> Case:
    return converted(recompute="auto", blocks=Block)


@case
def convert_only() -> Case:
    return converted(only=nn.Linear, functions=False)


@case
def functions() -> Case:
    x = torch.rand(3, 8, requires_grad=True)
    weight = torch.rand(5, 8, requires_grad=True)
    target = torch.tensor([0, 1, 2])
    F = brim.nn.functional  # noqa: N806  as torch's

    def call() -> Any:
        x.grad = weight.grad = None
        hidden = F.gated(F.rms_norm(x, (8,)), x, "silu")
        loss = F.linear_cross_entropy(hidden, weight, target)
        loss = loss + F.cross_entropy(F.linear(x, weight), target)
        F.rerun(lambda h: F.gelu(h).sum(), x).add(loss).backward()
        return x.grad.tolist(), weight.grad.tolist()  # type: ignore[attr-defined]

    return Case(call)


# -- More of samplers and streams ------------------------------------------------------------------


def fitted(fit: Callable[..., Any], sizes: Any = LENGTHS, **options: Any) -> Case:
    net = nn.Linear(4, 4)
    samples = [torch.ones(length, 4) for length in LENGTHS]

    def work(batch: list[torch.Tensor]) -> None:
        net(nn.utils.rnn.pad_sequence(batch, batch_first=True)).sum().backward()

    def call() -> Any:
        held = brim.memory_stats("cpu").allocated
        return fit(samples, work, sizes, held + 4000, "cpu", progress=False, probes=3, **options)

    return Case(call, lambda made: sorted(itertools.chain(*made)), net_and_random(net))


@case
def fit_of_a_size_aware_sampler() -> Case:
    return fitted(SizeAwareBatchSampler.fit)


def used(make: Callable[..., Any]) -> Case:
    """Everything that a sampler can be asked, and half an epoch that another resumes."""

    def call() -> Any:
        sampler = make(shuffle=True, seed=3)
        sampler.set_epoch(1)
        plan, report, count = sampler.plan(), str(sampler.report()), len(sampler)
        half = iter(sampler)
        first = [next(half) for _ in range(count // 2)]
        other = pickle.loads(pickle.dumps(make(shuffle=True, seed=3)))
        other.load_state_dict(sampler.state_dict())
        return plan.indices.tolist(), report, first, list(other), list(half), repr(sampler)

    return Case(call)


@case
def use_packed() -> Case:
    return used(functools.partial(PackedBatchSampler, LENGTHS, 18))


@case
def use_packed_in_two_sizes() -> Case:
    pairs = [(length, 1 + length % 3) for length in LENGTHS]
    return used(functools.partial(PackedBatchSampler, pairs, [18, 9], cost=["padded", "sum"]))


@case
def use_size_aware() -> Case:
    return used(functools.partial(SizeAwareBatchSampler, range(len(LENGTHS)), LENGTHS, 18))


@case
def use_bucketed() -> Case:
    return used(functools.partial(BucketBatchSampler, LENGTHS, [0, 5, 10], max_total_size=18))


@case
def load_of_a_position() -> Case:
    """Interrupted, it has either loaded the position or changed nothing."""

    def made() -> PackedBatchSampler:
        fresh = PackedBatchSampler(LENGTHS, 18, shuffle=True, seed=3)
        fresh.set_epoch(2)
        return fresh

    other = made()
    other.set_epoch(5)
    half = iter(other)
    next(half)
    latest = [made()]
    state, allowed = other.state_dict(), [list(made()), list(half)]

    def leaves() -> dict[str, Any]:
        assert list(copy.copy(latest[0])) in allowed, "half loaded"
        return {}

    def call() -> Any:
        latest[0] = made()
        latest[0].load_state_dict(state)
        return list(copy.copy(latest[0]))

    return Case(call, leaves=leaves)


@case
def index_of_a_sampler() -> Case:
    folder = tempfile.TemporaryDirectory()
    numbers = itertools.count()

    def call() -> Any:
        place = Path(folder.name) / str(next(numbers))
        sampler = PackedBatchSampler(LENGTHS, 18, shuffle=True, seed=1, index=place)
        sampler.make_index([0, 1])
        return len(sampler), list(PackedBatchSampler(LENGTHS, 18, seed=1, index=place))

    made = Case(call)
    weakref.finalize(made, folder.cleanup)
    return made


@case
def loader() -> Case:
    sampler = PackedBatchSampler(LENGTHS, 18, seed=1)
    made = torch.utils.data.DataLoader(LENGTHS, batch_sampler=sampler, num_workers=0)

    def call() -> Any:
        sampler.set_epoch(0)
        return [each.tolist() for each in made]

    return Case(call)


@case
def batches_as_functions() -> Case:
    return Case(lambda: list(size_aware_batching(LENGTHS, lambda length: length, 18)))


@case
def parts() -> Case:
    def call() -> Any:
        sizes = torch.tensor(LENGTHS)
        buckets = create_buckets(sizes, max_width=4, min_bucket_count=3)
        return (
            balance(flops(sizes), 3, equal_count=True),
            balance(LENGTHS, cap=12, sizes=LENGTHS),
            buckets.bucket_boundaries.tolist(),
            least_padding_boundaries(sizes, 2).tolist(),
        )

    return Case(call)


@case
def collator() -> Case:
    documents = [list(range(length)) for length in LENGTHS]

    def call() -> Any:
        made = PackedCollator(row_multiple=8)
        batch = made(documents[:4])
        split = SplitDocuments(documents, made.sizes(LENGTHS), largest=4)
        return [each.tolist() for each in batch.values() if torch.is_tensor(each)], len(split)

    return Case(call)


@case
def mixed_stream() -> Case:
    def call() -> Any:
        sources = [Shards([3, 4, 2], open=range, shuffle=True, seed=1), Shards([5], open=range)]
        mixture = mix(sources, [3, 1], at_end="drop")
        mixture.set_weights([1, 1])
        stream = pack_stream(mixture, 18, sizeof=lambda n: n + 1, sharded="divide")
        stream.set_epoch(1)
        reader = iter(stream)
        first = next(reader)
        other = pack_stream(mix(sources, [3, 1], at_end="drop"), 18, sizeof=lambda n: n + 1,
                            sharded="divide")  # fmt: skip
        other.load_state_dict(stream.state_dict())
        return first, list(reader), list(other)

    return Case(call)


@case
def even_batches() -> Case:
    batches = even(pack_stream(LENGTHS, 18, sizeof=lambda length: length))

    def call() -> Any:
        batches.set_epoch(0)
        return list(batches)

    return Case(call)


# -- The faces of other libraries ------------------------------------------------------------------


def fails_above_two(size: int) -> int:
    if size > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return size


@case
def torch_max_mem() -> Case:
    def call() -> Any:
        @maximize_memory_utilization(safe_devices=("cpu", "cuda"))
        def work(x: torch.Tensor, batch_size: int) -> int:
            return fails_above_two(batch_size)

        @infer_maximum_batch_size(max_value=8)
        def size(x: list[int], batch_size: int | None = None) -> int | None:
            return batch_size

        return work(torch.ones(2), batch_size=8), size([1, 2, 3])

    return Case(call)


@case
def toma_calls() -> Case:
    def call() -> Any:
        out: list[int] = []

        @toma.batch(initial_batchsize=8)
        def batch(batchsize: int) -> int:
            return fails_above_two(batchsize)

        @toma.range(initial_step=8)
        def part(start: int, end: int) -> None:
            out.append(fails_above_two(end - start))

        @toma.execute.chunked(torch.zeros(5), initial_step=8)
        def result(chunk: torch.Tensor, start: int, end: int) -> None:
            out.append(fails_above_two(len(chunk)))

        part(0, 5)
        return batch(), simple.batch(fails_above_two, 8), out

    return Case(call)


@case
def memsave() -> Case:
    def call() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
        nn.init.ones_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        saving = memsave_torch.nn.convert_to_memory_saving(net)
        saving(torch.ones(3, 4)).sum().backward()
        return [each.grad.tolist() for each in saving.parameters()]

    return Case(call)


@case
def bionemo_batches() -> Case:
    assert bionemo.__doc__

    def call() -> Any:
        sizes = torch.tensor([9, 1, 8, 2, 3])
        plain = torch.utils.data.BatchSampler
        options = {"drop_last": False}, {"batch_size": [2, 4]}
        boundaries = torch.tensor([0, 5, 10])
        ours = sampler.SizeAwareBatchSampler(range(5), [3, 1, 2, 2, 4], 4, info_logger=None)
        bucketed = sampler.BucketBatchSampler(sizes, boundaries, plain, *options, shuffle=False)
        points = memory_model.PolynomialRegression(degree=2)
        points.fit(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([8.0, 17.0, 32.0, 53.0]))
        return (
            list(sampler.size_aware_batching(["a", "list", "of"], len, 5)),
            list(ours),
            list(bucketed),
            utils.create_buckets(sizes, max_width=4, min_bucket_count=2).bucket_sizes.tolist(),
            round(points(torch.tensor([10.0])).item()),
        )

    return Case(call)
