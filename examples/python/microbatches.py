"""A training step that fits whatever memory there is, with the gradients of the whole batch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import brim


def main() -> None:
    """Train under budgets that get tighter; the gradients stay the same."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
    )
    batch = torch.rand(2048, 64), torch.randint(0, 10, (2048,))

    def loss_fn(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = part
        return cross_entropy(model(x), y)

    step = brim.Microbatches(loss_fn, model=model)
    brim.install_cpu_allocator()
    loss = step(batch)
    expected = [p.grad for p in model.parameters()]
    print(f"without a budget: loss {loss:.4f}, parts of {step.size}")
    for budget in ("20MiB", "12MiB", "20MiB"):
        model.zero_grad()
        with brim.budget(brim.memory_stats("cpu").allocated + brim.parse_bytes(budget), "cpu"):
            loss, attempts = step.record(batch)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        tried = [f"{a.size}{'' if a.fitted else ' (out of memory)'}" for a in attempts]
        print(f"with {budget} more: loss {loss:.4f}, parts of {', '.join(tried)}")


if __name__ == "__main__":
    main()
