"""The command line: `brim info`, `brim demo`, `brim probe`, `brim audit`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from brim.cli import audit, demo, info, probe

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Args:
        arguments: the words behind `brim`; those of the process where None.
    """
    parser = argparse.ArgumentParser(
        prog="brim", description="Fill memory to the brim, never over it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (info, demo, probe, audit):
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status
