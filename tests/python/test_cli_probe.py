"""`brim probe` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import brim
from brim.cli import main

PROGRAM = """
import torch

def line(size):
    torch.empty(size * 10_000, dtype=torch.uint8)

def square(n, length):
    torch.empty(n * length**2, dtype=torch.uint8)

number = 3
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_one_size(program: str, capsys: pytest.CaptureFixture[str], held: int) -> None:
    budget = held + 1_000_000
    words = ["probe", f"{program}:line", "--sizes", "1:64", "--device", "cpu"]
    assert main([*words, "--budget", str(budget)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["size", "measured", "predicted", "error"]
    rows = [line.split() for line in lines[2:9]]
    assert [row[0] for row in rows][:1] + [row[0] for row in rows][-1:] == ["1", "64"]
    assert all(row[-1] in ("+0.0%", "-0.0%") for row in rows)
    assert any("· s" in line for line in lines)
    assert any(line.startswith("margin") for line in lines)
    # Beyond what was measured, a square could begin to count: 64² · 100 / 64 = 80².
    assert 78 <= int(lines[-1].split()[-1]) <= 80


def test_batches(program: str, capsys: pytest.CaptureFixture[str], held: int) -> None:
    words = ["probe", f"{program}:square", "--sizes", "1:32", "--lengths", "16,64,256"]
    budget = held + 2**20
    assert main([*words, "--device", "cpu", "--budget", str(budget), "--probes", "6"]) == 0
    out = capsys.readouterr().out
    assert "1 x 16" in out
    assert f"within {brim.format_bytes(budget)} on cpu" in out
    length, most = out.splitlines()[-1].split()
    assert length == "256"
    assert 14 <= int(most) <= 16


def test_a_module_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe", "torch:empty", "--sizes", "1,1000,1000000", "--device", "cpu"]
    assert main(words) == 0
    assert "1000000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing"], "must be module:function"),
        (["no_such_module:f"], "was not found"),
        (["/no/such/file.py:f"], "was not found"),
        (["torch:no_such_name"], "was not found"),
        (["torch:__version__"], "is not a function"),
        (["torch:empty", "--sizes", "5:1"], "such as 1:64"),
        (["torch:empty", "--sizes", "0:4"], "such as 1:64"),
        (["torch:empty", "--sizes", "1:x"], "such as 1:64"),
        (["torch:empty", "--budget", "lots"], "lots"),
        (["torch:empty", "--device", "meta"], "--device"),
        (["torch:empty", "--sizes", "5"], "at least 2 different"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [] if "--sizes" in words else ["--sizes", "1:4"]
    assert main(["probe", *words, *sizes]) == 2
    assert text in capsys.readouterr().err
