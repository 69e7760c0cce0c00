"""Graphs of PyTorch Geometric: batches by nodes and edges, and parts of them by graphs."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.data import PackedBatchSampler

geometric = pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.nn import GCNConv, global_mean_pool  # noqa: E402

from .graph_samples import graphs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def sizes_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([[graph.num_nodes, graph.num_edges] for graph in samples])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GCNConv(4, 32), GCNConv(32, 32), nn.Linear(32, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index).relu()
        hidden = self.second(hidden, batch.edge_index).relu()
        return self.head(global_mean_pool(hidden, batch.batch)).squeeze(1)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> torch.Tensor:
        return (self(batch) - batch.y).square().mean()


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_parts_of_a_batch_of_graphs_leave_the_gradients_of_the_whole(size: int) -> None:
    torch.manual_seed(0)
    net = Net().double()
    batch = Batch.from_data_list(_doubles(10))
    net.loss(batch).backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    seen: list[int] = []

    def loss_fn(part: Any) -> torch.Tensor:
        seen.append(part.num_graphs)
        return net.loss(part)

    step = brim.Microbatches(
        loss_fn,
        model=net,
        size=size,
        split=lambda batch, start, stop: Batch.from_data_list(batch[start:stop]),
        length=lambda batch: batch.num_graphs,
    )
    step(batch)
    parts = seen[-math.ceil(10 / size) :]  # after the graphs that were compared
    assert sum(parts) == 10
    assert max(parts) == size
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert parameter.grad.allclose(gradient, 1e-12)


def _doubles(count: int) -> list[Any]:
    samples = graphs(count)
    for graph in samples:
        graph.x, graph.y = graph.x.double(), graph.y.double()
    return samples


def test_geometrics_loader_gives_batches_within_budgets_of_nodes_and_edges() -> None:
    samples = graphs(200)
    sampler = PackedBatchSampler(sizes_of(samples), [200, 1500], shuffle=True)
    loader = DataLoader(samples, batch_sampler=sampler)
    seen = 0
    for batch in loader:
        assert batch.num_nodes <= 200
        assert batch.num_edges <= 1500
        seen += batch.num_graphs
    assert seen == 200


def test_fit_learns_what_nodes_and_edges_need(held: int) -> None:
    samples = graphs(300)
    torch.manual_seed(0)
    net = Net()
    room = 8 * 2**20

    def work(batch: Any) -> None:
        net.zero_grad()
        net.loss(batch).backward()

    sampler = PackedBatchSampler.fit(
        samples,
        work,
        sizes_of(samples),
        held + room,
        "cpu",
        cost="sum",
        collate_fn=Batch.from_data_list,
        shuffle=True,
    )
    assert sampler.weights is not None
    assert min(sampler.weights) > 0
    peaks = []
    for batch in DataLoader(samples, batch_sampler=sampler):
        with brim.PeakMeter("cpu") as meter:
            work(batch)
        peaks.append(meter.start + meter.peak - held)
        gc.collect()
    assert max(peaks) <= room
    assert sum(sorted(peaks)[1:]) / len(peaks[1:]) >= 0.8 * room
