"""The command line."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

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
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


STEP_FILE = """
import torch

from neighbour_of_a_test import width

layer = torch.nn.Linear(256, width)
x = torch.zeros(64, 256)


def step():
    layer(x).sum().backward()


def branches(positive):
    if x.sum() > 0 or positive:
        step()


def fails():
    return {}["key"]


def parts():
    yield 1
"""


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    (tmp_path / "step_of_a_test.py").write_text(STEP_FILE)
    (tmp_path / "neighbour_of_a_test.py").write_text("width = 256")
    return tmp_path / "step_of_a_test.py"


def test_estimate_prints_the_peak_and_whether_it_fits(
    step_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "neighbour_of_a_test", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "neighbour_of_a_test")
    command = ["estimate", f"{step_file}:step", "--device", "cuda"]
    assert main([*command, "--capacity", "1GiB"]) == 0
    assert "fits the capacity of 1.00 GiB" in capsys.readouterr().out
    assert main([*command, "--capacity", "1MiB", "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is False
    assert figures["device"] == "cuda:0"


def test_a_file_does_not_outlive_its_command(step_file: Path, held: int) -> None:
    path = sys.path.copy()
    assert main(["estimate", f"{step_file}:step", "--device", "cpu"]) == 0
    gc.collect()
    assert brim.memory_stats("cpu").allocated == held
    assert sys.path == path
    assert step_file.stem not in sys.modules


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["step_of_a_test.py:branches", "True"], "estimate: step_of_a_test.py:15: the code"),
        (["step_of_a_test.py:branches"], "missing 1 required positional argument: 'positive'"),
        (["step_of_a_test.py:step", "1"], "takes 0 positional arguments but 1 was given"),
        (["step_of_a_test.py:step", "x"], "must be a Python literal, got x"),
        (["step_of_a_test.py:fails"], "step_of_a_test.py:20: KeyError: 'key'"),
        (["step_of_a_test.py:parts"], "is a generator function"),
        (["step_of_a_test.py:step", "--capacity", "lots"], "lots"),
        (
            ["step_of_a_test.py:step", "--device", "cuda:99", "--capacity", "50%"],
            "capacity must be bytes, such as 24GiB: cuda:99 is not there, got '50%'",
        ),
        (["step_of_a_test.py:step", "--device", "meta"], "must be cpu or cuda, got meta"),
        (["step_of_a_test.py:step", "--device", "x"], "must be cpu or cuda, got x"),
        (["step_of_a_test.py:step", "--calls", "0"], "calls must be an int of at least 1, got 0"),
        (["step_of_a_test.py:missing"], "missing was not found in"),
        (["step_of_a_test.py:x"], "is not a function but a Tensor"),
        (["nothing.py:step"], "was not found: there is no file"),
        (["no_package.module:step"], "was not found: No module named 'no_package'"),
        (["imports.py:f"], "could not be loaded: imports.py:2: ModuleNotFoundError: No module"),
        (["wrong.py:f"], "could not be loaded: wrong.py:1: "),
        (["exits.py:f"], "could not be loaded: exits.py:1: SystemExit: 3"),
    ],
)
def test_wrong_input_of_estimate_is_one_line_and_status_2(
    step_file: Path,
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(step_file.parent)
    Path("imports.py").write_text("# a comment\nimport no_module_of_a_test")
    Path("wrong.py").write_text("def f(:")
    Path("exits.py").write_text("raise SystemExit(3)")
    assert main(["estimate", "--device", "cpu", *words]) == 2
    errors = capsys.readouterr().err
    assert text in errors.splitlines()[-1]
    assert "Traceback" not in errors
