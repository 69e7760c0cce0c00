"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import brim
from brim import _C
from brim._estimate._places import line_of
from brim._state.undoing import Undoing


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
        _C.parse_bytes(text, 1, "")
    except ValueError as error:  # argparse names the option ahead of it
        raise argparse.ArgumentTypeError(str(error).strip()) from error
    return text


def whole(least: int) -> Callable[[str], int]:
    """A whole number that is at least `least`.

    Example:
        >>> whole(1)("64")
        64
    """

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, got {text}"
            )
        if int(text) >= 2**63:
            raise argparse.ArgumentTypeError(f"must be below 2**63, got {text}")
        return int(text)

    return parse


def output_file(*endings: str) -> Callable[[str], str]:
    """A file that can be written: wrong ones are refused before anything is run."""

    def check(text: str) -> str:
        path = Path(text)
        if path.suffix.lower() not in endings:
            allowed = f"{', '.join(endings[:-1])} or {endings[-1]}"
            raise argparse.ArgumentTypeError(f"must end in {allowed}, got {text}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}, got {text}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must be a file, but {text} is a folder")
        return text

    return check


def function(text: str) -> Callable[..., Any]:
    """A function of a module or of a file, such as `package.module:name` or `file.py:name`."""
    source, _, name = text.rpartition(":")
    if not source or not name or ":" in source:
        raise argparse.ArgumentTypeError(f"must be module:function or file.py:function, got {text}")
    try:
        module = _load(Path(source)) if source.endswith(".py") else _import(source)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, FileNotFoundError) or (
            isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}.")
        )
        reason = (
            f"was not found: {error}" if missing else f"could not be loaded: {in_one_line(error)}"
        )
        raise argparse.ArgumentTypeError(f"{source} {reason}") from error
    if not hasattr(module, name):
        raise argparse.ArgumentTypeError(f"{name} was not found in {source}")
    found = getattr(module, name)
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{text} is not a function but a {type(found).__name__}")
    result: Callable[..., Any] = found
    return result


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or the class of what can be called without having one."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_no_model(function: Callable[..., Any]) -> None:
    """Refuse a model where a function of numbers is wanted."""
    if isinstance(function, torch.nn.Module):
        raise ValueError(
            "the function is called with numbers, but this is a model, which takes tensors: name "
            "a function such as def step(size): model(torch.rand(size, 256))"
        )


def check_call(function: Callable[..., Any], *args: object) -> None:
    """Check that a function of the user can be called with these.

    Raises:
        ValueError: if it cannot; names the function and what it takes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = name_of(function)
        given = ("a tensor" if isinstance(each, torch.Tensor) else repr(each) for each in args)
        called = f"{name}({', '.join(given)})"
        raise ValueError(f"{name} takes {signature}, but is called as {called}: {error}") from None


_NAME = "__brim_file__"  # as `__main__` is of a program: it hides no other module


def put_program_back(undo: Undoing) -> None:
    """When the block ends, forget what was loaded from files, and the words of a program."""
    undo.callback(functools.partial(setattr, sys, "argv", sys.argv))
    undo.callback(functools.partial(sys.path.__setitem__, slice(None), sys.path.copy()))
    undo.callback(functools.partial(sys.modules.pop, _NAME, None))


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # it may import files next to it
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> Any:
    sys.path.insert(0, "")  # the working directory, as `python -m` does
    return importlib.import_module(name)


def in_one_line(error: BaseException, options: Iterable[str] = ()) -> str:
    """What an error says; one that was raised in the user's code also by its kind and place.

    Args:
        error: any exception.
        options: arguments of brim that options of the command line are named after: "batch_size"
            becomes "--batch-size".
    """
    text = " ".join(str(error).split())
    text = re.split(r", but expected one of:| \(Could this error message", text)[0]  # torch's rest
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '').name}:{error.lineno}: {error.msg}"
    line = "" if isinstance(error, brim.EstimateError) else line_of(error)
    if line:
        return ": ".join(filter(None, (line, type(error).__name__, text)))
    for name in options:
        # A single word is the argument only where the error says what it must be.
        named = rf"\b{name}\b" if "_" in name else rf"^{name}\b(?= must)"
        text = re.sub(named, f"--{name.replace('_', '-')}", text)
    return text or type(error).__name__
