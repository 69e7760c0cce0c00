"""torchdata: pipelines of nodes over brim's samplers and streams resume in the middle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from brim.data import PackedBatchSampler, bucket_stream, pack_stream

nodes = pytest.importorskip("torchdata.nodes")

SIZES = [(7 * i) % 19 + 1 for i in range(97)]
DATASET = ["x" * size for size in SIZES]
SOURCES: dict[str, Callable[[], Any]] = {
    "sampler": lambda: PackedBatchSampler(SIZES, 40, shuffle=True, seed=1),
    "packed stream": lambda: pack_stream(DATASET, 40, lookahead=30, shuffle=True, seed=1),
    "bucket stream": lambda: bucket_stream(DATASET, [0, 10, 20], 60, lookahead=30),
}


def load(kind: str, workers: int) -> Any:
    """What the guide shows: a source of batches, loaded by threads, a few ahead."""
    source = nodes.SamplerWrapper(SOURCES[kind]())
    read = (lambda batch: [DATASET[i] for i in batch]) if kind == "sampler" else list
    loaded = nodes.ParallelMapper(source, read, num_workers=workers, method="thread")
    return nodes.Loader(nodes.Prefetcher(loaded, prefetch_factor=3))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_pipeline_resumes_in_the_middle(kind: str, workers: int) -> None:
    whole = load(kind, workers)
    epochs = [list(whole) for _ in range(3)]
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [sorted(DATASET)] * 3
    assert (epochs[0] == epochs[1]) == (kind == "bucket stream")  # which does not shuffle
    stopped = load(kind, workers)
    list(stopped)
    done = list(itertools.islice(stopped, 4))
    resumed = load(kind, workers)
    resumed.load_state_dict(stopped.state_dict())
    assert done + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]
