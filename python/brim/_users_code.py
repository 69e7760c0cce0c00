"""Which code is the user's: not torch's, not brim's, not Python's own."""

from __future__ import annotations

import os
import re

import torch

from brim import _C

_OWN = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
_PYTHONS = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r"(?:site|dist)-packages[/\\]([^/\\]+)[/\\]")


def users_file(path: str) -> str | None:
    """The name of a file of the user's, or of a package that is not torch; None for others.

    Example:
        >>> users_file("/home/me/train.py"), users_file(torch.__file__)
        ('train.py', None)
        >>> users_file("/usr/lib/python3/dist-packages/peft/tuners/lora/layer.py")
        'peft/layer.py'
    """
    installed = _INSTALLED.search(path)
    if path.startswith(_OWN) or (path.startswith(_PYTHONS) and not installed):
        return None
    name = os.path.basename(path)
    return f"{installed[1]}/{name}" if installed else name


def is_installed(place: str) -> bool:
    """Whether a place, as a line of `users_file`, is in an installed package."""
    return "/" in place.partition(":")[0]


_C.provide(users_file=users_file)
