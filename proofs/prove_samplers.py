"""Samplers and streams under random programs: batches, states, epochs, other numbers of ranks.

Each machine holds samplers (or streams) of all ranks and a model of them in plain lists: what is
left of the epoch, computed once by samplers that nothing disturbs, and which samples the loops have
got. hypothesis draws the programs, and makes those that fail small.
"""

from __future__ import annotations

import argparse
import copy
import io
import itertools
import json
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tally import Tally
from tests.python.sampler_cases import COSTS
from torch.utils.data import DataLoader

from brim.data import (
    BucketBatchSampler,
    DocumentPart,
    PackedBatchSampler,
    PackedCollator,
    Shards,
    SizeAwareBatchSampler,
    SplitDocuments,
    balance,
    bucket_stream,
    create_buckets,
    even,
    least_padding_boundaries,
    mix,
    pack_stream,
    size_aware_batching,
)

warnings.simplefilter("ignore")  # of samples left out: those are counted here

BOUNDARIES = [0, 4, 9, 21]
BUDGETS = {
    "sum": (10, 60),
    "count": (1, 9),
    "padded": (10, 80),
    "padded_squared": (100, 900),
    "flops": (250_000, 2_000_000),
}


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    through_json,
    through_torch,
    lambda state: pickle.loads(pickle.dumps(state)),
]
"""What checkpoints do with a state."""


# ---------------------------------------------------------------- what is proved


@dataclass(frozen=True)
class Setup:
    """Settings of a sampler or stream, and what they demand of its batches."""

    kind: str
    sizes: tuple[Any, ...]
    costs: tuple[str, ...]
    maxima: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    epochs_differ: bool = False

    @property
    def samples(self) -> list[int]:
        return list(range(len(self.sizes)) if self.order is None else self.order)

    def _columns(self, batch: list[int]) -> list[list[int]]:
        if len(self.maxima) == 1:
            return [[self.sizes[index] for index in batch]]
        return [[self.sizes[index][k] for index in batch] for k in range(len(self.maxima))]

    def cost(self, batch: list[int]) -> list[float]:
        return [
            COSTS[cost](column)
            for cost, column in zip(self.costs, self._columns(batch), strict=True)
        ]

    def fits(self, batch: list[int]) -> bool:
        return all(cost <= most for cost, most in zip(self.cost(batch), self.maxima, strict=True))

    def bucket(self, index: int) -> int | None:
        size = self._columns([index])[0][0]
        pairs = itertools.pairwise(BOUNDARIES)
        return next((b for b, (low, high) in enumerate(pairs) if low <= size < high), None)

    def may_be_left_out(self, index: int) -> bool:
        """Whether a sample is over the budget, or in no bucket."""
        outside = "bucket" in self.kind and self.bucket(index) is None
        return outside or (self.options.get("oversize") == "leave_out" and not self.fits([index]))

    def complaint(self, batch: list[int]) -> str | None:
        """What is wrong with a batch."""
        if not batch:
            return "an empty batch"
        if "bucket" in self.kind and len({self.bucket(index) for index in batch}) != 1:
            return f"{batch} is of several buckets"
        counts = self.options.get("batch_size")
        if counts is not None:
            bucket = self.bucket(batch[0])
            fits = bucket is not None and len(batch) <= counts[bucket]
            return None if fits else f"{batch} has more samples than {counts}"
        most = self.options.get("max_batch_size")
        if most is not None and len(batch) > most:
            return f"{batch} has more than {most} samples"
        oversize = self.options.get("oversize")
        if oversize == "truncate" or self.fits(batch):
            return None
        if oversize == "alone" and len(batch) == 1:
            return None
        return f"{batch} costs {self.cost(batch)} of {self.maxima}"


def _some(draw: st.DrawFn, kind: str) -> Setup:
    budgets = draw(st.integers(1, 2))
    size = st.integers(0, 22)
    row: Any = size if budgets == 1 else st.tuples(size, size)
    costs = tuple(draw(st.sampled_from(sorted(COSTS))) for _ in range(budgets))
    sizes = draw(st.lists(row, min_size=1, max_size=40))
    maxima = tuple(draw(st.integers(*BUDGETS[cost])) for cost in costs)
    options: dict[str, Any] = {}
    options["oversize"] = draw(st.sampled_from(["leave_out", "alone", "truncate"]))
    if kind.startswith("bucket ") or kind == "bucket":
        # A sampler takes the bucket of the whole sample, a stream that of what is left of it.
        options["oversize"] = draw(st.sampled_from(["leave_out", "alone"]))
    options["max_batch_size"] = draw(st.none() | st.integers(1, 6))
    if "packed" not in kind or "sum" not in costs:
        options["batch_multiple"] = draw(st.sampled_from([1, 1, 2, 3]))
    most = options["max_batch_size"] or 9
    if {"sum", "count"} & set(costs) or options.get("batch_multiple", 1) > most:
        options.pop("batch_multiple", None)
    return Setup(kind, tuple(sizes), costs, maxima, options)


