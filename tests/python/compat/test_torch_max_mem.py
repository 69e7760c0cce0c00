"""The face of torch_max_mem: what its documents promise, and the sequence of values it tries."""

from __future__ import annotations

import inspect
import logging
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import brim
from brim.compat import torch_max_mem
from brim.compat.torch_max_mem import (
    MemoryUtilizationMaximizer,
    api,
    infer_maximum_batch_size,
    maximize_memory_utilization,
    set_memory_budget,
    version,
)
from brim.compat.torch_max_mem.api import maximize_memory_utilization_decorator

Values = tuple[int, ...]


def knn(x: torch.Tensor, y: torch.Tensor, batch_size: int, k: int = 3) -> torch.Tensor:
    parts = [
        torch.cdist(x[start : start + batch_size], y).topk(k=k, dim=1, largest=False).indices
        for start in range(0, x.shape[0], batch_size)
    ]
    return torch.cat(parts, dim=0)


def tried_by_halving(
    values: Sequence[int], qs: Sequence[int], fits: Callable[[Values], bool]
) -> list[Values]:
    """The reference: each value in turn is halved, kept a multiple of q, and left at 1."""
    current, tried = list(values), []
    for i, q in enumerate(qs):
        while current[i] > 0:
            tried.append(tuple(current))
            if fits(tried[-1]):
                return tried
            half = current[i] // 2
            current[i] = half if half <= q else half // q * q
        current[i] = 1
    return tried


def out_of_memory() -> RuntimeError:
    return RuntimeError("CUDA out of memory.")


# -- the documented examples ---------------------------------------------------------------------


def test_the_documented_knn_gives_the_plain_result() -> None:
    x, y = torch.rand(100, 16), torch.rand(200, 16)
    decorated = maximize_memory_utilization()(knn)
    assert torch.equal(decorated(x, y, batch_size=x.shape[0]), knn(x, y, 100))
    assert torch.equal(decorated(x, y, x.shape[0], k=2), knn(x, y, 100, 2))


def test_the_documented_knn_adapts_to_a_real_failure() -> None:
    x, y = torch.rand(64, 16), torch.rand(200, 16)
    expected = knn(x, y, 64)
    maximizer = maximize_memory_utilization(q=1)
    with brim.testing.inject_oom(at=1, count=1):
        assert torch.equal(maximizer(knn)(x, y, batch_size=64), expected)
    assert list(maximizer.parameter_value.values()) == [(32,)]


def test_the_inferred_batch_size_need_not_be_passed() -> None:
    seen = []

    @infer_maximum_batch_size()
    @maximize_memory_utilization()
    def documented(x: torch.Tensor, y: torch.Tensor, batch_size: int, k: int = 3) -> torch.Tensor:
        seen.append(batch_size)
        return knn(x, y, batch_size, k)

    x, y = torch.rand(100, 8), torch.rand(20, 8)
    assert torch.equal(documented(x, y), knn(x, y, 100))  # type: ignore[call-arg]
    documented(x, y, 10)
    documented(x, y, None)  # type: ignore[arg-type]
    # the last one starts where the first one ended: nothing failed at 100
    assert seen == [100, 10, 100]


def test_the_reduced_value_is_used_on_the_next_call_until_reset() -> None:
    tried = []
    maximizer = maximize_memory_utilization()

    @maximizer
    def function(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 100:
            raise out_of_memory()
        return batch_size

    assert [function(1000), function(1000), function(50), function(1000)] == [96, 96, 50, 96]
    assert tried == [1000, 480, 224, 96, 96, 50, 96]
    assert maximizer.parameter_value == {hash(()): (96,)}
    maximizer.reset()
    assert not maximizer.parameter_value
    tried.clear()
    function(1000)
    assert tried == [1000, 480, 224, 96]


# -- the sequence of values ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_values_are_tried_in_the_order_of_halving(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    names = ("batch_size", "slice_size", "step")[:count]
    values = [rng.randint(1, 4000) for _ in names]
    qs = [rng.choice([1, 4, 7, 32]) for _ in names]
    limits = [rng.choice([0, 1, rng.randint(1, 4000)]) for _ in names]

    def fits(tried: Values) -> bool:
        return all(value <= limit for value, limit in zip(tried, limits, strict=True))

    expected = tried_by_halving(values, qs, fits)
    tried = []

    @maximize_memory_utilization_decorator(parameter_name=names, q=qs)
    def function(batch_size: int = 0, slice_size: int = 0, step: int = 0) -> str:
        tried.append((batch_size, slice_size, step)[:count])
        if not fits(tried[-1]):
            raise out_of_memory()
        return "done"

    arguments = dict(zip(names, values, strict=True))
    if fits(expected[-1]):
        assert function(**arguments) == ("done", expected[-1])
    else:
        with pytest.raises(MemoryError, match="all equal to 1"):
            function(**arguments)
    assert tried == expected


def test_one_q_is_for_all_parameters_and_32_by_default() -> None:
    assert api.upgrade_to_sequence("a", 32) == (("a",), (32,))
    assert api.upgrade_to_sequence(["a", "b"], 4) == (("a", "b"), (4, 4))
    assert api.upgrade_to_sequence(["a", "b"], [4, 8]) == (("a", "b"), (4, 8))
    with pytest.raises(ValueError, match="does not match length"):
        api.upgrade_to_sequence(["a", "b"], [1, 2, 3])
    assert MemoryUtilizationMaximizer().qs == (32,)


# -- errors --------------------------------------------------------------------------------------


def test_giving_up_is_a_memory_error_from_the_cause() -> None:
    @maximize_memory_utilization()
    def function(batch_size: int) -> None:
        raise out_of_memory()

    with pytest.raises(MemoryError, match="did not even succeed") as caught:
        function(4)
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)
    assert "CUDA out of memory." in str(caught.value.__cause__)
    assert "batch_size = 2" in str(caught.value.__cause__)


