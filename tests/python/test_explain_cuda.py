"""`brim.explain` of real failures on a GPU: causes, holders, and remedies beside real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

import brim

pytestmark = pytest.mark.cuda

MIB = 2**20
ROOM = 2048 * MIB  # beyond what is held before


@pytest.fixture
def _small_gpu() -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction(0)
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + ROOM) / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(before, 0)
    torch.cuda.empty_cache()


def network(width: int = 1024, depth: int = 6) -> torch.nn.Module:
    layers = [
        layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())
    ]
    return torch.nn.Sequential(*layers).cuda()


def blocks(size: int, count: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]


@pytest.mark.usefixtures("_small_gpu")
def test_real_need_names_weights_and_lines() -> None:
    model, batch = network(), torch.randn(131_072, 1024, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as raised, brim.explain() as told:
        model(batch).square().mean().backward()
    found = told.explanation
    assert raised.value.explanation is found
    assert found.cause == "real need", found
    assert found.device == torch.device("cuda", 0)
    assert found.requested >= 512 * MIB
    held = {(one.kind.name, one.where): one.bytes for one in found.held}
    assert held["parameter", "Sequential"] >= 6 * 4 * MIB
    lines = [where for kind, where in held if kind == "activation"]
    assert any(where.startswith("test_explain_cuda.py:") for where in lines), found
    assert sum(held.values()) <= found.in_use


@pytest.mark.usefixtures("_small_gpu")
@pytest.mark.parametrize("decorated", [False, True])
def test_what_is_kept_grows(decorated: bool) -> None:
    model, batch, kept = network(depth=2), torch.randn(16_384, 1024, device="cuda"), []

    @torch.no_grad()
    def predict(batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    told = brim.explain()
    call, block = (told(predict), nullcontext()) if decorated else (predict, told)
    with pytest.raises(torch.OutOfMemoryError), block:
        kept.extend(call(batch) for _ in range(1000))
    assert told.explanation.cause == "memory that grows", told.explanation
    assert told.explanation.grown >= ROOM // 2
    growing = [one.where for one in told.explanation.held if one.grows]
    assert any("test_explain_cuda.py" in where for where in growing), told.explanation


@pytest.mark.usefixtures("_small_gpu")
def test_room_in_pieces_is_fragmentation() -> None:
    held = blocks(9 * MIB, 180)  # two in each of torch's segments of 20 MiB
    del held[::2]
    with pytest.raises(torch.OutOfMemoryError), brim.explain() as told:
        blocks(600 * MIB, 1)
    assert told.explanation.cause == "fragmentation", told.explanation
    assert "in pieces between tensors" in told.explanation.reason
    assert sum(one.nbytes for one in held) <= told.explanation.in_use


@pytest.mark.usefixtures("_small_gpu")
def test_a_block_in_the_place_of_one_that_was_freed_is_not_taken_for_it() -> None:
    def work() -> None:
        first = blocks(400 * MIB, 1)
        del first
        second = blocks(400 * MIB, 1)
        blocks(ROOM, len(second))

    with pytest.raises(torch.OutOfMemoryError), brim.explain() as told:
        work()
    (made,) = [one for one in told.explanation.held if one.bytes >= 400 * MIB]
    assert made.bytes < 800 * MIB


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_remedies_need_what_they_say(share: float) -> None:
    model, batch = network(), torch.randn(32_768, 1024, device="cuda")

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    def peak_of(work: Callable[[], None]) -> int:
        """What all tensors hold at most, where the libraries have their workspaces."""
        for _ in range(2):
            model.zero_grad()
            with brim.PeakMeter("cuda") as meter:
                work()
        model.zero_grad()
        return meter.start + meter.peak

    full = peak_of(lambda: step(batch))
    held = brim.memory_stats("cuda").allocated
    limit = held + int((full - held) * share)
    explained = brim.explain()
    with pytest.raises(torch.OutOfMemoryError), brim.budget(limit, device="cuda"):
        explained(step)(batch)
    told = explained.explanation
    assert told.need == pytest.approx(full, rel=0.03)
    remedies = {one.name: one for one in told.remedies}
    parts = next(one for name, one in remedies.items() if "microbatches" in name)
    smaller = next(one for name, one in remedies.items() if name.startswith("batch"))
    size, rows = int(smaller.code.partition("=")[2]), int(parts.name.rpartition(" ")[2])
    assert peak_of(lambda: step(batch[:size])) == pytest.approx(smaller.peak, rel=0.03), told
    assert peak_of(lambda: step(batch[:rows])) == pytest.approx(parts.peak, rel=0.03), told
    with brim.budget(limit, device="cuda"):  # what is said to fit does
        step(batch[:size])
    auto = remedies['recompute="auto"']
    model.zero_grad()
    if auto.fits:
        with brim.budget(limit, device="cuda"), brim.saving("auto"):
            step(batch)
