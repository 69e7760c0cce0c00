"""Which calls are of one kind: what they share a remembered size by."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import brim

from .remembering import X, check, first_size, make

pytestmark = pytest.mark.usefixtures("steady_memory")


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 3),
        torch.zeros(12),
        torch.zeros(3, 4, 1),
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 4, device="meta"),
    ],
    ids=["shape", "rank", "ones", "dtype", "device"],
)
def test_another_kind_of_tensor_is_another_key(other: torch.Tensor) -> None:
    function = make()
    function(X)
    assert first_size(function, other) == 64
    assert first_size(function, X) == 4


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x, X), lambda x: {"a": {"b": [x]}}])
def test_tensors_inside_containers_count(wrap: Any) -> None:
    function = make()
    function(wrap(X))
    assert first_size(function, wrap(X)) == 4
    assert first_size(function, wrap(torch.zeros(5))) == 64


def test_what_is_no_tensor_does_not_count_unless_it_is_named() -> None:
    function = make()
    function("a", mode="b")
    assert first_size(function, "c", mode="d") == 4
    named = make(keys="mode")
    named(X, mode="b")
    assert first_size(named, X, mode="c") == 64
    assert first_size(named, torch.zeros(9), mode="b") == 4, "the tensors no longer count"
    assert first_size(named, X) == 64
    assert first_size(named, X, mode="a") == 4, "a default is an argument"


def test_keys_may_be_several_positional_and_of_any_hashable_type() -> None:
    function = make(keys=["x", "other"])
    for x, other in [((1, 2), None), ("text", 1.5), (X, frozenset({1})), (None, None)]:
        assert first_size(function, x, other=other) == 64
        assert first_size(function, x, other=other) == 4
    assert first_size(function, [1], other=None) == 64
    assert first_size(function, [1], other=None) == 4


@pytest.mark.parametrize("kind", ["maximize", "batch", "range", "chunked"])
def test_keys_without_a_hash_are_an_error_before_the_function_runs(kind: str) -> None:
    ran: list[object] = []

    def function(*args: Any, config: Any = None, size: int = 8) -> None:
        ran.append(args)

    options: Any = {"keys": "config"}
    decorate = brim.maximize("size", **options) if kind == "maximize" else None
    adaptive: Any = (decorate or getattr(brim, kind)(8, **options))(function)
    args = {"maximize": (), "batch": (), "range": (0, 8), "chunked": (X,)}[kind]
    adaptive(*args, config=(1, [2.0, None, b"3", frozenset()]))
    ran.clear()
    for wrong in ({1: 2}, [{1}], (bytearray(),)):
        with pytest.raises(TypeError, match=r"keys names config, whose value .* has no hash"):
            adaptive(*args, config=wrong)
    assert not ran


@pytest.mark.parametrize(
    "value", ["\udc80", 1 << 20000, ("a", ["\udc80"])], ids=["text", "int", "both"]
)
def test_any_text_and_any_int_may_be_a_key(value: Any) -> None:
    adaptive = brim.maximize("n", keys="key")(lambda n, key: torch.empty(n).numel())
    with brim.testing.inject_oom(at=1):
        assert adaptive(8, value) < 8


def test_a_key_that_holds_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError):
        brim.maximize("n", keys="key")(lambda n, key: n)(8, value)


def test_a_hashers_error_comes_before_the_function_runs() -> None:
    ran: list[int] = []

    def hasher(arguments: Any) -> Any:
        return arguments["x"]

    @brim.maximize("size", hasher=hasher)
    def function(x: object, size: int = 4) -> None:
        ran.append(size)

    function(1)
    with pytest.raises(TypeError, match="hasher must return an int, got 'text'"):
        function("text")
    assert ran == [4]


@pytest.mark.parametrize("kind", ["batch", "chunked", "range", "method"])
def test_keys_are_found_where_the_caller_passes_them(kind: str) -> None:
    def fill(size: int) -> int:
        return check(size, 5)

    options: Any = {"keys": "mode", "strategy": "halving"}
    if kind == "batch":

        @brim.batch(64, **options)
        def function(size: int, x: object, mode: str) -> None:
            fill(size)

        args: tuple[Any, ...] = (X,)
    elif kind == "chunked":

        @brim.chunked(64, **options)
        def function(chunk: object, start: int, end: int, mode: str) -> None:
            fill(end - start)

        args = (torch.zeros(64),)
    elif kind == "range":

        @brim.range(64, **options)
        def function(start: int, end: int, mode: str) -> None:
            fill(end - start)

        args = (0, 64)
    else:

        class Model:
            @brim.batch(64, **options)
            def method(self, size: int, x: object, mode: str) -> None:
                fill(size)

        function, args = Model().method, (X,)
    assert first_size(function, *args, "a") == 64
    assert first_size(function, *args, "b") == 64, "another value, another kind of call"
    assert first_size(function, *args, mode="a") == 4
    assert first_size(function, *args, "b") == 4


def test_what_brim_passes_is_no_key() -> None:
    with pytest.raises(ValueError, match=r"keys: 'size' is not an argument of .*: it has x"):
        brim.batch(64, keys="size")(lambda size, x: None)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)


class Silent(torch.Tensor):
    """A subclass that does not tell its sizes."""

    @staticmethod
    def __new__(cls) -> Silent:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, (3,), dispatch_sizes_strides_policy="sizes"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no answer")


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return mode.from_tensor(torch.zeros(5, 7))


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: nested(torch.strided),
        lambda: nested(torch.jagged),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.zeros(3, device="meta"),
        fake,
        Silent,
    ],
    ids=["nested", "jagged", "sparse", "csr", "quantized", "meta", "fake", "silent"],
)
def test_tensors_of_all_kinds_may_be_arguments_of_a_call_that_runs_out(tensor: Any) -> None:
    for function in (make(), make(keys="x")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some of them a prototype, or old
            x = tensor()
        assert first_size(function, x) == 64
        assert first_size(function, x) == 4
        assert first_size(function, X) == 64, "another kind of tensor"


def test_a_hasher_decides_by_itself() -> None:
    seen: list[dict[str, Any]] = []

    def hasher(arguments: Any) -> int:
        seen.append(dict(arguments))
        return len(arguments["x"])

    function = make(hasher=hasher)
    function("abc")
    assert seen[0]["x"] == "abc"
    assert seen[0]["mode"] == "a"
    assert first_size(function, "xyz") == 4
    assert first_size(function, "four") == 64
    some = make(hasher=hasher, keys=["x"])
    seen.clear()
    some("abc")
    assert seen[0] == {"x": "abc"}


def test_a_hashers_error_passes() -> None:
    function = make(hasher=lambda arguments: arguments["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        function(X)


def test_functions_do_not_share_their_memory() -> None:
    first, second = make(), make()
    first(X)
    assert first_size(second, X) == 64


def test_the_length_that_chunked_cuts_is_no_part_of_the_key() -> None:
    @brim.chunked(64, strategy="halving")
    def function(chunk: torch.Tensor, start: int, end: int) -> None:
        check(end - start, 5)

    assert first_size(function, torch.zeros(64, 2)) == 64
    assert first_size(function, torch.zeros(100, 2)) == 4
    assert first_size(function, torch.zeros(100, 3)) == 64


def test_values_that_look_alike_are_told_apart() -> None:
    function = make(keys=["x"])
    for x in (None, 0, False, -1, -2, "0", b"0", 0.0, (0,), ((0,),), ()):
        assert first_size(function, x) == 64, x
        assert first_size(function, x) == 4, x


def test_tensors_in_other_places_are_other_calls_but_the_order_of_keywords_is_not() -> None:
    def work(size: int, a: Any = None, b: Any = None) -> None:
        sizes.append(size)
        if size > 4:
            raise RuntimeError("CUDA out of memory.")

    sizes: list[int] = []
    function = brim.batch(64)(work)
    other = torch.zeros(7)

    def first(*args: Any, **kwargs: Any) -> int:
        sizes.clear()
        function(*args, **kwargs)
        return sizes[0]

    assert first(X, None) == 64
    assert first(None, X) == 64
    assert first(a=X, b=other) == 64
    assert first(b=other, a=X) < 64


def test_a_hasher_must_return_an_int() -> None:
    with pytest.raises(TypeError, match=r"hasher must return an int, got 'text'"):
        make(hasher=lambda arguments: "text")(X)


LONG = 10**4


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x] * LONG,
        lambda x: [0] * LONG + [x],
        lambda x: [x] + [0] * LONG,
        lambda x: [0, x] * LONG,
        lambda x: [(0, "a", x)] * LONG,
        lambda x: dict.fromkeys(range(LONG), x),
        lambda x: {**{i: i for i in range(LONG)}, "x": x},
        lambda x: [0] * 400 + [x] + [0] * 400,
        lambda x: [list(range(LONG)), {"x": x}],
    ],
)
def test_tensors_in_long_containers_count(wrap: Any) -> None:
    function = make()
    assert first_size(function, wrap(torch.zeros(3))) == 64
    assert first_size(function, wrap(torch.zeros(3))) == 4
    assert first_size(function, wrap(torch.zeros(4))) == 64, "another shape"


def test_a_long_list_of_numbers_is_no_part_of_the_key() -> None:
    function = make()
    data = list(range(LONG))
    first_size(function, data)
    assert first_size(function, data) == 4
    assert first_size(function, data[:-1]) == 4, "numbers are no part of the key"


def test_a_long_list_of_numbers_is_not_walked() -> None:
    """It is known by its ends. To look for a tensor between a million numbers took 35 ms a call."""
    function = make()
    for length in (3, 4):
        data = [*range(LONG), torch.zeros(length), *range(LONG)]
        assert first_size(function, data) == (64 if length == 3 else 4)
