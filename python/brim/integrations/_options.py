"""Options of `brim.Microbatches` that a callback passes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import brim


def check(callback: str, options: Mapping[str, Any], *own: str) -> None:
    """Raise at once for options that are wrong, or that the callback sets itself.

    Args:
        callback: its name, for messages.
        options: what the user passed.
        own: options that the callback sets.
    """
    for name in own:
        if name in options:
            raise TypeError(f"{callback} sets {name} itself: leave {name}= out")
    brim.Microbatches(lambda part: part, **options)
