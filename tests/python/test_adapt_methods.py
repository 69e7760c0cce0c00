"""Adaptive functions in classes, and how they are pickled: the same for all kinds of calls."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import marshal
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import brim

X = torch.zeros(8, 2)
# What the function takes besides a receiver, which size that is, and what a caller passes.
KINDS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "maximize": ("x, size=8", "size", (X,)),
    "batch": ("size, x", "size", (X,)),
    "range": ("start, end, x", "end - start", (0, 8, X)),
    "chunked": ("chunk, start, end", "end - start", (X,)),
}
calls: list[tuple[object, int]] = []


def work(receiver: object, size: int) -> None:
    """Fail as an allocator would, above 4."""
    calls.append((receiver, size))
    if size > 4:
        raise torch.OutOfMemoryError("CPU out of memory.")


def decorator(kind: str, **options: Any) -> Any:
    if kind == "maximize":
        return brim.maximize("size", strategy="halving", **options)
    return getattr(brim, kind)(8, strategy="halving", **options)


def function(kind: str, name: str, receiver: str = "", **namespace: Any) -> Any:
    parameters, size, _ = KINDS[kind]
    first = f"{receiver}, " if receiver else ""
    namespace = {"work": work, "__name__": __name__, **namespace}
    exec(f"def {name}({first}{parameters}): work({receiver or None}, {size})", namespace)
    return namespace[name]


class Model:
    """Equal copies, so that a pickled one can be recognised."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return 1


for _kind in KINDS:
    _decorate = decorator(_kind)
    _members = {
        "method": _decorate(function(_kind, "method", "self")),
        "odd": _decorate(function(_kind, "odd", "this")),
        "class_above": classmethod(_decorate(function(_kind, "class_above", "cls"))),
        "class_below": _decorate(classmethod(function(_kind, "class_below", "cls"))),
        "static_above": staticmethod(_decorate(function(_kind, "static_above"))),
        "static_below": _decorate(staticmethod(function(_kind, "static_below"))),
        "__module__": __name__,
    }
    globals()[f"Model_{_kind}"] = type(f"Model_{_kind}", (Model,), _members)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, held: int) -> Iterator[str]:
    # A size that failed is tried again when more is free, and on a machine that always varies.
    with brim.budget(held + 2**26, device="cpu"):
        yield request.param
    for name in dir(globals()[f"Model_{request.param}"]):
        if isinstance(found := getattr(model_of(request.param), name), brim.AdaptiveFunction):
            found.clear()


def model_of(kind: str) -> Any:
    return globals()[f"Model_{kind}"]


def check_call(call: Any, receiver: object, *args: Any) -> None:
    """It works, the function has its receiver in every try, and sizes are those of a call."""
    calls.clear()
    call(*args)
    assert calls
    assert all(seen is receiver for seen, _ in calls)
    assert calls[-1][1] <= 4


def sizes(call: Any, *args: Any) -> list[int]:
    return [attempt.size for attempt in call.record(*args)[1]]


def test_a_method_has_its_instance_however_it_is_called(kind: str) -> None:
    cls, args = model_of(kind), KINDS[kind][2]
    model = cls()
    bound = model.method
    check_call(model.method, model, *args)
    check_call(bound, model, *args)
    check_call(cls.method, model, model, *args)
    check_call(types.MethodType(cls.method, model), model, *args)
    derived = type("Derived", (cls,), {})()
    check_call(super(type(derived), derived).method, derived, *args)
    check_call(model.odd, model, *args)
    assert (
        inspect.signature(bound).parameters.keys() < inspect.signature(cls.method).parameters.keys()
    )


def test_record_and_forget_of_a_bound_method_are_those_of_its_calls(kind: str) -> None:
    cls, args = model_of(kind), KINDS[kind][2]
    model = cls()
    first = sizes(model.method, *args)
    assert first[:2] == [8, 4]
    assert sizes(model.method, *args)[0] == 4
    assert sizes(cls.method, model, *args)[0] == 4, "the same call"
    model.method.forget(*args)
    assert sizes(model.method, *args) == first
    cls.method.forget(model, *args)
    assert sizes(model.method, *args) == first
    model.method.clear()
    assert sizes(model.method, *args) == first


@pytest.mark.parametrize("name", ["class_above", "class_below"])
def test_class_methods_in_both_orders(kind: str, name: str) -> None:
    cls, args = model_of(kind), KINDS[kind][2]
    derived = type("Derived", (cls,), {})
    # From Python 3.13 on, `classmethod` binds its function itself, so that other methods than
    # calls are those of what it was given, as with types.MethodType.
    is_method = name == "class_above" and sys.version_info >= (3, 13)
    for owner in (cls, derived):
        check_call(getattr(owner, name), owner, *args)
        check_call(getattr(owner(), name), owner, *args)
        given = (owner, *args) if is_method else args
        assert sizes(getattr(owner, name), *given)[0] == 4
        getattr(owner, name).forget(*given)
        assert sizes(getattr(owner, name), *given)[0] == 8


