"""`pytest --brim-oom`: users' tests while allocations fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import brim

pytest_plugins = ["pytester"]

PLUGIN = Path(__file__).parents[2] / "python"

TESTS = """
import unittest

import pytest
import torch

kept = []

def test_ends_cleanly():
    first = torch.empty(10)
    assert torch.empty(10).sub(first).numel() == 10

def test_hides_the_error():
    try:
        torch.empty(10)
        torch.empty(10)
    except torch.OutOfMemoryError:
        raise ValueError("something else")

def test_goes_on():
    try:
        torch.empty(10)
    except torch.OutOfMemoryError:
        assert torch.empty(5).numel() == 5

def test_leaves_bytes():
    first = torch.empty(10)
    try:
        torch.empty(10)
    except torch.OutOfMemoryError:
        kept.append(first)

@pytest.fixture
def log(tmp_path):
    torch.empty(3)  # fixtures are not the test's
    return []

def test_has_new_fixtures_in_each_run(log):
    log.append(0)
    torch.empty(10)
    torch.empty(10)
    assert len(log) == 1

class Suite(unittest.TestCase):
    def test_of_unittest(self):
        torch.empty(10)

def test_allocates_nothing():
    pass

@pytest.mark.skip
def test_skipped():
    torch.empty(10)
"""


@pytest.fixture
def users(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an installed brim brings it, too
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.syspath_prepend(str(PLUGIN))
    pytester.makepyfile(test_users=TESTS)
    return pytester


def outcome(users: pytest.Pytester, *arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines, in this process: importing torch anew takes seconds."""
    done = users.runpytest_inprocess("-p", "pytest_brim", "-p", "no:cacheprovider", *arguments)
    return int(done.ret), done.outlines


def test_each_allocation_fails_in_turn(users: pytest.Pytester) -> None:
    status, lines = outcome(users, "--brim-oom=all")
    assert status == 1
    assert any(line.startswith("FAILED test_users.py::test_hides_the_error") for line in lines)
    assert "allocation 1 of the test failed" in lines
    assert "1 failed, 6 passed, 1 skipped" in lines[-1]
    # 3 of the first test, 1 of the one that fails, 1, 2, 2, 1
    assert "brim: 10 allocations failed on purpose, in 6 tests" in lines


def test_one_allocation_fails(users: pytest.Pytester) -> None:
    status, lines = outcome(users, "--brim-oom=2", "-k", "not hides")
    assert status == 0
    assert "brim: 3 allocations failed on purpose, in 3 tests" in lines
    status, lines = outcome(users, "--brim-oom=2", "-k", "hides")
    assert status == 1
    assert "allocation 2 of the test failed" in lines


def test_failures_that_last(users: pytest.Pytester) -> None:
    status, lines = outcome(users, "--brim-oom=1", "--brim-oom-for=ever", "-k", "goes_on")
    assert status == 0  # what it does then fails as well, and so it ends cleanly
    assert "brim: 2 allocations failed on purpose, in 1 tests" in lines


def test_bytes_that_are_left_are_a_failure_if_asked_for(users: pytest.Pytester) -> None:
    status, lines = outcome(users, "--brim-oom=all", "--brim-oom-leaks", "-k", "not hides")
    assert status == 1
    assert "left 40 bytes" in lines
    assert "allocation 2 of the test failed" in lines
    assert "1 failed, 5 passed, 1 skipped, 1 deselected" in lines[-1]


def test_only_on_one_rank(users: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, failures in (("1", 1), ("0", 0)):
        monkeypatch.setenv("RANK", rank)
        _, lines = outcome(users, "--brim-oom=1", "--brim-oom-rank=1", "-k", "ends")
        told = f"brim: {failures} allocations failed on purpose, in {failures} tests"
        assert told in lines


def test_a_plain_failure_is_reported_as_it_is(users: pytest.Pytester) -> None:
    users.makepyfile(test_users="import torch\ndef test(): raise torch.OutOfMemoryError('real')")
    status, lines = outcome(users, "--brim-oom=all", "--brim-oom-leaks", "-k", "test")
    assert status == 1
    assert any("OutOfMemoryError: real" in line for line in lines)


def test_a_test_that_skips_itself_without_memory_goes_on_to_the_next(
    users: pytest.Pytester,
) -> None:
    users.makepyfile(
        test_users="""
import pytest, torch

def test_skips():
    try:
        torch.empty(10)
    except torch.OutOfMemoryError:
        pytest.skip("no room")
    try:
        torch.empty(10)
    except torch.OutOfMemoryError:
        assert False
"""
    )
    status, lines = outcome(users, "--brim-oom=all")
    assert status == 1
    assert "allocation 2 of the test failed" in lines


@pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="needs pytest-xdist")
@pytest.mark.slow
def test_processes_of_xdist_are_counted_together(
    users: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # First the core that is built: the plugin's folder has a brim without one.
    built = str(Path(brim._C.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([built, str(PLUGIN)]))
    plugins = ("-p", "pytest_brim", "-p", "xdist", "-p", "no:cacheprovider")
    done = users.runpytest_subprocess(*plugins, "-n2", "--brim-oom=all", "-k", "not hides")
    status, lines = int(done.ret), done.outlines
    assert status == 0
    assert "brim: 9 allocations failed on purpose, in 5 tests" in lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--brim-oom=0", "--brim-oom must be an integer from 1 or `all`, got '0'"),
        ("--brim-oom=-1", "--brim-oom must be an integer from 1 or `all`, got '-1'"),
        ("--brim-oom=often", "--brim-oom must be an integer from 1 or `all`, got 'often'"),
        ("--brim-oom=1.5", "--brim-oom must be an integer from 1 or `all`, got '1.5'"),
        (f"--brim-oom={2**63}", "--brim-oom must be an integer from 1 or `all`"),
        ("--brim-oom=1 --brim-oom-for=0", "--brim-oom-for must be an integer from 1 or `ever`"),
        ("--brim-oom=1 --brim-oom-rank=-1", "--brim-oom-rank must be an integer from 0, got '-1'"),
        ("--brim-oom=all --brim-oom-rank=0", "--brim-oom=all cannot be used with --brim-oom-rank"),
        ("--brim-oom=1 --brim-oom-device=mps", "--brim-oom-device must be cpu or cuda, got 'mps'"),
        ("--brim-oom-for=3", "--brim-oom-for does nothing without --brim-oom=N"),
        ("--brim-oom-rank=0", "--brim-oom-rank does nothing without --brim-oom=N"),
        ("--brim-oom-leaks", "--brim-oom-leaks does nothing without --brim-oom=N"),
    ],
)
def test_wrong_options_are_named(
    arguments: str, told: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    config = pytester.parseconfig("-p", "pytest_brim", *arguments.split())
    with pytest.raises(pytest.UsageError) as caught:
        config._do_configure()
    assert str(caught.value).startswith(told)


def test_without_the_option_nothing_is_imported() -> None:
    code = "import pytest_brim, sys; print({'torch', 'brim', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_the_package_registers_it() -> None:
    text = (PLUGIN.parent / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nbrim = "pytest_brim"' in text
    assert '"python/pytest_brim"' in text
