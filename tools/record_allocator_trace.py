#!/usr/bin/env python3
"""Records what torch's CUDA caching allocator does, for the tests of brim::AllocatorModel.

    python3 tools/record_allocator_trace.py tests/data/allocator [NAME...]

Needs a GPU and torch, not brim. Every case runs in a process of its own, so that it starts with an
empty allocator and its own settings, and becomes one file, NAME.json.gz:

- `settings`: the text of PYTORCH_CUDA_ALLOC_CONF; `capacity`: the bytes allowed, or null;
- `actions`: a letter per event: a(llocate), f(ree), o(ut of memory), e(mpty the cache);
- `values`: the bytes of an `a` or `o`, the number of the allocation of an `f`, 0 of an `e`;
- `streams`: of each event, numbered in the order of torch's addresses of them;
- `reserved`: how much the reserved bytes changed in each event;
- `segments`: [event, address, size] of each piece of memory taken from the device;
- `allocated`, `requested`, `inactive_split`: the changes of these in each event (random cases);
- `final`: memory_stats at the end.
"""

import argparse
import gzip
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 1 << 20
STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
}
FINAL = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "peak_requested": "requested_bytes.all.peak",
    "peak_inactive_split": "inactive_split_bytes.all.peak",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


class Sampler:
    """The statistics after each event of a work whose every operation is one event."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.columns: dict[str, list[int]] = {name: [] for name in STATISTICS}

    def note(self, action: str) -> None:
        stats = torch.cuda.memory_stats()
        self.actions.append(action)
        for name, key in STATISTICS.items():
            self.columns[name].append(stats[key])


def random_work(
    sampler: Sampler, events: int, largest: int, hold: int, streams: int = 1, seed: int = 0
) -> None:
    """Allocations of log-uniform sizes up to `largest`, about `hold` bytes of them held."""
    rng = random.Random(seed)
    pool = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(streams - 1)]
    # A few sizes come again and again, as in a training step.
    usual = [int(math.exp(rng.uniform(0, math.log(largest)))) for _ in range(12)]
    held: list[torch.Tensor] = []
    held_bytes = 0
    while len(sampler.actions) < events:
        chance = rng.random()
        if chance < 0.004:
            torch.cuda.empty_cache()
            sampler.note("e")
        elif held and (held_bytes > hold * rng.uniform(0.3, 1.2) or chance < 0.3):
            tensor = held.pop(rng.randrange(len(held)))
            held_bytes -= tensor.numel()
            del tensor
            sampler.note("f")
        else:
            size = int(math.exp(rng.uniform(0, math.log(largest))))
            if rng.random() < 0.5:
                size = rng.choice(usual)
            try:
                with torch.cuda.stream(rng.choice(pool)):
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                held_bytes += size
                sampler.note("a")
            except torch.OutOfMemoryError:
                sampler.note("o")
    while held:
        held.pop()
        sampler.note("f")


def train(model: nn.Module, batches: list[torch.Tensor], autocast: bool = False) -> None:
    """Steps with Adam over batches of changing sizes; a step that runs out of memory is left."""
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in batches:
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(batch.cuda()).float().square().mean()
            loss.backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            pass
        loss = None  # nothing of a step may reach into the next one
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def mlp(_: Sampler) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _i in range(6):
        layers += [nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1)]
    sizes = [512, 2048, 300, 3000, 1024, 2048]
    train(nn.Sequential(*layers), [torch.randn(n, 1024) for n in sizes])


def cnn(_: Sampler) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for out in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        channels = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    sizes = [16, 24, 9, 33, 20, 40, 12, 37]
    train(nn.Sequential(*layers), [torch.randn(n, 3, 64, 64) for n in sizes])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, 20000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))  # type: ignore[no-any-return]


def transformer(_: Sampler) -> None:
    torch.manual_seed(0)
    shapes = [(8, 128), (6, 200), (16, 60), (5, 256), (12, 111), (7, 190)]
    train(Encoder(), [torch.randint(20000, shape) for shape in shapes], autocast=True)


@dataclass
class Case:
    work: Callable[[Sampler], None]
    settings: str = ""
    capacity: int | None = None
    share_of: str = ""  # a case whose peak of allocated bytes gives the capacity
    share: float = 0.0


def sized(events: int, largest: int, hold: int, **options: int) -> Callable[[Sampler], None]:
    return lambda sampler: random_work(sampler, events, largest, hold, **options)


EXPANDABLE = "expandable_segments:True"
CASES: dict[str, Case] = {
    "random_small": Case(sized(1500, 2 * MIB, 24 * MIB)),
    "random_mixed": Case(sized(2000, 64 * MIB, 512 * MIB, seed=1)),
    "random_mixed_expandable": Case(sized(2000, 64 * MIB, 512 * MIB, seed=1), EXPANDABLE),
    "random_capped": Case(sized(2000, 64 * MIB, 400 * MIB, seed=2), capacity=361 * MIB),
    "random_capped_expandable": Case(
        sized(2000, 64 * MIB, 400 * MIB, seed=2), EXPANDABLE, capacity=361 * MIB
    ),
    "random_max_split": Case(
        sized(2000, 160 * MIB, 800 * MIB, seed=3), "max_split_size_mb:40", capacity=701 * MIB
    ),
    "random_power2": Case(sized(1000, 64 * MIB, 300 * MIB, seed=4), "roundup_power2_divisions:4"),
    "random_streams": Case(sized(2000, 32 * MIB, 300 * MIB, streams=3, seed=5)),
    "random_streams_expandable": Case(
        sized(2000, 32 * MIB, 300 * MIB, streams=3, seed=5), EXPANDABLE, capacity=401 * MIB
    ),
    "mlp": Case(mlp),
    "mlp_expandable": Case(mlp, EXPANDABLE),
    "cnn": Case(cnn),
    "cnn_expandable": Case(cnn, EXPANDABLE),
    "cnn_capped": Case(cnn, share_of="cnn", share=1.08),
    "cnn_capped_expandable": Case(cnn, EXPANDABLE, share_of="cnn", share=1.03),
    "transformer": Case(transformer),
    "transformer_expandable": Case(transformer, EXPANDABLE),
    "transformer_capped": Case(transformer, share_of="transformer", share=1.08),
}


class Events:
    """Torch's history of the allocator as one event per request."""

    def __init__(self, operations: list[str]) -> None:
        self.operations = operations  # what the work did, if it kept account; only it knows of `e`
        self.actions: list[str] = []
        self.values: list[int] = []
        self.streams: list[int] = []
        self.reserved: list[int] = []
        self.segments: list[list[int]] = []
        self.bytes = 0
        self.allocations = 0
        self.numbers: dict[int, int] = {}  # of the allocations, by address

    def emit(self, action: str, value: int, stream: int) -> None:
        self.actions.append(action)
        self.values.append(value)
        self.streams.append(stream)
        self.reserved.append(self.bytes)

    def emit_emptied(self) -> None:
        while self.operations[len(self.actions) : len(self.actions) + 1] == ["e"]:
            self.emit("e", 0, 0)

    def read(self, history: list[dict[str, Any]]) -> None:
        for entry in history:
            action, size, address = entry["action"], entry["size"], entry.get("addr", 0)
            if action in ("segment_free", "segment_unmap"):
                self.bytes -= size
            elif action in ("segment_alloc", "segment_map"):
                self.emit_emptied()
                self.bytes += size
                self.segments.append([len(self.actions), address, size])
            elif action == "alloc":
                self.emit_emptied()
                self.numbers[address] = self.allocations
                self.allocations += 1
                self.emit("a", size, entry["stream"])
            elif action == "free_completed":
                self.emit_emptied()
                self.emit("f", self.numbers.pop(address), entry["stream"])
            elif action == "oom":
                self.emit_emptied()
                self.emit("o", size, entry["stream"])
            elif action not in ("free_requested", "snapshot"):
                raise RuntimeError(f"unknown action in the history: {entry}")
        self.emit_emptied()


