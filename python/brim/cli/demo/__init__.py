"""Show what brim does in four situations, in under a minute, and draw a picture of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

import brim
from brim._table import Part
from brim.cli import arguments as types
from brim.cli.demo import adapted, batched, converted, foreseen
from brim.cli.demo.situation import Situation
from brim.cli.result import Result, add_output_options

HELP = "four situations, and a picture of them"
EXAMPLE = "  brim demo --plot demo.svg"

_SITUATIONS = {
    "adapted": ("A function that adapts", adapted.run),
    "foreseen": ("A training step that is foreseen", foreseen.run),
    "converted": ("A model audited and converted", converted.run),
    "batched": ("Batches under a budget", batched.run),
}
_PICTURE = "brim_demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the device and the amount of work."""
    parser.add_argument(
        "--device",
        type=types.device,
        help="cpu, cuda, … (default: the accelerator where there is one)",
    )
    parser.add_argument(
        "--scale", type=types.whole(1), default=1, help="divide the amount of work by this"
    )
    add_output_options(parser, plot=True)


def run(arguments: argparse.Namespace) -> Result:
    """Run the situations one after the other, each shown when it is done."""
    device = arguments.device or brim.default_device()
    if device.type == "cpu":
        brim.install_cpu_allocator()  # so that all tensors count
    figures: dict[str, Any] = {"device": str(device)}
    done: list[Situation] = []

    def parts() -> Iterator[Part]:
        for number, (name, (title, situation)) in enumerate(_SITUATIONS.items(), 1):
            yield from [""] if number > 1 else []
            yield f"{number}. {title} …"  # ahead of what may take 20 seconds
            torch.manual_seed(0)
            found = situation(device, arguments.scale)
            done.append(found)
            figures[name] = found.figures
            yield f"{found.headline}\n"
            yield found.table
            yield found.remark
        if without_picture:
            yield f"\n{without_picture}"

    without_picture = _why_no_picture()
    return Result(
        parts(),
        figures,
        draw=lambda path: _draw(done, path),
        picture=None if without_picture else _PICTURE,
    )


def _why_no_picture() -> str:
    from brim.plot import check_available

    try:
        check_available()
    except ImportError as error:
        return f"no picture was drawn: {error}"
    return ""


def _draw(done: list[Situation], path: str) -> None:
    from matplotlib.figure import Figure

    from brim.plot._canvas import save

    figure = Figure(figsize=(14, 10), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.2, h_pad=0.2)
    titles = [title for title, _ in _SITUATIONS.values()]
    for i, (axes, situation) in enumerate(zip(figure.subplots(2, 2).flat, done, strict=True)):
        situation.paint(axes)
        named = f"{i + 1}. {titles[i]}"
        axes.set_title(f"{named}: {situation.caption}", loc="left", fontweight="bold")
    save(figure, path, 110)
