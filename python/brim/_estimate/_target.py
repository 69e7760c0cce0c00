"""The device whose memory an estimate is about."""

from __future__ import annotations

import torch

from brim import _C
from brim.memory import DeviceLike, default_device


def target_device(device: DeviceLike) -> torch.device:
    """The device whose memory counts, with its number; it need not exist."""
    if device is None:
        return default_device()
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):  # torch lists all kinds that it has ever had
        target = torch.device("meta")
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
    return torch.device("cuda", target.index or 0) if target.type == "cuda" else target


def options_of(
    target: torch.device, capacity: int | None, beyond: int = 0
) -> tuple[_C.AllocatorOptions, list[str]]:
    """How the device's allocator is set, and the settings that its model does not know."""
    if target.type == "cpu":
        return _C.AllocatorOptions("exact", capacity=capacity), []
    options, unknown = _C.AllocatorOptions.from_settings(capacity=capacity, beyond=beyond)
    return options, list(unknown)


def stats_of(target: torch.device) -> _C.MemoryStats | None:
    """What the device holds and has; None if it is not there."""
    try:
        return _C.memory_stats(target)
    except (ValueError, RuntimeError):
        return None


def bytes_of(name: str, amount: int | str, target: torch.device) -> int:
    """An argument in bytes, or as a share of what the device has."""
    stats = stats_of(target)
    if stats is None and isinstance(amount, str) and amount.strip().endswith("%"):
        raise ValueError(
            f"{name} must be bytes, such as 24GiB: {target} is not there, got {amount!r}"
        )
    return _C.parse_bytes(amount, None if stats is None else stats.limit, name)
