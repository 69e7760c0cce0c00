"""Predict the peak memory of a function without running it.

Exits with 1 if it does not fit, and with 2 if that is not known without `--capacity`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from typing import Any

import torch

import brim
from brim._estimate._target import target_device
from brim._state.reach import Reachable
from brim.cli import arguments as types
from brim.cli.result import Result, add_output_options

HELP = "the peak memory of a function, without running it"
EXAMPLE = "  brim estimate train.py:step 64 --device cuda --capacity 24GiB --html step.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the function, the device and its capacity."""
    parser.add_argument(
        "function",
        type=types.function,
        help="module:function or file.py:function, such as one training step of a model that the "
        "module makes",
    )
    parser.add_argument(
        "values",
        nargs="*",
        default=[],
        type=_literal,
        metavar="ARGUMENT",
        help="what to call it with: Python literals such as 64 or (3, 224, 224)",
    )
    parser.add_argument(
        "--device", type=_device, help="cpu or cuda; need not be there (default: the current one)"
    )
    parser.add_argument(
        "--capacity",
        type=types.budget,
        help="what the device has, e.g. 24GiB; needed if the device is not there",
    )
    parser.add_argument(
        "--calls",
        type=types.whole(1),
        default=1,
        help="calls in a row; 2 for a step after the first one",
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help='compare with the modules that it uses after brim.convert(module, recompute="cheap")',
    )
    add_output_options(parser, plot=True, html=True)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(
            f"must be a Python literal such as 64 or (3, 224, 224), got {text}"
        ) from error


def _device(text: str) -> torch.device:
    """A device that need not exist."""
    try:
        return target_device(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}") from None


def run(arguments: argparse.Namespace) -> Result:
    """Trace; the status is 1 if it does not fit, and 2 if that is not known."""
    types.check_no_model(arguments.function)
    types.check_call(arguments.function, *arguments.values)
    found = _estimated(arguments)
    parts, figures = found._parts(), found.to_dict()
    converted = _converted(arguments) if arguments.convert else None
    if converted is not None:
        peak, held = map(brim.format_bytes, (converted.peak, converted.held_before))
        call = 'brim.convert(module, recompute="cheap")'
        parts += ["", f"after {call}: peak {peak} above the {held} held before"]
        figures["converted"] = converted.to_dict()
    if found.fits is None:
        _ask_for_capacity(found.device)
    beside = {"brim.convert": converted} if converted else {}
    return Result(
        parts,
        figures,
        draw=lambda path: found.plot(path, beside=beside),
        page=lambda: found.to_html(beside=beside),
        status=2 if found.fits is None else 0 if found.fits else 1,
    )


def _ask_for_capacity(device: torch.device) -> None:
    print(
        f"brim estimate: give --capacity, such as --capacity 24GiB: {device} is not there, so "
        "whether the call fits is not known (exit status 2)",
        file=sys.stderr,
    )


def _estimated(arguments: argparse.Namespace) -> brim.Estimate:
    try:
        return brim.estimate(
            arguments.function,
            *arguments.values,
            device=arguments.device,
            capacity=arguments.capacity,
            calls=arguments.calls,
        )
    except RuntimeError as error:
        if brim.is_out_of_memory(error) or isinstance(error, brim.EstimateError):
            raise
        negative = [each for each in arguments.values if isinstance(each, int) and each < 0]
        if not negative:
            raise
        # torch may say no more than "Expected cond to be True".
        name, values = types.name_of(arguments.function), ", ".join(map(repr, arguments.values))
        raise ValueError(
            f"{name}({values}) fails, and {negative[0]} is below 0: {types.in_one_line(error)}"
        ) from error


def _converted(arguments: argparse.Namespace) -> brim.Estimate:
    """The same with the modules that the function uses converted. They stay so: brim ends here."""
    modules = Reachable(arguments.function, tuple(arguments.values), {}).modules
    if not modules:
        raise ValueError("--convert: the function uses no module that exists before the call")
    for module in modules:
        brim.convert(module, recompute="cheap")
    return _estimated(arguments)
