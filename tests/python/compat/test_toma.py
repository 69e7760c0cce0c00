"""The face of toma: what its documents promise, and the sequence of sizes it tries."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

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
    explicit,
    get_cache_for_context,
    should_reduce_batch_size,
    simple,
    toma,
    torch_cuda_memory,
)

CACHES = (NoBatchsizeCache, GlobalBatchsizeCache, StacktraceMemoryBatchsizeCache)


@pytest.fixture(autouse=True)
def _same_free_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Free memory must not cross a step of the default cache between two calls of a test."""
    monkeypatch.setattr(cpu_memory, "get_available_cpu_memory", lambda: 2**33)
    yield
    get_cache_for_context.cache_clear()


def out_of_memory() -> RuntimeError:
    return RuntimeError("CUDA out of memory.")


def parts_by_halving(
    start: int, end: int, step: int, fits: Callable[[int], bool]
) -> tuple[list[tuple[int, int]], int]:
    """The reference: the parts that are tried, and the step at the end (0: nothing fitted)."""
    tried = []
    while start < end:
        stop = min(start + step, end)
        tried.append((start, stop))
        if fits(stop - start):
            start += step
        elif step > 1:
            step //= 2
        else:
            return tried, 0
    return tried, step


# -- the documented examples ---------------------------------------------------------------------


def test_the_documented_batch() -> None:
    tried = []

    @toma.batch(initial_batchsize=512)
    def run_inference(batchsize: int, model: str, dataset: str) -> str:
        tried.append(batchsize)
        if batchsize > 100:
            raise out_of_memory()
        return f"{model} {dataset} {batchsize}"

    assert run_inference("model", dataset="data") == "model data 64"
    assert tried == [512, 256, 128, 64]


def test_the_documented_chunked_and_range() -> None:
    @toma.chunked(initial_step=512)
    def compute_result(out: torch.Tensor, start: int, end: int) -> None:
        out[:] = torch.arange(start, end)

    result = torch.empty(8192, dtype=torch.int64)
    with brim.testing.inject_oom(at=1, count=2):
        compute_result(result)
    assert torch.equal(result, torch.arange(8192))

    @toma.range(initial_step=32)
    def reduce_data(start: int, end: int, out: torch.Tensor, data: torch.Tensor) -> None:
        out += data[start:end].sum()

    total = torch.zeros((), dtype=torch.int64)
    reduce_data(0, 1024, total, result)
    assert int(total) == sum(range(1024))


def test_the_documented_execute() -> None:
    data = torch.zeros(300)

    @toma.execute.chunked(data, initial_step=128)
    def compute(chunk: torch.Tensor, start: int, end: int) -> None:
        chunk += end - start

    assert compute is None
    assert data[0] == 128
    assert data[-1] == 300 - 256


def test_the_documented_ways_to_choose_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def function(batchsize: int) -> None:
        tried.append(batchsize)
        if batchsize > 16:
            raise out_of_memory()

    decorated = toma.batch(function, initial_batchsize=64, cache_type=toma.GlobalBatchsizeCache)
    decorated()
    decorated()
    assert tried == [64, 32, 16, 16]
    tried.clear()
    toma.explicit.batch(function, 64, toma_cache_type=toma.NoBatchsizeCache)
    assert tried == [64, 32, 16]
    # a default that is set later holds for what was decorated before
    for owner in (toma_module, toma):
        monkeypatch.setattr(owner, "DEFAULT_CACHE_TYPE", NoBatchsizeCache)
        plain = toma.batch(function, initial_batchsize=32)
        tried.clear()
        for _ in range(2):
            plain()
        assert tried == [32, 16, 32, 16]
        monkeypatch.undo()


