"""What one of the demo's situations shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brim._table import Table


@dataclass
class Situation:
    """What one of the demo's situations shows.

    Attributes:
        headline: what is done, in a sentence.
        table: the figures.
        remark: what they mean, in a sentence.
        figures: the same as plain values.
        caption: what the picture shows, in a few words.
        paint: draws them into an Axes.
    """

    headline: str
    table: Table
    remark: str
    figures: Any
    caption: str
    paint: Callable[[Any], object]
