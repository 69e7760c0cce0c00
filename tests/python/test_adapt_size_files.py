"""Sizes that adaptive calls keep in files, for other processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import brim

from .remembering import X, check, first_size, make

pytestmark = pytest.mark.usefixtures("steady_memory")


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
with brim.budget("64MiB", device="cpu"):  # as much is free in each process
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


def files_in(directory: Path) -> list[Path]:
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
    def fail_above(most: int, n: int) -> None:
        if n > most:
            raise RuntimeError("CUDA out of memory.")

    functions = (lambda n, m: fail_above(4, n), lambda n, m: fail_above(2, n))
    for function in [brim.maximize("m")(each) for each in functions]:
        adaptive = brim.maximize("n", persist=tmp_path)(functools.partial(function, m=1))
        assert adaptive.record(8)[1]
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


def test_nothing_is_lost_however_a_process_ends(tmp_path: Path) -> None:
    script = """
import multiprocessing, os, signal, sys, torch, brim
def learn(name):
    @brim.maximize("size", strategy="halving", persist=os.path.join(sys.argv[1], name))
    def function(x, size=8):
        if size > 5:
            raise torch.OutOfMemoryError("CPU out of memory.")
    for n in range(30):
        function(torch.zeros(n + 1))
ends = {"exit": sys.exit, "_exit": lambda: os._exit(0),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL)}
for name, end in ends.items():
    if (child := os.fork()) == 0:
        learn(name)
        end()
    os.waitpid(child, 0)
child = multiprocessing.get_context("fork").Process(target=learn, args=("multiprocessing",))
child.start()
child.join()
assert child.exitcode == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)
    for name in ("exit", "_exit", "killed", "multiprocessing"):
        assert len(list((tmp_path / name).rglob("*.brim-sizes"))) == 30, name


def test_clearing_one_function_keeps_the_files_of_another(tmp_path: Path) -> None:
    def another(size: int, x: Any) -> None:
        if size > 2:
            raise RuntimeError("CUDA out of memory.")

    one, two = make(persist=tmp_path), brim.batch(64, strategy="halving", persist=tmp_path)(another)
    one(X)
    two(X)
    assert len(list(tmp_path.rglob("*.brim-sizes"))) == 2
    one.clear()
    assert len(list(tmp_path.rglob("*.brim-sizes"))) == 1
