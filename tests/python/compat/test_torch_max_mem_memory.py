"""The face of torch_max_mem: which values it remembers, and by which key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.compat.torch_max_mem import (
    MemoryUtilizationMaximizer,
    api,
    maximize_memory_utilization,
)


def out_of_memory() -> RuntimeError:
    return RuntimeError("CUDA out of memory.")


def failing_above_n(maximizer: MemoryUtilizationMaximizer) -> Callable[..., int]:
    @maximizer
    def function(n: Any, batch_size: int = 1024) -> int:
        if batch_size > (n if isinstance(n, int) else 64):
            raise out_of_memory()
        return batch_size

    return function


def test_keys_are_read_from_positional_and_keyword_arguments() -> None:
    maximizer = maximize_memory_utilization(keys="n")
    function = failing_above_n(maximizer)
    assert [function(64), function(n=2048), function(n=64), function(2048)] == [64, 1024, 64, 1024]
    assert maximizer.parameter_value == {hash((64,)): (64,), hash((2048,)): (1024,)}


def test_tensor_keys_are_compared_by_shape_dtype_and_device() -> None:
    maximizer = maximize_memory_utilization(keys=["n"])
    function = failing_above_n(maximizer)
    function(torch.zeros(3))
    function(torch.ones(3))
    function(torch.zeros(4))
    assert len(maximizer.parameter_value) == 2
    described = ("torch.Tensor", (2,), torch.int32, torch.device("cpu"))
    assert api.hashable_key(torch.zeros(2, dtype=torch.int32)) == described


def test_a_hasher_sees_all_arguments_by_name() -> None:
    seen: list[dict[str, Any]] = []

    def hasher(arguments: Any) -> int:
        seen.append(dict(arguments))
        return 7

    maximizer = maximize_memory_utilization(hasher=hasher, keys="ignored")

    @maximizer
    def function(a: int, batch_size: int = 4, *, b: int = 5, **others: int) -> None: ...

    function(1, z=2)
    assert seen == [{"a": 1, "batch_size": 4, "b": 5, "z": 2}]
    assert maximizer.parameter_value == {7: (4,)}


def test_the_least_recently_used_value_is_dropped() -> None:
    maximizer = maximize_memory_utilization(keys="n", max_cache_size=2)
    function = failing_above_n(maximizer)
    for n in (1, 2, 1, 3):
        function(n)
    assert list(maximizer.parameter_value) == [hash((1,)), hash((3,))]
    assert api.DEFAULT_MAX_CACHE_SIZE == MemoryUtilizationMaximizer().max_cache_size == 128


def test_a_call_that_fails_uses_its_value_too() -> None:
    maximizer = maximize_memory_utilization(keys="n")
    limits = {1: 1024, 2: 1024}

    @maximizer
    def function(n: int, batch_size: int = 1024) -> None:
        if batch_size > limits[n]:
            raise out_of_memory()

    function(1)
    function(2)
    limits[1] = 0
    with pytest.raises(MemoryError):
        function(1)
    assert list(maximizer.parameter_value) == [hash((2,)), hash((1,))]


def test_keys_and_parameters_should_not_overlap(caplog: pytest.LogCaptureFixture) -> None:
    maximize_memory_utilization(keys=["batch_size", "x"])
    assert "contained in the hashing keys" in caplog.text


def test_threads_share_one_function() -> None:
    maximizer = maximize_memory_utilization(keys="n")
    function = failing_above_n(maximizer)
    results: list[bool] = []

    def work() -> None:
        results.extend(
            function(n % 5 + 1) == 2 ** ((n % 5 + 1).bit_length() - 1) for n in range(50)
        )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200
    assert sorted(maximizer.parameter_value.values()) == [(1,), (2,), (2,), (4,), (4,)]
