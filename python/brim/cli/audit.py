"""`brim audit`: what a model saves for backward with torch.nn, with brim, and at the least."""

from __future__ import annotations

import argparse
import fnmatch
import json
from typing import Any

import torch

import brim
from brim.cli import arguments

HELP = "what a model's layers save for backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the model, its inputs, and what is frozen."""
    parser.add_argument(
        "factory",
        type=arguments.function,
        help="module:function or file.py:function; called without arguments, returns the model",
    )
    parser.add_argument(
        "--input",
        type=_shape,
        action="append",
        required=True,
        help="a shape such as 8,3,224,224, or 8,128:int64 if the dtype is not float32; once for "
        "each input of the model",
    )
    patterns: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATTERN"}
    several = "; may be given several times"
    frozen = "freeze the parameters with matching names, e.g. 'layer*'"
    trained = "freeze all parameters except those with matching names"
    parser.add_argument("--freeze", help=frozen + several, **patterns)
    parser.add_argument("--train-only", help=trained + several, **patterns)
    parser.add_argument("--eval", action="store_true", help="call model.eval() first")
    parser.add_argument("--device", type=arguments.device, help="cpu, cuda, …")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _shape(text: str) -> tuple[list[int], torch.dtype]:
    """Parse sizes, optionally followed by a colon and a dtype.

    Example:
        >>> _shape("8,128:int64")
        ([8, 128], torch.int64)
    """
    sizes, colon, name = text.partition(":")
    dtype = getattr(torch, name, None) if colon else torch.float32
    parts = sizes.split(",")
    if not all(part.strip().isdecimal() for part in parts) or not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(
            f"must be a shape such as 8,3,224,224 or 8,128:int64, got {text}"
        )
    return [int(part) for part in parts], dtype


def run(arguments: argparse.Namespace) -> int:
    """Make the model and its inputs, freeze parameters, measure and print."""
    model = arguments.factory()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the factory must return a torch.nn.Module, got {model!r}")
    device = arguments.device or brim.default_device()
    model = model.to(device)
    if arguments.eval:
        model.eval()
    _freeze(model, arguments.freeze, arguments.train_only)
    torch.manual_seed(0)
    inputs = [
        # Integers are mostly indices, and 0 is always a valid one.
        torch.randn(shape, device=device).to(dtype)
        if dtype.is_floating_point
        else torch.zeros(shape, device=device, dtype=dtype)
        for shape, dtype in arguments.input
    ]
    figures = brim.audit(model, *inputs)
    print(json.dumps(figures.to_dict(), indent=2) if arguments.json else figures)
    return 0


def _freeze(model: torch.nn.Module, frozen: list[str], trained: list[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in (*frozen, *trained):
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"the pattern {pattern!r} matches no parameter of the model")
    for name, parameter in model.named_parameters():
        trains = not trained or any(fnmatch.fnmatchcase(name, pattern) for pattern in trained)
        if not trains or any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen):
            parameter.requires_grad_(False)
