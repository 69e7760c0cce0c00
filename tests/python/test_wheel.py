"""The wheel: it is made, installed, imported, run, and found by CMake for a C++ program."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import brim

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_is_made_and_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("auditwheel", "build", "scikit_build_core", "twine"):
        pytest.importorskip(module)
    for program in ("cmake", "ninja", "patchelf"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    # The folder of `./dev wheel`: a compiler cache then knows what it compiled there.
    work = ROOT / "build" / f"{torch.__version__.partition('+')[0]}-wheel"
    command = [sys.executable, "tools/wheel.py", "--dist", str(tmp_path), str(work)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-5000:]
    (wheel,) = tmp_path.glob("*.whl")
    (installed,) = re.findall(r"^pip install took .* s$", told, re.MULTILINE)
    assert f"brim {brim.__version__}, built with torch" in told  # by the C++ program
    with capsys.disabled():
        print(f"\n{wheel.name}: {installed}")
