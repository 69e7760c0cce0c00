"""Measure what a model keeps for backward: with torch.nn, with brim, and at the least."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
from pathlib import Path
from typing import Any

import torch

import brim
from brim._arguments import refused, shown
from brim.cli import arguments as types
from brim.cli.result import Result, add_output_options

HELP = "what a model's layers keep for backward"
EXAMPLE = (
    "  brim audit torchvision.models:resnet18 --input 8,3,224,224 --train-only 'conv1.*' --eval"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the model, its inputs, and what is frozen."""
    parser.add_argument(
        "factory",
        type=types.function,
        help="module:function or file.py:function; called without arguments, returns the model "
        "(a model itself will do)",
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
    parser.add_argument("--device", type=types.device, help="cpu, cuda, …")
    add_output_options(parser, plot=True, html=True)


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


def run(arguments: argparse.Namespace) -> Result:
    """Make the model and its inputs, freeze parameters and measure."""
    model = arguments.factory
    if not isinstance(model, torch.nn.Module):
        if signature := refused(model, 0):
            raise ValueError(
                "a model is wanted, or a function without arguments that makes one, but "
                f"{types.name_of(model)} takes {signature}"
            )
        model = model()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the factory must return a torch.nn.Module, got {shown(model)}")
    device = arguments.device or brim.default_device()
    model = model.to(device)
    if arguments.eval:
        model.eval()
    _freeze(model, arguments.freeze, arguments.train_only)
    torch.manual_seed(0)
    shapes = " and ".join(",".join(map(str, shape)) for shape, _ in arguments.input)
    try:
        inputs = [_input(shape, dtype, device) for shape, dtype in arguments.input]
        types.check_call(model.forward, *inputs)
        found = brim.audit(model, *inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = types.in_one_line(error)
        raise ValueError(f"the model fails with --input {shapes}: {reason}") from error
    return Result(
        found._parts(),
        found.to_dict(),
        draw=found.plot,
        page=lambda: found.to_html(places=_places(model)),
    )


def _input(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.zeros(shape, device=device, dtype=dtype)  # mostly indices: 0 is always a valid one


def _places(model: torch.nn.Module) -> dict[str, str]:
    """Where the class of each module is written; of torch's and brim's, the one that has them."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] in ("torch", "brim"):
            place = found.get(name.rpartition(".")[0] or "(model)", "")
        else:
            try:
                file, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
            except (OSError, TypeError):
                continue
            place = f"{Path(file or '').name}:{line}"
        found[name or "(model)"] = place
    return found


def _freeze(model: torch.nn.Module, frozen: list[str], trained: list[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in (*frozen, *trained):
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"the pattern {pattern!r} matches no parameter of the model")
    for name, parameter in model.named_parameters():
        trains = not trained or any(fnmatch.fnmatchcase(name, pattern) for pattern in trained)
        if not trains or any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen):
            parameter.requires_grad_(False)