# -- the sequence of sizes -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_parts_are_tried_in_the_order_of_halving(seed: int) -> None:
    rng = random.Random(seed)
    start, length, step = rng.randint(0, 50), rng.randint(0, 300), rng.randint(1, 100)
    limit, odd = rng.choice([0, 1, rng.randint(1, 100)]), rng.random() < 0.3

    def fits(size: int) -> bool:
        return size <= limit and not (odd and size % 3 == 0)

    expected, last = parts_by_halving(start, start + length, step, fits)
    tried = []

    def function(begin: int, end: int) -> None:
        tried.append((begin, end))
        if not fits(end - begin):
            raise out_of_memory()

    def run() -> None:
        if rng.random() < 0.5:
            simple.range(function, start, start + length, step)
        else:
            explicit.range(function, start, start + length, step)

    if last:
        run()
    else:
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            run()
    assert tried == expected


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", ["explicit", "toma", "execute"])
def test_what_is_remembered_between_calls(cache: type, form: str) -> None:
    tried: list[int] = []

    def function(batchsize: int) -> int:
        tried.append(batchsize)
        if batchsize > 16:
            raise out_of_memory()
        return batchsize

    decorated = toma.batch(function, initial_batchsize=64, cache_type=cache)

    def run() -> object:
        if form == "explicit":
            return explicit.batch(function, 64, toma_cache_type=cache)
        if form == "toma":
            return decorated()
        return toma.execute.batch(64, cache_type=cache)(function)

    for _ in range(3):
        assert run() == 16
    assert run() == 16  # from another line
    first, again = [64, 32, 16], [16]
    fourth = again if cache is GlobalBatchsizeCache and form != "execute" else first
    known = first if cache is NoBatchsizeCache else again
    assert tried == first + known + known + fourth


def test_memory_that_is_free_counts_for_the_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    @toma.batch(initial_batchsize=64)
    def function(batchsize: int) -> None:
        tried.append(batchsize)
        if batchsize > 32:
            raise out_of_memory()

    for free in (2**33, 2**33 + 1, 2**34, 2**33):
        monkeypatch.setattr(cpu_memory, "get_available_cpu_memory", lambda free=free: free)
        function()
    assert tried == [64, 32, 32, 64, 32, 32]


def test_a_context_takes_the_place_of_the_function() -> None:
    tried = []

    def body(batchsize: int) -> None:
        tried.append(batchsize)
        if batchsize > 32:
            raise out_of_memory()

    decorate = toma.batch(initial_batchsize=64, cache_type=GlobalBatchsizeCache, context="shared")
    decorate(lambda batchsize: body(batchsize))()
    decorate(lambda batchsize: body(batchsize))()
    decorate(lambda batchsize: body(batchsize))(toma_context="other")
    assert tried == [64, 32, 32, 64, 32]


# -- giving up, errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", [simple.batch, explicit.batch])
def test_at_size_one_the_error_is_raised(form: Callable[..., object]) -> None:
    tried = []

    def function(batchsize: int) -> None:
        tried.append(batchsize)
        raise out_of_memory()

    with pytest.raises(RuntimeError, match="CUDA out of memory") as caught:
        form(function, 5)
    assert tried == [5, 2, 1]
    assert brim.is_out_of_memory(caught.value)


def test_another_error_is_the_callers() -> None:
    error = RuntimeError("shape mismatch")

    def function(batchsize: int) -> None:
        raise error

    with pytest.raises(RuntimeError, match="shape mismatch") as caught:
        simple.batch(function, 64)
    assert caught.value is error


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_below_one_is_an_error_at_once(step: int) -> None:
    with pytest.raises(ValueError, match="initial_step must be"):
        simple.range(lambda start, end: None, 0, 10, step)


def test_a_size_that_was_never_given_is_an_error() -> None:
    with pytest.raises(TypeError, match="initial_batchsize must be an int"):
        toma.batch(lambda batchsize: None)()


@pytest.mark.parametrize(
    ("error", "cuda", "cudnn", "cpu"),
    [
        (RuntimeError("CUDA out of memory."), True, False, False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to"), True, False, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Oh."), False, True, False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), False, False, True),
        # what the original does not know
        (RuntimeError("DefaultCPUAllocator: not enough memory: you"), False, False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), False, True, False),
        (MemoryError(), False, False, True),
        (ValueError("CUDA out of memory."), False, False, False),
        (RuntimeError("shape mismatch"), False, False, False),
    ],
)
def test_errors_are_told_apart(error: BaseException, cuda: bool, cudnn: bool, cpu: bool) -> None:
    assert torch_cuda_memory.is_cuda_out_of_memory(error) is cuda
    assert torch_cuda_memory.is_cudnn_snafu(error) is cudnn
    assert cpu_memory.is_out_of_cpu_memory(error) is cpu
    assert should_reduce_batch_size(error) is (cuda or cudnn or cpu)

    def function(batchsize: int) -> int:
        if batchsize > 2:
            raise error
        return batchsize

    if cuda or cudnn or cpu:
        assert simple.batch(function, 8) == 2
    else:
        with pytest.raises(type(error)):
            simple.batch(function, 8)


