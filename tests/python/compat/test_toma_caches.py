"""The face of toma: its caches, stack traces, and what it says of free memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import brim
import brim.compat.toma as toma_module
import brim.compat.toma.stacktrace as tst
from brim.compat.toma import (
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    StacktraceMemoryBatchsizeCache,
    batchsize_cache,
    cpu_memory,
    get_cache_for_context,
    torch_cuda_memory,
)


@pytest.fixture(autouse=True)
def _same_free_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Free memory must not cross a step of the default cache between two calls of a test."""
    monkeypatch.setattr(cpu_memory, "get_available_cpu_memory", lambda: 2**33)
    yield
    get_cache_for_context.cache_clear()


def test_batchsize() -> None:
    size = batchsize_cache.Batchsize()
    size.set_initial_batchsize(6)
    size.set_initial_batchsize(60)
    assert size.get() == 6
    size.decrease_batchsize()
    size.decrease_batchsize()
    assert size == batchsize_cache.Batchsize(1)
    with pytest.raises(AssertionError):
        size.decrease_batchsize()


def test_caches() -> None:
    none, one = NoBatchsizeCache(), GlobalBatchsizeCache()
    assert none.get_batchsize(4) is not none.get_batchsize(4)
    assert one.get_batchsize(4) is one.get_batchsize(9)
    assert one.get_batchsize(9).get() == 4
    places = StacktraceMemoryBatchsizeCache(lru_cache_size=2)
    found = [places.get_batchsize(size) for size in (4, 9)]
    assert found[0] is found[1]
    assert places in batchsize_cache.BatchsizeCache.all_instances.values()
    with pytest.raises(NotImplementedError):
        batchsize_cache.BatchsizeCache().get_batchsize(1)


def test_a_cache_belongs_to_a_type_and_a_context() -> None:
    cache = get_cache_for_context(GlobalBatchsizeCache, "a")
    assert get_cache_for_context(GlobalBatchsizeCache, "a") is cache
    assert get_cache_for_context(GlobalBatchsizeCache, "b") is not cache
    assert get_cache_for_context.cache_info().maxsize == toma_module.CONTEXT_CACHE_SIZE == 2**14


def here() -> tuple[tst.Frame, ...]:
    return tst.get_simple_traceback()


def test_a_traceback_says_where_a_call_came_from() -> None:
    traces = [here() for _ in range(2)]
    assert traces[0] == traces[1]
    filename, number, function, line, index = here()[0]
    assert (filename, function, index) == (__file__, "here", 0)
    assert number > 0
    assert line is not None
    assert "get_simple_traceback" in line
    one, same = here(), here()
    other = here()  # from another line
    assert one == same != other
    assert one[0] == other[0]


def test_frames_outside_of_a_watermark_are_left_out() -> None:
    full = len(here())

    @tst.set_watermark
    def marked() -> int:
        return len(here())

    with tst.watermark():
        assert [frame[2] for frame in here()] == [
            "here",
            "test_frames_outside_of_a_watermark_are_left_out",
        ]
    assert marked() == 2
    assert len(here()) == full


def test_a_watermark_is_the_threads_own() -> None:
    lengths: list[int] = []

    def work() -> None:
        lengths.append(len(here()))

    def run() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    run()
    with tst.watermark():
        run()
    assert lengths[0] == lengths[1] > 1


def test_free_memory_is_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    free = cpu_memory.get_available_cpu_memory()
    assert isinstance(free, int)
    with brim.budget("1MiB", device="cpu"):
        assert cpu_memory.get_available_cpu_memory() <= 2**20 < free


def test_cuda_memory_without_a_device_is_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_cuda_memory.get_cuda_total_memory() == 0
    assert torch_cuda_memory.get_cuda_assumed_available_memory() == 0
    assert torch_cuda_memory.get_cuda_blocked_memory() == 0
    assert torch_cuda_memory.get_cuda_available_memory() == 0
    torch_cuda_memory.cuda_meminfo()
    torch_cuda_memory.gc_cuda()
    assert capsys.readouterr().out == ""


@pytest.mark.cuda
def test_cuda_memory_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    total = torch_cuda_memory.get_cuda_total_memory()
    assert 0 < torch_cuda_memory.get_cuda_available_memory() <= total
    assert 0 <= torch_cuda_memory.get_cuda_blocked_memory() < total
    torch_cuda_memory.cuda_meminfo()
    assert "Max Total" in capsys.readouterr().out


def test_a_limit_on_the_address_space_makes_the_batch_smaller() -> None:
    program = """
import resource, torch
from brim.compat.toma import cpu_memory, toma

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
cpu_memory.set_cpu_memory_limit((used + 2**29) / 2**30)

@toma.batch(initial_batchsize=2048)
def allocate(mebibytes):
    torch.empty(mebibytes * 2**20, dtype=torch.uint8)
    return mebibytes

print(allocate())
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # CUDA cannot start under such a limit
    )
    assert run.returncode == 0, run.stderr
    assert 32 <= int(run.stdout) <= 512
