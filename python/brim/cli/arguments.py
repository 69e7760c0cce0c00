"""Arguments that several commands take."""

from __future__ import annotations

import argparse

import torch

import brim


def device(text: str) -> torch.device:
    """A device that exists."""
    try:
        brim.memory_stats(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return torch.device(text)


def budget(text: str) -> str:
    """A number of bytes or a share, as `brim.budget` takes it."""
    try:
        brim.parse_bytes(text, of=1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
