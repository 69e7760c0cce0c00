"""Adaptive calls where the machine has less than they would take: refused, not killed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

import brim

from .patience import FOR_EVER

KILLED = -9

PREAMBLE = """
import resource, time, torch, brim
torch.set_num_threads(1)
MIB = 2**20
def rows(n):  # 1 MiB each, written to
    return torch.ones(n, 2**18).sum(1).shape[0]
def check(adaptive, *args, least, fails=True):
    result, attempts = adaptive.record(*args)
    assert all(a.outcome in (brim.OomKind.none, brim.OomKind.host_memory) for a in attempts)
    assert not fails or 1 <= sum(not a.fitted for a in attempts) <= 6, attempts
    assert max(a.size for a in attempts if a.fitted) >= least, attempts
    return attempts[-1].size
"""

Run = Callable[[str], None]

pytestmark = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes what it limits"
)


def _limited_cgroup(limit: int) -> pathlib.Path | None:
    """A new memory cgroup of so many bytes, where this process may make one."""
    files = {"memory": "memory.limit_in_bytes", "": "memory.max"}
    for controller, file in files.items():
        folder = pathlib.Path("/sys/fs/cgroup") / controller / f"brim_test_{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / file).write_text(str(limit))
        except OSError:
            folder.rmdir()
            continue
        return folder
    return None


def run(code: str, group: pathlib.Path | None = None, expected: int = 0) -> None:
    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=FOR_EVER,
        preexec_fn=join,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
        },  # calls on an accelerator have no such limit
    )
    assert done.returncode == expected, done.stderr


@pytest.fixture
def container() -> Iterator[pathlib.Path]:
    """A container of 700 MB, of which the interpreter with torch takes 200 to 400."""
    group = _limited_cgroup(700_000_000)
    if group is None:
        pytest.skip("cannot make a memory cgroup here")
    yield group
    group.rmdir()


def test_the_example_of_the_readme_without_a_budget_ends_well(container: pathlib.Path) -> None:
    run(
        """
        @brim.maximize("batch_size")
        def knn(x, y, batch_size, k=3):
            parts = x.split(batch_size)
            nearest = [torch.cdist(p, y).topk(k, dim=1, largest=False).indices for p in parts]
            return torch.cat(nearest)
        x, y = torch.rand(65536, 128), torch.rand(2048, 128)
        check(knn, x, y, len(x), least=1024)
        """,
        container,
    )


@pytest.mark.slow
def test_without_the_limit_it_is_killed(container: pathlib.Path) -> None:
    run("brim.batch(4096, host_limit=False)(rows)()", container, expected=KILLED)


@pytest.mark.slow
def test_every_kind_of_call_shrinks_instead(container: pathlib.Path) -> None:
    run(
        """
        def held_and_then_written(n):
            kept = [torch.empty(n * MIB, dtype=torch.uint8) for _ in range(8)]
            for tensor in kept:
                tensor.fill_(1)

        check(brim.maximize("n")(rows), 4096, least=150)
        check(brim.batch(4096)(rows), least=150)
        check(brim.maximize("n")(held_and_then_written), 1024, least=1)
        with brim.budget("64GiB", "cpu"):
            check(brim.batch(4096)(rows), least=150)
        # Their first parts are short, so that they may never fail.
        check(brim.range(4096)(lambda a, b: rows(b - a)), 0, 5000, least=50, fails=False)
        of_tensor = brim.chunked(4096)(lambda chunk, a, b: rows(b - a))
        check(of_tensor, torch.ones(5000), least=50, fails=False)
        """,
        container,
    )


def test_all_memory_counts_and_what_never_fits_is_an_error(container: pathlib.Path) -> None:
    run(
        """
        other = b"x" * (150 * MIB)
        beside = check(brim.batch(4096)(rows), least=1)
        del other
        time.sleep(0.1)  # figures of the machine may be 50 ms old
        alone = check(brim.batch(4096)(rows), least=150)
        assert 110 <= alone - beside <= 190, (alone, beside)
        try:
            brim.batch(8)(lambda n: rows(2048))()
        except torch.OutOfMemoryError as error:
            assert "that the machine and its cgroups have for tensors" in str(error), error
            assert "It does not fit even with batch size = 1" in str(error), error
        else:
            raise AssertionError
        """,
        container,
    )


@pytest.mark.slow
def test_small_blocks_that_take_more_than_their_bytes(container: pathlib.Path) -> None:
    """Allocators round up, and keep what was freed for later; both look used from outside."""
    run(
        """
        def blocks(n):
            return len([torch.ones(MIB // 8) for _ in range(2 * n)])
        adaptive = brim.maximize("n", strategy="halving")(blocks)
        sizes = []
        for _ in range(4):
            sizes.append(adaptive.record(4096)[1][-1].size)
            pins = [torch.ones(10) for _ in range(100)]
        assert min(sizes) >= 64, sizes
        """,
        container,
    )


def test_the_address_space_limit_counts() -> None:
    """Needs no cgroup. The refusal is ours, ahead of the system's."""
    run("""
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MIB, used + 512 * MIB))
        check(brim.maximize("n")(rows), 4096, least=50)
        for limited, said in ((True, "that the machine and its cgroups have for tensors"),
                              (False, "the system has no more")):
            try:
                brim.batch(1, host_limit=limited)(lambda n: rows(4096))()
            except torch.OutOfMemoryError as error:
                assert said in str(error), error
            else:
                raise AssertionError
    """)


def test_the_limit_holds_inside_the_call_only() -> None:
    available = brim.memory_stats("cpu").free

    @brim.batch(1, device="cpu")
    def too_much(size: int) -> None:
        torch.empty(available * 2, dtype=torch.uint8)

    with pytest.raises(torch.OutOfMemoryError, match="the machine and its cgroups have"):
        too_much()
    said = ""
    try:  # it is not written to: the system promises it or not, by its own rules
        torch.empty(available * 2, dtype=torch.uint8)
    except torch.OutOfMemoryError as error:
        said = str(error)
    assert "the machine and its cgroups have" not in said


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_host_limit_must_be_a_bool(value: object) -> None:
    with pytest.raises(TypeError, match="host_limit"):
        brim.batch(1, host_limit=value)(lambda n: n)  # type: ignore[arg-type]
