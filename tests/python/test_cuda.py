"""What is particular to CUDA: fractions, blocks, the cache, real failures. Needs a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import brim
from brim import OomKind

pytestmark = pytest.mark.cuda

MIB = 2**20
BLOCK = 20 * MIB  # larger than torch's small pools: such tensors get segments of their own


@pytest.fixture(autouse=True)
def _empty_gpu() -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction(0)
    yield
    assert torch.cuda.get_per_process_memory_fraction(0) == before, "a budget was left behind"
    torch.cuda.empty_cache()


def tensor_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda:0")


def total() -> int:
    return torch.cuda.mem_get_info(0)[1]


def test_the_default_device_is_the_gpu() -> None:
    assert brim.default_device() == torch.device("cuda:0")


def test_stats_are_torchs() -> None:
    kept = tensor_of(BLOCK)
    cached = tensor_of(BLOCK)
    del cached
    stats = brim.memory_stats("cuda")
    assert stats.allocated == torch.cuda.memory_allocated(0) >= BLOCK
    assert stats.reserved == torch.cuda.memory_reserved(0) >= 2 * BLOCK
    assert stats.limit == total()
    assert stats.allocated <= stats.peak
    # Other processes may come and go on the device between the two readings.
    expected = torch.cuda.mem_get_info(0)[0] + stats.reserved - stats.allocated
    assert abs(stats.free - expected) < 512 * MIB
    assert kept.numel() == BLOCK


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0), None])
def test_devices_in_every_form(device: str | int | torch.device | None) -> None:
    assert brim.memory_stats(device).limit == total()


def test_devices_that_do_not_exist() -> None:
    for device in ("cuda:99", 99):
        with pytest.raises(ValueError, match="cuda:99"):
            brim.memory_stats(device)
    with pytest.raises(ValueError, match="device"):
        brim.memory_stats(1000)


class TestPeakMeter:
    def test_counts_blocks(self) -> None:
        with brim.PeakMeter("cuda") as meter:
            a = tensor_of(BLOCK)
            b = tensor_of(BLOCK)
            del a
            c = tensor_of(BLOCK // 2)
        assert meter.peak == 2 * BLOCK
        assert meter.left == BLOCK + BLOCK // 2
        del b, c

    def test_nests(self) -> None:
        with brim.PeakMeter("cuda") as outer:
            tensor_of(4 * BLOCK)
            with brim.PeakMeter("cuda") as inner:
                tensor_of(2 * BLOCK)
            tensor_of(BLOCK)
        assert (outer.peak, inner.peak) == (4 * BLOCK, 2 * BLOCK)

    def test_the_peak_of_the_statistics_survives_meters(self) -> None:
        brim.reset_peak("cuda")
        start = brim.memory_stats("cuda").allocated
        tensor_of(4 * BLOCK)
        with brim.PeakMeter("cuda"):
            tensor_of(BLOCK)
        assert brim.memory_stats("cuda").peak == start + 4 * BLOCK

    def test_several_devices_at_once(self) -> None:
        with brim.PeakMeter(["cpu", "cuda"]) as meter:
            tensor_of(BLOCK)
            torch.empty(1000, dtype=torch.uint8)
        assert meter.peaks == {torch.device("cpu"): 1000, torch.device("cuda:0"): BLOCK}
        with pytest.raises(ValueError, match="2 devices"):
            _ = meter.peak

    def test_one_device_cannot_be_named_twice(self) -> None:
        with pytest.raises(ValueError, match="twice"), brim.PeakMeter(["cuda", "cuda:0"]):
            pass


class TestBudget:
    @pytest.mark.parametrize("size", [10 * BLOCK, 10 * BLOCK + 1, 7_777_777_777, 12_345_678_901])
    def test_the_limit_is_exact_to_the_byte(self, size: int) -> None:
        with brim.budget(size, device="cuda") as budget:
            assert budget.limit == size
            assert brim.memory_stats("cuda").limit == size
            fraction = torch.cuda.get_per_process_memory_fraction(0)
            assert int(fraction * total()) == size

    def test_over_it_is_out_of_memory_and_up_to_it_is_not(self) -> None:
        held = torch.cuda.memory_allocated(0)
        with brim.budget(held + 4 * BLOCK, device="cuda"):
            kept = tensor_of(4 * BLOCK)
            with pytest.raises(torch.OutOfMemoryError, match="allowed by the budget") as caught:
                tensor_of(1)
            assert brim.classify_error(caught.value).requested == 1
            assert brim.classify_error(caught.value).in_use == held + 4 * BLOCK
            del kept
            tensor_of(4 * BLOCK)
        tensor_of(8 * BLOCK)

    def test_pieces_of_the_cache_are_no_reason_to_fail(self) -> None:
        held = torch.cuda.memory_allocated(0)
        fraction = torch.cuda.get_per_process_memory_fraction(0)
        with brim.budget(held + 8 * BLOCK, device="cuda"):
            assert torch.cuda.get_per_process_memory_fraction(0) < fraction
            whole = tensor_of(8 * BLOCK)
            del whole
            pieces = [tensor_of(2 * BLOCK) for _ in range(4)]
            del pieces[2], pieces[0]  # four blocks are free, in two pieces
            pieces.append(tensor_of(3 * BLOCK))
            assert torch.cuda.get_per_process_memory_fraction(0) < fraction
            stats = brim.memory_stats("cuda")
            assert stats.allocated == held + 7 * BLOCK
            assert stats.free == BLOCK
            assert stats.reservable > stats.allocated + stats.free
            with pytest.raises(torch.OutOfMemoryError):
                tensor_of(2 * BLOCK)

    def test_what_is_cached_stays_below_it(self) -> None:
        held = torch.cuda.memory_reserved(0)
        with brim.budget(held + 8 * BLOCK, device="cuda"):
            for blocks in range(1, 8):  # each a segment of its own
                tensor_of(blocks * BLOCK)
            assert torch.cuda.memory_reserved(0) <= held + 8 * BLOCK

    def test_threads_together_never_go_over_it(self) -> None:
        held = torch.cuda.memory_allocated(0)
        served, refused = [], []

        def work() -> None:
            for _ in range(200):
                try:
                    tensor = tensor_of(BLOCK)
                except torch.OutOfMemoryError as error:
                    refused.append(error)
                else:
                    served.append(tensor.numel())
                    del tensor

        with brim.PeakMeter("cuda") as meter, brim.budget(held + 3 * BLOCK, device="cuda"):
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not refused, "three at a time fit"
        assert len(served) == 600
        assert meter.peak <= 3 * BLOCK

    def test_free_is_what_the_budget_leaves(self) -> None:
        held = brim.memory_stats("cuda").allocated
        with brim.budget(held + 4 * BLOCK, device="cuda"):
            kept = tensor_of(BLOCK)
            assert brim.memory_stats("cuda").free == 3 * BLOCK
        assert kept.numel() == BLOCK

    def test_empty_tensors_are_no_bytes(self) -> None:
        kept = tensor_of(BLOCK)
        with brim.budget(1, device="cuda"):
            assert torch.empty(0, device="cuda").numel() == 0
        assert kept.numel() == BLOCK

    def test_nests_and_puts_the_users_fraction_back(self) -> None:
        torch.cuda.set_per_process_memory_fraction(0.5, 0)
        try:
            half = brim.memory_stats("cuda").limit
            with brim.budget("1GiB", device="cuda"):
                with brim.budget("256MiB", device="cuda"), brim.budget("512MiB", device="cuda"):
                    assert brim.memory_stats("cuda").limit == 256 * MIB
                assert brim.memory_stats("cuda").limit == 1024 * MIB
            assert torch.cuda.get_per_process_memory_fraction(0) == 0.5
            with brim.budget(total(), device="cuda"):
                assert brim.memory_stats("cuda").limit == half, "the user's own limit is tighter"
            with brim.budget("50%", device="cuda") as quarter:
                assert quarter.limit == half // 2
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 0)

    def test_is_taken_away_when_an_exception_passes(self) -> None:
        with pytest.raises(torch.OutOfMemoryError), brim.budget("64MiB", device="cuda"):
            tensor_of(1024 * MIB)
        assert brim.memory_stats("cuda").limit == total()
        tensor_of(1024 * MIB)

    def test_below_what_is_in_use_the_next_allocation_fails(self) -> None:
        kept = tensor_of(4 * BLOCK)
        with brim.budget(BLOCK, device="cuda"):
            with pytest.raises(torch.OutOfMemoryError):
                tensor_of(BLOCK)
            assert brim.memory_stats("cuda").free == 0
        assert kept.numel() == 4 * BLOCK

    def test_what_is_cached_does_not_slip_under_the_limit(self) -> None:
        tensor_of(8 * BLOCK)
        with brim.budget(4 * BLOCK, device="cuda"), pytest.raises(torch.OutOfMemoryError):
            tensor_of(8 * BLOCK)


class TestFailures:
    def test_a_real_one_is_classified(self) -> None:
        with (
            brim.budget("1GiB", device="cuda"),
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            tensor_of(2048 * MIB)
        cause = brim.classify_error(caught.value)
        assert cause.kind == OomKind.device_memory
        assert cause.device == torch.device("cuda:0")
        assert cause.requested == 2048 * MIB
        assert brim.memory_stats("cuda").ooms > 0

    def test_in_backward(self) -> None:
        x = torch.ones(BLOCK, device="cuda", requires_grad=True)  # 4 blocks
        loss = (x * x).sum()
        held = torch.cuda.memory_allocated(0)
        with brim.budget(held + BLOCK, device="cuda"), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        assert brim.memory_stats("cuda").limit == total()

    def test_injection(self) -> None:
        with brim.testing.inject_oom(at=2, device="cuda:0") as injector:
            tensor_of(BLOCK)
            with pytest.raises(torch.OutOfMemoryError, match="injected by brim"):
                tensor_of(BLOCK)
            tensor_of(BLOCK)
        assert injector.allocations == 3


class TestCache:
    def test_release_gives_back_what_no_tensor_uses(self) -> None:
        kept = tensor_of(BLOCK)
        tensor_of(8 * BLOCK)
        reserved = torch.cuda.memory_reserved(0)
        released = brim.release_cached("cuda")
        assert released >= 8 * BLOCK
        assert torch.cuda.memory_reserved(0) == reserved - released
        assert brim.release_cached("cuda") == 0
        assert kept.numel() == BLOCK

    def test_fragmentation_tells_cached_from_stuck(self) -> None:
        before = brim.fragmentation("cuda")
        whole = tensor_of(8 * BLOCK)
        del whole  # one cached segment, of which the next tensor takes a part
        assert brim.fragmentation("cuda").cached == before.cached + 8 * BLOCK
        assert brim.fragmentation("cuda").stuck == before.stuck
        part = tensor_of(BLOCK)
        now = brim.fragmentation("cuda")
        assert now.cached == before.cached + 7 * BLOCK
        assert now.stuck == before.stuck + 7 * BLOCK
        assert 0 < now.share < 1
        brim.release_cached("cuda")
        assert brim.fragmentation("cuda").stuck == before.stuck + 7 * BLOCK
        assert part.numel() == BLOCK

    def test_fragmentation_explains_a_failure(self) -> None:
        held = torch.cuda.memory_reserved(0)
        torch.cuda.set_per_process_memory_fraction((held + 8 * BLOCK + MIB) / total(), 0)
        try:
            whole = tensor_of(8 * BLOCK)
            del whole
            pieces = [tensor_of(2 * BLOCK) for _ in range(4)]
            del pieces[2], pieces[0]  # four blocks are free, in two pieces
            with pytest.raises(torch.OutOfMemoryError) as caught:
                tensor_of(3 * BLOCK)
            requested = brim.classify_error(caught.value).requested
            assert requested == 3 * BLOCK
            assert brim.fragmentation("cuda").explains_failure_of(requested)
            assert not brim.fragmentation("cuda").explains_failure_of(5 * BLOCK)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 0)