def changes(values: list[int]) -> list[int]:
    return [now - before for before, now in zip([0, *values], values, strict=False)]


def record(name: str, capacity: int | None, file: Path) -> None:
    """Runs a case in this process and writes its file."""
    case = CASES[name]
    torch.cuda.init()
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    if capacity is not None:
        torch.cuda.set_per_process_memory_fraction(capacity / total)
        capacity = int(capacity / total * total)
    if torch.cuda.memory_reserved() != 0:
        raise RuntimeError("the allocator is in use already")
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    sampler = Sampler()
    case.work(sampler)
    stats = torch.cuda.memory_stats()
    history = torch.cuda.memory._snapshot()["device_traces"][device]
    torch.cuda.memory._record_memory_history(enabled=None)

    events = Events(sampler.actions)
    events.read(history)
    if sampler.actions and sampler.actions != events.actions:
        at = next(
            (
                i
                for i, (a, b) in enumerate(zip(sampler.actions, events.actions, strict=False))
                if a != b
            ),
            min(len(sampler.actions), len(events.actions)),
        )
        raise RuntimeError(
            f"{name}: the history differs from what the work did, from event {at} on"
        )
    if events.bytes != stats["reserved_bytes.all.current"]:
        raise RuntimeError(f"{name}: the history lacks segments")
    streams = {stream: number for number, stream in enumerate(sorted(set(events.streams)))}
    lowest = min(address for _, address, _ in events.segments)
    data = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "settings": case.settings,
        "capacity": capacity,
        "actions": "".join(events.actions),
        "values": events.values,
        "streams": "".join(str(streams[stream]) for stream in events.streams),
        "reserved": changes(events.reserved),
        "segments": [[at, address - lowest, size] for at, address, size in events.segments],
        "final": {key: stats[of] for key, of in FINAL.items()},
    }
    if sampler.actions:
        data |= {key: changes(values) for key, values in sampler.columns.items()}
    text = json.dumps(data, separators=(",", ":")).encode()
    file.write_bytes(gzip.compress(text, 9, mtime=0))
    print(
        f"{name}: {len(events.actions)} events, {events.actions.count('o')} out of memory, "
        f"{stats['num_alloc_retries']} retries, "
        f"at most {stats['reserved_bytes.all.peak'] >> 20} MiB reserved, "
        f"{file.stat().st_size} bytes",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="default: all cases")
    parser.add_argument("--here", action="store_true", help="one case, in this process")
    parser.add_argument("--capacity", type=int)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        name = arguments.names[0]
        record(name, arguments.capacity, arguments.folder / f"{name}.json.gz")
        return 0
    status = 0
    for name in arguments.names or CASES:
        case = CASES[name]
        command = [sys.executable, __file__, "--here", str(arguments.folder), name]
        capacity = case.capacity
        if case.share_of:
            with gzip.open(arguments.folder / f"{case.share_of}.json.gz") as file:
                peak = json.load(file)["final"]["peak_allocated"]
            # An odd MiB: segments are multiples of 2 MiB, so rounding decides nothing.
            capacity = int(peak * case.share) // (2 * MIB) * (2 * MIB) + MIB
        if capacity is not None:
            command += ["--capacity", str(capacity)]
        environment = dict(os.environ)
        environment.pop("PYTORCH_ALLOC_CONF", None)
        environment["PYTORCH_CUDA_ALLOC_CONF"] = case.settings
        if not case.settings:
            environment.pop("PYTORCH_CUDA_ALLOC_CONF")
        if subprocess.run(command, env=environment, timeout=300).returncode != 0:
            print(f"{name}: failed", file=sys.stderr, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
