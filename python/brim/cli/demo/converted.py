"""The third situation: a model that keeps less for backward."""

from __future__ import annotations

import time
from typing import Any

import torch

import brim
from brim._table import Table
from brim.cli.demo.network import images, network
from brim.cli.demo.situation import Situation

_IMAGES = 64


def run(device: torch.device, scale: int) -> Situation:
    """Audit a model of which only the first layer is trained, convert it, and measure steps."""
    batch = images(max(_IMAGES // scale, 1), device)
    model = network(device).eval()
    model.requires_grad_(False)
    first: Any = model[0]
    first.requires_grad_(True)
    audit = brim.audit(model, batch)
    kept = {"torch.nn": audit.torch_nn, "brim.convert(model)": audit.brim}
    steps = {}
    gradients = []
    for name in kept:
        if name != "torch.nn":
            brim.convert(model)
        _step(model, batch)  # the first one loads kernels
        steps[name] = _measured(model, batch)
        gradients.append(first.weight.grad)
    difference = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    rows = [
        [name, brim.format_bytes(kept[name]), brim.format_bytes(peak), f"{1000 * seconds:.0f} ms"]
        for name, (peak, seconds) in steps.items()
    ]

    share = audit.brim / audit.torch_nn
    return Situation(
        f"Fine-tuning of the first layer with {len(batch)} images:",
        Table(["layers", "kept for backward", "peak of a step", "time"], rows),
        f"brim keeps {share:.1%} of the bytes, and the gradients are "
        f"{f'within {difference:.0e}' if difference else 'the same to the last bit'}.",
        {
            "kept": kept,
            "peak": {name: peak for name, (peak, _) in steps.items()},
            "difference": difference,
        },
        "kept for backward",
        audit.plot,
    )


def _step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()


def _measured(model: torch.nn.Module, batch: torch.Tensor) -> tuple[int, float]:
    """Peak and seconds of a step."""
    with brim.PeakMeter(batch.device) as meter:
        begin = time.perf_counter()
        _step(model, batch)
        if batch.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - begin
    return meter.peak, seconds
