"""PyTorch Geometric: sizes of graphs, batches under budgets, parts of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import brim
from brim.integrations import pyg

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader, DynamicBatchSampler

from .graph_samples import graphs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_geometric")


class InMemory(InMemoryDataset):  # type: ignore[misc]
    def __init__(self, samples: list[Any], transform: Any = None) -> None:
        super().__init__(None, transform)
        self.data, self.slices = self.collate(samples)


def read(samples: Any) -> list[list[int]]:
    return [[graph.num_nodes, graph.num_edges] for graph in samples]


@pytest.mark.filterwarnings("ignore:Unable to accurately infer 'num_nodes'")
def test_sizes_are_those_of_the_graphs() -> None:
    samples = graphs()
    expected = read(samples)
    assert pyg.graph_sizes(samples).tolist() == expected
    assert pyg.graph_sizes(samples[:0]).shape == (0, 2)
    hetero = HeteroData()
    hetero["paper"].x, hetero["author"].x = torch.rand(3, 1), torch.rand(4, 1)
    hetero["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2], [0, 0, 1]])
    assert pyg.graph_sizes([hetero]).tolist() == [[7, 3]]
    with pytest.raises(ValueError, match="graph 1 has no num_nodes"):
        pyg.graph_sizes([samples[0], Data(y=torch.ones(1))])


@pytest.mark.filterwarnings("ignore:It is not recommended to directly access the internal storage")
def test_graphs_in_memory_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = graphs()
    dataset = InMemory(samples)
    chosen = dataset[torch.tensor([5, 3, 8])]
    apart = InMemory([Data(edge_index=g.edge_index, num_nodes=g.num_nodes) for g in samples])
    doubled = InMemory(samples, transform=lambda g: Batch.from_data_list([g, g]))
    assert pyg.graph_sizes(apart).tolist() == read(samples)
    assert pyg.graph_sizes(doubled).tolist() == [[2 * n, 2 * e] for n, e in read(samples)]
    monkeypatch.setattr(InMemory, "get", lambda *_: pytest.fail("a graph was read"))
    assert pyg.graph_sizes(dataset).tolist() == read(samples)
    assert pyg.graph_sizes(chosen).tolist() == read([samples[i] for i in (5, 3, 8)])


@pytest.mark.parametrize(
    ("limits", "mode"),
    [({"max_nodes": 100}, "node"), ({"max_edges": 800}, "edge"), ({}, "both")],
)
def test_batches_are_within_the_budgets_and_fewer_than_pygs(
    limits: dict[str, int], mode: str
) -> None:
    samples = graphs(200)
    both = limits or {"max_nodes": 100, "max_edges": 800}
    sampler = pyg.graph_sampler(samples, **both)
    batches = list(DataLoader(samples, batch_sampler=sampler))
    assert len(sampler) == len(batches)
    assert sum(batch.num_graphs for batch in batches) == 200
    for batch in batches:
        assert batch.num_nodes <= both.get("max_nodes", 10**9)
        assert batch.num_edges <= both.get("max_edges", 10**9)
    if mode != "both":
        theirs = DynamicBatchSampler(samples, *limits.values(), mode)
        assert len(batches) < sum(1 for _ in theirs)


def test_graphs_over_the_budget() -> None:
    samples = graphs()
    most = int(pyg.graph_sizes(samples)[:, 0].max())
    with pytest.warns(UserWarning, match="samples are left out, over budget"):
        left = pyg.graph_sampler(samples, max_nodes=most - 1)
    assert sum(map(len, left)) < len(samples)
    alone = pyg.graph_sampler(samples, max_nodes=most - 1, oversize="alone")
    assert sum(map(len, alone)) == len(samples)
    with pytest.raises(ValueError, match="max_nodes or max_edges must be given"):
        pyg.graph_sampler(samples)


def test_fit_stays_within_a_budget_in_bytes(held: int) -> None:
    samples = graphs(150)
    weight = torch.rand(4, 256, requires_grad=True)
    room = 4 * 2**20

    def work(batch: Any) -> None:
        weight.grad = None
        messages = (batch.x @ weight)[batch.edge_index[0]].relu()
        messages.sum().backward()

    sampler = pyg.fit_graph_sampler(samples, work, held + room, "cpu", shuffle=True)
    assert sampler.weights is not None
    assert sampler.weights[1] > 0
    for batch in DataLoader(samples, batch_sampler=sampler):
        with brim.PeakMeter("cpu") as meter:
            work(batch)
        assert meter.start + meter.peak <= held + room


def test_parts_are_batches_of_the_graphs_between() -> None:
    samples = graphs(6)
    batch = next(iter(DataLoader(samples, batch_size=6, follow_batch=["y"])))
    cut = pyg.part(batch, 2, 5)
    expected = Batch.from_data_list(samples[2:5], follow_batch=["y"])
    assert sorted(cut.keys()) == sorted(expected.keys())
    for key in expected.keys():  # noqa: SIM118  a Batch is no mapping
        assert torch.equal(cut[key], expected[key])
    assert (pyg.length(batch), pyg.length(cut)) == (6, 3)


def test_microbatches_of_graphs_leave_the_gradients_of_the_whole() -> None:
    batch = Batch.from_data_list(graphs(10))
    weight = torch.rand(4, 8, dtype=torch.float64, requires_grad=True)

    def loss_fn(part: Any) -> torch.Tensor:
        out = torch.zeros(part.num_graphs, 8, dtype=torch.float64)
        return out.index_add(0, part.batch, part.x.double() @ weight).square().mean()

    (expected,) = torch.autograd.grad(loss_fn(batch), [weight])
    step = brim.Microbatches(loss_fn, split=pyg.part, length=pyg.length, size=3)
    step(batch)
    assert weight.grad is not None
    assert weight.grad.allclose(expected, 1e-12)
