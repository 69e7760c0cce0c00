"""What all benchmarks share: timing in turns, and the libraries beside brim.

Works take turns, so that a slower moment of the machine affects all of them, and each figure is a
median. The libraries come from PyPI and are installed into a folder of their own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import brim

Work = Callable[[], object]

FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"

# Without dependencies, which would bring a second torch: those that they import are named here.
PACKAGES = (
    "torch_max_mem==0.1.6",
    "toma==1.1.0",
    "bionemo-size-aware-batching==1.0.0",
    "psutil",
    "accelerate",
    "huggingface_hub",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
    "idna",
    "certifi",
    "pyyaml",
    "packaging",
    "safetensors",
)

# ---- time ----------------------------------------------------------------------------------------


def synchronize(device: str | torch.device) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def medians(
    works: Mapping[str, Work],
    rounds: int,
    *,
    calls: int = 1,
    warmup: int = 1,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
    after: Work = lambda: None,
) -> dict[str, float]:
    """Median seconds per call of each work.

    Args:
        works: each takes its turn in each round.
        rounds: how many rounds are timed.
        calls: how often a work is called in its turn.
        warmup: rounds before those.
        device: where the works run; its queue is waited for.
        clock: gives seconds.
        after: runs after each turn, when the clock has stopped and the last result is freed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + rounds):
        for name, work in works.items():
            synchronize(device)
            begin = clock()
            for _ in range(calls - 1):
                work()
            result = work()
            synchronize(device)
            seconds = clock() - begin
            del result
            after()
            if turn >= warmup:
                times[name].append(seconds / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def median(work: Work, rounds: int, **options: object) -> float:
    """Median seconds per call of one work."""
    return medians({"": work}, rounds, **options)[""]  # type: ignore[arg-type]


# ---- text ----------------------------------------------------------------------------------------


def progress(what: str) -> None:
    """What is running now, apart from the results."""
    print(f"    {what}", file=sys.stderr, flush=True)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


# ---- peers ---------------------------------------------------------------------------------------


def install_peers() -> None:
    """Install the peers that are missing, or there in another version, into their folder."""

    def normal(name: str) -> str:
        return re.sub("[-_.]+", "-", name).lower()

    there = {
        normal(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions(path=[str(FOLDER)])
    }
    missing = []
    for package in PACKAGES:
        name, _, version = package.partition("==")
        found = there.get(normal(name))
        if found is None or version not in ("", found):
            missing.append(package)
    if missing:
        print(f"==> Installing peers (once): {' '.join(missing)}")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        pip += ["--disable-pip-version-check", "--target", str(FOLDER)]
        if subprocess.run([*pip, *missing], check=False).returncode != 0:
            print("    could not: the rows of missing peers are left out")
    sys.path.append(str(FOLDER))


def peer(name: str) -> ModuleType | None:
    """A peer's module. If it is missing, None, and a line says that its rows are left out."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"    {name} is left out: {error}")
        return None


Adaptive = Callable[[Callable[[int], object], int], Work]


def adaptive_peers() -> Iterator[tuple[str, Adaptive]]:
    """Adaptive calls of other libraries, which know nothing yet.

    Each takes a function of `batch_size` and the first size to try.
    """
    if torch_max_mem := peer("torch_max_mem"):
        decorator: Any = torch_max_mem.maximize_memory_utilization

        def maximized(function: Callable[[int], object], first: int) -> Work:
            theirs = decorator(safe_devices=["cpu", "cuda"])(function)
            return lambda: theirs(batch_size=first)

        yield "torch_max_mem", maximized
    if accelerate := peer("accelerate.utils"):
        find = accelerate.find_executable_batch_size
        yield "accelerate", lambda function, first: find(function, starting_batch_size=first)


def network_options(
    about: str | None,
    networks: Iterable[str],
    rounds: int,
    what: str,
    add_more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> argparse.Namespace:
    """The `networks`, the `device` and the `rounds` that the command line asks for.

    Args:
        about: what the script is, in its first line.
        networks: the names of all.
        rounds: without `--rounds`.
        what: that number counts.
        add_more: adds the options of this script.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("networks", nargs="*", help="parts of their names; default: all")
    parser.add_argument("--rounds", type=int, default=rounds, help=what)
    parser.add_argument("--device", help="cpu, cuda, …; default: the accelerator if there is one")
    add_more(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of the frameworks
    parts = [part.lower() for part in options.networks or [""]]
    options.networks = [n for n in networks if any(part in n.lower() for part in parts)]
    options.device = options.device or brim.default_device().type
    return options
