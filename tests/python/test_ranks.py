"""Ranks agree: real processes, started by torchrun, on gloo and with budgets of CPU memory."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import brim

from .patience import FOR_EVER
from .torchrun import environment, once, results_of, torchrun

if not dist.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

JOB = Path(__file__).with_name("rank_job.py")
QUICK = [
    *("half_budget", "per_rank", "every_kind", "settled", "slow_rank", "a_group", "fully_sharded"),
    *("error_on_one_rank", "does_not_fit", "different_sizes", "different_functions"),
    *("failure_in_each_place", "random_schedules", "random_microbatches"),
    *("fit_together", "fit_fails", "samplers_are_compared"),
    *("even_steps", "even_repeats", "even_resumes", "even_fails"),
]

Results = list[dict[str, Any]]


def run_cases(folder: Path, ranks: int, cases: list[str], *options: str, **env: str) -> Results:
    """What the cases returned on each rank."""
    torchrun(JOB, folder, *cases, ranks=ranks, options=options, **env)
    return results_of(folder, ranks)


def without_torchrun(folder: Path, ranks: int, case: str) -> list[tuple[int, Any]]:
    """Exit status and result of each rank, where torchrun would end all when one ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(folder), case],
            env=environment(ranks)
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]
    try:
        status = [process.wait(timeout=FOR_EVER) for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = []
    for rank, code in enumerate(status):
        file = folder / f"{rank}.json"
        results.append((code, json.loads(file.read_text()) if file.exists() else None))
    return results


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    ranks = request.param
    return once(tmp_path_factory, f"ranks_{ranks}", lambda folder: run_cases(folder, ranks, QUICK))


def same(results: Results, case: str) -> Any:
    """What all ranks returned, which must be the same."""
    first = results[0][case]
    assert all(result[case] == first for result in results)
    return first


def test_all_ranks_use_the_size_that_fits_on_the_one_with_half_the_budget(results: Results) -> None:
    sizes = same(results, "half_budget")
    assert all(90 <= size <= 100 for size in sizes)


def test_per_rank_sizes_are_each_ranks_own(results: Results) -> None:
    assert all(90 <= size <= 100 for size in results[-1]["per_rank"])
    first, *later = results[0]["per_rank"]
    assert 128 <= first <= 200, "no worse than halving"
    assert all(180 <= size <= 200 for size in later)


def test_every_kind_of_call_agrees_and_does_each_part_once(results: Results) -> None:
    for rank, result in enumerate(results):
        assert result["every_kind"]["out"] == [2.0]  # once by range, once by chunked
        assert result["every_kind"]["batch"] == results[0]["every_kind"]["batch"] <= 25
        for kind, steps in result["every_kind"]["steps"].items():
            ours = results[0]["every_kind"]["steps"][kind]
            # The first size is the length of the rank's own argument; the last part is shorter.
            whole = min(len(steps), len(ours)) - 1
            alike = slice(1, None) if kind == "maximize" else slice(whole)
            assert steps[alike] == ours[alike]
        assert result["every_kind"]["steps"]["maximize"][0] == 100 + rank


def test_with_settled_a_rank_is_alone_until_the_next_exchange(results: Results) -> None:
    other, failing = results[1]["settled"], results[0]["settled"]
    assert failing[:20] == other[:20] == [64] * 20
    assert max(failing[20:]) <= 40
    assert other[30] == 64
    assert other[-1] == failing[-1]


def test_an_error_on_one_rank_reaches_all_and_they_can_go_on(results: Results) -> None:
    *others, last = [result["error_on_one_rank"] for result in results]
    assert last[0][0] == "KeyError"
    assert last[1] == last[3] == 64
    assert last[2] == ["ValueError", "no key"]  # ahead of the work
    for (kind, text), after, ahead, after_that in others:
        assert ahead[0] == "RankError"
        assert ahead[1].startswith(f"rank {len(results) - 1} failed with ValueError: no key")
        assert after_that == 64
        assert kind == "RankError"
        start = f"rank {len(results) - 1} failed with batch size = 64: KeyError: 'no such sample …"
        assert text.startswith(start)
        assert after == 64


def test_where_it_does_not_fit_on_one_rank_all_end(results: Results) -> None:
    assert results[0]["does_not_fit"][0] == "OutOfMemoryError"
    for result in results[1:]:
        kind, text = result["does_not_fit"]
        assert kind == "RankError"
        assert text.startswith("rank 0 failed with batch size = 1: CPU out of memory.")


def test_different_calls_are_an_error_that_shows_them(results: Results) -> None:
    kind, text = same(results, "different_sizes")
    assert kind == "RankError"
    assert "rank 0: batch" in text
    assert "batch size from 64 down" in text
    assert "batch size from 65 down" in text
    kind, text = same(results, "different_functions")
    assert kind == "RankError"
    assert "locals>.one" in text
    assert "locals>.two" in text


def test_a_slow_rank_is_waited_for(results: Results) -> None:
    assert same(results, "slow_rank") == 64


def test_a_group_agrees_by_itself(results: Results) -> None:
    sizes = [result["a_group"] for result in results]
    assert 10 <= sizes[0] <= 20
    assert sizes == [sizes[0], sizes[0], *[0] * (len(results) - 2)]


def test_with_fsdp_sizes_grow_to_the_least_that_fits_without_a_failure(results: Results) -> None:
    sizes = same(results, "fully_sharded")
    assert sizes[0] <= 64
    # What FSDP holds between calls moves, and a failure would be final: steps down are small.
    assert all(later >= 0.95 * before for before, later in itertools.pairwise(sizes))
    assert 1000 <= sizes[-1] < 2048


@pytest.mark.parametrize("place", ["forward", "backward", "reduction", "update"])
def test_a_failure_on_one_rank_changes_nothing(results: Results, place: str) -> None:
    outcome = same(results, "failure_in_each_place")
    assert outcome[place] == outcome["none"]
    shrunk = place in ("forward", "backward")
    assert (min(outcome[place + "_sizes"]) < 12) == shrunk


def test_random_schedules_of_failures_change_nothing(results: Results) -> None:
    outcome = same(results, "random_schedules")
    failed = 0
    for parameters, sizes in outcome["results"]:
        assert parameters == outcome["expected"]
        failed += min(sizes) < 12
    assert 5 * failed > 2 * len(outcome["results"])


def test_random_failures_in_microbatches_of_random_length_change_nothing(results: Results) -> None:
    failed = 0
    for trainings in zip(*(result["random_microbatches"] for result in results), strict=True):
        for without, parameters, _ in trainings:
            assert parameters == without == trainings[0][0]
        for of_ranks in zip(*(sizes for *_, sizes in trainings), strict=True):
            parts = {size for size, length in of_ranks if size < length}
            assert len(parts) <= 1  # where a batch is run in parts, they have the same size
            for size, length in of_ranks:
                assert size == min([length, *parts])
            failed += bool(parts)
    assert 2 * failed > len(results[0]["random_microbatches"])


def samples_of(batches: list[list[list[int]]]) -> list[int]:
    """Of all ranks."""
    return sorted(index for of_rank in batches for batch in of_rank for index in batch)


@pytest.mark.parametrize("kind", ["packed", "ordered", "sum"])
def test_a_fit_on_ranks_that_hold_different_bytes_is_one_for_all(
    results: Results, kind: str
) -> None:
    outcomes = [result["fit_together"][kind] for result in results]
    assert all(outcome[:2] == outcomes[0][:2] for outcome in outcomes)
    batches = [batches for *_, batches in outcomes]
    assert len({len(each) for each in batches}) == 1
    assert samples_of(batches) == list(range(400))


def test_a_fit_that_fails_on_one_rank_fails_on_all(results: Results) -> None:
    last = len(results) - 1
    for rank, result in enumerate(results):
        (wrong, other, held), samples = result["fit_fails"]
        assert wrong[0] == ("KeyError" if rank == last else "RankError")
        assert "no such sample" in wrong[1]
        assert other[0] == "RankError"
        assert "the same samples and options, but rank 0 has" in other[1]
        assert held[0] == ("ValueError" if rank == last else "RankError")
        assert "held" in held[1]
        assert samples == 400


def test_a_look_on_one_rank_is_no_epoch_and_other_samples_are_an_error(results: Results) -> None:
    for epoch in range(2):
        batches = [result["samplers_are_compared"][0][epoch] for result in results]
        assert samples_of(batches) == list(range(200))
    kind, text = results[0]["samplers_are_compared"][1]
    assert kind == "RankError"
    assert "sizes" in text
    assert all(result["samplers_are_compared"][1] == [kind, text] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_killed_in_a_call_without_exchange_ends_all_others(
    tmp_path: Path, ranks: int
) -> None:
    results = without_torchrun(tmp_path, ranks, "killed_rank_settled")
    assert results.pop(1)[0] == -signal.SIGKILL
    texts = []
    for code, result in results:
        assert code == 0
        kind, text = result["killed_rank_settled"]
        assert kind == "RankError"
        assert result["killed_rank_settled_seconds"] < 30
        texts.append(text)
    # A rank that waits for others of the program's group only is free when these have ended.
    assert any("nothing was heard of rank 1" in text for text in texts)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_on_all_others(tmp_path: Path, ranks: int) -> None:
    results = without_torchrun(tmp_path, ranks, "killed_rank")
    assert results.pop(1)[0] == -signal.SIGKILL
    for code, result in results:
        assert code == 0
        kind, text = result["killed_rank"]
        assert kind == "RankError"
        assert "did not answer in time; nothing was heard of rank 1 since (" in text
        assert result["killed_rank_seconds"] < 30


@pytest.mark.slow
def test_a_failure_inside_of_a_collective_step_is_named_on_all_ranks(tmp_path: Path) -> None:
    for rank, (code, result) in enumerate(without_torchrun(tmp_path, 2, "failure_inside")):
        assert code == 0
        kind, text = result["failure_inside"]
        assert kind == ("OutOfMemoryError" if rank == 1 else "RankError")
        assert text.startswith("" if rank == 1 else "rank 1 failed with batch size = ")
        assert "CPU out of memory" in text
        assert result["failure_inside_seconds"] < 30


@pytest.mark.slow
def test_after_a_restart_by_torchrun_sizes_are_known(tmp_path: Path) -> None:
    sizes = str(tmp_path / "sizes")
    results = run_cases(tmp_path, 2, ["restarted"], "--max-restarts=1", SIZES=sizes)
    sizes_used, attempts = zip(*(result["restarted"] for result in results), strict=True)
    assert sizes_used[0] == sizes_used[1]
    assert min(sizes_used[0]) >= 90
    assert all(all(fitted) for fitted in attempts)


def test_without_a_process_group_ranks_have_no_effect() -> None:
    @brim.batch(64, ranks=True)
    def step(size: int) -> int:
        return size

    assert step() == 64
    assert brim.run_batch(64, lambda size: size, ranks=True, per_rank=True) == 64


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ranks": 1}, TypeError, "ranks must be a bool or a process group, got 1"),
        ({"ranks": True, "sync": "never"}, ValueError, "sync must be 'always' or 'settled'"),
        ({"ranks": True, "per_rank": 1}, TypeError, "per_rank must be True or False"),
        ({"ranks": True, "collectives": "no"}, ValueError, "collectives must be 'between' or"),
        ({"per_rank": True}, ValueError, "per_rank needs ranks=True"),
        (
            {"ranks": True, "per_rank": True, "collectives": "inside"},
            ValueError,
            "collectives='inside' and per_rank=True exclude each other",
        ),
        (
            {"ranks": True, "sync": "settled", "collectives": "inside"},
            ValueError,
            "collectives='inside' and sync='settled' exclude each other",
        ),
    ],
)
def test_wrong_options_are_named(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        brim.batch(64, **options)(lambda size: size)


def test_a_rank_error_is_not_taken_for_a_lack_of_memory() -> None:
    calls = []

    def step(size: int) -> None:
        calls.append(size)
        raise brim.RankError("rank 1 failed with batch size = 4: CUDA out of memory.")

    with pytest.raises(brim.RankError):
        brim.run_batch(64, step)
    assert calls == [64]


@pytest.mark.cuda
def test_nccl_with_one_rank(tmp_path: Path) -> None:
    [result] = run_cases(tmp_path, 1, ["nccl"])
    between, inside, (kind, text) = result["nccl"]
    assert 10 <= between <= 20
    assert inside[0] == 10
    assert inside == sorted(inside)
    assert kind == "OutOfMemoryError"
    assert "collectives inside" in text


# ---------------------------------------------------------------- own shards, equal steps


def test_ranks_that_read_their_own_shards_have_equal_steps_and_say_what_is_left(
    results: Results,
) -> None:
    world = len(results)
    for trial, of_ranks in enumerate(
        zip(*(result["even_steps"] for result in results), strict=False)
    ):
        counts = of_ranks[0][0]
        totals = [-(-sum(counts[rank::world]) // 10) for rank in range(world)]
        for rank, (_, batches, warned, left) in enumerate(of_ranks):
            assert len(batches) == min(totals)
            own = {
                n
                for shard in range(rank, len(counts), world)
                for n in range(1000 * shard, 1000 * shard + counts[shard])
            }
            given = list(itertools.chain(*batches))
            assert len(set(given)) == len(given)
            assert own.issuperset(given)
            told = [text for text in warned if "another rank has no more" in text]
            assert (left > 0) == (totals[rank] > min(totals)) == bool(told)
            empty = any("no batch at all" in text for text in warned)
            assert empty == (min(totals) == 0 < totals[rank])
        assert trial > 0 or min(totals) == 0


def test_shorter_ranks_repeat_their_shards(results: Results) -> None:
    for rank, result in enumerate(results):
        counts, epochs, resumed = result["even_repeats"]
        longest = -(-max(counts) // 10)
        for epoch in epochs:
            assert len(epoch) == longest
            own = range(1000 * rank, 1000 * rank + counts[rank])
            times = [list(itertools.chain(*epoch)).count(n) for n in own]
            assert min(times) >= 1
            assert sum(times) == sum(map(len, epoch))
        assert resumed == [epochs] * 3


def test_equal_steps_resume_exactly(results: Results) -> None:
    assert same(results, "even_resumes") > 6


def test_a_rank_that_cannot_read_ends_the_epoch_on_all(results: Results) -> None:
    for rank, result in enumerate(results):
        (broken, other), warned = result["even_fails"]
        assert broken[0] == ("KeyError" if rank == 0 else "RankError")
        assert "a broken file" in broken[1]
        assert other[0] == "RankError"
        assert "even must be the same on all ranks" in other[1]
        assert any("all ranks begin with the same batch" in text for text in warned)
