"""PyTorch Geometric: batches of graphs under budgets of nodes and edges, and parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Unpack

from brim.data import PackedBatchSampler
from brim.data.base import SamplerOptions

__all__ = ["fit_graph_sampler", "graph_sampler", "graph_sizes", "length", "part"]


def graph_sizes(dataset: Any) -> torch.Tensor:
    """The nodes and edges of each graph: an int64 tensor of two columns.

    Graphs of an `InMemoryDataset` are not taken apart for this; of others each is read once.

    Args:
        dataset: a data set or a list of `torch_geometric.data.Data` or `HeteroData`.

    Example:
        >>> from torch_geometric.data import Data
        >>> path = Data(x=torch.rand(3, 1), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> graph_sizes([path, path])
        tensor([[3, 2],
                [3, 2]])
    """
    known = _sizes_in_memory(dataset)
    if known is not None:
        return known
    sizes = [(graph.num_nodes, graph.num_edges) for graph in dataset]
    for index, (nodes, _) in enumerate(sizes):
        if nodes is None:
            raise ValueError(f"graph {index} has no num_nodes: give it x, pos or num_nodes")
    return torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)


def _sizes_in_memory(dataset: Any) -> torch.Tensor | None:
    """The same from the offsets at which the graphs of an `InMemoryDataset` lie, if they tell."""
    slices = getattr(dataset, "slices", None)
    # An attribute of the graphs or a transform may change what there is.
    if not isinstance(slices, dict) or getattr(dataset, "transform", None) is not None:
        return None
    nodes = next((slices[key] for key in ("x", "pos") if key in slices), None)
    edges = slices.get("edge_index")
    if "num_nodes" in slices or not (
        isinstance(nodes, torch.Tensor) and isinstance(edges, torch.Tensor)
    ):
        return None
    sizes = torch.stack([nodes.diff(), edges.diff()], 1)
    return sizes[list(dataset.indices())]


def graph_sampler(
    dataset: Any,
    max_nodes: int | None = None,
    max_edges: int | None = None,
    *,
    window: int | None = 10_000,
    **options: Unpack[SamplerOptions],
) -> PackedBatchSampler:
    """A batch sampler for `torch_geometric.loader.DataLoader`: full batches within both budgets.

    In place of `DynamicBatchSampler(dataset, max_num, mode)`, which knows one budget and takes the
    graphs as they come. The length is exact, ranks share the batches out, and states can be saved.

    Args:
        dataset: graphs; see `graph_sizes`.
        max_nodes: the most nodes of a batch.
        max_edges: the most edges of a batch. At least one of the two is needed.
        window: how many graphs are packed together; see `PackedBatchSampler`.
        **options: keywords of all samplers, such as `shuffle`, `seed` and `max_batch_size`.
            `oversize="alone"` gives a graph over a budget a batch of its own, as
            `skip_too_big=False` does; by default it is left out, with a warning.

    Example:
        >>> from torch_geometric.data import Data
        >>> def path(n): return Data(x=torch.rand(n, 1), edge_index=torch.zeros(2, n - 1).long())
        >>> list(graph_sampler([path(2), path(6), path(5), path(3)], max_nodes=8, max_edges=7))
        [[1, 0], [2, 3]]
    """
    limits = {"max_nodes": max_nodes, "max_edges": max_edges}
    given = [limit for limit in limits.values() if limit is not None]
    if not given:
        raise ValueError("max_nodes or max_edges must be given, or both")
    sizes = graph_sizes(dataset)
    columns = [place for place, limit in enumerate(limits.values()) if limit is not None]
    options = {"cost": "sum", **options}
    return PackedBatchSampler(sizes[:, columns].contiguous(), given, window=window, **options)


def fit_graph_sampler(
    dataset: Any,
    work: Callable[[Any], object],
    budget: int | str,
    device: str | torch.device | int | None = None,
    **options: Any,
) -> PackedBatchSampler:
    """Measure what nodes and edges need, and make a sampler that stays under a budget in bytes.

    Args:
        dataset: graphs; see `graph_sizes`.
        work: what is done with a batch, such as a training step; called about forty times.
        budget: bytes that the device may hold at once, including what it holds now.
        device: the current accelerator if None, else the CPU.
        **options: see `PackedBatchSampler.fit`.

    Returns:
        A sampler; its `weights` are what a node and an edge count.

    Example:
        >>> import brim
        >>> from torch_geometric.data import Data
        >>> def path(n): return Data(x=torch.rand(n, 1), edge_index=torch.zeros(2, n - 1).long())
        >>> def step(batch): return (batch.x @ torch.rand(1, 64))[batch.edge_index[0]].sum()
        >>> budget = brim.memory_stats("cpu").allocated + 2**20
        >>> sampler = fit_graph_sampler([path(n) for n in range(2, 50)], step, budget, "cpu")
        >>> sampler.report().batched, len(sampler.weights)
        (48, 2)
    """
    from torch_geometric.data import Batch

    options = {"collate_fn": Batch.from_data_list, "cost": "sum", **options}
    return PackedBatchSampler.fit(dataset, work, graph_sizes(dataset), budget, device, **options)


def length(batch: Any) -> int:
    """How many graphs a `Batch` has; for `length=` of `brim.Microbatches`.

    Example:
        >>> from torch_geometric.data import Batch, Data
        >>> length(Batch.from_data_list([Data(x=torch.ones(n, 1)) for n in (3, 4, 5)]))
        3
    """
    return int(batch.num_graphs)


def part(batch: Any, start: int, stop: int) -> Any:
    """The graphs from `start` to `stop` of a `Batch`; for `split=` of `brim.Microbatches`.

    Example:
        >>> from torch_geometric.data import Batch, Data
        >>> graphs = [Data(x=torch.ones(n, 1)) for n in (3, 4, 5)]
        >>> part(Batch.from_data_list(graphs), 1, 3).x.shape
        torch.Size([9, 1])
    """
    keys = batch.keys()
    followed = [key.removesuffix("_batch") for key in keys if key.endswith("_batch")]
    return type(batch).from_data_list(batch[start:stop], follow_batch=followed)