def test_xpu_is_recognised() -> None:
    assert should_reduce_batch_size(RuntimeError("XPU out of memory. Tried to allocate 2 GiB"))


# -- what the original gets wrong ----------------------------------------------------------------


def test_chunks_are_cut_along_the_dimension_of_the_decorator_or_the_call() -> None:
    shapes: list[tuple[int, ...]] = []

    @toma.chunked(initial_step=2, dimension=1)
    def function(chunk: torch.Tensor, start: int, end: int) -> None:
        shapes.append(tuple(chunk.shape))

    tensor = torch.zeros(2, 4, 6)
    function(tensor)
    function(tensor, toma_dimension=0)
    function(tensor, toma_dimension=-1, toma_initial_step=3)
    assert shapes[:2] == [(2, 2, 6)] * 2
    assert shapes[2:3] == [(2, 4, 6)]
    assert {shape[:2] for shape in shapes[3:]} == {(2, 4)}


def test_chunked_passes_other_arguments_on() -> None:
    seen: list[Any] = []

    def function(chunk: torch.Tensor, start: int, end: int, *args: Any, **kwargs: Any) -> None:
        seen.append((start, end, args, kwargs))

    explicit.chunked(function, torch.zeros(3), 2, "a", b="c")
    toma.chunked(function, initial_step=2)(torch.zeros(3), "a", b="c")
    assert seen == [(0, 2, ("a",), {"b": "c"}), (2, 3, ("a",), {"b": "c"})] * 2


def test_a_call_that_fits_collects_no_garbage() -> None:
    collections: list[object] = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"] == 2))
    try:
        for form in (simple.batch, explicit.batch):
            assert form(lambda batchsize: batchsize, 64) == 64
        toma.chunked(lambda chunk, start, end: None, initial_step=2)(torch.zeros(9))
    finally:
        gc.callbacks.pop()
    assert True not in collections


def test_a_failed_call_leaves_nothing_behind() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def function(batchsize: int) -> None:
        left.extend(reference() is not None for reference in alive)
        tensor = torch.zeros(batchsize)
        alive.append(weakref.ref(tensor))
        if batchsize > 2:
            raise out_of_memory()

    simple.batch(function, 8)
    assert left == [False, False, False]


def test_random_numbers_do_not_depend_on_failures() -> None:
    def draw(start: int, end: int, out: torch.Tensor) -> None:
        noise = torch.rand(8)
        if end - start > 2:
            raise out_of_memory()
        out[start:end] = noise[0]

    torch.manual_seed(0)
    expected, found = torch.zeros(8), torch.zeros(8)
    simple.range(draw, 0, 8, 2, expected)
    torch.manual_seed(0)
    simple.range(draw, 0, 8, 8, found)
    assert torch.equal(expected, found)


def test_threads_share_a_size() -> None:
    def function(batchsize: int) -> int:
        if batchsize > 4:
            raise out_of_memory()
        return batchsize

    results: list[int] = []

    def work() -> None:
        for _ in range(50):
            results.append(explicit.batch(function, 64, toma_cache_type=GlobalBatchsizeCache))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4] * 200


# -- caches, stack, memory -----------------------------------------------------------------------


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
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 32 <= int(run.stdout) <= 512


def test_the_docstring_says_what_a_decorator_adds() -> None:
    @toma.range(initial_step=2)
    def function(start: int, end: int) -> None:
        """Its own words."""

    assert function.__name__ == "function"
    assert "toma_initial_step" in function.__doc__
    assert "Its own words." in function.__doc__
