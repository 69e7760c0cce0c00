"""C++ programs find the library that the Python package brings along."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import brim
from brim.cli import main

CONSUMER = Path(__file__).parents[1] / "package"


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
