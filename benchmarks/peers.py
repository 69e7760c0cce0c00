"""The libraries that brim is measured beside, from PyPI, in a folder of their own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"

# Without dependencies: they would bring a second torch. What they import beside it is named here.
PACKAGES = (
    "torch_max_mem==0.1.6",
    "toma==1.1.0",
    "psutil",
    "accelerate",
    "huggingface_hub",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
    "idna",
    "certifi",
    "pyyaml",
    "packaging",
    "safetensors",
)


def install() -> None:
    """Put the peers into their folder, once; what cannot be installed is left out."""
    if not FOLDER.exists():
        print("==> Installing the peers (once)")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER)]
        if subprocess.run([*pip, *PACKAGES], check=False).returncode != 0:
            print("    could not: rows of peers that are missing are left out")
    sys.path.append(str(FOLDER))


def find(name: str) -> ModuleType | None:
    """A peer's module, or None where it is not there; what is left out is said."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"    {name} is left out: {error}")
        return None