@st.composite
def sampler_setups(draw: st.DrawFn) -> Setup:
    kinds = ["ordered", "asked", "packed", "indices", "work", "bucket", "counted bucket"]
    setup = _some(draw, draw(st.sampled_from(kinds)))
    options = {**setup.options, "shuffle": draw(st.booleans())}
    options["seed"] = draw(st.integers(0, 2**63 - 1))
    order = None
    costs = setup.costs
    if setup.kind in ("ordered", "asked", "indices") and draw(st.booleans()):
        order = tuple(draw(st.permutations(range(len(setup.sizes)))))
        order = order[: draw(st.integers(0, len(order)))]
    if setup.kind in ("packed", "indices", "work"):
        options["window"] = draw(st.none() | st.integers(1, 12))
    if setup.kind == "work":
        costs = ("sum",)
        options.pop("batch_multiple", None)
    one = setup.sizes if len(setup.maxima) == 1 else tuple(each[0] for each in setup.sizes)
    if setup.kind in ("work", "counted bucket"):
        most = draw(st.integers(*BUDGETS["sum"]))
        setup = Setup(setup.kind, one, ("sum",), (most,), setup.options)
        costs = setup.costs
    if setup.kind == "counted bucket":
        options = {key: options[key] for key in ("shuffle", "seed")}
        options["drop_last"] = draw(st.booleans())
        options["batch_size"] = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
    return Setup(setup.kind, setup.sizes, costs, setup.maxima, options, order)


def sampler_of(setup: Setup, rank: int, world: int, index: str | None = None) -> Any:
    several = len(setup.maxima) > 1
    cost: Any = list(setup.costs) if several else setup.costs[0]
    most: Any = list(setup.maxima) if several else setup.maxima[0]
    options = {**setup.options, "rank": rank, "world_size": world}
    sizes: Any = list(setup.sizes)
    if index is not None and not several and setup.kind != "asked":
        options["index"] = index
    if setup.kind in ("ordered", "asked"):
        order = range(len(sizes)) if setup.order is None else list(setup.order)
        asked = sizes.__getitem__ if setup.kind == "asked" else sizes
        return SizeAwareBatchSampler(order, asked, most, cost=cost, **options)
    if setup.kind == "counted bucket":
        return BucketBatchSampler(sizes, BOUNDARIES, **options)
    if setup.kind == "bucket":
        return BucketBatchSampler(sizes, BOUNDARIES, max_total_size=most, cost=cost, **options)
    if setup.kind == "indices":
        options["indices"] = setup.samples
    if setup.kind == "work":
        options["work"] = [1 + size * size for size in sizes]
    return PackedBatchSampler(sizes, most, cost=cost, **options)


