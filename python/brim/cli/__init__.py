"""The command line: `brim info`, `demo`, `probe`, `audit`, `estimate`, `plan` and `run`."""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import brim
from brim._state.undoing import Undoing
from brim.cli import audit, demo, estimate, info, plan, probe, run
from brim.cli.arguments import in_one_line, put_program_back
from brim.cli.result import Result, publish

__all__ = ["main"]

_COMMANDS = {
    "info": info,
    "demo": demo,
    "probe": probe,
    "audit": audit,
    "estimate": estimate,
    "plan": plan,
    "run": run,
}
_NAMES = ", ".join(_COMMANDS)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse itself prints the usage ahead of it."""

    example = ""  # how the command is called; empty for brim itself

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\d")  # -1:4 too is a value and no option

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following"):
            message += f"; for example: {self.example}" if self.example else f", one of {_NAMES}"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="brim",
        description="Fill memory to the brim, never over it.",
        epilog="Each command has a --help of its own, with an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # wraps no path
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"brim {brim.__version__} (torch {torch.__version__}, "
        f"Python {platform.python_version()})",
    )
    parser.add_argument(
        "--cmake-dir",
        action="version",
        version=brim.cmake_prefix_path,
        help="print the directory of brimConfig.cmake, for find_package(brim)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            epilog=f"example:\n{module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.example = module.EXAMPLE.partition("\n")[0].strip()
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 if the work does not fit, 2 for errors.

    A reader that has seen enough, as in `brim plan … | head`, is no error.

    Args:
        arguments: the words after `brim`; None for those of the process.
    """
    status = 0
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of a bar
        with Undoing() as undo:
            put_program_back(undo)
            status = _run(arguments)
        sys.stdout.flush()  # here and not when the interpreter ends, which could only complain
        return status
    except BrokenPipeError:
        _print_to_nobody()
        return status
    except KeyboardInterrupt:
        print("brim: interrupted", file=sys.stderr)
        return 130


def _print_to_nobody() -> None:
    """The reader has seen enough, as in `brim info | head -1`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    try:
        chosen, unknown = _parser().parse_known_args(arguments)
        if unknown:  # argparse itself would not name the command
            message = f"unknown argument {' '.join(unknown)}"
            if not unknown[0].startswith("-"):  # a value whose option was left out
                message += f"; for example: {chosen.parser.example}"
            chosen.parser.error(message)
    except SystemExit as said:  # --help, --version, or a wrong word
        return int(said.code or 0)
    result: Result | None = None
    try:
        result = chosen.run(chosen)
        return publish(result, chosen)
    except BrokenPipeError:
        _print_to_nobody()
        return 0 if result is None else publish(result, chosen)  # with its files and its status
    except (Exception, SystemExit) as error:  # the latter of the user's code
        print(f"brim {chosen.command}: {in_one_line(error, vars(chosen))}", file=sys.stderr)
        return 2
