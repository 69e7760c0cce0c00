"""Parts and batches of equal work under a cap."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.data import PackedBatchSampler, balance, flops

from .torchrun import results_of, torchrun


def check(
    parts: list[list[int]], sizes: list[float], cap: float, *, equal_count: bool = False
) -> None:
    assert sorted(itertools.chain(*parts)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in part) <= cap for part in parts)
    assert all(parts) or len(parts) > len(sizes)
    if equal_count:
        assert len({len(part) for part in parts}) <= 2
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


numbers = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@settings(max_examples=50)
@given(numbers, st.integers(1, 4), st.booleans(), st.integers(1, 5), st.data())
def test_no_part_is_over_the_cap(
    sizes: list[int], room: int, equal_count: bool, multiple: int, data: st.DataObject
) -> None:
    cap = max(1, room * max(sizes))
    costs = data.draw(st.lists(st.floats(0, 1e6), min_size=len(sizes), max_size=len(sizes)))
    options: dict[str, Any] = {"cap": cap, "sizes": sizes, "equal_count": equal_count}
    parts = balance(costs, **options, multiple_of=multiple)
    check(parts, sizes, cap, equal_count=equal_count)
    assert len(parts) % multiple == 0
    assert len(parts) >= -(-sum(sizes) // cap)
    more = len(parts) + data.draw(st.integers(0, 5))
    check(balance(costs, more, **options), sizes, cap, equal_count=equal_count)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(9, 14))
def test_parts_of_a_few_items_are_the_fewest(sizes: list[int], cap: int) -> None:
    def holds(parts: int) -> bool:
        return any(
            max(np.bincount(choice, sizes, parts)) <= cap
            for choice in itertools.product(range(parts), repeat=len(sizes))
        )

    fewest = next(parts for parts in itertools.count(1) if holds(parts))
    assert len(balance(sizes, cap=cap)) == fewest
    if fewest > 1:
        with pytest.raises(ValueError, match=rf"parts={fewest - 1} .*{fewest} parts hold them"):
            balance(sizes, fewest - 1, cap=cap)


def test_the_cap_is_on_the_costs_where_there_are_no_sizes() -> None:
    assert balance([4, 3, 3, 2], cap=6) == [[0, 3], [1, 2]]
    assert balance([0.1, 0.2], cap=0.5) == [[0, 1]]
    assert balance([], cap=1) == [[]]
    assert balance([2**30, 2**29], cap="1GiB") == [[0], [1]]


def test_work_is_even_and_tokens_are_under_the_cap() -> None:
    lengths = torch.randn(512, generator=torch.Generator().manual_seed(0))
    lengths = lengths.mul_(0.9).exp_().mul_(2500).clamp_(50, 32768).long()
    work = flops(lengths)
    cap = 65_536
    fewest = len(balance(work, cap=cap, sizes=lengths))
    parts = balance(work, fewest + 1, cap=cap, sizes=lengths)
    check(parts, lengths.tolist(), cap)
    loads = [float(work[part].sum()) for part in parts]
    assert max(loads) / (sum(loads) / len(loads)) < 1.1  # what tokens leave
    # Of parts with equal work, those of short samples have more tokens.
    free = balance(work, fewest + 1)
    assert max(int(lengths[part].sum()) for part in free) > cap


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (([1, 2],), {}, "parts must be given without cap"),
        (([1, 2], 2), {"sizes": [1, 2]}, "sizes needs cap"),
        (([1, 2], 2), {"ranks": True}, "ranks needs cap"),
        (([1, 2], 2), {"cap": 3, "ranks": True}, "leave parts out: got 2"),
        (([1, 2], 3), {"cap": 3, "multiple_of": 2}, "parts must be a multiple of multiple_of=2"),
        (([1, 2],), {"cap": 3, "multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        (([1, 2],), {"cap": 0}, "cap must be positive and finite, got 0"),
        (([1, 2],), {"cap": "x"}, "cap"),
        (([1, 2], 2), {"cap": 3, "sizes": [1]}, "sizes must be as many as costs, 2, got 1"),
        (([1, 2],), {"cap": 3, "sizes": [1]}, "sizes must be as many as costs, 2, got 1"),
        (([1, 2],), {"cap": 3, "sizes": [1, -1]}, "sizes must be .* got -1 at index 1"),
        (([1, -1],), {"cap": 3}, "costs must be .* got -1 at index 1"),
        (([1, float("nan")],), {"cap": 3, "sizes": [1, 1]}, "costs must be .* got nan at index 1"),
        (([1, 7], 2), {"cap": 3}, "item 1 exceeds the cap by itself: its size is 7, cap is 3"),
        (([1, 7],), {"cap": 3}, "item 1 exceeds the cap by itself: its size is 7, cap is 3"),
        (([5] * 6, 2), {"cap": 10}, "parts=2 .* 3 parts hold them, and fewer than 3 cannot"),
    ],
)
def test_wrong_arguments(arguments: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        balance(*arguments, **options)


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="ranks must be a bool or a process group"):
        balance([1], cap=1, ranks=2)
    with pytest.raises(TypeError, match="cap"):
        balance([1], cap=[1])  # type: ignore[arg-type]


JOB = """
import json, sys
import torch.distributed as dist
import brim
from brim.data import balance

