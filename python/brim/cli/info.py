"""Show versions, this machine's memory as brim sees it, and which kernels are built in."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

import brim
from brim import _C
from brim._table import Part, Table
from brim.cli.result import Result, add_output_options

HELP = "versions, devices, limits of memory, kernels"
EXAMPLE = "  brim info --json"

_COLUMNS = ("allocated", "reserved", "limit", "free")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which all commands have."""
    add_output_options(parser)


def run(arguments: argparse.Namespace) -> Result:
    """Ask torch, brim and the machine."""
    figures = {
        "brim": brim.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "devices": {str(device): _memory(device) for device in _devices()},
        "limits": _limits(),
        "kernels": _kernels(),
        "libbrim_cuda": (Path(_C.__file__).parent / "lib" / "libbrim_cuda.so").is_file(),
    }
    return Result(_parts(figures), figures)


def _devices() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")]
    count = torch.accelerator.device_count()
    return [torch.device("cpu"), *(torch.device(accelerator.type, i) for i in range(count))]


def _memory(device: torch.device) -> dict[str, Any]:
    stats = brim.memory_stats(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"name": name, **{key: getattr(stats, key) for key in _COLUMNS}}


def _limits() -> dict[str, int | None]:
    host = _C.host_memory()
    return {
        "machine": host.physical_total,
        "container (cgroup)": host.cgroup_limit,
        "address space (ulimit -v)": host.address_space_limit,
    }


def _kernels() -> dict[str, int]:
    """For each kind of device, how many of brim's operators have a kernel written for it."""
    names = {
        f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("brim::")
    }
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {kind.lower(): sum(has_kernel(name, kind) for name in names) for kind in ("CPU", "CUDA")}


def _parts(figures: dict[str, Any]) -> list[Part]:
    cuda = f"for CUDA {figures['cuda']}" if figures["cuda"] else "for the CPU alone"
    rows = [
        [name, stats["name"], *(brim.format_bytes(stats[key]) for key in _COLUMNS)]
        for name, stats in figures["devices"].items()
    ]
    limits = [
        [what, "none" if limit is None else brim.format_bytes(limit)]
        for what, limit in figures["limits"].items()
    ]
    kernels = figures["kernels"]
    if not figures["libbrim_cuda"]:
        library = "there is no libbrim_cuda"
    elif kernels["cuda"]:
        library = "libbrim_cuda is there"
    else:
        library = "libbrim_cuda is there, not loaded without a CUDA device"
    return [
        f"brim {figures['brim']}, torch {figures['torch']} ({cuda}), Python {figures['python']}",
        f"{figures['platform']}, {figures['cores']} cores",
        "",
        Table(["device", "name", *_COLUMNS], rows, left=2),
        "",
        Table(["limit of the CPU's memory", ""], limits),
        "",
        f"operators with kernels of brim's own: {kernels['cpu']} on the CPU, {kernels['cuda']} on "
        f"CUDA ({library})",
    ]
