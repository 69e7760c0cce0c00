"""brim.maximize: the decorator, what it decorates, and how arguments are found."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim


def check(size: int, most: int) -> int:
    """Fail as an allocator would, above `most`."""
    if size > most:
        raise torch.OutOfMemoryError("CPU out of memory.")
    return size


@brim.maximize("batch_size")
def documented(x: torch.Tensor, batch_size: int = 4) -> int:
    """Say how large a batch may be."""
    return check(batch_size, len(x))


# ---------------------------------------------------------------- finding the argument


def test_the_argument_may_come_by_position_by_name_or_by_default() -> None:
    @brim.maximize("size")
    def function(a: str, size: int = 64, *, b: str = "b") -> tuple[str, int, str]:
        return a, check(size, 20), b

    for _ in range(2):  # the first call knows nothing, the second does
        assert function("x", 10) == ("x", 10, "b")
        assert function("x", size=10) == ("x", 10, "b")
        assert function(a="x", size=10, b="c") == ("x", 10, "c")
        assert function(b="c", size=10, a="x") == ("x", 10, "c")
        name, size, b = function("x", b="d")
        assert (name, b) == ("x", "d")
        assert 1 <= size <= 20


def test_keyword_only_and_positional_only_arguments() -> None:
    @brim.maximize("size")
    def keyword_only(*rest: str, size: int) -> tuple[tuple[str, ...], int]:
        return rest, check(size, 20)

    @brim.maximize("size")
    def positional_only(size: int, /, name: str) -> tuple[int, str]:
        return check(size, 20), name

    for _ in range(2):
        assert keyword_only("a", "b", size=100)[0] == ("a", "b")
        assert 1 <= keyword_only(size=100)[1] <= 20
        assert positional_only(100, name="n")[1] == "n"
        assert positional_only(7, "n") == (7, "n")


def test_a_name_that_was_made_at_run_time_is_the_same_name() -> None:
    @brim.maximize("batch_size", remember="none")
    def function(batch_size: int, other: int = 0) -> tuple[int, int]:
        return check(batch_size, 3), other

    made = "".join(["batch", "_", "size"])
    assert made is not inspect.signature(function).parameters["batch_size"].name
    assert function(**{made: 3}) == (3, 0)
    size, other = function(**{"".join(["ot", "her"]): 5, made: 8})
    assert 1 <= size <= 3
    assert other == 5


def test_arguments_the_function_takes_in_bulk_are_handed_on() -> None:
    @brim.maximize("size", remember="none")
    def function(*args: int, size: int = 9, **kwargs: int) -> tuple[object, ...]:
        check(size, 4)
        return args, kwargs

    assert function(1, 2, size=9, z=3) == ((1, 2), {"z": 3})
    assert function(1, 2, z=3, y=4) == ((1, 2), {"z": 3, "y": 4})


@pytest.mark.parametrize("given_as", ["missing", "none", "number"])
def test_the_maximum_is_inferred_from_a_length(given_as: str) -> None:
    sizes = []

    @brim.maximize("size", infer="x", strategy="halving")
    def function(x: torch.Tensor, size: int | None = None) -> int:
        assert size is not None
        sizes.append(size)
        return check(size, 5)

    x = torch.zeros(16, 2)
    arguments = {"missing": (x,), "none": (x, None), "number": (x, 16)}[given_as]
    assert function(*arguments) == 4
    assert sizes == [16, 8, 4]
    assert function(x[:3]) == 3
    assert function(x=x[:3]) == 3
    assert function(x[:0]) == 1, "an empty tensor still needs a size"


def test_infer_counts_anything_with_a_length() -> None:
    @brim.maximize(infer="items")
    def function(items: object, batch_size: int | None = None) -> int | None:
        return batch_size

    assert function([1, 2, 3]) == 3
    assert function("four") == 4
    with pytest.raises(TypeError, match="len"):
        function(5)


def test_several_names_are_lowered_in_order() -> None:
    tried = []

    @brim.maximize("a", "b", strategy="halving", remember="none")
    def function(a: int, b: int) -> tuple[int, int]:
        tried.append((a, b))
        check(a * b, 2)
        return a, b

    assert function(4, 4) == (1, 2)
    assert tried == [(4, 4), (2, 4), (1, 4), (1, 2)]


def test_a_group_of_names_shrinks_together() -> None:
    tried = []

    @brim.maximize(("height", "width"), "depth", strategy="halving", remember="none")
    def function(height: int, width: int, depth: int = 3) -> tuple[int, int, int]:
        tried.append((height, width, depth))
        check(height * width, 40)
        return height, width, depth

    assert function(16, 32) == (4, 8, 3)
    assert tried == [(16, 32, 3), (8, 16, 3), (4, 8, 3)]


def test_multiples_of_q_for_all_or_by_name() -> None:
    tried = []

    def function(a: int, b: int) -> tuple[int, int]:
        tried.append((a, b))
        check(a * b, 4000)
        return a, b

    both = brim.maximize("a", "b", q=16, remember="none")(function)
    a, b = both(1000, 50)
    assert b == 50
    assert a % 16 == 0
    tried.clear()
    one = brim.maximize("a", "b", q={"a": 16}, remember="none")(function)
    a, b = one(1000, 4001)
    assert all(values[0] <= 16 or values[0] % 16 == 0 for values in tried[1:])


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([1, 7, 32]))
def test_finds_a_size_that_fits_or_says_that_none_does(wanted: int, most: int, q: int) -> None:
    tried: list[int] = []

    @brim.maximize("size", q=q, remember="none")
    def function(size: int) -> int:
        tried.append(size)
        return check(size, most)

    assert 1 <= function(wanted) <= min(wanted, most)
    assert tried[0] == wanted
    assert sorted(set(tried), reverse=True) == tried
    assert len(tried) <= 2 + math.log2(wanted + 1) * 2


# ---------------------------------------------------------------- what can be decorated


class Model:
    def __init__(self, most: int) -> None:
        self.most = most

    @brim.maximize("size", remember="none", strategy="halving")
    def method(self, size: int = 16) -> tuple[Model, int]:
        return self, check(size, self.most)

    @classmethod
    @brim.maximize("size", remember="none", strategy="halving")
    def of_class(cls, size: int = 16) -> tuple[type[Model], int]:
        return cls, check(size, 5)

    @staticmethod
    @brim.maximize("size", remember="none", strategy="halving")
    def static(size: int = 16) -> int:
        return check(size, 5)


def test_methods_of_all_kinds() -> None:
    model = Model(9)
    assert model.method() == (model, 8)
    assert model.method(4) == (model, 4)
    assert model.method(size=32) == (model, 8)
    assert Model.method(model, 16) == (model, 8)
    bound = model.method
    assert bound(16) == (model, 8)
    assert Model.of_class() == (Model, 4)
    assert model.of_class(size=2) == (Model, 2)
    assert Model.static() == 4
    assert model.static(3) == 3


def test_callables_partials_lambdas_and_builtins() -> None:
    class Work:
        def __call__(self, size: int) -> int:
            return check(size, 5)

    assert brim.maximize("size", strategy="halving")(Work())(16) == 4
    assert brim.maximize("size", strategy="halving")(lambda size: check(size, 5))(16) == 4
    partial = functools.partial(check, most=5)
    assert brim.maximize("size", strategy="halving")(partial)(16) == 4
    partial = functools.partial(check, size=16)
    assert brim.maximize("size", strategy="halving", remember="none")(partial)(most=5) == 4
    assert brim.maximize("k")(math.comb)(5, 2) == 10


def test_without_parentheses_it_adapts_batch_size() -> None:
    @brim.maximize
    def function(batch_size: int) -> int:
        return check(batch_size, 5)

    assert 1 <= function(100) <= 5


def test_looks_like_the_function() -> None:
    assert documented.__name__ == "documented"
    assert documented.__qualname__ == "documented"
    assert documented.__module__ == __name__
    assert documented.__doc__ == "Say how large a batch may be."
    assert documented.__annotations__["return"] == "int"
    assert (
        str(inspect.signature(documented)) == "(x: 'torch.Tensor', batch_size: 'int' = 4) -> 'int'"
    )
    assert inspect.unwrap(documented) is documented.__wrapped__
    assert callable(documented)
    assert repr(documented) == "<brim.maximize(batch_size) of documented>"
    assert isinstance(documented, brim.AdaptiveFunction)


def test_has_attributes_of_its_own_and_those_of_the_function() -> None:
    def function(size: int) -> int:
        return size

    function.tag = "mine"  # type: ignore[attr-defined]
    adaptive: Any = brim.maximize("size")(function)
    assert adaptive.tag == "mine"
    adaptive.note = 3
    assert adaptive.note == 3
    assert not hasattr(function, "note")


def test_is_pickled_by_name_as_a_function_is() -> None:
    assert pickle.loads(pickle.dumps(documented)) is documented
    assert copy.copy(documented) is documented
    assert copy.deepcopy(documented) is documented


def test_weak_references_and_garbage() -> None:
    def make() -> Callable[[int], int]:
        return brim.maximize("size")(lambda size: size)

    adaptive = make()
    reference = weakref.ref(adaptive)
    assert reference() is adaptive
    del adaptive
    assert reference() is None


@pytest.mark.parametrize("kind", ["method", "observer", "default", "hasher"])
def test_a_cycle_through_it_is_collected(kind: str) -> None:
    class Owner:
        function: Any

        def method(self, size: int = 4) -> int:
            return size

    owner = Owner()
    if kind == "method":
        owner.function = brim.maximize("size")(owner.method)
    elif kind == "observer":
        owner.function = brim.maximize("size", observer=lambda _, held=owner: None)(
            lambda size: size
        )
    elif kind == "hasher":
        owner.function = brim.maximize("size", hasher=lambda _, held=owner: 3)(lambda size: size)
    else:
        owner.function = brim.maximize("size")(lambda size, other=owner: size)
    assert owner.function(3) == 3
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None


def test_references_are_balanced() -> None:
    class Item:
        pass

    @brim.maximize("size", remember="none")
    def function(item: Item, size: int | None = None, **extra: Item) -> Item:
        assert size is not None
        check(size, 3)
        return item

    infer = brim.maximize("size", infer="items", remember="none")(
        lambda items, size=None: check(size, 3)
    )
    item, extra = Item(), Item()
    references = weakref.ref(item), weakref.ref(extra)
    for size in (2, 50):
        for _ in range(20):
            assert function(item, size, extra=extra) is item
            assert function(item=item, size=size) is item
            with pytest.raises(ValueError, match="size was not passed"):
                function(item)
    items = [item] * 10
    infer(items)
    del item, extra, items
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# ---------------------------------------------------------------- the record


def test_record_returns_the_result_and_the_tries(held: int) -> None:
    @brim.maximize("size", strategy="halving", remember="none")
    def function(size: int) -> int:
        base, growing = (torch.empty(bytes_, dtype=torch.uint8) for bytes_ in (1000, size))
        return len(base) * 0 + len(growing)

    with brim.budget(held + 3000, device="cpu"):
        result, tries = function.record(5000)
    assert result == 1250
    assert [t.size for t in tries] == [5000, 2500, 1250]
    assert [t.fitted for t in tries] == [False, False, True]
    assert [t.outcome for t in tries[1:]] == [brim.OomKind.host_memory, brim.OomKind.none]
    assert [t.requested for t in tries] == [5000, 2500, None]
    assert [t.peak for t in tries] == [1000, 1000, 2250]
    assert {t.held for t in tries} == {held}
    assert {t.available for t in tries} == {3000}
    assert all(t.seconds > 0 for t in tries)
    assert not any(t.repeats for t in tries)
    assert repr(tries[0]).startswith("Attempt(size=5000, out of host memory, held ")


def test_record_of_a_bound_method_and_of_several_parameters() -> None:
    model = Model(9)
    (owner, size), tries = Model.method.record(model, 16)
    assert owner is model
    assert [t.size for t in tries] == [16, size]

    @brim.maximize("a", "b")
    def function(a: int, b: int) -> int:
        return a * b

    result, tries = function.record(3, b=4)
    assert result == 12
    assert tries[0].values == (3, 4)


# ---------------------------------------------------------------- threads and nesting


def test_eight_threads_call_one_function() -> None:
    @brim.maximize("size")
    def function(x: torch.Tensor, size: int) -> int:
        return check(size, len(x))

    wrong: list[object] = []

    def work(number: int) -> None:
        x = torch.zeros(3 + number % 4)
        try:
            for _ in range(150):
                size = function(x, 64)
                if not 1 <= size <= len(x):
                    wrong.append((number, size))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_when_an_inner_call_gives_up_the_outer_one_shrinks() -> None:
    tried = []

    @brim.maximize("inner", strategy="halving", remember="none")
    def inside(outer: int, inner: int = 4) -> int:
        tried.append((outer, inner))
        return check(outer * inner, 6)

    @brim.maximize("outer", strategy="halving", remember="none")
    def outside(outer: int = 8) -> int:
        return inside(outer)

    assert outside() == 4
    assert tried == [(8, 4), (8, 2), (8, 1), (4, 4), (4, 2), (4, 1)]


def test_a_function_may_call_itself() -> None:
    @brim.maximize("size", strategy="halving")
    def function(depth: int, size: int = 8) -> int:
        return (
            check(size, depth + 1) if depth == 0 else function(depth - 1) + check(size, depth + 1)
        )

    assert function(3) >= 4