dist.init_process_group("gloo")
rank = dist.get_rank()
sizes = [[5, 5, 5], [5] * 9][rank]
found = [len(balance(sizes, cap=10, multiple_of=4, ranks=True)),
         len(balance(sizes, cap=10, ranks=dist.group.WORLD)),
         len(balance(sizes, cap=10))]
try:  # wrong costs, with sizes that are right
    balance([-1.0 if rank else 1.0], cap=10, sizes=[1], ranks=True)
except (ValueError, brim.RankError) as error:
    found.append(type(error).__name__)
for wrong in ([[1, 11], [1]][rank], 2), ([1], rank + 1):
    try:
        balance(wrong[0], cap=10, multiple_of=wrong[1], ranks=True)
    except (ValueError, brim.RankError) as error:
        found.append(f"{type(error).__name__}: {error}")
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_agree_on_the_number_of_parts(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(JOB)
    torchrun(program, tmp_path)
    first, other = results_of(tmp_path)
    assert first[:3] == [8, 5, 2]
    assert other[:3] == [8, 5, 5]
    assert (first[3], other[3]) == ("RankError", "ValueError")
    assert first[4] == "ValueError: item 1 exceeds the cap by itself: its size is 11, cap is 10"
    assert other[4] == f"RankError: rank 0 failed in balance: {first[4]}"
    assert first[5] == other[5]
    assert "rank 0 has multiple_of=1, and rank 1 has multiple_of=2" in first[5]


# ---- samplers ----------------------------------------------------------------------------------

LENGTHS = torch.randn(4000, generator=torch.Generator().manual_seed(0))
LENGTHS = LENGTHS.mul_(1.2).exp_().mul_(600).clamp_(10, 16384).long()
BUDGET = 16384


def sampler(rank: int = 0, world_size: int = 4, **options: Any) -> PackedBatchSampler:
    options = {"cost": "sum", "shuffle": True, "window": 2000, "work": "flops", **options}
    return PackedBatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size, **options)


def test_batches_of_a_step_have_equal_work_under_the_budget() -> None:
    shares = [list(sampler(rank)) for rank in range(4)]
    assert len({len(share) for share in shares}) == 1
    batches = list(itertools.chain(*shares))
    assert all(int(LENGTHS[batch].sum()) <= BUDGET for batch in batches)
    assert sorted(itertools.chain(*batches)) == list(range(len(LENGTHS)))

    def imbalance(shares: list[list[list[int]]]) -> float:
        work = flops(LENGTHS)
        steps = [[float(work[batch].sum()) for batch in step] for step in zip(*shares, strict=True)]
        return sum(max(step) / sum(step) * 4 - 1 for step in steps) / len(steps)

    before = [list(sampler(rank, work=None)) for rank in range(4)]
    assert imbalance(shares) == pytest.approx(sampler().report().imbalance)
    assert imbalance(shares) < imbalance(before) / 5
    assert len(shares[0]) == len(before[0])


def test_work_is_a_formula_or_numbers() -> None:
    expected = list(sampler())
    assert list(sampler(work=flops)) == expected
    assert list(sampler(work=flops(LENGTHS).tolist())) == expected
    assert list(sampler(work=lambda lengths: flops(lengths, 12, 1))) != expected


def test_a_run_with_work_resumes() -> None:
    for done in (0, 1, 17, 60):
        first = sampler(1)
        batches = iter(first)
        for _ in range(done):
            next(batches)
        state = json.loads(json.dumps(first.state_dict()))
        again = sampler(1)
        again.load_state_dict(state)
        assert list(again) == list(batches)
    with pytest.raises(ValueError, match="work"):
        sampler(1, work=None).load_state_dict(state)
    with pytest.raises(ValueError, match="work"):
        sampler(1, work=lambda lengths: lengths).load_state_dict(state)


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        ("tokens", ValueError, 'work must be "flops"'),
        ([1.0], ValueError, "work must be as many as sizes, 4000, got 1"),
        (lambda lengths: -lengths, ValueError, "work must be finite and not negative, got"),
        (3, TypeError, "work must be"),
    ],
)
def test_wrong_work(work: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        sampler(work=work)


def test_work_is_not_for_padded_samples() -> None:
    with pytest.raises(ValueError, match='work needs a budget with cost="sum"'):
        sampler(cost="padded")
