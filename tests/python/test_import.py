"""Importing brim changes nothing in the process, and refuses a torch that it was not built for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from brim import _torch_version

from .patience import FOR_EVER


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=FOR_EVER,
    )


def test_import_changes_no_allocator_hook_or_environment_variable() -> None:
    code = """
import gc, json, os, signal, sys, threading, warnings
import torch

def state():
    return {
        "environment": dict(os.environ),
        "hooks": [repr(f) for f in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "collector": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)],
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "threads": [threading.active_count(), torch.get_num_threads()],
        "warnings": [repr(f) for f in warnings.filters],
        "optional": sorted({"matplotlib", "pyarrow", "rich", "tqdm"} & set(sys.modules)),
        "torch": [torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.initial_seed()],
    }

before = state()
import brim
after = state()
x = torch.empty(1000)
stats = brim.memory_stats("cpu")
changed = [key for key in before if before[key] != after[key]]
counted = [brim.cpu_allocator_installed(), stats.allocated, stats.peak]
print(json.dumps([changed, counted]))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    changed, counted = json.loads(done.stdout)
    assert changed == []
    assert counted == [False, 0, 0]


@pytest.mark.parametrize("found", ["2.13.0", "2.13.7", "2.13.0+cpu", "2.13.1+cu130"])
def test_another_patch_of_the_same_minor_version_is_accepted(found: str) -> None:
    _torch_version.check(found, "2.13.0")


@pytest.mark.parametrize("found", ["2.12.0", "2.14.0+cu130", "3.13.0", "2.1.0"])
def test_another_minor_version_is_one_sentence(found: str) -> None:
    with pytest.raises(ImportError) as caught:
        _torch_version.check(found, "2.13.0")
    text = str(caught.value)
    assert "built for torch 2.13.0" in text
    assert f"torch {found}" in text
    assert "pip install" in text
    assert text.endswith(".")
    assert "\n" not in text


def test_the_check_comes_before_the_core_is_loaded() -> None:
    code = """
import sys, torch
torch.__version__ = "2.99.0"
try:
    import brim
except ImportError as error:
    assert "torch 2.99.0" in str(error), error
    assert "brim._C" not in sys.modules
    print("refused")
"""
    done = run(code)
    assert done.stdout == "refused\n", done.stderr
