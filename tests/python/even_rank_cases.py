"""Streams whose ranks read their own shards, for rank_job.py."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from brim.data import Shards, even, pack_stream


def error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def sharded_stream(counts: list[int], **options: Any) -> Any:
    """A stream of which rank r reads counts[r], counts[r + world], … samples."""
    data = Shards(
        range(len(counts)), lambda shard: range(1000 * shard, 1000 * shard + counts[shard])
    )
    return pack_stream(data, 10, sizeof=lambda _: 1, cost="sum", sharded="divide", **options)


def even_epoch(batches: Any, most: int = 1000) -> tuple[list[list[int]], list[str]]:
    """Its batches, with a collective in each step, and warnings."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _, batch in zip(range(most), batches, strict=False):
            dist.all_reduce(torch.ones(1))
            found.append(batch)
    return found, [str(each.message) for each in caught]


def even_steps(rank: int, world: int) -> Any:
    """Random numbers of samples per rank, none on some: (batches, warnings, left out) of each."""
    generator = random.Random(world)
    results = []
    for trial in range(8):
        counts = [generator.randrange(120) for _ in range(2 * world)]
        if trial == 0:
            counts[0] = counts[world] = 0  # rank 0 has nothing
        batches = even(sharded_stream(counts, lookahead=20), ahead=1 + trial)
        results.append([counts, *even_epoch(batches), batches.left_out])
    return results


def even_repeats(rank: int, world: int) -> Any:
    counts = [30 + 70 * shard for shard in range(world)]
    batches = even(sharded_stream(counts, lookahead=20), at_end="repeat", ahead=3)
    epochs = [even_epoch(batches)[0] for _ in range(2)]
    resumed = []
    for steps in (1, 4, 7):
        stopped = even(sharded_stream(counts, lookahead=20), at_end="repeat", ahead=3)
        done, _ = even_epoch(stopped, steps)
        again = even(sharded_stream(counts, lookahead=20), at_end="repeat", ahead=3)
        again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        resumed.append([done + even_epoch(again)[0], even_epoch(again)[0]])
    return counts, epochs, resumed


def even_resumes(rank: int, world: int) -> Any:
    counts = [40 + 37 * shard for shard in range(2 * world)]
    whole = even(sharded_stream(counts, shuffle=True, lookahead=20), ahead=4)
    epochs = [even_epoch(whole)[0] for _ in range(2)]
    for steps in (1, 3, 6, len(epochs[0])):
        stopped = even(sharded_stream(counts, shuffle=True, lookahead=20), ahead=4)
        done, _ = even_epoch(stopped, steps)
        again = even(sharded_stream(counts, shuffle=True, lookahead=20), ahead=4)
        again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert done + even_epoch(again)[0] == epochs[0], steps
        assert even_epoch(again)[0] == epochs[1], steps
    return len(epochs[0])


def even_fails(rank: int, world: int) -> Any:
    """An error of one rank's samples, other options, the same samples on all ranks."""

    def samples(shard: int) -> Any:
        yield from range(100)
        if shard == 0:
            raise KeyError("a broken file")

    data = Shards(range(world), samples)
    broken = pack_stream(data, 10, sizeof=lambda _: 1, cost="sum", sharded="divide", lookahead=20)
    errors = [error_of(lambda: even_epoch(even(broken)))]
    stream = sharded_stream([100] * world, lookahead=20)
    errors.append(error_of(lambda: even_epoch(even(stream, ahead=2 + rank))))
    same = pack_stream(range(100), 10, sizeof=lambda _: 1, cost="sum", sharded=True)
    return errors, even_epoch(even(same))[1]


EVEN_CASES: dict[str, Callable[[int, int], Any]] = {
    each.__name__: each for each in (even_steps, even_repeats, even_resumes, even_fails)
}
