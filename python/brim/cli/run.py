"""Run a program, and explain it if it runs out of memory.

The program runs as `python train.py ARGUMENT...` would. If memory runs out, its traceback ends in
a report: the cause, and who holds the memory, by kind and line. What would help is known for
functions that are decorated with `@brim.explain()`. The exit status is the program's.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

import brim
from brim.cli import arguments as types
from brim.cli.result import Result

HELP = "run a program, and explain it if it runs out of memory"
EXAMPLE = "  brim run --html report.html train.py --epochs 3"
_RUNPY = (runpy.__file__, "<frozen runpy>")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the device, the page, the program and its own arguments."""
    parser.add_argument("--device", help="whose memory counts (default: the current one)")
    parser.add_argument(
        "--html",
        dest="page",
        type=types.output_file(".html", ".htm"),
        metavar="FILE",
        help="write the report as a page for the browser, too",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the program is a module: -m package.name"
    )
    parser.add_argument("program", help="a file of Python, or with -m a module")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="what the program is called with"
    )
    parser.set_defaults(json=False, plot=None, html=None)


def run(arguments: argparse.Namespace) -> Result:
    """Run the program; the status is its own. The words of brim itself are put back by `main`."""
    told = brim.explain(device=arguments.device, html=arguments.page)
    program = arguments.program
    if not arguments.is_module and not Path(program).is_file():
        raise FileNotFoundError(f"there is no file {program}")
    sys.argv = [program, *arguments.rest]
    sys.path[0] = os.getcwd() if arguments.is_module else str(Path(program).resolve().parent)
    try:
        with told:
            if arguments.is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
    except SystemExit as said:
        if said.code is not None and not isinstance(said.code, int):
            print(said.code, file=sys.stderr)
            return Result([], {}, status=1)
        return Result([], {}, status=said.code or 0)
    except Exception as error:
        error.__traceback__ = _in_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return Result([], {}, status=1)
    return Result([], {})


def _in_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without what runs the program, as `python train.py` prints it."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, *_RUNPY):
        trace = trace.tb_next
    return trace
