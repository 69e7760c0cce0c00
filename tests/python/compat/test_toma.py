"""The face of toma: what its documents promise, and the sequence of sizes it tries."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import brim
import brim.compat.toma as toma_module
from brim.compat.toma import (
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    StacktraceMemoryBatchsizeCache,
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


def test_the_docstring_says_what_a_decorator_adds() -> None:
    @toma.range(initial_step=2)
    def function(start: int, end: int) -> None:
        """Its own words."""

    assert function.__name__ == "function"
    assert "toma_initial_step" in function.__doc__
    assert "Its own words." in function.__doc__
