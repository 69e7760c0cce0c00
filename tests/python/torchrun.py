"""Starts a program on several ranks."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .patience import FOR_EVER


def environment(ranks: int) -> dict[str, str]:
    """The environment of a rank's process."""
    return (
        os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if ranks > 1 else {})
    )


def torchrun(
    program: Path,
    folder: Path,
    *arguments: object,
    ranks: int = 2,
    options: tuple[str, ...] = (),
    timeout: float = FOR_EVER,
    **env: str,
) -> None:
    """Run `program folder arguments...` on each rank; its output is shown if it fails.

    Several ranks see no GPU: a machine may have one alone, which they would share.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, f"--nproc-per-node={ranks}", *options, *map(str, (program, folder, *arguments))],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(ranks) | env,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def results_of(folder: Path, ranks: int = 2) -> list[Any]:
    """What each rank wrote to its file."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], list[Any]]) -> list[Any]:
    """What a job returned that all tests share, also where pytest-xdist has several processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            done.write_text(json.dumps(run(folder)))
    return json.loads(done.read_text())
