"""`brim probe` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import brim
from brim.cli import main

PROGRAM = """
import torch

def line(size):
    return torch.empty(size * 10_000, dtype=torch.uint8)

def bends(size):
    torch.empty(max(size * 10_000, size * size * 12), dtype=torch.uint8)

def flat(size):
    torch.empty(5_000_000 + size * 5_000, dtype=torch.uint8)

def square(n, length):
    torch.empty(n * length**2, dtype=torch.uint8)

number = 3

def fails(size):
    return {}["key"]

def exits(size):
    raise SystemExit(3)

def huge(size):
    torch.empty(size * 2**55, dtype=torch.uint8)

def wrong(size):
    torch.addmm(torch.zeros(2), torch.zeros(3))

model = torch.nn.Linear(3, 3)

def jumps(size):
    torch.empty(size * (20_000 if size % 3 == 0 else 10_000), dtype=torch.uint8)
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
    assert lines[0].split() == ["size", "measured", "predicted", "error", "time"]
    rows = [line.split() for line in lines[2 : lines.index("")]]
    assert [row[0] for row in rows][:1] + [row[0] for row in rows][-1:] == ["1", "64"]
    assert all(row[5] in ("+0.0%", "-0.0%") for row in rows)
    assert any("· s" in line for line in lines)
    assert any(line.startswith("margin") for line in lines)
    # Beyond what was measured, a square could begin to count: 64² · 100 / 64 = 80².
    measured, careful, formula = (line.split()[0] for line in lines[-5:-2])
    assert measured == "64"
    assert re.fullmatch(r"(7[89]|80)\*", careful)
    assert re.fullmatch(r"(9[89]|100)\*", formula)
    assert lines[-1] == "* was not measured: larger --sizes tell more"


