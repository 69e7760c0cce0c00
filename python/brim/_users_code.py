"""Which code is the user's: not torch's, not brim's, not Python's own."""

from __future__ import annotations

import os

import torch

from brim import _C

_OWN = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
_PYTHONS = os.path.dirname(os.__file__) + os.sep


def users_file(path: str) -> str | None:
    """The name of a file of the user's, or of a package that is not torch; None for others.

    Example:
        >>> users_file("/home/me/train.py"), users_file(torch.__file__)
        ('train.py', None)
    """
    if path.startswith(_OWN) or (path.startswith(_PYTHONS) and "site-packages" not in path):
        return None
    return os.path.basename(path)


_C.provide(users_file=users_file)
