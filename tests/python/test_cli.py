"""The command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import brim
from brim.cli import main


def test_info_shows_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"brim {brim.__version__}, torch {torch.__version__}"
    assert lines[1].split() == ["device", "allocated", "reserved", "limit", "free"]
    row = next(line for line in lines if line.startswith("cpu"))
    assert brim.format_bytes(brim.memory_stats("cpu").limit) in row


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "brim", "info"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"brim {brim.__version__}")


def rows_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.split() and line.split()[0].isdigit()]


def test_demo_tells_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--scale", "2048", "--budget", "44MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "with a budget of 44MiB" in lines[0]
    output = "\n".join(lines)
    fixed, first, second = (rows_in(part) for part in re.split("first call|second call", output))
    assert [int(row.split()[0]) for row in fixed] == [16, 64, 256, 1024, 4096, 16384, 65536]
    assert fixed[0].endswith("%"), "a small batch fits"
    assert fixed[-1].rstrip().endswith("out of memory"), "the largest does not"
    shares = [int(row.split()[-1].rstrip("%")) for row in fixed if row.endswith("%")]
    assert shares == sorted(shares)
    assert shares[-1] <= 100
    # The adaptive run: what it tried, last what it settled on, and nothing failing the second time.
    assert int(first[0].split()[0]) == 65536
    assert first[0].rstrip().endswith("out of memory")
    assert first[-1].endswith("%")
    assert [row.endswith("%") for row in second] == [True]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["demo", "--scale", "0"], "--scale"),
        (["demo", "--scale", "x"], "--scale"),
        (["demo", "--budget", "lots"], "--budget"),
        (["demo", "--device", "meta"], "--device"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code not in (0, None)
    assert text in capsys.readouterr().err + str(caught.value.code)


STEP_FILE = """
import torch

layer = torch.nn.Linear(256, 256)
x = torch.zeros(64, 256)


def step():
    layer(x).sum().backward()


def branches(positive):
    if x.sum() > 0 or positive:
        step()
"""


@pytest.fixture
def step_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "step_of_a_test.py"
    file.write_text(STEP_FILE)
    # So that the file and its tensors do not outlive the test.
    monkeypatch.setitem(sys.modules, file.stem, ModuleType(file.stem))
    return file


def test_estimate_prints_the_peak_and_whether_it_fits(
    step_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["estimate", f"{step_file}:step", "--device", "cuda"]
    assert main([*command, "--capacity", "1GiB"]) == 0
    assert "fits the capacity of 1.00 GiB" in capsys.readouterr().out
    assert main([*command, "--capacity", "1MiB", "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is False
    assert figures["device"] == "cuda:0"


def test_estimate_says_which_line_cannot_be_traced(step_file: Path) -> None:
    with pytest.raises(SystemExit, match=r"step_of_a_test\.py:13: "):
        main(["estimate", f"{step_file}:branches", "True", "--device", "cpu"])