def test_sizes_up_to_the_budget_are_measured(
    program: str, capsys: pytest.CaptureFixture[str], held: int
) -> None:
    words = ["probe", f"{program}:line", "--sizes", "1:100000", "--device", "cpu", "--json"]
    assert main([*words, "--budget", str(held + 10_000_000)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert max(each["size"][0] for each in figures["measured"]) > 950
    assert not any(each["out_of_memory"] for each in figures["measured"])
    assert 960 <= figures["largest"][0]["size"] <= figures["largest"][0]["by_formula"] <= 1000


def test_a_square_that_begins_to_count_stays_within_the_budget(
    program: str, capsys: pytest.CaptureFixture[str], held: int
) -> None:
    words = ["probe", f"{program}:bends", "--sizes", "1:100000", "--device", "cpu", "--json"]
    assert main([*words, "--budget", str(held + 10_000_000)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert max(each["size"][0] for each in figures["measured"]) > 834  # from there on it counts
    assert all(each["peak"] <= held + 10_000_000 for each in figures["measured"])
    assert 890 <= figures["largest"][0]["size"] <= 912  # 912² · 12 is just within it


def test_a_formula_that_promises_more_than_is_known_to_fit_is_named(
    program: str, capsys: pytest.CaptureFixture[str], held: int
) -> None:
    words = ["probe", f"{program}:jumps", "--sizes", "1:90", "--device", "cpu"]
    assert main([*words, "--budget", str(held + 1_000_000)]) == 0
    *_, size, formula = capsys.readouterr().out.splitlines()
    known, allowed = int(size.split()[-1]), int(formula.split()[5].rstrip(","))
    assert known < allowed
    assert re.fullmatch(
        r"the formula alone would allow \d+, but it may be wrong by its margin of [\d.]+ %", formula
    )


def test_a_formula_far_beyond_what_was_measured_says_how_far(
    program: str, capsys: pytest.CaptureFixture[str], held: int
) -> None:
    words = ["probe", f"{program}:line", "--sizes", "1:8", "--device", "cpu"]
    assert main([*words, "--budget", str(held + 10_000_000)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"\* was not measured, 12[345] times as large as what was: larger --sizes tell more", last
    )


def test_json_and_picture(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: int
) -> None:
    pytest.importorskip("matplotlib")
    picture = str(tmp_path / "line.svg")
    words = ["probe", f"{program}:line", "--sizes", "1:64", "--device", "cpu", "--json"]
    assert main([*words, "--budget", str(held + 320_000), "--plot", picture]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["picture"] == picture
    assert "budget" in Path(picture).read_text()
    sizes = [size for each in figures["measured"] for size in each["size"]]
    assert sizes[0] == 1
    assert all(each["seconds"] >= 0 for each in figures["measured"] if not each["out_of_memory"])
    (largest,) = figures["largest"]
    assert 25 <= largest["size"] <= 32
    assert largest["extrapolated"] == (largest["size"] > max(sizes))
    assert largest["size"] <= largest["by_formula"] <= 32


def test_the_largest_size_is_measured_where_a_floor_hides_growth(
    program: str, capsys: pytest.CaptureFixture[str], held: int
) -> None:
    words = ["probe", f"{program}:flat", "--sizes", "1:512", "--device", "cpu", "--json"]
    assert main([*words, "--budget", str(held + 32_000_000)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert max(each["size"][0] for each in figures["measured"]) == 512
    assert figures["largest"][0]["by_formula"] == pytest.approx(5400, rel=0.05)


def test_batches(program: str, capsys: pytest.CaptureFixture[str], held: int) -> None:
    words = ["probe", f"{program}:square", "--sizes", "1:32", "--lengths", "16,64,256"]
    budget = held + 2**20
    assert main([*words, "--device", "cpu", "--budget", str(budget), "--probes", "6"]) == 0
    out = capsys.readouterr().out
    assert "1 x 16" in out
    assert f"within {brim.format_bytes(budget)} on cpu" in out
    length, most, formula = next(x.split() for x in out.splitlines() if x.startswith("256 "))
    assert length == "256"
    assert 14 <= int(most.rstrip("*")) <= int(formula) <= 16


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
        (["torch:empty", "--sizes", "5:1"], "from the smallest to the largest, such as 1:5, got"),
        (["torch:empty", "--sizes", "1:1e9"], "whole numbers from 1 to 2**53, such as 1:64"),
        (["torch:empty", "--sizes", f"1:{10**20}"], "whole numbers from 1 to 2**53"),
        (["torch:empty", "--sizes", "0:4"], "such as 1:64"),
        (["torch:empty", "--sizes", "-1:4"], "such as 1:64 or 1,2,4, got -1:4"),
        (["torch:empty", "--sizes", "1:x"], "such as 1:64"),
        (["torch:empty", "--budget", "lots"], 'argument --budget: "lots" is not understood: '),
        (["torch:empty", "--budget", "0"], 'argument --budget: "0" is not positive: '),
        (["FILE:model"], "brim probe: the function is called with numbers, but this is a model"),
        (["FILE::line"], "must be module:function or file.py:function, got "),
        (["torch:empty", "5"], "unknown argument 5; for example: brim probe train.py:step --sizes"),
        (["torch:empty", "--device", "meta"], "--device"),
        (["torch:empty", "--sizes", "5"], "--sizes must hold at least 2 different"),
        (["torch:empty", "--probes", "1"], "must be a whole number of at least 2, got 1"),
        (["FILE:square", "--lengths", "4", "--probes", "2"], "--probes must be 3 or more, got 2"),
        (
            ["FILE:line", "--device", "cpu", "--budget", "9000"],
            "too small for these sizes: a fit needs 2 of them",
        ),
        (["FILE:wrong"], "program.py:28: TypeError: addmm() received an invalid combination of "),
        (["FILE:line", "--plot", "folder.png"], "must be a file, but folder.png is a folder"),
        (["FILE:line", "--html", "x.html"], "brim probe: unknown argument --html x.html"),
        (["FILE:line", "--lengths", "1:4"], "line takes (size), but is called as line(1, 1)"),
        (["FILE:fails"], "program.py:19: KeyError: 'key'"),
        (["FILE:exits"], "program.py:22: SystemExit: 3"),
        (["FILE:huge"], "Even the smallest of the sizes, 1, does not fit"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    words: list[str],
    text: str,
    program: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(Path(program).parent)
    Path("folder.png").mkdir()
    sizes = [] if "--sizes" in words else ["--sizes", "1:4"]
    words = [words[0].replace("FILE", program), *words[1:]]
    assert main(["probe", *words, *sizes]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert "expected one of" not in errors
    assert len(errors.splitlines()) == 1
