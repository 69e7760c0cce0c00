"""The face of bionemo's size_aware_batching: peaks of memory on CUDA."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
import torch

from brim.compat.bionemo.size_aware_batching.utils import collect_cuda_peak_alloc


class FakeCuda:
    """Stands for torch.cuda's statistics: the peak is what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        self.events: list[str] = []
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self._reset())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.events.append("empty"))
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda _: {"allocated_bytes.all.peak": self.peak}
        )

    def _reset(self) -> None:
        self.peak = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_peaks_are_of_cuda_only() -> None:
    with pytest.raises(ValueError, match="CUDA devices only"):
        collect_cuda_peak_alloc([1], lambda x: x, torch.device("cpu"))


def test_features_and_peaks_stay_in_step_when_some_run_out(
    cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(n: int) -> str:
        cuda.peak = 100 * n
        if n in (1, 4):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return f"feature {n}"

    def cleanup() -> None:
        cuda.events.append("cleanup")

    device = torch.device("cuda:0")
    features, peaks = collect_cuda_peak_alloc(range(6), work, device, cleanup)
    assert features == [f"feature {n}" for n in (0, 2, 3, 5)]
    assert peaks == [100 * n for n in (0, 2, 3, 5)]
    assert cuda.events == ["cleanup", "empty"] * 6
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "Element 1" in errors[0]
    assert "Element 4" in errors[1]
    assert all("skipped" in line for line in errors)


def test_other_errors_pass_after_the_cleanup(cuda: FakeCuda) -> None:
    def work(n: int) -> int:
        raise KeyError(n)

    with pytest.raises(KeyError):
        collect_cuda_peak_alloc(
            [7], work, torch.device("cuda"), lambda: cuda.events.append("cleanup")
        )
    assert cuda.events == ["cleanup", "empty"]


@pytest.mark.usefixtures("cuda")
def test_failed_attempt_and_element_are_gone_before_the_cleanup() -> None:
    class Held:
        pass

    alive: list[weakref.ref[Held]] = []

    def elements() -> Iterable[Held]:
        for _ in range(2):
            element = Held()
            alive.append(weakref.ref(element))
            yield element
            del element

    def work(element: Held) -> None:
        inside = Held()
        alive.append(weakref.ref(inside))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def cleanup() -> None:
        assert alive[-1]() is None, "a tensor of the failed attempt is still held"

    gc.disable()
    try:
        assert collect_cuda_peak_alloc(elements(), work, torch.device("cuda"), cleanup) == ([], [])
    finally:
        gc.enable()
    assert all(one() is None for one in alive)


@pytest.mark.cuda
def test_peaks_on_a_gpu_are_what_was_allocated() -> None:
    mib = 2**20
    device = torch.device("cuda:0")
    total = torch.cuda.get_device_properties(device).total_memory

    def work(size: int) -> int:
        torch.empty(size, dtype=torch.uint8, device=device)
        return size

    sizes = [20 * mib, 2 * total, 60 * mib]
    before = torch.cuda.memory_allocated(device)
    features, peaks = collect_cuda_peak_alloc(sizes, work, device)
    assert features == [20 * mib, 60 * mib]
    assert [peak - before for peak in peaks] == features
