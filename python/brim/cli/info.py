"""`brim info`: what brim sees of this machine's memory."""

from __future__ import annotations

import argparse

import torch

import brim
from brim.cli.table import print_table

HELP = "versions, devices and their memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Print versions and one row per device."""
    print(f"brim {brim.__version__}, torch {torch.__version__}")
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        devices += [
            torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())
        ]
    print_table(["device", "allocated", "reserved", "limit", "free"], map(_row, devices))
    return 0


def _row(device: torch.device) -> list[str]:
    stats = brim.memory_stats(device)
    figures = (stats.allocated, stats.reserved, stats.limit, stats.free)
    return [str(device), *map(brim.format_bytes, figures)]
