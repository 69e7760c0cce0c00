"""What a command found, and how it reaches the user: text, JSON, a picture, a page."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from brim._table import Part
from brim._whole_file import write_whole
from brim.cli.arguments import output_file
from brim.cli.screen import show


@dataclass
class Result:
    """What a command found.

    Attributes:
        parts: lines and tables. If they are made one by one, each is shown as soon as it is there.
        figures: the same as plain values, for JSON; complete when all parts are made.
        draw: draws a picture into a file, for `--plot`.
        picture: the file to draw if `--plot` names none; None for no picture then.
        page: the text of an HTML page, for `--html`.
        status: the exit status.
    """

    parts: Iterable[Part]
    figures: dict[str, Any]
    draw: Callable[[str], object] | None = None
    picture: str | None = None
    page: Callable[[], str] | None = None
    status: int = 0


def add_output_options(
    parser: argparse.ArgumentParser, *, plot: bool = False, html: bool = False
) -> None:
    """Add the options that say how the result is shown; `--json` always."""
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(plot=None, html=None)
    if plot:
        parser.add_argument(
            "--plot",
            type=_picture_file,
            metavar="FILE",
            help="draw a picture: .png, .svg or .pdf (needs matplotlib)",
        )
    if html:
        parser.add_argument(
            "--html",
            type=output_file(".html", ".htm"),
            metavar="FILE",
            help="write a page for the browser, which needs no network",
        )


def publish(result: Result, arguments: argparse.Namespace) -> int:
    """Show a result as the options say, and return the exit status."""
    if arguments.json:
        deque(result.parts, maxlen=0)
    else:
        for part in result.parts:
            show(part)
    written = {}
    picture = arguments.plot or result.picture
    if picture and result.draw:
        result.draw(picture)
        written["picture"] = picture
    if arguments.html and result.page:
        page = result.page().encode()
        write_whole(arguments.html, lambda out: out.write(page))
        written["page"] = arguments.html
    if arguments.json:
        print(json.dumps({**result.figures, **written}, indent=2))
    else:
        for what, file in written.items():
            show(f"\n{what}: {file}")
    return result.status


def _picture_file(text: str) -> str:
    from brim.plot import check_available

    try:
        check_available()
    except ImportError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return output_file(".png", ".svg", ".pdf")(text)
