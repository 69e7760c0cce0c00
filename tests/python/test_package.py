"""The package as a whole: its version, and C++ programs find the library that it brings along."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import brim
from brim.cli import main

ROOT = Path(__file__).parents[2]
CONSUMER = ROOT / "tests" / "package"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CMakeLists.txt", r"^project\(brim VERSION (\S+)"),
        ("pyproject.toml", r'^version = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
    ],
)
def test_every_file_names_the_same_version(file: str, pattern: str) -> None:
    text = (ROOT / file).read_text()
    assert re.findall(pattern, text, re.MULTILINE) == [brim.__version__]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize("variable", ["CMAKE_PREFIX_PATH", "brim_DIR"])
def test_cmake_finds_this_brim(variable: str, tmp_path: Path) -> None:
    options = ["-G", "Ninja", f"-D{variable}={brim.cmake_prefix_path}"]
    subprocess.run(["cmake", "-S", CONSUMER, "-B", tmp_path, *options], check=True)
    cache = (tmp_path / "CMakeCache.txt").read_text()
    assert re.findall("^brim_DIR:.*=(.*)$", cache, re.MULTILINE) == [brim.cmake_prefix_path]


def test_the_command_line_prints_where_cmake_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cmake-dir"]) == 0
    assert capsys.readouterr().out == brim.cmake_prefix_path + "\n"