def test_class_methods_as_python_3_13_binds_them(kind: str) -> None:
    cls, args = model_of(kind), KINDS[kind][2]
    # There `classmethod` asks the function for nothing: it makes a method of it.
    check_call(types.MethodType(vars(cls)["class_above"].__func__, cls), cls, *args)


@pytest.mark.parametrize("name", ["static_above", "static_below"])
def test_static_methods_in_both_orders(kind: str, name: str) -> None:
    cls, args = model_of(kind), KINDS[kind][2]
    check_call(getattr(cls, name), None, *args)
    check_call(getattr(cls(), name), None, *args)
    assert sizes(getattr(cls, name), *args)[0] == 4


def test_bound_methods_compare_as_methods_do(kind: str) -> None:
    cls = model_of(kind)
    model, other = cls(), cls()
    assert model.method == model.method
    assert hash(model.method) == hash(model.method)
    assert model.method != other.method
    assert model.method != model.odd
    assert model.method.__self__ is model
    assert model.method.__func__ is cls.method
    assert weakref.WeakMethod(model.method)() == model.method
    with pytest.raises(AttributeError):
        _ = cls.method.__self__


@pytest.mark.parametrize("name", ["method", "odd", "class_above", "class_below"])
def test_bound_methods_are_pickled(kind: str, name: str) -> None:
    model = model_of(kind)()
    other = pickle.loads(pickle.dumps(getattr(model, name)))
    calls.clear()
    other(*KINDS[kind][2])
    assert calls[0][0] == (model if name in ("method", "odd") else type(model))


# ---------------------------------------------------------------- by value


def remake(code: bytes, name: str) -> types.FunctionType:
    made = types.FunctionType(marshal.loads(code), {"work": work, "__builtins__": __builtins__})
    made.__qualname__, made.__module__ = name, "__main__"
    return made


def set_function(made: types.FunctionType, state: Any) -> None:
    made.__defaults__ = state[0]
    made.__globals__.update(state[1])


class CloudPickler(pickle.Pickler):
    """Takes along functions that cannot be imported, as cloudpickle's does."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and obj.__module__ == "__main__":
            wanted = {
                name: obj.__globals__[name]
                for name in obj.__code__.co_names
                if name in obj.__globals__
            }
            wanted.pop("work", None)
            made = (marshal.dumps(obj.__code__), obj.__qualname__)
            return remake, made, (obj.__defaults__, wanted), None, None, set_function
        return NotImplemented

    def dump(self, obj: Any) -> None:
        super().dump(obj)


def test_a_function_of_main_is_pickled_by_value_for_cloudpickle(kind: str) -> None:
    adaptive = decorator(kind)(function(kind, "adaptive", __name__="__main__"))
    # A function may refer to itself by its global name.
    adaptive.__wrapped__.__globals__["again"] = adaptive
    file = io.BytesIO()
    CloudPickler(file).dump(adaptive)
    other = pickle.loads(file.getvalue())
    assert isinstance(other, brim.AdaptiveFunction)
    assert other is not adaptive
    args = KINDS[kind][2]
    check_call(other, None, *args)
    assert sizes(other, *args)[0] == 4
    assert sizes(adaptive, *args)[0] == 8, "each has a memory of its own"
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(adaptive)  # by name, and this __main__ has none of it


class Work:
    def __call__(self, size: int) -> int:
        return size


@pytest.mark.parametrize("thing", [Work(), functools.partial(Work())], ids=["object", "partial"])
def test_callable_objects_and_partials_are_pickled_and_copied(thing: Any) -> None:
    adaptive = brim.maximize("size")(thing)
    for other in (pickle.loads(pickle.dumps(adaptive)), copy.deepcopy(adaptive)):
        assert isinstance(other, brim.AdaptiveFunction)
        assert other(8) == 8


def test_a_function_that_refers_to_itself_is_pickled_by_value() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "brim": brim}
    exec("def countdown(size, n):\n    return countdown(n - 1) + 1 if n else 0", namespace)
    namespace["countdown"] = brim.batch(4)(namespace["countdown"])
    file = io.BytesIO()
    CloudPickler(file).dump(namespace["countdown"])
    assert pickle.loads(file.getvalue())(3) == 3


SCRIPT = """
import sys, cloudpickle, torch, brim
class Model:
    @brim.batch(8, strategy="halving", observer=lambda attempt: None)
    def method(self, size, x):
        if size > limit:
            raise torch.OutOfMemoryError("CPU out of memory.")
        return size
limit = 4
@brim.maximize("size", strategy="halving")
def work(x, size=8):
    return Model().method(x) + size
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump((work, Model, Model().method), file)
"""


@pytest.mark.slow
def test_cloudpickle_itself(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    script, file = tmp_path / "script.py", tmp_path / "pickled"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, str(script), str(file)], check=True)
    work, model, method = pickle.loads(file.read_bytes())
    assert work(X) == 12
    assert model().method(X) == 4
    assert method(X) == 4
