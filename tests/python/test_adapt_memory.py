"""What adaptive calls remember, by which key, and across processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import brim


def check(size: int, most: int) -> int:
    """Fail as an allocator would, above `most`."""
    if size > most:
        raise torch.OutOfMemoryError("CPU out of memory.")
    return size


def first_size(function: Any, *args: Any, **kwargs: Any) -> int:
    """The size that a call tries first: what it remembers."""
    _, tries = function.record(*args, **kwargs)
    size: int = tries[0].size
    return size


def make(**options: Any) -> Any:
    @brim.maximize("size", strategy="halving", **options)
    def function(x: object, size: int = 64, *, mode: str = "a", other: object = None) -> int:
        return check(size, 5)

    return function


X = torch.zeros(3, 4)


@pytest.fixture(autouse=True)
def _what_is_available_does_not_change(held: int) -> Iterator[None]:
    # A size that failed is tried again when more is free, and on a machine that always varies.
    with brim.budget(held + 2**26, device="cpu"):
        yield


# ---------------------------------------------------------------- keys


def test_the_next_call_starts_where_the_last_one_ended() -> None:
    function = make()
    assert first_size(function, X) == 64
    assert first_size(function, X) == 4
    assert first_size(function, X + 1) == 4, "another tensor of the same shape"


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


def test_each_place_of_a_call_may_remember_by_itself() -> None:
    tried: list[int] = []

    @brim.batch(64, strategy="halving", remember="call_site")
    def function(size: int) -> None:
        tried.append(size)
        check(size, 5)

    def here() -> list[int]:
        tried.clear()
        function()
        return tried

    def there() -> list[int]:
        tried.clear()
        function()
        return tried

    assert here()[0] == 64
    assert here() == [4]
    assert there()[0] == 64
    assert there() == [4]
    assert here() == [4]


def test_nothing_is_remembered_if_so_wished() -> None:
    function = make(remember="none")
    assert [first_size(function, X) for _ in range(3)] == [64] * 3


def test_the_length_that_chunked_cuts_is_no_part_of_the_key() -> None:
    @brim.chunked(64, strategy="halving")
    def function(chunk: torch.Tensor, start: int, end: int) -> None:
        check(end - start, 5)

    assert first_size(function, torch.zeros(64, 2)) == 64
    assert first_size(function, torch.zeros(100, 2)) == 4
    assert first_size(function, torch.zeros(100, 3)) == 64


# ---------------------------------------------------------------- forgetting


def test_forget_drops_one_kind_of_call_and_clear_all() -> None:
    function = make()
    y = torch.zeros(7)
    for _ in range(2):
        function(X)
        function(y)
        assert function.forget(X) is None
        assert first_size(function, y) == 4
        assert first_size(function, X) == 64
        assert function.clear() is None
        assert first_size(function, y) == 64
        function.clear()


def test_forget_of_calls_by_place_drops_all() -> None:
    function = make(remember="call_site")
    sizes = []
    for _ in range(2):
        sizes.append(first_size(function, X))
        function.forget(X)
    assert sizes == [64, 64]


def test_forget_and_clear_without_a_memory_do_nothing() -> None:
    function = make(remember="none")
    function.forget(X)
    function.clear()


def test_thousands_of_shapes_in_turn_are_remembered() -> None:
    function = make()
    shapes = [torch.zeros(1).expand(n + 1) for n in range(1000)]
    assert [first_size(function, x) for x in shapes] == [64] * 1000
    assert [first_size(function, x) for x in shapes] == [4] * 1000


def test_the_kind_of_call_that_was_not_used_for_longest_is_forgotten_first() -> None:
    function = make(capacity=2)
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    for tensor in (x, y, x, z):
        function(tensor)
    assert first_size(function, x) == 4
    assert first_size(function, y) == 64
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="capacity must be"):
            make(capacity=wrong)
        with pytest.raises(error, match="capacity must be"):
            brim.run_batch(4, lambda size: size, capacity=wrong)  # type: ignore[arg-type]


def test_a_memory_holds_so_many_keys() -> None:
    memory = brim.SizeMemory(capacity=2)
    assert len(memory) == 0
    memory.clear()
    for wrong in (0, -1):
        with pytest.raises((ValueError, TypeError)):
            brim.SizeMemory(capacity=wrong)


# ---------------------------------------------------------------- across processes

SCRIPT = """
import functools, sys, torch, brim
def work(size, x, names):
    if size > 5 and x in {"a", "b", "c", "d"}:
        raise torch.OutOfMemoryError("CPU out of memory.")
class Work:
    def __call__(self, size): return work(size, "a", None)
persist = sys.argv[1]
@brim.maximize("size", strategy="halving", keys=["x", "name"], persist=persist)
def function(x, name, size=64):
    work(size, "b", None)