def stream_of(setup: Setup, rank: int, world: int, index: str | None = None) -> Any:
    several = len(setup.maxima) > 1
    cost: Any = list(setup.costs) if several else setup.costs[0]
    most: Any = list(setup.maxima) if several else setup.maxima[0]
    options = {**setup.options, "rank": rank, "world_size": world}
    samples: Any = range(len(setup.sizes))
    sizeof: Any = setup.sizes.__getitem__
    if "mixed" in setup.kind:
        parts = [samples[0::3], samples[1::3], samples[2::3]]
        samples = mix(parts, [3, 1, 2], seed=5, at_end="drop")
    if "blocks" in setup.kind:
        samples = [torch.arange(*at) for at in _blocks(len(setup.sizes))]
        table = torch.tensor(setup.sizes)
        sizeof = lambda block: list(table[block].unbind(1)) if several else table[block]  # noqa: E731
        options["blocks"] = True
    if "bucket" in setup.kind:
        return bucket_stream(samples, BOUNDARIES, most, sizeof=sizeof, cost=cost, **options)
    return pack_stream(samples, most, sizeof=sizeof, cost=cost, **options)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Blocks of uneven lengths."""
    begin = 0
    for length in itertools.cycle((5, 1, 9)):
        if begin >= count:
            return
        yield begin, min(begin + length, count)
        begin += length


@st.composite
def stream_setups(draw: st.DrawFn) -> Setup:
    shapes = ["pack", "pack mixed", "pack blocks", "bucket", "bucket mixed", "bucket blocks"]
    kind = draw(st.sampled_from(shapes))
    setup = _some(draw, "packed" if "pack" in kind else kind)
    options = {**setup.options, "lookahead": draw(st.integers(1, 15))}
    if "pack" in kind:
        options |= {"shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 2**63 - 1))}
    return Setup(kind, setup.sizes, setup.costs, setup.maxima, options)


def plain(batch: Any) -> list[int]:
    """The samples of a batch, also of one in blocks."""
    if isinstance(batch, torch.Tensor):
        return [int(index) for index in batch]
    if batch and isinstance(batch[0], tuple):
        return [int(block[row]) for block, rows in batch for row in rows.tolist()]
    return list(batch)


# ---------------------------------------------------------------- the machines


class Machine(RuleBasedStateMachine):
    """Samplers of all ranks beside what is known of them; a class below says what they are."""

    checks: ClassVar[Counter[str]] = Counter()
    setups: st.SearchStrategy[Setup]
    make: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.untouched = True  # by any loop since the samplers were made
        self.folder = tempfile.TemporaryDirectory(prefix="brim-proof-")

    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(data=st.data(), world=st.integers(1, 4), indexed=st.booleans())
    def begin(self, data: st.DataObject, world: int, indexed: bool) -> None:
        self.setup = data.draw(type(self).setups)
        self.index = self.folder.name if indexed else None
        self.epoch = 0
        self.checks["programs"] += 1
        try:
            self.ranks = self._made(world)
        except RuntimeError as error:
            if "no sample is in any bucket" not in str(error):
                raise
            assert all(map(self.setup.may_be_left_out, self.setup.samples)), self.setup
            self.ranks = []
            return
        self._enter_epoch(0)

    def _made(self, world: int) -> list[Any]:
        return [type(self).make(self.setup, rank, world, self.index) for rank in range(world)]

    # -- the model

    def _enter_epoch(self, epoch: int) -> None:
        for each in self.ranks:
            each.set_epoch(epoch)
        self.epoch = epoch
        self.used: list[int] = []  # by earlier numbers of ranks in this epoch
        self._expect(None)

    def _expect(self, state: Any) -> None:
        """What is left, of samplers that nothing disturbs."""
        others = self._made(len(self.ranks))
        for each in others:
            each.set_epoch(self.epoch)
            if state is not None:
                each.load_state_dict(copy.deepcopy(state))
        self.expected = [[plain(batch) for batch in iter(each)] for each in others]
        self.done = [0] * len(self.ranks)
        self.running: list[Any] = [None] * len(self.ranks)
        self._check_what_is_left()

    def _check_what_is_left(self) -> None:
        """Ranks are disjoint and together complete, no batch is over its limit."""
        self.checks["epochs"] += 1
        assert len({len(batches) for batches in self.expected}) == 1, "ranks differ in length"
        for batch in itertools.chain.from_iterable(self.expected):
            complaint = self.setup.complaint(batch)
            assert complaint is None, complaint
        seen = Counter(self.used)
        for batches in self.expected:
            seen.update(itertools.chain.from_iterable(batches))
        assert max(seen.values(), default=1) == 1, f"more than once: {seen.most_common(3)}"
        assert seen.keys() <= set(self.setup.samples)
        missing = set(self.setup.samples) - seen.keys()
        self._check_missing({each for each in missing if not self.setup.may_be_left_out(each)})
        if not self.setup.options.get("drop_last"):
            wrongly = [each for each in seen if self.setup.may_be_left_out(each)]
            assert not wrongly, f"{wrongly} should have been left out"

    def _check_missing(self, missing: set[int]) -> None:
        # Only the last few can be too few to give every rank a batch.
        dropped = 0
        if self.setup.options.get("drop_last"):
            dropped = sum(size - 1 for size in self.setup.options["batch_size"])
        least = max(len(self.ranks), getattr(self, "most_ranks", 1)) - 1
        assert len(missing) <= least + dropped, f"lost {missing}"

    def _rest(self, rank: int) -> list[list[int]]:
        return self.expected[rank][self.done[rank] :]

    # -- the rules

    @rule(rank=st.integers(0, 3), count=st.integers(1, 8))
    def take(self, rank: int, count: int) -> None:
        """A loop on one rank gets some batches."""
        if not self.ranks:
            return
        rank %= len(self.ranks)
        wanted = self._rest(rank)[:count]
        if not wanted:
            return
        self._run(rank)
        got = [plain(each) for each in itertools.islice(self.running[rank], len(wanted))]
        assert got == wanted, f"rank {rank}: {got} for {wanted}"
        self.done[rank] += len(wanted)
        self.checks["batches"] += len(wanted)

    def _run(self, rank: int) -> None:
        if self.running[rank] is None:
            self.running[rank] = iter(self.ranks[rank])
            self.untouched = False

    @rule(count=st.integers(0, 8))
    def take_on_all(self, count: int) -> None:
        for rank in range(len(self.ranks)):
            self.take(rank, max(count, 1))

    @rule(data=st.data(), world=st.integers(1, 4), same=st.booleans())
    def resume(self, data: st.DataObject, world: int, same: bool) -> None:
        """The job stops where all ranks have got equally many, and goes on, maybe on others."""
        if not self.ranks:
            return
        way = data.draw(st.sampled_from(WAYS))
        steps = min(self.done)
        begun = [running is not None for running in self.running]
        if not all(begun) and (any(begun) or not self.untouched):
            return  # a state is that of the latest iteration, which is not of this epoch everywhere
        asked = {"batches": steps} if all(begun) else {}
        states = [way(each.state_dict(**asked)) for each in self.ranks]
        # A rank that has looked beyond the last batch knows that there is none.
        looked = [state.pop("finished") for state in states]
        assert all(each == states[0] for each in states), f"states of ranks: {states}"
        finished = states[0]["finished"] = any(looked)
        self.checks["resumed"] += 1
        before = [batches[:steps] for batches in self.expected]
        after = [batches[steps:] for batches in self.expected]
        self.most_ranks = max(getattr(self, "most_ranks", 1), len(self.ranks))
        self.ranks = self._made(len(self.ranks) if same else world)
        for each in self.ranks:
            each.load_state_dict(way(states[0]))
            assert each.epoch in (self.epoch, self.epoch + 1)
        self.untouched = True
        if finished:
            self._enter_epoch(self.epoch + 1)
            return
        self.used += itertools.chain.from_iterable(itertools.chain.from_iterable(before))
        if data.draw(st.booleans()):
            for each in self.ranks:
                each.set_epoch(self.epoch)  # as loops do: keeps the position
        self._expect(states[0])
        if same:
            assert self.expected == after, f"{self.expected} after a resume, {after} without"

    @rule(step=st.integers(1, 3))
    def next_epoch(self, step: int) -> None:
        if self.ranks:
            self.most_ranks = 1
            self._enter_epoch(self.epoch + step)

    @rule(rank=st.integers(0, 3))
    def finish(self, rank: int) -> None:
        """The rest of the epoch, and the end of the iterator."""
        if not self.ranks:
            return
        rank %= len(self.ranks)
        self._run(rank)
        rest = [plain(batch) for batch in self.running[rank]]
        assert rest == self._rest(rank)
        assert list(self.running[rank]) == []
        self.done[rank] = len(self.expected[rank])
        self.checks["finished"] += 1


class SamplerMachine(Machine):
    """SizeAware-, Packed- and BucketBatchSampler, also with an index."""

    setups = sampler_setups()
    make = staticmethod(sampler_of)

    def _fresh(self, rank: int) -> Any:
        """A sampler that stands where this rank's loop began."""
        return self.running[rank] is None

    @rule(rank=st.integers(0, 3), begin=st.integers(0, 6), count=st.none() | st.integers(0, 6))
    def ask_for_the_plan(self, rank: int, begin: int, count: int | None) -> None:
        """`plan`, `len` and `report` of an iteration that has not begun are what comes of it."""
        if not self.ranks:
            return
        rank %= len(self.ranks)
        if self.running[rank] is not None:
            assert len(self.ranks[rank]) == len(self.expected[rank])
            return
        sampler, batches = self.ranks[rank], self.expected[rank]
        assert len(sampler) == len(batches), f"len {len(sampler)}, {len(batches)} batches"
        plan = sampler.plan(begin, None if count is None else begin + count)
        offsets, indices = plan.offsets.tolist(), plan.indices.tolist()
        planned = [indices[a:b] for a, b in itertools.pairwise(offsets)]
        end = None if count is None else begin + count
        assert planned == batches[begin:end], f"plan {planned}"
        self.checks["plans"] += 1

    @rule(rank=st.integers(0, 3))
    def ask_for_the_report(self, rank: int) -> None:
        if not self.ranks:
            return
        rank %= len(self.ranks)
        if self.running[rank] is not None:
            return
        report = self.ranks[rank].report()
        given = list(itertools.chain.from_iterable(itertools.chain.from_iterable(self.expected)))
        assert report.batched == len(given)
        assert report.batches == sum(map(len, self.expected))
        assert report.world_size == len(self.ranks)
        lost = [index for each in report.left_out.values() for index in each.tolist()]
        everything = Counter(self.setup.samples)
        everything.subtract(self.used)
        left = Counter(lost)
        left.update(given)
        # Samples that are over the budget count for the part of the epoch in which they lie.
        for index in set(everything) | set(left):
            if not self.setup.may_be_left_out(index):
                assert everything[index] == left[index], f"sample {index}: {report.left_out}"
            else:
                assert left[index] <= 1
        if not self.used:
            assert report.samples == len(self.setup.samples)
            assert +everything == +left, report.left_out
        self.checks["reports"] += 1

    @rule(rank=st.integers(0, 3))
    def copy_the_sampler(self, rank: int) -> None:
        """Pickling it is what a DataLoader's workers do; a copy goes on with the next epoch."""
        if not self.ranks or self.setup.kind == "asked":
            return
        rank %= len(self.ranks)
        if self.running[rank] is None:
            twin = pickle.loads(pickle.dumps(self.ranks[rank]))
            assert [plain(batch) for batch in twin] == self.expected[rank]
            self.checks["copies"] += 1

    @invariant()
    def nothing_is_lost_on_the_way(self) -> None:
        if getattr(self, "ranks", None):
            assert len({each.epoch for each in self.ranks}) == 1


