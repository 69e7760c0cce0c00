"""Graphs of PyTorch Geometric for the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data


def graphs(count: int = 40, seed: int = 0) -> list[Any]:
    """Some have many edges for each node, some have few."""
    generator = torch.Generator().manual_seed(seed)

    def graph() -> Any:
        nodes = int(torch.randint(3, 40, (), generator=generator))
        edges = nodes * int(torch.randint(1, 20, (), generator=generator))
        return Data(
            x=torch.rand(nodes, 4, generator=generator),
            edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
            y=torch.rand(1, generator=generator),
        )

    return [graph() for _ in range(count)]
