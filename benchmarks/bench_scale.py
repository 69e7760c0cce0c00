"""Samplers of up to a billion lengths in a file, as one of 1024 ranks of a job.

Writes uint16 lengths (log-normal, median 300, from 30 to 2000) into a temporary folder, 2 bytes per
sample, and deletes them. One process makes the index; then each row is a process of its own, which
opens the sampler with the index there, as rank 700 of 1024, budget 16384. Milliseconds are of
processor time, so other programs on the machine do not count:

- make: seconds to make the index, counts by bucket and the index of one epoch included, by as many
  threads as the machine has (the epoch by one);
- first: milliseconds from the array of lengths to the first batch, the sampler's making included;
- len: milliseconds of `len(sampler)`, after that;
- plan: milliseconds of `plan(k, k + 1)`, the batch in the middle of the epoch;
- resume: milliseconds from the array to the batch after a saved state;
- memory: MiB of anonymous memory that all this added, with up to 201 batches read;
- index: MiB of the index's own mapped files. The lengths are mapped, too, and not counted.

    ./dev bench scale -- --n 1e9
    ./dev bench scale -- --n 1e7 --samplers packed
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from results import Table

from brim import data

BUDGET = 16384
BUCKETS = 30
RANKS = {"rank": 700, "world_size": 1024}
SAMPLERS = ("ordered", "packed", "buckets")


def write_lengths(path: Path, count: int) -> None:
    random = np.random.default_rng(0)
    logarithms = random.standard_normal(min(count, 1 << 23), dtype=np.float32) * np.float32(0.6)
    some = np.rint(300 * np.exp(logarithms)).clip(30, 2000).astype(np.uint16)
    with path.open("wb") as file:  # the same lengths again and again, from another one on
        for begin in range(0, count, len(some)):
            rolled = np.roll(some, int(random.integers(len(some))))
            file.write(rolled[: count - begin].tobytes())


def boundaries() -> Any:
    """With the least padding for a million such lengths."""
    random = np.random.default_rng(1)
    lengths = np.rint(300 * np.exp(0.6 * random.standard_normal(1_000_000))).clip(30, 2000)
    return data.least_padding_boundaries(lengths.astype(np.int64), BUCKETS)


def sampler_of(name: str, lengths: Any, shuffle: bool, edges: Any) -> Any:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 0, "index": True, **RANKS}
    if name == "ordered":
        order = range(len(lengths))
        return data.SizeAwareBatchSampler(order, lengths, BUDGET, cost="sum", **options)
    if name == "packed":
        return data.PackedBatchSampler(lengths, BUDGET, **options)
    return data.BucketBatchSampler(lengths, edges, max_total_size=BUDGET, **options)


def memory() -> tuple[float, float]:
    """Anonymous memory of this process, and that of the index's files, in MiB."""
    anonymous = index = 0
    of_index = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            of_index = line.endswith(".brim-index")
        elif key == "Anonymous:":
            anonymous += int(rest[0])
        elif key == "Rss:" and of_index:
            index += int(rest[0])
    return anonymous / 1024, index / 1024


def measure(name: str, shuffle: bool, path: str, make: bool, length: bool) -> dict[str, float]:
    lengths = np.memmap(path, np.uint16, "r")
    edges = boundaries().tolist() if name == "buckets" else None
    if make:
        begin = time.perf_counter()
        sampler = sampler_of(name, lengths, shuffle, edges)
        made = time.perf_counter() - begin
        if length:
            sampler.make_index()
        return {"sizes": made, "epoch": time.perf_counter() - begin - made}
    before = memory()[0]
    begin = time.process_time()
    sampler = sampler_of(name, lengths, shuffle, edges)
    batches = iter(sampler)
    next(batches)
    result = {"first": 1e3 * (time.process_time() - begin)}
    given = 1 + sum(1 for _ in islice(batches, 200))
    state = sampler.state_dict(batches=(given + 1) // 2)
    del batches
    begin = time.process_time()
    if length:
        len(sampler)
        result["len"] = 1e3 * (time.process_time() - begin)
        half = len(sampler) // 2
        begin = time.process_time()
        sampler.plan(half, half + 1)
        result["plan"] = 1e3 * (time.process_time() - begin)
    anonymous, index = memory()
    result |= {"anonymous": anonymous - before, "index": index}
    begin = time.process_time()
    again = sampler_of(name, lengths, shuffle, edges)
    again.load_state_dict(state)
    next(iter(again), None)
    result["resume"] = 1e3 * (time.process_time() - begin)
    return result


def in_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=float, default=1e7, help="the largest number of samples")
    parser.add_argument("--least", type=float, default=1e6, help="the smallest")
    parser.add_argument("--samplers", nargs="*", default=SAMPLERS, choices=SAMPLERS)
    parser.add_argument("--no-len", nargs="*", default=(), help="samplers without epochs")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*json.loads(arguments.measure))))
        return
    columns = ("sampler, samples", "make", "first", "len", "plan", "resume", "memory", "index")
    table = Table("Samplers as rank 700 of 1024, budget 16384", columns, width=34)
    count = int(arguments.least)
    while count <= arguments.n:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lengths.u16"
            write_lengths(path, count)
            for name in arguments.samplers:
                for shuffle in (False, True):
                    length = name not in arguments.no_len
                    made = in_process(name, shuffle, str(path), True, length)
                    found = in_process(name, shuffle, str(path), False, length)
                    cells = [f"{made['sizes'] + made['epoch']:.1f} s"]
                    cells += [
                        f"{found[key]:.0f} ms" if key in found else "-"
                        for key in ("first", "len", "plan", "resume")
                    ]
                    cells += [f"{found['anonymous']:.0f} MiB", f"{found['index']:.0f} MiB"]
                    label = f"{name}{', shuffled' if shuffle else ''}"
                    table.row(f"{label}, {count:,}", *cells)
        count *= 10


if __name__ == "__main__":
    main()
