"""Predict the peak memory of a function without running it.

With --hub-config, of a training step of a Hugging Face model, from its config.json alone.

Exits with 1 if it does not fit, and with 2 if that is not known without `--capacity`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

import torch

import brim
from brim._estimate._target import target_device
from brim._state.reach import Reachable
from brim.cli import arguments as types
from brim.cli import hub_config
from brim.cli.result import Result, add_output_options

HELP = "the peak memory of a function, without running it"
EXAMPLE = """\
  brim estimate train.py:step 64 --device cuda --capacity 24GiB --html step.html
  brim estimate --hub-config config.json --batch 8 --length 1024 --device cuda --capacity 24GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the function, the device and its capacity."""
    parser.add_argument(
        "function",
        nargs="?",
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
        help="calls in a row (default: 1); 2 for a step after the first one (with --hub-config: 2)",
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help='compare with the modules that it uses after brim.convert(module, recompute="cheap")',
    )
    hub = parser.add_argument_group("a training step of a Hugging Face model")
    hub.add_argument("--hub-config", type=Path, metavar="FILE", help="the model's config.json")
    hub.add_argument("--batch", type=types.whole(1), metavar="N", help="samples (default: 8)")
    hub.add_argument("--length", type=types.whole(1), metavar="N", help="tokens (default: 512)")
    hub.add_argument(
        "--dtype", choices=hub_config.DTYPES, help="of the weights (default: what the file says)"
    )
    hub.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="mixed precision in the forward"
    )
    hub.add_argument("--optimizer", choices=hub_config.OPTIMIZERS, help="default: adamw")
    hub.add_argument(
        "--checkpointing", action="store_true", help="compute layers again in backward"
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
    training = _training(arguments)
    types.check_no_model(arguments.function)
    types.check_call(arguments.function, *arguments.values)
    found = _estimated(arguments)
    parts, figures = found._parts(), found.to_dict()
    if training is not None:
        figures["training"] = training.figures(found)
        parts = [*training.lines(found), "", *parts]
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


def _training(arguments: argparse.Namespace) -> hub_config.Training | None:
    """The step of `--hub-config`, which becomes the function; None for a function of the user's."""
    options = {name: getattr(arguments, name) for name in hub_config.OPTIONS}
    if arguments.hub_config is None:
        if arguments.function is None:
            raise ValueError(
                "a function is missing, or a model with --hub-config; for example: "
                + EXAMPLE.partition("\n")[0].strip()
            )
        if given := next((name for name, value in options.items() if value), None):
            raise ValueError(f"--{given} goes with --hub-config")
        return None
    if arguments.function is not None:
        raise ValueError("give either a function or --hub-config, not both")
    training = hub_config.training(arguments.hub_config, **options)
    arguments.function, arguments.values = hub_config.step, training.arguments
    arguments.calls = arguments.calls or 2
    return training


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
            calls=arguments.calls or 1,
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
