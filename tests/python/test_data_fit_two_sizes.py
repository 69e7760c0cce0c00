"""Fitted samplers of samples that have two sizes: nodes and edges of graphs."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest
import torch

import brim
from brim.data import PackedBatchSampler, SizeAwareBatchSampler


class Graphs:
    """Nodes and edges, of which samples have very different numbers, and a step over both."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        nodes = torch.randint(3, 60, (300,), generator=generator)
        self.sizes = torch.stack(
            [nodes, nodes * torch.randint(0, 25, (300,), generator=generator)], 1
        )
        torch.manual_seed(0)
        self.of_node, self.of_edge = torch.nn.Linear(16, 64), torch.nn.Linear(8, 16)

    def step(self, batch: list[int]) -> None:
        nodes, edges = self.sizes[batch].sum(0).tolist()
        for layer in (self.of_node, self.of_edge):
            layer.zero_grad()
        hidden = self.of_node(torch.ones(nodes, 16)).relu().sum()
        (hidden + self.of_edge(torch.ones(edges, 8)).relu().sum()).backward()


@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
def test_two_sizes_per_sample_fill_the_budget(sampler: Any, held: int) -> None:
    graphs, room = Graphs(), 4 * 2**20
    ways: list[Any] = [
        graphs.sizes,
        [tuple(row) for row in graphs.sizes.tolist()],
        lambda index: graphs.sizes[index].tolist(),
    ]
    for sizeof in ways:
        made = sampler.fit(
            range(300), graphs.step, sizeof, held + room, "cpu", cost="sum", shuffle=True, seed=1
        )
        peaks = []
        for batch in made:
            with brim.PeakMeter("cpu") as meter:
                graphs.step(batch)
            peaks.append(meter.start + meter.peak - held)
        assert max(peaks) <= room
        full = sorted(peaks)[1:] if len(peaks) > 1 else peaks  # the last one may be short
        assert sum(full) / len(full) >= 0.9 * room
        # A node takes 16 + 64 + 64 floats and more, an edge 8 + 16 + 16.
        assert made.weights[0] / made.weights[1] == pytest.approx(3.6, rel=0.15)


class GraphNeed(NamedTuple):
    """Bytes that batches of graphs need."""

    sizes: torch.Tensor
    of_node: int
    of_edge: int
    of_sample: int
    of_square: int  # of a graph's nodes
    floor: int
    in_phases: bool  # nodes and edges do not need memory at the same time

    def need(self, batch: list[int]) -> int:
        nodes, edges = self.sizes[batch].sum(0).tolist()
        both = [self.of_node * nodes, self.of_edge * edges]
        most = max(both) if self.in_phases else sum(both)
        squares = int(self.sizes[batch][:, 0].square().sum())
        most += self.of_sample * len(batch) + self.of_square * squares
        return max(self.floor, most) + 64

    def __call__(self, batch: list[int]) -> None:
        torch.empty(self.need(batch), dtype=torch.uint8)


@pytest.mark.parametrize("seeds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_no_batch_of_a_program_of_two_sizes_is_over_the_budget(seeds: int) -> None:
    brim.install_cpu_allocator()
    for seed in range(seeds):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        nodes = torch.randint(3, 60, (300,), generator=generator)
        edges = (nodes * torch.rand(300, generator=generator) * dice.choice([5, 30])).long()
        sizes = torch.stack([nodes, edges], 1)
        program = GraphNeed(
            sizes,
            of_node=dice.choice([100, 1000]),
            of_edge=dice.choice([0, 20, 300]),
            of_sample=dice.choice([0, 1000]),
            of_square=dice.choice([0, 0, 30]),
            floor=dice.choice([0, 200_000]),
            in_phases=dice.random() < 0.3,
        )
        held, room = brim.memory_stats("cpu").allocated, 1_500_000
        made = PackedBatchSampler.fit(
            range(300), program, sizes, held + room, "cpu", cost="sum", shuffle=True, seed=1
        )
        used = sorted(program.need(batch) / room for batch in made)
        assert used[-1] <= 1, seed
        assert made.report().batched == 300
        assert len(used) == 1 or sum(used[1:]) / len(used[1:]) >= 0.7, seed


@pytest.mark.filterwarnings("ignore:the sizes of the samples do not determine")
def test_a_restarted_job_has_the_weights_of_its_state(held: int) -> None:
    graphs = Graphs()

    def fit(work: Any, **options: Any) -> Any:
        options = {"cost": "sum", "shuffle": True, "seed": 1, **options}
        made = PackedBatchSampler.fit(
            range(300), work, graphs.sizes, held + 2**22, "cpu", **options
        )
        assert made.weights is not None
        return made

    def more(batch: list[int]) -> None:
        kept = torch.ones(int(graphs.sizes[batch][:, 0].sum()), 64)
        graphs.step(batch)
        del kept

    stopped = fit(graphs.step)
    running = iter(stopped)
    for _ in range(3):
        next(running)
    state = json.loads(json.dumps(stopped.state_dict()))
    rest = list(running)
    restarted = fit(more)
    assert restarted.weights != stopped.weights
    restarted.load_state_dict(state)
    assert restarted.weights == stopped.weights
    assert list(restarted) == rest
    assert list(fit(None, state=state)) == rest
    plain = PackedBatchSampler.fit(range(300), graphs.step, [1] * 300, held + 2**22, "cpu")
    with pytest.raises(ValueError, match="its cost is 'sum', here it is 'padded'"):
        plain.load_state_dict(state)


def test_wrong_sizes_per_sample() -> None:
    graphs = Graphs()

    def fit(sizes: Any, **options: Any) -> Any:
        options = {"cost": "sum", **options}
        return PackedBatchSampler.fit(range(300), graphs.step, sizes, "1GiB", "cpu", **options)

    with pytest.raises(ValueError, match="columns must be from 1 to 4"):
        fit(graphs.sizes.repeat(1, 3), cost="padded")
    with pytest.raises(ValueError, match="sizes must not be negative, got -1 at index 7"):
        fit(graphs.sizes.index_fill(0, torch.tensor([7]), -1))
    with pytest.raises(ValueError, match="sizes must have 2 numbers for each sample"):
        fit([(1, 2)] * 299 + [(1,)])
    wrong = graphs.sizes.double()
    wrong[3, 1] = float("nan")
    with pytest.raises(ValueError, match="sizes must be finite, got nan at index 3"):
        fit(wrong)
