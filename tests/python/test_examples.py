"""Every Python example runs by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Runs each example in a process of its own, with torch loaded: see `docs_blocks.serve`."""
    run = [sys.executable, str(Path(__file__).with_name("docs_blocks.py"))]
    with subprocess.Popen(run, stdin=PIPE, stdout=PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_there_are_examples() -> None:
    assert "budget.py" in {example.name for example in EXAMPLES}


@pytest.mark.parametrize(
    "example",
    [  # test_ranks.py starts ranks, too
        pytest.param(path, marks=pytest.mark.slow if path.name == "ranks.py" else ())
        for path in EXAMPLES
    ],
    ids=lambda path: path.name,
)
def test_runs(example: Path, tmp_path: Path, server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    name = str(example.relative_to(ROOT))
    print(json.dumps([name, str(tmp_path)]), file=server.stdin, flush=True)
    wrong = json.loads(server.stdout.readline())
    assert not wrong, wrong
