"""What adaptive calls remember, by which key, and across processes."""

from __future__ import annotations

import os
import subprocess
import sys
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
    with pytest.raises(TypeError, match="keys names x, whose value"):
        function({1: 2})  # only asked for when something is to be remembered


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


def test_a_memory_holds_so_many_keys() -> None:
    memory = brim.SizeMemory(capacity=2)
    assert len(memory) == 0
    memory.clear()
    for wrong in (0, -1):
        with pytest.raises((ValueError, TypeError)):
            brim.SizeMemory(capacity=wrong)


# ---------------------------------------------------------------- across processes

SCRIPT = """
import sys, torch, brim
@brim.maximize("size", strategy="halving", keys=["x", "name"], {options})
def function(x, name, size=64):
    if size > 5:
        raise torch.OutOfMemoryError("CPU out of memory.")
print(function.record(torch.zeros(3, 4), name="some name")[1][0].size)
"""


def run_script(options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", SCRIPT.format(options=options)],
        env={**os.environ, **environment, "PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_another_process_knows_what_this_one_learned(tmp_path: Path) -> None:
    options = f"persist={str(tmp_path)!r}"
    assert run_script(options).stdout == "64\n"
    assert run_script(options).stdout == "4\n"
    (file,) = tmp_path.rglob("*.brim-sizes")
    assert file.suffix == ".brim-sizes"
    file.write_bytes(b"\x80\x04not ours")
    damaged = run_script(options)
    assert damaged.stdout == "64\n"
    assert f"ignored {file}" in damaged.stderr
    assert "UserWarning" in damaged.stderr


def test_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert brim.SizeMemory.default_directory() == tmp_path / "brim" / "sizes"
    function = make(persist=True)
    function(X)
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
    (file,) = tmp_path.rglob("*.brim-sizes")
    file.write_text("rubbish")
    with pytest.warns(UserWarning, match="it is damaged"):
        assert first_size(make(persist=tmp_path), X) == 64
    assert first_size(make(persist=tmp_path), X) == 4, "and is replaced"


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
