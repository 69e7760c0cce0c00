"""The command line: `brim info`, `brim demo`, `brim probe`, `brim audit`, `brim estimate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import brim
from brim.cli import audit, demo, estimate, info, probe
from brim.cli.arguments import files_may_be_loaded, in_one_line

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 if the work does not fit, 2 for errors.

    Args:
        arguments: the words after `brim`; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="brim", description="Fill memory to the brim, never over it."
    )
    parser.add_argument(
        "--cmake-dir",
        action=_Print,
        const=brim.cmake_prefix_path,
        nargs=0,
        help="print the directory of brimConfig.cmake, for find_package(brim)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (info, demo, probe, audit, estimate):
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    with files_may_be_loaded():
        try:
            chosen = parser.parse_args(arguments)
        except SystemExit as said:  # --help, or a wrong word
            return int(said.code or 0)
        try:
            status: int = chosen.run(chosen)
        except Exception as error:
            print(f"brim {chosen.command}: {in_one_line(error)}", file=sys.stderr)
            return 2
    return status


class _Print(argparse.Action):
    """Prints its constant as it is (action="version" would wrap a long line) and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self.const)
        parser.exit()
