"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import brim


def device(text: str) -> torch.device:
    """A device that exists."""
    try:
        brim.memory_stats(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return torch.device(text)


def budget(text: str) -> str:
    """A number of bytes or a percentage, as `brim.budget` takes it."""
    try:
        brim.parse_bytes(text, of=1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def function(text: str) -> Callable[..., Any]:
    """A function of a module or of a file, such as `package.module:name` or `file.py:name`."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        raise argparse.ArgumentTypeError(f"must be module:function or file.py:function, got {text}")
    try:
        module = _load(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        found = getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{text} was not found: {error}") from error
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{text} is not a function, but {found!r}")
    result: Callable[..., Any] = found
    return result


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
