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


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize(
    ("driver", "visible", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", None, "native"),
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "0", "native"),
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "", "all-major"),
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "-1", "all-major"),
        ("echo 'No devices found'", None, "all-major"),
        ("exit 9", None, "all-major"),
        (None, None, "all-major"),
    ],
)
def test_kernels_are_built_for_the_gpu_that_is_there(
    driver: str | None,
    visible: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cmake, shell = shutil.which("cmake"), shutil.which("sh")
    assert cmake is not None
    monkeypatch.setenv("PATH", str(tmp_path))  # with no other nvidia-smi than this one
    if driver is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!{shell}\n{driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    script = tmp_path / "choose.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/CudaArchitectures.cmake")\n'
        "brim_cuda_architectures(chosen)\n"
        'message("${chosen}")\n'
    )
    done = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == expected


def test_the_command_line_prints_where_cmake_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cmake-dir"]) == 0
    assert capsys.readouterr().out == brim.cmake_prefix_path + "\n"
