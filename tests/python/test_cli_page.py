"""docs/howto/command_line.md shows what its commands print."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from brim.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "command_line.md"
BLOCK = re.compile(r"^```(\S+)(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(\.\d+)?")


def without_numbers(text: str) -> str:
    return re.sub("[ -]+", " ", NUMBER.sub("#", text))


def test_the_page_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    printed, commands = "", 0
    for language, marks, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            if "file=" in marks:
                Path(marks.partition("file=")[2].strip()).write_text(text)
            exec(text, names)
        elif language == "console":
            _, *words = shlex.split(text.removeprefix("$ "))
            assert main(words) == 0
            printed = capsys.readouterr().out
            commands += 1
        elif language == "text":
            shown = text
            if "numbers differ" in marks:
                shown, printed = (
                    re.sub(" +", " ", NUMBER.sub("#", each)) for each in (shown, printed)
                )
            assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed
    assert commands == 4
    batches = names["batches"]
    assert isinstance(batches, list)
    assert f"{len(batches)} batches" in PAGE.read_text()
    assert {path.suffix for path in tmp_path.iterdir()} >= {".png", ".html", ".npz"}
