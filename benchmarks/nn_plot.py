"""Time against peak: one picture per row of `bench_nn.py`, one point per way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

MARKERS = {
    "torch": ("s", "black"),
    "brim": ("o", "#4c78a8"),
    "brim cheap": ("o", "#0b2a4a"),
    "brim products": ("X", "#0b2a4a"),
    "checkpoint": ("^", "#777777"),
    "selective": ("v", "#777777"),
    "Liger": ("P", "#b07020"),
    "compile 1": ("D", "#dddddd"),
    "compile 0.5": ("D", "#aaaaaa"),
    "compile 0.2": ("D", "#666666"),
}


def plot(title: str, points: Mapping[str, tuple[float, float]], folder: Path) -> Path | None:
    """Draw the milliseconds and MiB of each way; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for way, (milliseconds, mebibytes) in points.items():
        marker, colour = MARKERS[way]
        axes.scatter(
            milliseconds,
            mebibytes,
            s=70,
            marker=marker,
            facecolor=colour,
            edgecolor="black",
            linewidth=0.8,
            label=way,
            zorder=2,
        )
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.1 * max(mebibytes for _, mebibytes in points.values()))
    axes.set_xlabel("time of forward and backward (ms)")
    axes.set_ylabel("peak beyond the model (MiB)")
    axes.set_title(title)
    axes.grid(color="0.9", zorder=0)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in title)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150)
    return path
