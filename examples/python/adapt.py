"""Nearest neighbours with no batch size to tune: whatever the budget, the largest that fits."""

import torch

import brim


@brim.maximize("batch_size", infer="x")
def knn(
    x: torch.Tensor, y: torch.Tensor, batch_size: int | None = None, k: int = 3
) -> torch.Tensor:
    """Indices of the k nearest of y for each row of x."""
    assert batch_size is not None  # inferred from x where it is not passed
    return torch.cat(
        [
            torch.cdist(part, y, p=1).topk(k, dim=1, largest=False).indices
            for part in x.split(batch_size)
        ]
    )


def main() -> None:
    """Run under budgets that get tighter and wider again; print what was tried."""
    brim.install_cpu_allocator()
    x, y = torch.rand(16384, 32), torch.rand(1024, 32)
    expected = knn(x, y)
    for budget in ("40MiB", "24MiB", "40MiB"):
        with brim.budget(budget, device="cpu"):
            result, attempts = knn.record(x, y)
        assert torch.equal(result, expected)
        tried = [f"{a.size}{'' if a.fitted else ' (out of memory)'}" for a in attempts]
        print(f"{budget}: {', '.join(tried)}")


if __name__ == "__main__":
    main()
