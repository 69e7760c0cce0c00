"""brim audit on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from brim.cli import main

PROGRAM = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.act = torch.nn.Sequential(torch.nn.ReLU())
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.act(self.layer(x))

words = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.ReLU())  # no function

def trained():
    return torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 4))

def nothing():
    return 3

def sized(width):
    return torch.nn.Linear(width, width)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "audited_program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_on_the_command_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", f"{program}:model", "--input", "2,3,10,10", "--device", "cpu"]
    assert main([*words, "--train-only", "0.*", "--eval"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["1", "ReLU", "4.00", "KiB", *("128", "B") * 3]
    assert main([*words, "--freeze", "*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["torch_nn"] == 0
    assert main(["audit", f"{program}:words", "--input", "2,3:int64", "--device", "cpu"]) == 0
    assert "ReLU" in capsys.readouterr().out


def test_a_model_of_which_nothing_can_be_saved_is_told_why(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", f"{program}:trained", "--input", "2,4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "brim keeps 100.0% of what torch.nn keeps" in out
    hint = "hint: backward needs all that is kept, most of it at 2 (Linear): frozen layers"
    assert hint in out


def test_a_page_says_where_the_users_classes_are(program: str, tmp_path: Path) -> None:
    page = tmp_path / "kept.html"
    line = 1 + PROGRAM.splitlines().index("class Block(torch.nn.Module):")
    words = ["audit", f"{program}:Block", "--input", "2,4", "--device", "cpu"]
    assert main([*words, "--html", str(page)]) == 0
    assert f"ReLU in audited_program.py:{line}" in page.read_text()
    words = ["audit", f"{program}:model", "--input", "2,3,10,10", "--device", "cpu"]
    assert main([*words, "--html", str(page)]) == 0  # made of torch's classes alone
    assert not re.search(r"\w+\.py:\d", page.read_text())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing"], "must return a torch.nn.Module, got 3"),
        (["model", "--input", "2,x"], "must be a shape such as"),
        (["model", "--input", "2:no_type"], "must be a shape such as"),
        (["model", "--freeze", "head.*"], "'head.*' matches no parameter"),
        (["missing"], "was not found"),
        (["sized"], "a model is wanted, or a function without arguments that makes one, but sized"),
        (["model", "--input", "2,4,10,10"], "the model fails with --input 2,4,10,10: Given"),
        (["model", "--input", "2,3,9,9", "--input", "1"], "too many positional arguments"),
        (["model", "--input", f"{10**10},{10**10}"], f"--input {10**10},{10**10}: Storage size"),
        (["model", "--html", "page.txt"], "must end in .html or .htm, got page.txt"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    program: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = words
    shape = [] if "--input" in rest else ["--input", "2,3,10,10"]
    assert main(["audit", f"{program}:{name}", *shape, *rest, "--device", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1