class StreamMachine(Machine):
    """pack_stream and bucket_stream, of samples, mixtures and blocks."""

    setups = stream_setups()
    make = staticmethod(stream_of)


# ---------------------------------------------------------------- one case after the other


def run_machine(machine: Any, number: int, examples: int, *, shrink: bool = False) -> list[str]:
    """One run of hypothesis; what went wrong, in its words. Making that small takes minutes."""
    chosen = settings(
        max_examples=examples,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        stateful_step_count=14,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(machine), settings=chosen)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return [f"seed {number}: {type(error).__name__}: {error}\n{notes}"]
    return []


def machine_row(
    tally: Tally, what: str, machine: Any, first: int, seconds: float, shrink: bool
) -> None:
    machine.checks.clear()
    wrong: list[str] = []
    until = time.monotonic() + seconds
    number = first
    while time.monotonic() < until and len(wrong) < 3:
        wrong += run_machine(machine, number, 150, shrink=shrink)
        number += 1
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(machine.checks.items()))
    print(f"{what}: seeds {first} to {number - 1}: {counts}", flush=True)
    tally.row(what, machine.checks["programs"], wrong)


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


def check_in_order(dice: random.Random) -> None:
    """size_aware_batching beside ten lines that do the same."""
    sizes = [dice.randrange(1, 25) for _ in range(dice.randrange(60))]
    cost = dice.choice(sorted(COSTS))
    most = dice.randint(*BUDGETS[cost])
    limit = dice.choice([None, None, dice.randint(1, 5)])
    oversize = dice.choice(["leave_out", "alone"])
    numbers = range(len(sizes))
    expected: list[list[int]] = []
    open_ = False
    for sample in numbers:
        if COSTS[cost]([sizes[sample]]) > most:
            if oversize == "alone":
                expected.append([sample])
                open_ = False
            continue
        longer = [*expected[-1], sample] if open_ else []
        fits = open_ and COSTS[cost]([sizes[each] for each in longer]) <= most
        if fits and (limit is None or len(longer) <= limit):
            expected[-1].append(sample)
        else:
            expected.append([sample])
            open_ = True
    batches = size_aware_batching(
        numbers, sizes.__getitem__, most, cost=cost, max_batch_size=limit, oversize=oversize
    )
    got = list(batches)
    assert got == expected, (sizes, cost, most, limit, oversize, got, expected)