def test_another_error_is_the_callers() -> None:
    error = ValueError("mine")
    calls = []

    @maximize_memory_utilization()
    def function(batch_size: int) -> None:
        calls.append(batch_size)
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        function(64)
    assert caught.value is error
    assert calls == [64]


@pytest.mark.parametrize("value", [0, -3])
def test_a_value_below_one_is_a_memory_error_without_a_call(value: int) -> None:
    @maximize_memory_utilization()
    def function(batch_size: int) -> None:
        pytest.fail("called")

    with pytest.raises(MemoryError, match=str(value)):
        function(value)


def test_wrong_arguments_are_named() -> None:
    decorate = maximize_memory_utilization()
    with pytest.raises(ValueError, match="does not have a parameter batch_size"):
        decorate(lambda x: x)

    @decorate
    def function(x: int, batch_size: int | None = None) -> None: ...

    with pytest.raises(ValueError, match="neither integer nor None"):
        function(1, batch_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Neither value nor default"):
        function(1)

    @decorate
    def no_default(x: int, batch_size: int) -> None: ...

    with pytest.raises(TypeError, match="batch_size"):
        no_default(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="x"):
        no_default(batch_size=1)  # type: ignore[call-arg]


def test_the_decorators_order_is_checked() -> None:
    def function(x: list[int], batch_size: int) -> None: ...

    inferring = infer_maximum_batch_size()(function)
    for decorate in (maximize_memory_utilization(), maximize_memory_utilization_decorator()):
        with pytest.raises(ValueError, match="wrong order"):
            decorate(inferring)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("Invalid buffer size: 74.51 GB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 MB)"), True),
        (RuntimeError("CUDA driver error: device not ready"), True),
        (RuntimeError("INTERNAL ASSERT FAILED at c10/cuda/CUDACachingAllocator.cpp"), True),
        (RuntimeError("INTERNAL ASSERT FAILED at torch/csrc/autograd/engine.cpp"), False),
        (RuntimeError("selected index k out of range"), False),
        (NameError("CUDA out of memory."), False),
        # what the original does not know
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("XPU out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
    ],
)
def test_errors_are_told_apart(error: BaseException, expected: bool) -> None:
    assert api.is_oom_error(error) is expected
    calls = []

    @maximize_memory_utilization()
    def function(batch_size: int) -> int:
        calls.append(batch_size)
        if batch_size > 2:
            raise error
        return batch_size

    if expected:
        assert function(4) == 2
    else:
        with pytest.raises(type(error)):
            function(4)
    assert calls == ([4, 2] if expected else [4])


def test_texts_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        api, "ADDITIONAL_OOM_ERROR_INFIXES", {*api.ADDITIONAL_OOM_ERROR_INFIXES, "no more room"}
    )

    @maximize_memory_utilization()
    def function(batch_size: int) -> int:
        if batch_size > 2:
            raise RuntimeError("there is no more room")
        return batch_size

    assert function(8) == 2


# -- how a function is called --------------------------------------------------------------------


def test_arguments_arrive_as_the_function_takes_them() -> None:
    def check(batch_size: int) -> None:
        if batch_size > 10:
            raise out_of_memory()

    @maximize_memory_utilization()
    def positional_only(a: int, batch_size: int = 16, c: int = 3, /, *rest: int) -> object:
        check(batch_size)
        return a, batch_size, c, rest

    @maximize_memory_utilization()
    def keyword_only(*a: int, batch_size: int, **others: int) -> object:
        check(batch_size)
        return a, batch_size, others

    assert positional_only(1) == (1, 8, 3, ())
    assert positional_only(1, 20, 5, 6, 7) == (1, 8, 5, (6, 7))
    assert keyword_only(1, 2, batch_size=20, z=3) == ((1, 2), 10, {"z": 3})


def test_methods_are_decorated_too() -> None:
    class Model:
        scale = 3

        @maximize_memory_utilization()
        def run(self, x: int, batch_size: int = 8) -> int:
            """Its own words."""
            if batch_size > 4:
                raise out_of_memory()
            return self.scale * x * batch_size

    assert Model().run(2) == 24
    assert Model.run.__doc__ == "Its own words."
    assert list(inspect.signature(Model.run).parameters) == ["self", "x", "batch_size"]