sizes = [function.record(torch.zeros(3, 4), name="some name")[1][0].size]
for callable in (functools.partial(work, x="b", names={"e", "f", "g", "h"}), Work()):
    adaptive = brim.batch(64, strategy="halving", persist=persist)(callable)
    sizes.append(adaptive.record()[1][0].size)
print(*sizes)
"""


def test_another_process_knows_what_this_one_learned(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for expected in ("64 64 64\n", "4 4 4\n"):
        run = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "sizes")],
            env={**os.environ, "PYTHONHASHSEED": "random"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == expected
    assert len(list(tmp_path.rglob("*.brim-sizes"))) == 3


def test_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert brim.SizeMemory.default_directory() == tmp_path / "brim" / "sizes"
    function = make(persist=True)
    function(X)
    brim.SizeMemory.flush()
    assert len(list((tmp_path / "brim" / "sizes").rglob("*.brim-sizes"))) == 1
    function.forget(X)
    assert not list((tmp_path / "brim" / "sizes").rglob("*.brim-sizes"))


def test_persistence_within_one_process(tmp_path: Path) -> None:
    function = make(persist=tmp_path / "deep" / "er")
    assert first_size(function, X) == 64
    again = make(persist=tmp_path / "deep" / "er")
    assert first_size(again, X) == 4
    again.clear()
    assert not list((tmp_path / "deep" / "er").rglob("*.brim-sizes"))


def test_a_damaged_file_is_a_warning(tmp_path: Path) -> None:
    function = make(persist=tmp_path)
    function(X)
    brim.SizeMemory.flush()
    (file,) = tmp_path.rglob("*.brim-sizes")
    file.write_text("rubbish")
    with pytest.warns(UserWarning, match="it is damaged"):
        assert first_size(make(persist=tmp_path), X) == 64
    assert first_size(make(persist=tmp_path), X) == 4, "and is replaced"


def files_in(directory: Path) -> list[Path]:
    brim.SizeMemory.flush()
    return list(directory.rglob("*.brim-sizes"))


def test_only_news_is_written(tmp_path: Path) -> None:
    @brim.maximize("size", strategy="halving", persist=tmp_path)
    def function(x: torch.Tensor, size: int = 8) -> int:
        return check(size, 8 if len(x) < 100 else 5)

    for n in range(50):
        function(torch.zeros(n))
    assert not files_in(tmp_path), "what fits as it is need not be known"
    function(torch.zeros(100))
    (file,) = files_in(tmp_path)
    file.unlink()
    for _ in range(20):
        assert function(torch.zeros(100)) == 4
    assert not files_in(tmp_path), "the same again"


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(persist="~/sizes")(X)
    assert len(files_in(tmp_path / "sizes")) == 1


def test_a_relative_directory_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = make(persist="sizes")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    function(X)
    assert len(files_in(tmp_path / "sizes")) == 1


def test_no_home_directory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(UserWarning, match="nothing is kept. .*neither XDG_CACHE_HOME nor HOME"):
        function = make(persist=True)
    assert first_size(function, X) == 64
    assert first_size(function, X) == 4, "this process remembers"


def test_a_directory_that_cannot_be_written_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    function = make(persist=tmp_path / "file")
    with pytest.warns(UserWarning, match=r"sizes could not be kept in .*: Not a directory"):
        function(X)
    function.clear()
    function(X)
    assert first_size(function, X) == 4, "this process remembers, and says it once"


def defined(source: str, file: str = "", **names: Any) -> Any:
    """A function as a script (with a file) or a notebook (without) would have it."""
    namespace = {"__name__": "__main__", "check": check, **names}
    if file:
        namespace["__file__"] = file
    unique = file or f"/tmp/ipykernel_{os.urandom(4).hex()}/cell.py"
    exec(compile(source, unique, "exec"), namespace)
    return namespace["function"]


PLAIN = "def function(size, x):\n    return check(size, {most})"
INNER = "def function(size, x):\n    return [check(size, {most}) for _ in range(1)]"
DEFAULT = "def function(size, x, most={most}):\n    return check(size, most)"
CLOSURE = """
def outer(most):
    def function(size, x):
        return check(size, most)
    return function
function = outer({most})
"""
PARTIAL = """
import functools, torch
def work(size, x, y, most): return check(size, most)
function = functools.partial(work, y=torch.rand(9), most={most})
"""
OBJECT = """
class Work:
    def __init__(self): self.other = object()
    def __call__(self, size, x): return check(size, {most})
