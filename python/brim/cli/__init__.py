"""The command line: `brim info`, `brim demo`, `brim probe`, `brim audit`, `brim estimate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from brim.cli import audit, demo, estimate, info, probe

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Args:
        arguments: the words after `brim`; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="brim", description="Fill memory to the brim, never over it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (info, demo, probe, audit, estimate):
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status
