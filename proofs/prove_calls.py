"""Adaptive calls against a device that is simulated, their cost in counted operations, the peers.

The device is a function that runs out of memory above a size nobody is told, or real tensors under
a budget. With `--peers PATH` (made by `pip install --no-deps --target PATH torch_max_mem toma
bionemo-size-aware-batching`) the faces of brim.compat get the same random calls as the originals.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import logging
import math
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tally import Tally

import brim
from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler, pack_stream

warnings.simplefilter("ignore")
logging.disable()
STRATEGIES = ("predictive", "halving", "bisect")


def each_case(
    tally: Tally, what: str, check: Callable[[random.Random], None], first: int, cases: int
) -> None:
    """Run a check with many seeds."""
    wrong = []
    for number in range(first, first + cases):
        try:
            check(random.Random(number))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"seed {number}: {type(error).__name__}: {error} (line {place.lineno})")
    tally.row(what, cases, wrong)


# ---------------------------------------------------------------- the search


class Device:
    """Runs out of memory above a size, in one of the ways that programs see."""

    def __init__(self, dice: random.Random, fits: Callable[[int], bool]) -> None:
        self.fits = fits
        self.says = dice.choice(["nothing", "bytes", "runtime", "memory"])
        self.per_item = dice.choice([1, 100, 2**20])
        self.tried: list[tuple[int, bool]] = []

    def use(self, size: int) -> None:
        """Take a size, or fail."""
        fits = self.fits(size)
        self.tried.append((size, fits))
        if fits:
            return
        if self.says == "memory":
            raise MemoryError
        if self.says == "runtime":
            raise RuntimeError("CUDA error: out of memory")
        text = "CPU out of memory."
        if self.says == "bytes":
            text += f" Tried to allocate {size * self.per_item} bytes."
        raise torch.OutOfMemoryError(text)

    def failures(self) -> int:
        """How often it was too much."""
        return sum(not fits for _, fits in self.tried)


def halving(size: int, fits: Callable[[int], bool], lower: int = 1) -> tuple[int, int]:
    """What halving ends at (0: nowhere), and how often it fails."""
    failures = 0
    while not fits(size):
        failures += 1
        if size <= lower:
            return 0, failures
        size = max(size // 2, lower)
    return size, failures


def check_promises(device: Device, given: int, lower: int, strategy: str) -> None:
    """What docs/explanation/adapt.md promises of one call, whatever the work."""
    best, failures = halving(given, device.fits, lower)
    sizes = [size for size, _ in device.tried]
    assert all(lower <= size <= given for size in sizes), sizes
    told = (strategy, given, device.tried, best, failures)
    if strategy == "halving":
        expected = [*itertools.takewhile(lambda n: n > lower, _halves(given)), lower]
        assert sizes == expected[: len(sizes)], told
    most = failures + 1 if strategy != "bisect" else 2 * math.ceil(math.log2(given + 1)) + 3
    assert device.failures() <= most, told
    lowest = math.inf
    for size, fits in device.tried:
        assert size < lowest, told
        lowest = lowest if fits else min(lowest, size)


def _halves(size: int) -> Iterator[int]:
    while size > 0:
        yield size
        size //= 2


def check_first_call(dice: random.Random) -> None:
    """One call, nothing known: the result is right, attempts are few, nothing is beyond."""
    given = dice.choice([1, 2, 3, 7, 64, 1000, dice.randint(1, 10**6), dice.randint(1, 2**50)])
    lower = dice.choice([1, 1, 1, dice.randint(1, given)])
    kind = dice.choice(["threshold", "threshold", "any sizes", "never"])
    most = dice.choice([dice.randint(1, given), given, lower, max(given // 2, 1)])
    salt = dice.getrandbits(32)

    def fits(size: int) -> bool:
        if kind == "threshold":
            return size <= most
        return kind == "any sizes" and random.Random(size ^ salt).random() < 0.4

    device = Device(dice, fits)
    if most * device.per_item > 2**30 and device.says == "bytes":
        device.says = "nothing"  # it would say that what fits is more than the machine has
    strategy = dice.choice(STRATEGIES)

    def work(size: int) -> int:
        device.use(size)
        return size

    options = {"strategy": strategy, "lower": lower, "device": "cpu"}
    face = dice.choice(["maximize", "batch"])
    if face == "maximize":
        call: Any = brim.maximize("size", **options)(work)
    else:
        wrapped = brim.batch(given, **options)(work)
        call = lambda size: wrapped()  # noqa: E731  the size is the decorator's
    try:
        result = call(size=given) if face == "maximize" else call(given)
    except torch.OutOfMemoryError:
        assert not fits(lower), (strategy, given, lower, device.tried)
        assert device.tried[-1][0] == lower, device.tried
        if kind != "any sizes":
            check_promises(device, given, lower, strategy)
        return
    assert device.tried[-1] == (result, True), device.tried
    if kind == "threshold":
        check_promises(device, given, lower, strategy)
        if strategy != "bisect":
            best, _ = halving(given, fits, lower)
            assert result >= best, (strategy, given, lower, most, device.tried)
    assert len(device.tried) <= 3 * math.ceil(math.log2(given + 1)) + 4, device.tried


def check_under_a_budget(dice: random.Random) -> None:
    """Calls one after the other, real tensors, a limit that changes: sizes remembered."""
    unit = 256
    fixed, line, square = dice.randint(0, 200), dice.randint(1, 60), dice.choice([0, 0, 0, 1])
    given = dice.choice([16, 100, 1000, 4096])
    changed = False
    strategy = dice.choice(["predictive", "predictive", "halving"])

    def need(size: int) -> int:
        return unit * (fixed + line * size + square * size * size // 8)

    device = Device(dice, lambda _: True)

    @brim.maximize("size", strategy=strategy, device="cpu")
    def work(size: int) -> int:
        device.tried.append((size, False))
        held = [torch.empty(max(unit * fixed, 1), dtype=torch.uint8)]
        for _ in range(line):
            held.append(torch.empty(unit * size, dtype=torch.uint8))
        if square:
            held.append(torch.empty(unit * (size * size // 8) or 1, dtype=torch.uint8))
        device.tried[-1] = (size, True)
        return size

    brim.install_cpu_allocator()
    room = need(dice.randint(1, given)) + 4096
    for number in range(dice.randint(2, 7)):
        if number and dice.random() < 0.3:
            room = need(dice.randint(1, given)) + 4096
            changed = True
        device.tried.clear()
        base = brim.memory_stats("cpu").allocated
        # Blocks are rounded up a little, so the edge itself is not asked about.
        slack = 64 * (line + 4)

        def sure(size: int, most: int = room - slack) -> bool:
            return need(size) <= most

        with brim.budget(base + room, device="cpu"):
            try:
                result = work(size=given)
            except torch.OutOfMemoryError:
                assert not sure(1), (given, room, device.tried)
                continue
        told = (strategy, given, room, fixed, line, square, number, device.tried)
        assert device.tried[-1] == (result, True), told
        assert need(result) <= room, told
        assert all(1 <= size <= given for size, _ in device.tried), told
        best, failures = halving(given, sure)
        assert device.failures() <= failures + 1, told
        assert len(device.tried) <= failures + 3, told
        # After the limit has changed a halving that remembers begins elsewhere, too.
        if strategy == "predictive" and not changed:
            assert result >= best, told


def check_parts(dice: random.Random) -> None:
    """`range` and `chunked`: each place once, no finished part again, whatever fits when."""
    start, length = dice.randint(-5, 5), dice.randint(0, 300)
    step = dice.choice([1, 5, 64, 1000])
    limits = [dice.randint(1, 120) for _ in range(400)]
    turn = itertools.count()
    current = [limits[0]]

    def fits(size: int) -> bool:
        if dice.random() < 0.05:
            current[0] = limits[next(turn) % 400]
        return size <= current[0]

    device = Device(dice, fits)
    done: list[tuple[int, int]] = []

    def body(begin: int, end: int) -> int:
        device.use(end - begin)
        done.append((begin, end))
        return end - begin

    strategy = dice.choice(STRATEGIES)
    options: dict[str, Any] = {"strategy": strategy, "device": "cpu", "collect": True}
    if dice.random() < 0.5:
        sizes = brim.range(step, **options)(body)(start, start + length)
    else:
        start = 0
        rows = torch.arange(length)

        def chunk_of(chunk: torch.Tensor, begin: int, end: int) -> int:
            assert chunk.tolist() == list(range(begin, end))
            return body(begin, end)

        sizes = brim.chunked(step, **options)(chunk_of)(rows)
    assert sum(sizes) == length
    places = [place for begin, end in done for place in range(begin, end)]
    assert places == list(range(start, start + length)), done
    assert all(end - begin <= step for begin, end in done)


def check_several(dice: random.Random) -> None:
    """Several parameters that shrink together or one after the other."""
    a, b, c = (dice.randint(1, 200) for _ in range(3))
    room = dice.randint(1, a * b + c)
    device = Device(dice, lambda _: True)
    tried: list[tuple[int, int, int]] = []

    @brim.maximize(("rows", "columns"), "depth", device="cpu", strategy=dice.choice(STRATEGIES))
    def work(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
        tried.append((rows, columns, depth))
        device.fits = lambda _: rows * columns + depth <= room
        device.use(rows)
        return rows, columns, depth

    try:
        result = work(rows=a, columns=b, depth=c)
    except torch.OutOfMemoryError:
        assert room < 2, (a, b, c, room, tried)
        return
    assert result == tried[-1]
    assert result[0] * result[1] + result[2] <= room
    assert all(1 <= x <= a and 1 <= y <= b and 1 <= z <= c for x, y, z in tried)
    assert len(tried) <= 6 * math.ceil(math.log2(max(a, b, c) + 1)) + 6, tried


# ---------------------------------------------------------------- operations, counted


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Counting:
    """Sizes, and a cost, that count how often they are asked for."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.asked, self.costed = sizes, 0, 0

    def size(self, index: int) -> int:
        self.asked += 1
        return self.sizes[index]

    def cost(self, n: float, longest: float) -> float:
        self.costed += 1
        return n * longest


