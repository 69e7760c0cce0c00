"""The libraries that brim is measured beside, from PyPI, in a folder of their own."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"

# Without dependencies: they would bring a second torch. What they import beside it is named here.
PACKAGES = (
    "torch_max_mem==0.1.6",
    "toma==1.1.0",
    "bionemo-size-aware-batching==1.0.0",
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


def missing() -> list[str]:
    """The packages that are not in the folder, or in another version than the one wanted."""
    there = {
        re.sub("[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in importlib.metadata.distributions(path=[str(FOLDER)])
    }

    def wanted(package: str) -> bool:
        name, _, version = package.partition("==")
        found = there.get(re.sub("[-_.]+", "-", name).lower())
        return found is None or version not in ("", found)

    return [package for package in PACKAGES if wanted(package)]


def install() -> None:
    """Put the peers that are missing into their folder; what cannot be installed is left out."""
    if packages := missing():
        print(f"==> Installing peers (once): {' '.join(packages)}")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        pip += ["--disable-pip-version-check", "--target", str(FOLDER)]
        if subprocess.run([*pip, *packages], check=False).returncode != 0:
            print("    could not: rows of peers that are missing are left out")
    sys.path.append(str(FOLDER))


def find(name: str) -> ModuleType | None:
    """A peer's module, or None where it is not there; what is left out is said."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"    {name} is left out: {error}")
        return None