function = Work()
"""


@pytest.mark.parametrize("file", ["", "/somewhere/script.py"], ids=["notebook", "script"])
@pytest.mark.parametrize(
    "source",
    [PLAIN, INNER, DEFAULT, CLOSURE, PARTIAL, OBJECT],
    ids=["plain", "inner", "default", "closure", "partial", "object"],
)
def test_a_function_is_known_again_until_a_constant_is_edited(
    source: str, file: str, tmp_path: Path
) -> None:
    def first(most: int) -> int:
        adaptive = brim.batch(64, strategy="halving", persist=tmp_path)(
            defined(source.format(most=most), file)
        )
        return first_size(adaptive, X)

    assert first(5) == 64
    assert first(5) == 4
    assert first(17) == 64, "a constant was edited"
    assert first(17) == 16
    assert first(5) == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_partials_of_two_adaptive_functions_are_two(tmp_path: Path) -> None:
    inner = [brim.maximize("n")(function) for function in (lambda n: n, lambda n: n + 1)]
    for function in inner:
        with brim.testing.inject_oom(at=1):
            adaptive = brim.maximize("n", persist=tmp_path)(functools.partial(function))
            adaptive.record(8)
    brim.SizeMemory.flush()
    assert len(list(tmp_path.iterdir())) == 2


def test_run_batch_keeps_sizes_across_processes_too(tmp_path: Path) -> None:
    def work(size: int, most: int) -> None:
        tried.append(size)
        check(size, most)

    for most in (5, 17):  # two partials of one function are two
        sizes = []
        for _ in range(2):
            tried: list[int] = []
            partial = functools.partial(work, most=most)
            brim.run_batch(64, partial, strategy="halving", persist=tmp_path)
            sizes.append(tried[0])
        assert sizes == [64, tried[-1]]
    assert len(files_in(tmp_path)) == 2


def test_a_list_that_a_function_fills_is_no_part_of_it(tmp_path: Path) -> None:
    tried: list[int] = []
    results: dict[int, int] = {}

    def work(size: int, results: dict[int, int]) -> None:
        tried.append(size)
        results[len(results)] = check(size, 5)

    for _ in range(2):
        partial = functools.partial(work, results=results)
        brim.run_batch(64, partial, strategy="halving", persist=tmp_path)
    assert tried == [64, 32, 16, 8, 4, 4]


def test_equal_functions_of_two_scripts_are_two(tmp_path: Path) -> None:
    decorate = brim.batch(64, strategy="halving", persist=tmp_path)
    source = PLAIN.format(most=5)
    assert first_size(decorate(defined(source, "/a/script.py")), X) == 64
    assert first_size(decorate(defined(source, "/b/script.py")), X) == 64


def test_nothing_is_lost_when_a_process_ends(tmp_path: Path) -> None:
    script = """
import multiprocessing, os, sys, torch, brim
def learn(name):
    @brim.maximize("size", strategy="halving", persist=os.path.join(sys.argv[1], name))
    def function(x, size=8):
        if size > 5:
            raise torch.OutOfMemoryError("CPU out of memory.")
    # The first is written at once, those that follow within a second are not.
    for n in range(30):
        function(torch.zeros(n + 1))
learn("exit")
if (child := os.fork()) == 0:
    learn("fork")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
child = multiprocessing.get_context("fork").Process(target=learn, args=("multiprocessing",))
child.start()
child.join()
assert child.exitcode == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)
    for name in ("exit", "fork", "multiprocessing"):
        assert len(list((tmp_path / name).rglob("*.brim-sizes"))) == 30, name


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
    assert first(b=other, a=X) == 4


def test_clearing_one_function_keeps_the_files_of_another(tmp_path: Path) -> None:
    def another(size: int, x: Any) -> None:
        if size > 2:
            raise RuntimeError("CUDA out of memory.")

    one, two = make(persist=tmp_path), brim.batch(64, persist=tmp_path)(another)
    one(X)
    two(X)
    brim.SizeMemory.flush()
    assert len(list(tmp_path.rglob("*.brim-sizes"))) == 2
    one.clear()
    assert len(list(tmp_path.rglob("*.brim-sizes"))) == 1


def test_a_hasher_must_return_an_int() -> None:
    with pytest.raises(TypeError, match=r"hasher must return an int, got 'text'"):
        make(hasher=lambda arguments: "text")(X)


def test_run_batch_may_remember_by_the_place_of_the_call() -> None:
    sizes: list[int] = []

    def work(size: int) -> None:
        sizes.append(size)
        if size > 4:
            raise RuntimeError("CUDA out of memory.")

    for _ in range(2):
        brim.run_batch(64, work, remember="call_site")
    assert sizes[-1:] == [4]
    assert sizes.count(64) == 1, "the second time, this place knows"
    brim.run_batch(64, work, remember="call_site")
    assert sizes.count(64) == 2, "another place does not"
