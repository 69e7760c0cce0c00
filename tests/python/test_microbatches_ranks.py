"""Microbatches on several ranks: real processes, with gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .torchrun import once, results_of, torchrun

JOB = Path(__file__).parent / "microbatches_job.py"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks returned, by case."""

    def run(folder: Path) -> list[Any]:
        torchrun(JOB, folder)
        return results_of(folder)

    return once(tmp_path_factory, "microbatches_ranks", run)


def close(found: Any, expected: Any) -> bool:
    if found is None or expected is None:
        return found is expected
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(close(found[k], expected[k]) for k in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(abs(found - expected) <= 1e-12 * max(1, abs(expected)))


SUMS = ["mean", "sum_twice", "counts", "labels", "settled_each_with_its_own_size"]


@pytest.mark.parametrize("case", SUMS)
def test_gradients_of_all_ranks_together(job: Any, case: str) -> None:
    found, expected = job[0][case]
    assert None in expected["gradients"]  # and stays None where no rank has one
    assert found == job[1][case][0]  # to the bit
    for each in found:
        assert close(each, expected)


@pytest.mark.cuda
def test_gradients_on_a_gpu(tmp_path: Path) -> None:
    """Both ranks have the same: gloo sums its tensors, as NCCL would not."""
    gpu = {"CUDA_VISIBLE_DEVICES": "0", "BRIM_TEST_DEVICE": "cuda"}
    torchrun(JOB, tmp_path, *SUMS, "ctrl_c", **gpu)
    here, there = results_of(tmp_path)
    for case in SUMS:
        found, expected = here[case]
        assert found == there[case][0]
        for each in found:
            assert close(each, expected)
    assert [each[0] for each in here["ctrl_c"][0]] == ["KeyboardInterrupt"] * 2


def test_ctrl_c_on_one_rank_leaves_none_waiting(job: Any) -> None:
    (found, expected), (there, _) = job[0]["ctrl_c"], job[1]["ctrl_c"]
    for (ended, left, after), (ended_there, left_there, after_there) in zip(
        found, there, strict=True
    ):
        assert ended == "KeyboardInterrupt"
        assert set(left) == {None}  # as before the step
        assert ended_there in ("fitted", "RankError")
        assert left_there == (after_there["gradients"] if ended_there == "fitted" else left)
        assert after == after_there
        assert close(after, expected)


def test_a_loss_of_the_items_of_all_ranks(job: Any) -> None:
    found, expected = job[0]["joint"]
    assert found == job[1]["joint"][0]  # to the bit
    for each in found:
        assert close(each, expected)


def test_a_loss_of_all_items_is_exact_after_a_failure_on_one_rank(job: Any) -> None:
    for rank in job:
        assert rank["joint_failures"]["wrong"] == []
    sizes = job[0]["joint_failures"]["sizes"]
    assert sizes == job[1]["joint_failures"]["sizes"]
    assert len(sizes) > 20
    assert set(sizes) <= {1, 2, 3, 4}


def test_errors_of_a_loss_of_all_items_reach_all_ranks(job: Any) -> None:
    for rank, results in enumerate(job):
        errors, found, expected = results["joint_errors"]
        assert errors[1::2] == [[]] * 6
        counting, assigning, failed, wider, drawing, rows = errors[::2]
        assert "encode changes the buffer" in counting
        assert "loss changes the buffer" in assigning
        assert failed.startswith("KeyError" if rank else "RankError: rank 1 failed with")
        assert "outputs of encode differ between the ranks" in wider
        assert "must not draw random numbers" in drawing
        assert "loss must return one element" in rows
        assert close(found, expected)


def test_exact_after_a_failure_at_each_allocation_of_one_rank(job: Any) -> None:
    for rank in job:
        assert rank["failures"]["wrong"] == []
    sizes = job[0]["failures"]["sizes"]
    assert sizes == job[1]["failures"]["sizes"]
    assert len(sizes) > 40
    assert set(sizes) <= {1, 2, 3, 4}
    assert set(sizes) & {1, 2, 3}


def test_ranks_with_different_memory(job: Any) -> None:
    (same, own), (same_there, own_there) = (rank["budgets"] for rank in job)
    assert same["sizes"] == same_there["sizes"]
    assert own["sizes"][-1] > own_there["sizes"][-1]
    expected = same["gradient"]
    assert same_there["gradient"] == expected
    assert own["gradient"] == own_there["gradient"]
    assert own["gradient"] == pytest.approx(expected)


def test_a_model_that_reduces_its_gradients_itself(job: Any) -> None:
    for rank in job:
        found, expected = rank["fully_sharded"]
        for each in found:
            assert close(each, expected)
        assert close(*rank["fully_sharded_labels"])


def test_a_sharded_model_never_waits_for_ever(job: Any) -> None:
    for rank in job:
        given, reached, between, early = rank["sharded_and_waiting"]
        for error in (given, reached):
            assert error.startswith("ValueError: ")
            assert "pass ranks=True" in error
        assert 'collectives is "between"' in between
        assert 'pass collectives="inside"' in early


def test_a_static_graph_is_refused_and_works_as_before(job: Any) -> None:
    (here, left), (there, left_there) = (rank["static_graph"] for rank in job)
    assert "static_graph=True, which torch cannot run in parts" in here
    assert "static_graph=True, which torch cannot run in parts" in there
    assert left == left_there


def test_a_loss_without_parts_on_one_rank_is_an_error_on_all(job: Any) -> None:
    (here, left), (there, left_there) = (rank["no_parts"] for rank in job)
    assert here.startswith("RankError: rank 1 failed with part size = 3: ValueError: the loss")
    assert "does not follow from the losses of parts" in there
    assert set(map(str, left + left_there)) == {"None"}


def test_ranks_of_such_a_model_may_have_batches_of_any_length(job: Any) -> None:
    for rank in job:
        assert len(rank["fully_sharded_of_any_length"]) == 8
        for found, expected in rank["fully_sharded_of_any_length"]:
            assert close(found, expected)


def test_an_error_on_one_rank_leaves_nothing_on_any(job: Any) -> None:
    (here, left_here), (there, left_there) = (rank["error_on_one_rank"] for rank in job)
    assert (here, there) == ("RankError", "KeyError")
    assert left_here == left_there
    assert [g for g in left_here if g] == [[1.0] * 8]


def test_an_error_ahead_of_the_parts_reaches_all_ranks(job: Any) -> None:
    (here, found, expected), (there, found_there, _) = (rank["refused"] for rank in job)
    assert [error[:10] for error in there] == ["ValueError"] * 2
    assert here == [f"RankError: rank 1 failed with {error}" for error in there]
    assert found == found_there
    assert close(found, expected)


def test_what_the_loss_uses_must_be_in_the_model(job: Any) -> None:
    (errors, found, expected), (errors_there, found_there, _) = (
        rank["model_of_the_step"] for rank in job
    )
    for around, around_a_layer, other in (errors, errors_there):
        assert "pass the DistributedDataParallel as model=" in around
        assert "around model= or a layer of it (Linear)" in around_a_layer
        assert "a parameter of shape [] that model= does not have" in other
    assert found == found_there  # with a layer that was replaced after the first call
    assert close(found, expected)


def test_a_short_batch_on_one_rank_does_not_shorten_the_parts_of_others(job: Any) -> None:
    assert job[0]["short_batches"] == [[100, 1]] * 3
    assert job[1]["short_batches"] == [[7, 1], [3, 1], [100, 1]]


def test_exact_after_a_failure_in_a_call_without_an_exchange(job: Any) -> None:
    here, there = (rank["settled"] for rank in job)
    assert here["wrong"] == there["wrong"] == []
    assert here["sizes"] == there["sizes"]
    assert len(here["sizes"]) > 10
    assert set(here["sizes"]) <= {1, 2, 3, 4}
    assert set(here["sizes"]) & {1, 2, 3}
    assert [error.split(":")[0] for error in there["errors"]] == ["KeyError", "ValueError"]
    assert here["errors"][0].startswith("RankError: rank 1 failed with part size = 4: KeyError")
    assert here["errors"][1].startswith("RankError: rank 1 failed with ValueError: the length")
    assert here["after"]
    assert there["after"]


def test_a_model_is_needed() -> None:
    with pytest.raises(ValueError, match="ranks needs model="):
        brim.Microbatches(lambda part: part.mean(), ranks=True)


def test_alone_it_is_as_without_ranks() -> None:
    model = nn.Linear(3, 1)
    x = torch.rand(5, 3)
    found = []
    for ranks in (True, None):
        model.zero_grad()
        step = brim.Microbatches(lambda part: model(part).mean(), model=model, ranks=ranks, size=2)
        step(x)
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    assert found[0].equal(found[1])
