"""`brim estimate`: the peak memory of a function without running it."""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any

import torch

import brim
from brim.cli import arguments

HELP = "the peak memory of a function, without running it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the function, the device and its capacity."""
    parser.add_argument(
        "function",
        type=arguments.function,
        help="module:function or file.py:function, such as one training step of a model that the "
        "module makes",
    )
    parser.add_argument(
        "values",
        nargs="*",
        type=_literal,
        metavar="ARGUMENT",
        help="what to call it with: Python literals such as 64 or (3, 224, 224)",
    )
    parser.add_argument(
        "--device", type=_device, help="cpu or cuda; need not be there (default: the current one)"
    )
    parser.add_argument("--capacity", type=arguments.budget, help="what the device has, e.g. 24GiB")
    parser.add_argument(
        "--calls", type=int, default=1, help="calls in a row; 2 for a step after the first one"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f"must be a Python literal, got {text}") from error


def _device(text: str) -> torch.device:
    """A device that need not exist."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Trace, print, and return 1 if it does not fit."""
    found = brim.estimate(
        arguments.function,
        *arguments.values,
        device=arguments.device,
        capacity=arguments.capacity,
        calls=arguments.calls,
    )
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return 0 if found.fits else 1