def growth(count: Callable[[int], int], n: int) -> tuple[int, int]:
    """Operations of n and of 4n."""
    return count(n), count(4 * n)


def check_growth(tally: Tally, first: int) -> None:
    """Nothing grows faster than n log n: 4n takes at most 5 times what n does."""
    dice = random.Random(first)

    def sizes(n: int) -> list[int]:
        return [dice.randint(1, 500) for _ in range(n)]

    def of_cost(make: Callable[..., Any]) -> Callable[[int], int]:
        def count(n: int) -> int:
            counting = Counting(sizes(n))
            list(make(counting))
            return counting.costed

        return count

    def of_calls(make: Callable[..., Any]) -> Callable[[int], int]:
        def count(n: int) -> int:
            counting = Counting(sizes(n))
            return calls_of(lambda: [None for _ in make(counting)])

        return count

    def ordered(c: Counting, **o: Any) -> Any:
        return SizeAwareBatchSampler(range(len(c.sizes)), c.sizes, 4000, **o)

    def packed(c: Counting, **o: Any) -> Any:
        return PackedBatchSampler(c.sizes, 4000, **o)

    def whole(c: Counting, **o: Any) -> Any:
        return PackedBatchSampler(c.sizes, 4000, window=None, **o)

    def buckets(c: Counting, **o: Any) -> Any:
        return BucketBatchSampler(c.sizes, [1, 50, 150, 501], max_total_size=4000, **o)

    def stream(c: Counting, **o: Any) -> Any:
        return pack_stream(range(len(c.sizes)), 4000, sizeof=c.size, lookahead=500, **o)

    makers = {"ordered": ordered, "packed": packed, "one window": whole, "buckets": buckets}
    cases: dict[str, Callable[[int], int]] = {}
    for name, make in {**makers, "stream": stream}.items():
        cases[f"{name}: calls"] = of_calls(make)
        cases[f"{name}: cost"] = of_cost(lambda c, make=make: make(c, cost=c.cost))
        cases[f"{name}, sum: calls"] = of_calls(lambda c, make=make: make(c, cost="sum"))

    def sizeof_of(make: Callable[[Counting], Any]) -> Callable[[int], int]:
        def count(n: int) -> int:
            counting = Counting(sizes(n))
            for _ in make(counting):
                pass
            assert counting.asked <= 2 * n, f"{counting.asked} sizes asked for {n} samples"
            return counting.asked

        return count

    cases["stream: sizes asked"] = sizeof_of(stream)
    cases["asked one by one: sizes"] = sizeof_of(
        lambda c: SizeAwareBatchSampler(range(len(c.sizes)), c.size, 4000)
    )

    def resumed(n: int) -> int:
        """States taken at many places, and loaded."""
        sampler = PackedBatchSampler(sizes(n), 4000, shuffle=True)
        running = iter(sampler)
        counted = 0
        for _ in range(n // 500):
            next(running)
            counted += calls_of(lambda: sampler.state_dict())
        other = PackedBatchSampler(sampler.sizes, 4000, shuffle=True)
        return counted + calls_of(lambda: other.load_state_dict(sampler.state_dict()))

    cases["states"] = resumed

    def remembered(n: int) -> int:
        """n different calls of one adaptive function, each of which has to be found again."""

        @brim.maximize("size", keys=["x"], device="cpu", strategy="halving")
        def work(x: int, size: int = 8) -> None:
            if size > 4:
                raise torch.OutOfMemoryError("CPU out of memory.")

        return calls_of(lambda: [work(number) for number in range(n // 20)])

    cases["remembered calls"] = remembered
    wrong = []
    for name, count in cases.items():
        few, many = growth(count, 2000)
        print(f"  {name}: {few:,} operations of 2,000 samples, {many:,} of 8,000", flush=True)
        if many > 5 * few + 200:
            wrong.append(f"{name}: {few} and {many}")
    if not _is_noticed(
        growth(lambda n: calls_of(lambda: [abs(i) for i in range(n * n // 1000)]), 2000)
    ):
        wrong.append("quadratic work is not noticed")
    tally.row("operations of n and 4n", len(cases) + 1, wrong)


def _is_noticed(counts: tuple[int, int]) -> bool:
    return counts[1] > 5 * counts[0] + 200


def check_attempts(tally: Tally, first: int) -> None:
    """Attempts grow as the logarithm of the size that was asked for."""
    wrong, cases = [], 0
    for strategy, bits in itertools.product(STRATEGIES, range(4, 60, 4)):
        dice = random.Random(first + bits)
        most = dice.randint(1, 2**bits)
        device = Device(dice, lambda size, most=most: size <= most)
        device.says = "nothing"

        @brim.maximize("size", strategy=strategy, device="cpu")
        def work(size: int, device: Device = device) -> int:
            device.use(size)
            return size

        work(size=2**bits)
        cases += 1
        if len(device.tried) > 2 * bits + 3:
            wrong.append(f"{strategy}: {len(device.tried)} attempts from 2**{bits} to {most}")
    tally.row("attempts from n grow as log n", cases, wrong)


# ---------------------------------------------------------------- the originals


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """The result, or the kind of error."""
    try:
        return "result", call()
    except Exception as error:
        return "error", error


def same(what: object, theirs: tuple[str, Any], ours: tuple[str, Any]) -> None:
    """Compare: of errors the type, of which ours may be a kind."""
    assert theirs[0] == ours[0], f"{what}: original {theirs}, brim {ours}"
    if theirs[0] == "result":
        assert theirs[1] == ours[1], f"{what}: original {theirs[1]}, brim {ours[1]}"
        return
    assert isinstance(ours[1], type(theirs[1])), f"{what}: original {theirs!r}, brim {ours!r}"


def torch_max_mem_case(theirs: Any, ours: Any) -> Callable[[random.Random], None]:
    def case(dice: random.Random) -> None:
        given: Any = dice.choice([1, 2, 7, 64, 1000, dice.randint(1, 10**6), None, 2.5, "x"])
        default: Any = dice.choice([..., 32, None])
        limit = dice.choice([0, 1, 5, 40, 10**7])
        quantum = dice.choice([1, 1, 2, 8, 10])
        fails = dice.choice(["oom", "oom", "oom", "other"])
        name = dice.choice(["batch_size"] * 6 + ["nothing"])
        twice = dice.random() < 0.4

        def run(module: Any) -> list[Any]:
            tried: list[Any] = []

            def work(x: Any, batch_size: Any) -> Any:
                tried.append(batch_size)
                if batch_size > limit:
                    text = "CUDA out of memory." if fails == "oom" else "another error"
                    raise RuntimeError(text)
                return batch_size

            if default is not ...:
                work.__defaults__ = (default,)
            maximizer = module.MemoryUtilizationMaximizer(parameter_name=name, q=quantum)
            function = maximizer(work)
            arguments = {} if given is None else {"batch_size": given}
            results = [function(0, **arguments)]
            if twice:
                results.append(function(0, **arguments))
            return [results, tried]

        what = (given, default, limit, quantum, fails, name, twice)
        same(what, outcome(lambda: run(theirs)), outcome(lambda: run(ours)))

    return case


def toma_case(theirs: Any, ours: Any) -> Callable[[random.Random], None]:
    def case(dice: random.Random) -> None:
        initial = dice.choice([1, 2, 7, 64, dice.randint(1, 500)])
        limit = dice.choice([0, 1, 5, 40, 1000])
        start, end = dice.randint(-3, 9), dice.randint(0, 120)
        face = dice.choice(["simple", "explicit", "toma"])
        shape = dice.choice(["batch", "range", "chunked"])
        fails = dice.choice(["oom", "oom", "oom", "other"])
        times = dice.randint(1, 3)

        def run(module: Any) -> list[Any]:
            tried: list[Any] = []
            cache = {} if face == "simple" else {"cache_type": module.NoBatchsizeCache}
            if face != "simple" and dice_cache:
                cache = {"cache_type": module.GlobalBatchsizeCache}

            def check(size: int) -> None:
                if size > limit:
                    raise RuntimeError("CUDA out of memory." if fails == "oom" else "another error")

            def batch(size: int, *args: Any) -> int:
                tried.append(size)
                check(size)
                return size

            def part(begin: int, stop: int) -> None:
                tried.append((begin, stop))
                check(stop - begin)

            def chunk(tensor: torch.Tensor, begin: int, stop: int) -> None:
                tried.append((tensor.tolist(), begin, stop))
                check(stop - begin)

            rows = torch.arange(max(end, 0))
            results = []
            for _ in range(times):
                if face == "toma":
                    if shape == "batch":
                        call = module.toma.batch(batch, initial_batchsize=initial, **cache)
                        results.append(call())
                    elif shape == "range":
                        call = module.toma.range(part, initial_step=initial, **cache)
                        results.append(call(start, end))
                    else:
                        call = module.toma.chunked(chunk, initial_step=initial, **cache)
                        results.append(call(rows))
                else:
                    kind = getattr(module, face)
                    if shape == "batch":
                        results.append(kind.batch(batch, initial, **cache))
                    elif shape == "range":
                        results.append(kind.range(part, start, end, initial, **cache))
                    else:
                        results.append(kind.chunked(chunk, rows, initial, **cache))
            return [results, tried]

        dice_cache = dice.random() < 0.3
        what = (face, shape, initial, limit, start, end, fails, times, dice_cache)
        for module in (theirs, ours):
            module.get_cache_for_context.cache_clear()
        same(what, outcome(lambda: run(theirs)), outcome(lambda: run(ours)))

    return case


def bionemo_case(theirs: Any, ours: Any) -> Callable[[random.Random], None]:
    def in_order(dice: random.Random) -> Callable[[Any], Any]:
        sizes = [
            dice.choice([dice.randint(0, 9), dice.random() * 9]) for _ in range(dice.randrange(40))
        ]
        most: Any = dice.choice([1, 7.5, 20, 10**9, "x", None])
        sizeof: Any = dice.choice([sizes.__getitem__] * 5 + [None])
        sampler: Any = dice.choice([range(len(sizes))] * 5 + ["text", 7])
        if dice.random() < 0.5:
            return lambda m: list(m.SizeAwareBatchSampler(sampler, sizeof, most, None, None))
        own = dice.choice([None, len, tuple])
        return lambda m: list(m.size_aware_batching(range(len(sizes)), sizeof, most, own))

    def in_buckets(dice: random.Random) -> Callable[[Any], Any]:
        dtype = dice.choice([torch.int64, torch.int32, torch.float32])
        sizes = torch.tensor([dice.randint(0, 30) for _ in range(dice.randint(0, 40))]).to(dtype)
        edges = torch.tensor(dice.sample(range(40), dice.randint(0, 5)))
        buckets = max(len(edges) - 1, 1)
        individual: Any = {"batch_size": [dice.randint(1, 6) for _ in range(buckets)]}
        shared: Any = {"drop_last": dice.random() < 0.5}
        if dice.random() < 0.1:
            individual = dice.choice([{"batch_size": [1]}, None, 7, {1: [2]}])
        if dice.random() < 0.1:
            shared = dice.choice([None, 7, {2: 3}, {"nothing": 3}])
        shuffle: Any = dice.choice([True, False, False, 1])
        seed = dice.randrange(99)

        def run(module: Any) -> Any:
            generator = torch.Generator().manual_seed(seed)
            sampler = module.BucketBatchSampler(
                sizes,
                edges,
                torch.utils.data.BatchSampler,
                shared,
                individual,
                shuffle=shuffle,
                generator=generator,
            )
            return [
                len(sampler),
                [list(map(int, b)) for b in sampler],
                [list(map(int, b)) for b in sampler],
            ]

        return run

    def made(dice: random.Random) -> Callable[[Any], Any]:
        sizes = torch.tensor([dice.randint(0, 60) for _ in range(dice.randrange(50))])
        width, least = dice.choice([0, 1, 5, 20]), dice.choice([0, 1, 5, 20])
        return lambda m: [each.tolist() for each in m.create_buckets(sizes, width, least)]

    def case(dice: random.Random) -> None:
        number = dice.getrandbits(60)
        kind = dice.choice([in_order, in_buckets, made])
        # Twice the same draw: neither may see what the other changed.
        runs = [kind(random.Random(number)) for _ in range(2)]
        found = [outcome(lambda r=r, m=m: r(m)) for r, m in zip(runs, (theirs, ours), strict=True)]
        same((kind.__name__, number), *found)

    return case


def compare_with_peers(tally: Tally, peers: Path | None, first: int, cases: int) -> None:
    """Rows for those that are installed there."""
    if peers is not None:
        sys.path.insert(0, str(peers))
    for name, attributes, make, share in (
        ("torch_max_mem", ("torch_max_mem",), torch_max_mem_case, 1.0),
        ("toma", ("toma",), toma_case, 0.1),  # collects garbage in each call
        (
            "bionemo.size_aware_batching",
            ("bionemo.size_aware_batching.sampler", "bionemo.size_aware_batching.utils"),
            bionemo_case,
            1.0,
        ),
    ):
        theirs = None
        if peers is not None:
            with contextlib.suppress(ImportError):
                theirs = _joined(attributes)
        if theirs is None:
            tally.row(f"{name}: not installed", 0)
            continue
        ours = _joined([f"brim.compat.{each}" for each in attributes])
        each_case(tally, f"as {name} does", make(theirs, ours), first, max(int(cases * share), 1))


def _joined(names: Any) -> Any:
    """The names of several modules together."""
    joined = SimpleNamespace()
    for name in names:
        vars(joined).update(vars(importlib.import_module(name)))
    return joined


# ---------------------------------------------------------------- planted faults


def planted() -> list[str]:
    """Faults that the checks do not notice: there must be none."""
    unnoticed = []
    dice = random.Random(0)
    device = Device(dice, lambda size: size <= 5)
    device.tried = [
        (64, False),
        (60, False),
        (50, False),
        (40, False),
        (30, False),
        (9, False),
        (4, True),
    ]
    tries: list[tuple[str, Callable[[], None]]] = [
        ("too many failures", lambda: check_promises(device, 64, 1, "predictive")),
        ("another sequence", lambda: check_promises(device, 64, 1, "halving")),
        ("other results", lambda: same("", ("result", 1), ("result", 2))),
        ("another error", lambda: same("", ("error", ValueError()), ("error", TypeError()))),
    ]
    higher = Device(dice, lambda size: size <= 5)
    higher.tried = [(64, False), (64, False), (5, True)]
    tries.append(("a failed size again", lambda: check_promises(higher, 64, 1, "predictive")))
    for name, check in tries:
        try:
            check()
        except AssertionError:
            continue
        unnoticed.append(f"{name} is not noticed")
    return unnoticed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cases", type=int, default=2000, help="of each row")
    options.add_argument("--peers", type=Path, help="where the originals are installed")
    chosen = options.parse_args()
    first = chosen.seed * 1_000_000
    tally = Tally("Adaptive calls, simulated devices, counted operations, the originals")
    tally.row("planted faults, all noticed", 5, planted())
    each_case(tally, "first calls", check_first_call, first, chosen.cases)
    each_case(tally, "calls under budgets", check_under_a_budget, first, chosen.cases)
    each_case(tally, "ranges and chunks", check_parts, first, chosen.cases)
    each_case(tally, "several parameters", check_several, first, chosen.cases)
    check_attempts(tally, first)
    check_growth(tally, first)
    compare_with_peers(tally, chosen.peers, first, chosen.cases)
    tally.finish()


if __name__ == "__main__":
    main()
