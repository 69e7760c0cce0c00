"""Adaptive calls: errors that pass, errors that end them, wrong arguments."""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import traceback
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import brim

MIB = 2**20


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CPU out of memory.")


def call(kind: str, work: Any, **options: Any) -> Any:
    """Adapt `work(size)` in one of the four ways."""
    options = {"remember": "none", "strategy": "halving", **options}
    if kind == "maximize":
        return brim.maximize("size", **options)(lambda size=8: work(size))()
    if kind == "batch":
        return brim.batch(8, **options)(work)()
    if kind == "range":
        return brim.range(8, **options)(lambda start, end: work(end - start))(0, 8)
    return brim.chunked(8, **options)(lambda chunk, start, end: work(end - start))(torch.zeros(8))


KINDS = pytest.mark.parametrize("kind", ["maximize", "batch", "range", "chunked"])
WATCHED = pytest.mark.parametrize("options", [{}, {"observer": print}], ids=["", "watched"])


class UnprintableError(RuntimeError):
    def __str__(self) -> str:
        raise ZeroDivisionError("no text")


# ---------------------------------------------------------------- errors that pass


@KINDS
@WATCHED
@pytest.mark.parametrize(
    "error",
    [
        KeyError("key"),
        ValueError("CPU out of memory."),
        RuntimeError("shape mismatch"),
        KeyboardInterrupt(),
        SystemExit(3),
        StopIteration(),
        NotImplementedError("CUDA out of memory."),
        UnprintableError(),
        RecursionError("deep"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("after_a_failure", [False, True])
def test_an_error_that_is_not_about_memory_is_the_same_object(
    kind: str, options: dict[str, Any], error: BaseException, after_a_failure: bool
) -> None:
    def work(size: int) -> None:
        if after_a_failure and size == 8:
            out_of_memory()
        raise error

    with pytest.raises(type(error)) as caught:
        call(kind, work, **options)
    assert caught.value is error
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "work"
    assert error.__cause__ is None
    assert error.__context__ is None
    error.__traceback__ = None


@KINDS
def test_cause_and_context_of_an_error_stay(kind: str) -> None:
    def work(size: int) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise LookupError("mine") from error

    with pytest.raises(LookupError, match="mine") as caught:
        call(kind, work)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_wrong_call_is_the_functions_own_error() -> None:
    @brim.maximize("size")
    def function(a: int, size: int = 4) -> None: ...

    with pytest.raises(
        TypeError, match=r"function\(\) missing 1 required positional argument: 'a'"
    ):
        function()
    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        function(1, b=2)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        function(1, 2, 3)


# ---------------------------------------------------------------- errors that are about memory


@KINDS
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
        torch.OutOfMemoryError("a text that nobody has seen before"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("upsample: input has more than INT_MAX elements"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
    ],
    ids=lambda error: str(error)[:25],
)
def test_every_cause_that_a_smaller_size_cures_shrinks(kind: str, error: Exception) -> None:
    sizes = []

    def work(size: int) -> None:
        sizes.append(size)
        if size > 2:
            raise type(error)(*error.args)

    call(kind, work, device="cpu")
    assert sizes[0] == 8
    assert sizes[-1] <= 2


@KINDS
def test_at_the_floor_it_gives_up_with_a_summary(kind: str, held: int) -> None:
    def work(size: int) -> None:
        base = torch.empty(MIB, dtype=torch.uint8)
        torch.empty((3 + size) * MIB, dtype=torch.uint8)
        assert base is None

    with (
        brim.budget(held + 2 * MIB, device="cpu"),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        call(kind, work)
    text = str(caught.value)
    name = {"maximize": "size", "batch": "batch size"}.get(kind, "step")
    assert text.startswith("CPU out of memory. Tried to allocate 4.00 MiB")
    assert f"It does not fit even with {name} = 1, the smallest that is allowed" in text
    for size in (8, 4, 2, 1):
        more = brim.format_bytes((3 + size) * MIB)
        assert f"{name} = {size}: out of host memory, held 1.00 MiB, asked for {more} more" in text
    assert "On cpu: limit" in text
    assert "in use before the call" in text
    assert brim.is_out_of_memory(caught.value)
    pickle.loads(pickle.dumps(caught.value))


def test_a_higher_floor() -> None:
    sizes = []

    def work(size: int) -> None:
        sizes.append(size)
        out_of_memory()

    for kind in ("batch", "maximize"):
        sizes.clear()
        with pytest.raises(torch.OutOfMemoryError, match="= 3, the smallest"):
            call(kind, work, lower=3)
        assert sizes == [8, 4, 3]


def test_what_the_last_error_held_is_gone_when_it_gives_up() -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def work(size: int) -> None:
        local = torch.empty(10)
        references.append(weakref.ref(local))
        out_of_memory()

    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            call("batch", work)
        assert [reference() for reference in references] == [None] * 4
        assert caught.value.__context__ is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- leaks


class Leaky:
    """Keeps a tensor of each failed try."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, size: int) -> None:
        if size > 2:
            self.kept.append(torch.empty(3 * MIB, dtype=torch.uint8))
            out_of_memory()


LEAK = r"3\.00 MiB of a failed attempt's memory on cpu did not come back"


@KINDS
def test_a_tensor_that_a_failed_try_left_behind_is_a_warning(kind: str, held: int) -> None:
    with pytest.warns(UserWarning, match=LEAK) as caught:
        call(kind, Leaky())
    assert len(caught) == 1
    assert caught[0].filename == __file__


@KINDS
def test_the_warning_may_be_an_error(kind: str, held: int) -> None:
    before = sys.getrefcount(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=LEAK):
            call(kind, Leaky())
    assert abs(sys.getrefcount(None) - before) < 50


@KINDS
def test_the_warning_does_not_hide_the_error_that_ended_the_call(kind: str, held: int) -> None:
    leaky = Leaky()

    def then_another_error(size: int) -> None:
        leaky(size)
        raise KeyError("mine")

    def then_nothing_fits(size: int) -> None:
        leaky(size)
        out_of_memory()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="mine"):
            call(kind, then_another_error)
        with pytest.raises(torch.OutOfMemoryError, match="the smallest that is allowed"):
            call(kind, then_nothing_fits)
    with pytest.warns(UserWarning, match=LEAK), pytest.raises(KeyError, match="mine"):
        call(kind, then_another_error)


def test_the_result_is_let_go_where_the_warning_is_an_error(held: int) -> None:
    leaky = Leaky()
    references: list[weakref.ref[torch.Tensor]] = []

    def work(size: int) -> torch.Tensor:
        leaky(size)
        result = torch.empty(3)
        references.append(weakref.ref(result))
        return result

    with pytest.raises(UserWarning, match=LEAK):
        call("batch", work)
    assert references[0]() is None


# ---------------------------------------------------------------- wrong arguments


async def coroutine(size: int) -> None: ...


async def async_generator(size: int) -> AsyncIterator[int]:
    yield size


def generator(size: int) -> Iterator[int]:
    yield size


@pytest.mark.parametrize("function", [coroutine, async_generator, generator])
@pytest.mark.parametrize(
    "decorate",
    [brim.maximize("size"), brim.batch(4), brim.range(4), brim.chunked(4)],
    ids=["maximize", "batch", "range", "chunked"],
)
def test_functions_that_run_after_the_call_are_refused(function: Any, decorate: Any) -> None:
    with pytest.raises(TypeError, match="runs after the call has returned"):
        decorate(function)


def test_a_method_that_is_a_coroutine_is_refused_too() -> None:
    class Model:
        async def method(self, size: int) -> None:
            await asyncio.sleep(0)

    with pytest.raises(TypeError, match="coroutine"):
        brim.maximize("size")(Model().method)


def function(x: object, size: int = 4, other: int = 4) -> None: ...


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: brim.maximize("wrong")(function),
            ValueError,
            "names: 'wrong' is not.*x, size, other",
        ),
        (lambda: brim.maximize("size", "size"), ValueError, "size, size"),
        (lambda: brim.maximize(("size", "other"), "size"), ValueError, "twice"),
        (lambda: brim.maximize(3), TypeError, "names must be strings"),
        (lambda: brim.maximize(()), TypeError, "names must be"),
        (lambda: brim.maximize("size", infer="y")(function), ValueError, "infer: 'y' is not"),
        (lambda: brim.maximize("size", keys=["y"])(function), ValueError, "keys: 'y' is not"),
        (lambda: brim.maximize("size", q=0), ValueError, "q must be at least 1"),
        (lambda: brim.maximize("size", q=1.5), TypeError, "q must be an int, got 1.5"),
        (lambda: brim.maximize("size", q={"size": -1}), ValueError, r"q\['size'\]"),
        (lambda: brim.maximize("size", q={"other": 2}), ValueError, "q has other"),
        (lambda: brim.maximize("size", lower=0)(function), ValueError, "lower must be at least 1"),
        (lambda: brim.maximize("size", lower=True)(function), TypeError, "lower must be an int"),
        (lambda: brim.maximize("size", strategy="best")(function), ValueError, "strategy='best'"),
        (lambda: brim.maximize("size", objective="x")(function), ValueError, "objective must be"),
        (lambda: brim.maximize("size", remember="x")(function), ValueError, "remember must be"),
        (
            lambda: brim.maximize("size", remember="none", persist=True)(function),
            ValueError,
            "persist asks",
        ),
        (lambda: brim.maximize("size", device="x")(function), (ValueError, RuntimeError), "x"),
        (lambda: brim.maximize("size", hasher=3)(function), TypeError, "hasher must be callable"),
        (lambda: brim.maximize("size", observer=3)(function), TypeError, "observer must be"),
        (
            lambda: brim.maximize("size", nonsense=1)(function),
            TypeError,
            "unknown option.*nonsense",
        ),
        (lambda: brim.maximize("size")(3), TypeError, "function must be callable, got 3"),
        (lambda: brim.batch(0), ValueError, "initial must be at least 1"),
        (lambda: brim.batch(2**63), ValueError, "initial must be below 2"),
        (lambda: brim.batch("4"), TypeError, "initial must be an int, got '4'"),
        (lambda: brim.batch(True), TypeError, "initial must be an int, got True"),
        (lambda: brim.batch(torch.ones(2)), TypeError, r"initial must be an int, got a tensor"),
        (
            lambda: brim.maximize("n")(torch.empty),
            ValueError,
            "'n' is not an argument of .*empty: it has none by name. Wrap it in a function",
        ),
        (lambda: brim.batch(4, q=0), ValueError, "q must be"),
        (lambda: brim.run_batch(4, function, ranks=[]), TypeError, "ranks must be"),
        (lambda: brim.run_batch(4, function, persist=[]), TypeError, "persist must be"),
        (
            lambda: brim.run_chunked(torch.ones(2), 2, function, dim=0.5),
            TypeError,
            "dim must be an int, got 0.5",
        ),
        (lambda: brim.range(-1), ValueError, "initial must be"),
        (lambda: brim.batch(function), TypeError, r"got the function .*: write @brim.batch\("),
        (lambda: brim.range(function), TypeError, r"got the function .*: write @brim.range\("),
        (lambda: brim.chunked(function), TypeError, r"write @brim.chunked\(1024\), with the"),
        (
            lambda: brim.maximize(lambda rows, columns: 0),
            ValueError,
            r"adapts batch_size, but .* has rows, columns: .* as in @brim.maximize\(\"columns\"\)",
        ),
        (lambda: brim.chunked(4, dim=1.0), TypeError, "dim must be an int, got 1.0"),
        (lambda: brim.run_batch(0, function), ValueError, "initial must be"),
        (lambda: brim.run_range(0, 1, 0, function), ValueError, "initial must be"),
        (lambda: brim.run_chunked(torch.zeros(3), 0, function), ValueError, "initial must be"),
    ],
)
def test_wrong_decorations_are_named(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("call_wrongly", "error", "says"),
    [
        (lambda f, r, c: f(1, 0), ValueError, "size must be between 1 and .*, got 0"),
        (lambda f, r, c: f(1, -7), ValueError, "size must be between 1 and .*, got -7"),
        (lambda f, r, c: f(1, 2**63), ValueError, "size must be between 1"),
        (lambda f, r, c: f(1, 2.0), TypeError, "size must be an int, got 2.0"),
        (lambda f, r, c: f(1, True), TypeError, "size must be an int, got True"),
        (lambda f, r, c: f(1, None), ValueError, "size"),
        (lambda f, r, c: r(1), TypeError, "start and end must be passed"),
        (lambda f, r, c: r(start=1, end=2), TypeError, "start and end must be passed"),
        (lambda f, r, c: r(3, 2), ValueError, "start must not be after end, got 3 and 2"),
        (lambda f, r, c: r(0.0, 2), TypeError, "start must be an int, got 0.0"),
        (lambda f, r, c: r(0, "2"), TypeError, "end must be an int, got '2'"),
        (lambda f, r, c: r(0, 2**70), ValueError, "end must be between"),
        (
            lambda f, r, c: r(-(2**62), 2**63 - 1),
            ValueError,
            "less than 2^63 apart".replace("^", r"\^"),
        ),
        (lambda f, r, c: c(), TypeError, "tensor must be passed"),
        (lambda f, r, c: c([1, 2]), TypeError, "tensor must be a torch.Tensor, got <class 'list'>"),
        (lambda f, r, c: c(torch.tensor(1.0)), ValueError, "no dimension to cut"),
        (lambda f, r, c: c(torch.zeros(3)), ValueError, "dim must be from -1 to 0 .*, got 1"),
    ],
)
def test_wrong_calls_are_named(call_wrongly: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        call_wrongly(
            brim.maximize("size")(function),
            brim.range(4)(lambda start, end: None),
            brim.chunked(4, dim=1)(lambda chunk, start, end: None),
        )


def test_a_size_may_be_anything_that_is_an_integer() -> None:
    class Index:
        def __index__(self) -> int:
            return 6

    sized = brim.maximize("size", remember="none")(lambda size: size)
    assert sized(torch.tensor(6)) == 6
    assert brim.batch(Index())(lambda size: size)() == 6  # type: ignore[arg-type]


# ---------------------------------------------------------------- what a beginner writes


def test_a_function_that_cannot_take_its_part_is_named_at_once() -> None:
    with pytest.raises(TypeError, match=r"brim.chunked .*f\(chunk, start, end, …\).*da> takes \(c"):
        brim.chunked(16)(lambda c: c.sum())
    with pytest.raises(TypeError, match=r"brim.range .*f\(start, end, …\).* takes \(\)"):
        brim.run_range(0, 8, 4, lambda: None)

    class Owner:
        @brim.chunked(4)
        def method(self, chunk: torch.Tensor, start: int, end: int) -> None: ...

        @brim.batch(4)
        @classmethod
        def of_class(cls, size: int) -> int:
            return size

    assert Owner.of_class() == 4  # type: ignore[call-arg]
    Owner().method(torch.zeros(8))


def test_results_that_nobody_gets_are_told_once() -> None:
    @brim.chunked(4)
    def total(chunk: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return chunk.sum()

    with pytest.warns(UserWarning, match=r"total returns .*\(Tensor\), which is dropped.*collect"):
        total(torch.ones(8))
    total(torch.ones(8))
    out = torch.zeros(8)
    brim.run_chunked(out, 4, lambda chunk, start, end: chunk.add_(1))  # in place: nothing is lost
    brim.run_range(0, 8, 4, lambda start, end: out[start:end].mul_(2))
    with torch.inference_mode():
        brim.run_chunked(out.clone(), 4, lambda chunk, start, end: chunk.add_(1))
    with pytest.warns(UserWarning, match="which is dropped"):
        brim.run_range(0, 8, 4, lambda start, end, x: torch.eye(2).to_sparse(), out)
    assert out.tolist() == [2.0] * 8
