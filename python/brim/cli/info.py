"""`brim info`: what brim sees of this machine's memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

import brim
from brim.cli.table import Table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(commands: Subparsers) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser("info", help="versions, devices and their memory")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print versions and one row a device."""
    print(f"brim {brim.__version__}, torch {torch.__version__}")
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        devices += [
            torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())
        ]
    table = Table("device", "allocated", "reserved", "limit", "free")
    for device in devices:
        stats = brim.memory_stats(device)
        figures = (stats.allocated, stats.reserved, stats.limit, stats.free)
        table.add(str(device), *(brim.format_bytes(figure) for figure in figures))
    return 0