def test_a_default_is_the_maximum_where_none_is_passed() -> None:
    @maximize_memory_utilization()
    def function(batch_size: int = 7) -> int:
        return batch_size

    assert [function(), function(None), function(3)] == [7, 7, 3]  # type: ignore[arg-type]


def test_a_failed_call_leaves_nothing_behind() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    @maximize_memory_utilization()
    def function(batch_size: int) -> int:
        left.extend(reference() is not None for reference in alive)
        tensor = torch.zeros(batch_size)
        alive.append(weakref.ref(tensor))
        if batch_size > 2:
            raise out_of_memory()
        return batch_size

    assert function(8) == 2
    assert left == [False, False, False]


def test_random_numbers_do_not_depend_on_failures() -> None:
    def draw(batch_size: int) -> torch.Tensor:
        noise = torch.rand(4)
        if batch_size > 2:
            raise out_of_memory()
        return noise

    torch.manual_seed(0)
    expected = draw(1)
    torch.manual_seed(0)
    assert torch.equal(maximize_memory_utilization()(draw)(64), expected)


# -- inferring -----------------------------------------------------------------------------------


def test_a_length_is_inferred_where_no_value_is_given() -> None:
    @infer_maximum_batch_size(parameter_name="size", x_parameter_name="y", max_value=3)
    def function(y: Sequence[int] = (1, 2), size: int | None = None, **others: int) -> object:
        return size, others

    assert function([1]) == (1, {})
    assert function(range(9)) == (3, {})
    assert function(range(9), 5) == (5, {})
    assert function(range(9), None, z=1) == (3, {"z": 1})
    assert function(y=range(9), size=5) == (5, {})
    assert function() == (2, {})


def test_a_length_that_cannot_be_inferred_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not have a parameter z"):
        infer_maximum_batch_size(x_parameter_name="z")(knn)

    @infer_maximum_batch_size()
    def function(x: list[int], batch_size: int | None = None) -> None: ...

    with pytest.raises(TypeError, match="did not receive a value for x"):
        function()  # type: ignore[call-arg]


# -- the helpers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "q", "expected"), [(15, 4, 12), (16, 4, 16), (3, 4, 3), (4, 4, 4)])
def test_floor_to_nearest_multiple_of(x: int, q: int, expected: int) -> None:
    assert api.floor_to_nearest_multiple_of(x=x, q=q) == expected


def test_default_and_passed_maximum(caplog: pytest.LogCaptureFixture) -> None:
    def function(a: int, b: int = 4, c: float = 5.5, d: None = None) -> None: ...

    signature = inspect.signature(function)
    found = {n: api.determine_default_max_value(function, n, signature) for n in "abcd"}
    assert found == {"a": None, "b": 4, "c": 5, "d": None}
    assert "casting to int" in caplog.text
    bound = signature.bind(7)
    assert api.determine_max_value(bound, "a", None) == 7
    assert api.determine_max_value(bound, "b", 4) == 4


def test_key_hasher() -> None:
    hasher = api.KeyHasher("a")
    assert hasher.keys == ["a"]
    assert hasher({"a": 1, "b": 2}) == hash((1,))
    assert hasher({}) == hash((None,))
    assert api.KeyHasher(None)({"a": 1}) == api.KeyHasher([])({})


def test_tensors_are_found_inside_containers() -> None:
    here, nowhere = torch.zeros(1), torch.zeros(1, device="meta")
    loop: list[Any] = [here]
    loop.append(loop)
    found = list(api.iter_tensor_devices(1, "text", loop, a={"b": (nowhere, {3})}))
    assert sorted(device.type for device in found) == ["cpu", "meta"]


def test_tensors_elsewhere_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    api.create_tensor_checker(["cpu"])(torch.zeros(1))
    assert not caplog.records
    maximize_memory_utilization()(knn)(torch.zeros(4, 2), torch.zeros(4, 2), batch_size=4)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "considered safe" in record.getMessage()


def test_a_memory_budget_sets_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 1000

    calls: list[tuple[float, object]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: calls.append((fraction, device)),
    )
    assert set_memory_budget(250) == 0.25
    assert set_memory_budget(5000, "cuda") == 1.0
    assert set_memory_budget(500, "cuda:1") == 0.5
    assert calls == [(0.25, 2), (1.0, 2), (0.5, torch.device("cuda:1"))]
    with pytest.raises(ValueError, match="must be positive"):
        set_memory_budget(0)


def test_the_version_is_that_of_the_original() -> None:
    assert version.get_version() == version.VERSION == "0.1.6"
    assert version.get_version(with_git_hash=True).startswith("0.1.6-")
    module = "brim.compat.torch_max_mem.version"
    printed = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    assert printed.stdout.startswith("0.1.6-")


def test_names_are_where_they_are_in_the_original() -> None:
    assert set(torch_max_mem.__all__) == {
        "MemoryUtilizationMaximizer",
        "infer_maximum_batch_size",
        "maximize_memory_utilization",
        "set_memory_budget",
    }
    assert api.maximize_memory_utilization is api.MemoryUtilizationMaximizer
    names = list(inspect.signature(MemoryUtilizationMaximizer).parameters)
    assert names == ["parameter_name", "q", "safe_devices", "hasher", "keys", "max_cache_size"]
