"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings


def warn(message: str) -> None:
    """Warn at the caller's line, however deep inside brim the reason is found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] == "brim":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