def check_buckets(dice: random.Random) -> None:
    sizes = [dice.randrange(1, 60) for _ in range(dice.randint(1, 80))]
    width, least = dice.randint(1, 20), dice.randint(1, 30)
    boundaries, counts = (each.tolist() for each in create_buckets(sizes, width, least))
    assert boundaries[0] <= min(sizes)
    assert boundaries[-1] > max(sizes)
    assert all(a < b for a, b in itertools.pairwise(boundaries))
    pairs = list(itertools.pairwise(boundaries))
    assert counts == [sum(a <= size < b for size in sizes) for a, b in pairs]
    assert all(b - a <= width for a, b in pairs), (boundaries, width)

    most = dice.randint(1, 4)
    sizes = [dice.randrange(1, 12) for _ in range(dice.randint(1, 12))]
    found = least_padding_boundaries(sizes, most).tolist()
    assert len(found) - 1 <= most
    assert found[0] <= min(sizes)
    assert found[-1] > max(sizes)

    def padding(edges: list[int]) -> int:
        rows = [[s for s in sizes if a <= s < b] for a, b in itertools.pairwise(edges)]
        assert sum(map(len, rows)) == len(sizes)
        return sum(len(row) * max(row) - sum(row) for row in rows if row)

    distinct = sorted(set(sizes))
    ways = itertools.chain.from_iterable(
        itertools.combinations(distinct[1:], inner) for inner in range(min(most, len(distinct)))
    )
    best = min(padding([distinct[0], *way, distinct[-1] + 1]) for way in ways)
    assert padding(found) == best, (sizes, most, found)


def check_balance(dice: random.Random) -> None:
    work = [dice.randrange(1, 100) for _ in range(dice.randint(1, 40))]
    parts = dice.randint(1, len(work))
    groups = [list(map(int, part)) for part in balance(work, parts)]
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(work)))
    assert len(groups) == parts
    # No part can do better than the mean or the heaviest; taking them greedily reaches 4/3 of that.
    bound = max(sum(work) / parts, max(work), _third(work, parts))
    assert max(sum(work[i] for i in group) for group in groups) <= bound * 4 / 3 + 1e-9


def _third(work: list[int], parts: int) -> float:
    """Two of the parts + 1 heaviest are together somewhere."""
    heavy = sorted(work, reverse=True)
    return heavy[parts - 1] + heavy[parts] if len(work) > parts else 0.0


def check_rows(dice: random.Random) -> None:
    """Packed rows: every token at its place, none of two documents at one, also of parts."""
    count = dice.randint(1, 25)
    documents = [
        [1000 * number + place + 1 for place in range(dice.randint(1, 30))]
        for number in range(count)
    ]
    multiple = dice.choice([1, 1, 2, 4])
    row_multiple = dice.choice([1, 4, 8])
    most = 8 * dice.randint(4, 12)
    collator = PackedCollator(
        document_multiple=multiple,
        row_multiple=row_multiple,
        positions=dice.choice(["restart", "continue"]),
    )
    splits = dice.random() < 0.5
    if splits:
        most = 8 * dice.randint(1, 4)
    stream = pack_stream(
        documents,
        most,
        collate_fn=collator,
        lookahead=dice.randint(1, 12),
        oversize="split" if splits else "leave_out",
    )
    seen: Counter[int] = Counter()
    for row in stream:
        tokens, positions = row["input_ids"][0].tolist(), row["position_ids"][0].tolist()
        bounds = row["cu_seq_lens_q"].tolist()
        assert len(tokens) == len(positions) == bounds[-1] <= most
        assert len(tokens) % row_multiple == 0
        assert max(b - a for a, b in itertools.pairwise(bounds)) == row["max_length_q"]
        for begin, end in itertools.pairwise(bounds):
            real = [token for token in tokens[begin:end] if token]
            seen.update(real)
            assert len({token // 1000 for token in real}) <= 1, "two documents in one"
            assert real == list(range(real[0], real[0] + len(real))) if real else True
            labels = row["labels"][0, begin:end].tolist()
            assert labels[0] == -100
            assert labels[1 : len(real)] == real[1:]
    assert seen == Counter(itertools.chain.from_iterable(documents)), "tokens lost or repeated"

    lengths = [len(document) for document in documents]
    parts = SplitDocuments(documents, lengths, most)
    taken: list[int] = []
    for part in (parts[i] for i in range(len(parts))):
        whole = not isinstance(part, DocumentPart)
        own = part if whole else part.document[part.start : part.stop]
        assert len(own) <= most
        taken += own
    assert sorted(taken) == sorted(itertools.chain.from_iterable(documents))


def check_mixture(dice: random.Random) -> None:
    """Shares follow the weights at any sample, and a stream of them resumes."""
    weights = [dice.randint(0, 5) for _ in range(dice.randint(1, 4))]
    weights[dice.randrange(len(weights))] = dice.randint(1, 5)
    lengths = [dice.randint(1, 60) for _ in weights]
    sources = [[(number, i) for i in range(n)] for number, n in enumerate(lengths)]
    at_end = dice.choice(["stop", "drop", "restart"])
    mixture = mix(sources, weights, seed=dice.randrange(99), at_end=at_end)
    given: Counter[int] = Counter()
    drawn = []
    ended = False
    for n, (source, place) in enumerate(mixture, start=1):
        drawn.append((source, place))
        given[source] += 1
        ended = ended or given[source] > lengths[source]
        some_done = any(given[s] >= lengths[s] for s in range(len(weights)) if weights[s])
        if not some_done:
            for s, weight in enumerate(weights):
                share = weight * n / sum(weights)
                assert abs(given[s] - share) <= len(weights), (weights, n, given)
    assert all(given[s] == 0 for s in range(len(weights)) if weights[s] == 0)
    alive = [s for s in range(len(weights)) if weights[s]]
    if at_end == "drop":
        assert sorted(drawn) == sorted((s, i) for s in alive for i in range(lengths[s]))
    elif at_end == "restart":
        assert all(given[s] >= lengths[s] for s in alive)
    else:
        assert not ended
        assert any(given[s] == lengths[s] for s in alive)

    def stream() -> Any:
        own = mix(sources, weights, seed=7, at_end=at_end)
        return pack_stream(own, 5, sizeof=lambda _: 1, cost="sum", lookahead=dice_lookahead)

    dice_lookahead = dice.randint(1, 9)
    other = [dice.randint(1, 5) for _ in weights]
    change, stop = dice.randrange(8), dice.randrange(12)

    running, batches, state = stream(), [], None
    for number, batch in enumerate(running):
        batches.append(batch)
        if number == change:
            running.iterable.set_weights(other)
        if number == max(stop, change):
            state = through_json(running.state_dict())
            place = len(batches)
    if state is not None:
        again = stream()
        again.load_state_dict(state)
        assert list(again) == batches[place:], (weights, other, at_end, change, stop)


def check_loaders(dice: random.Random) -> None:
    """DataLoaders with workers: the batches of all ranks are those without workers."""
    sizes = [dice.randint(1, 20) for _ in range(dice.randint(1, 60))]
    world, workers = dice.randint(1, 2), dice.randint(1, 3)
    kind = dice.choice(["packed", "pack", "divide", "mixed divide"])
    shards = world * workers + dice.randrange(3)
    options: dict[str, Any] = {"cost": "sum"}
    if kind != "packed":
        options["lookahead"] = dice.randint(1, 30)
    seen: Counter[int] = Counter()
    for rank in range(world):
        own = {**options, "rank": rank, "world_size": world}
        if kind == "packed":
            sampler = PackedBatchSampler(sizes, 40, seed=1, shuffle=True, **own)
            loader = DataLoader(
                range(len(sizes)), batch_sampler=sampler, num_workers=workers, collate_fn=list
            )
            given = list(loader)
            assert given == list(PackedBatchSampler(sizes, 40, seed=1, shuffle=True, **own))
        else:
            data: Any = range(len(sizes))
            if "divide" in kind:
                data = Shards(
                    [list(range(k, len(sizes), shards)) for k in range(shards)], open=iter
                )
                own["sharded"] = "divide"
            if kind == "mixed divide":
                half = len(sizes) // 2
                own_shards = world * workers
                halves = [range(half), range(half, len(sizes))]
                data = mix(
                    [
                        Shards([list(part[k::own_shards]) for k in range(own_shards)], open=iter)
                        for part in halves
                        if len(part)
                    ],
                    [1 for part in halves if len(part)],
                    at_end="drop",
                )
            stream = pack_stream(data, 40, sizeof=sizes.__getitem__, **own)
            given = list(DataLoader(stream, batch_size=None, num_workers=workers))
            if kind == "pack":
                assert given == list(pack_stream(data, 40, sizeof=sizes.__getitem__, **own))
        for batch in given:
            assert sum(sizes[index] for index in batch) <= 40
            seen.update(batch)
    assert max(seen.values()) == 1
    missing = set(range(len(sizes))) - seen.keys()
    assert len(missing) < world, f"{kind}: lost {missing}"


# ---------------------------------------------------------------- ranks that are processes


def even_stream(counts: list[int], lookahead: int) -> Any:
    data = Shards(
        range(len(counts)), lambda shard: range(1000 * shard, 1000 * shard + counts[shard])
    )
    return pack_stream(
        data, 10, sizeof=lambda _: 1, cost="sum", sharded="divide", lookahead=lookahead
    )


def even_rank(rank: int, world: int, port: int, first: int, cases: int, results: Any) -> None:
    """One rank of random `even` epochs; what was given goes to the first process."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = []
    for number in range(first, first + cases):
        dice = random.Random(number)  # alike on all ranks
        counts = [dice.randrange(90) for _ in range(dice.randint(1, 2) * world)]
        at_end, ahead = dice.choice(["stop", "repeat"]), dice.randint(1, 9)
        lookahead, stop = dice.randint(1, 30), dice.randrange(9)

        def batches(at_end: str = at_end, ahead: int = ahead) -> Any:
            stream = even_stream(counts, lookahead)  # noqa: B023  called in this round
            return even(stream, at_end=at_end, ahead=ahead)

        if at_end == "repeat" and not all(sum(counts[r::world]) for r in range(world)):
            at_end = "stop"
        whole = list(batches(at_end))
        first_part = batches(at_end)
        head = list(itertools.islice(first_part, stop))
        state = through_json(first_part.state_dict())
        again = batches(at_end)
        again.load_state_dict(state)
        tail = list(again) if len(head) < len(whole) else []
        found.append((counts, at_end, whole, head + tail))
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def check_even(tally: Tally, first: int, cases: int) -> None:
    world = 3
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    server = __import__("socket").socket()
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.close()
    ranks = [
        context.Process(target=even_rank, args=(rank, world, port, first, cases, results))
        for rank in range(world)
    ]
    for each in ranks:
        each.start()
    try:
        found = dict(results.get(timeout=600) for _ in ranks)
    except Exception as error:
        for each in ranks:
            each.kill()
        tally.row("even, 3 processes", cases, [f"seeds from {first}: {error!r}"])
        return
    for each in ranks:
        each.join()
    wrong = []
    for number, every in enumerate(zip(*(found[rank] for rank in range(world)), strict=True)):
        at = f"seed {first + number}: {every[0][:2]}"
        counts, at_end = every[0][:2]
        wholes = [whole for _, _, whole, _ in every]
        if len({len(whole) for whole in wholes}) != 1:
            wrong.append(f"{at}: lengths {list(map(len, wholes))}")
        if any(whole != resumed for _, _, whole, resumed in every):
            wrong.append(f"{at}: resumed otherwise")
        seen = Counter(s for whole in wholes for batch in whole for s in batch)
        everything = {1000 * k + i for k, n in enumerate(counts) for i in range(n)}
        if at_end == "stop" and max(seen.values(), default=1) > 1:
            wrong.append(f"{at}: a sample twice")
        if at_end == "repeat" and seen.keys() != everything:
            wrong.append(f"{at}: lost {sorted(everything - seen.keys())[:5]}")
        full = min(-(-sum(counts[r::world]) // 10) for r in range(world))
        if at_end == "stop" and len(wholes[0]) < full - 1:
            wrong.append(f"{at}: {len(wholes[0])} steps, and each rank has {full} batches")
    tally.row("even, 3 processes", cases, wrong)


# ---------------------------------------------------------------- planted faults


def planted() -> list[str]:
    """The names of faults that the machines do not notice: there must be none."""
    unnoticed = []
    original = SizeAwareBatchSampler.__iter__

    def loses_one(self: Any) -> Iterator[Any]:
        for batch in original(self):
            kept = list(batch)
            yield kept[:-1] if len(kept) > 1 else kept

    def repeats(self: Any) -> Iterator[Any]:
        batches = list(original(self))
        yield from batches
        yield from batches[:1]

    def one_too_early(self: Any, batches: int | None = None) -> Any:
        return state_dict(self, batches - 1 if batches else batches)

    base = SizeAwareBatchSampler.__mro__[2]
    state_dict = base.state_dict
    faults: list[tuple[str, Any, str, Any]] = [
        ("a sample lost", base, "__iter__", loses_one),
        ("a batch repeated", base, "__iter__", repeats),
        ("a state of one batch too early", base, "state_dict", one_too_early),
        ("a length too large", base, "__len__", lambda self, old=base.__len__: old(self) + 1),
    ]
    for name, owner, attribute, fault in faults:
        before = owner.__dict__[attribute]
        setattr(owner, attribute, fault)
        try:
            if not run_machine(SamplerMachine, 1, 200):
                unnoticed.append(f"{name} is not noticed")
        finally:
            setattr(owner, attribute, before)
    return unnoticed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=180, help="of each machine")
    options.add_argument("--cases", type=int, default=400, help="of each other row")
    options.add_argument("--shrink", action="store_true", help="make a program that fails small")
    chosen = options.parse_args()
    tally = Tally("Random programs of samplers and streams")
    first = chosen.seed * 1_000_000
    tally.row("planted faults, all noticed", 4, planted())
    machine_row(tally, "programs of samplers", SamplerMachine, first, chosen.seconds, chosen.shrink)
    machine_row(tally, "programs of streams", StreamMachine, first, chosen.seconds, chosen.shrink)
    each_case(tally, "size_aware_batching", check_in_order, first, 5 * chosen.cases)
    each_case(tally, "buckets, least padding", check_buckets, first, 2 * chosen.cases)
    each_case(tally, "balance", check_balance, first, 5 * chosen.cases)
    each_case(tally, "packed rows and parts", check_rows, first, 2 * chosen.cases)
    each_case(tally, "mixtures", check_mixture, first, 2 * chosen.cases)
    each_case(tally, "loaders with workers", check_loaders, first, max(chosen.cases // 10, 1))
    check_even(tally, first, max(chosen.cases // 4, 1))
    tally.finish()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
