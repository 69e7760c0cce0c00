"""Two ranks train one model; the second has half the memory of the first, and both use one size.

Runs by itself, or with `torchrun --nproc-per-node=2 ranks.py`.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

import brim


def train() -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model everywhere
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.rand(1024, 64, generator=torch.Generator().manual_seed(rank))

    def loss_fn(part: torch.Tensor) -> torch.Tensor:
        return (model(part) - part.mean(1, keepdim=True)).square().mean()

    # Parts without a collective, agreement, then the gradients of both ranks' batches together.
    step = brim.Microbatches(loss_fn, model=model, ranks=True)
    brim.install_cpu_allocator()
    with brim.budget("3MiB" if rank == 0 else "1.5MiB", device="cpu"):
        for number in range(5):
            optimizer.zero_grad()
            loss, attempts = step.record(data)
            optimizer.step()
            tried = [f"{a.size}{'' if a.fitted else ' (out of memory)'}" for a in attempts]
            text = f"rank {rank}, step {number}: {', '.join(tried)}; loss {loss:.4f}"
            print(text + "\n", end="", flush=True)  # in one piece: the ranks share the terminal
    dist.destroy_process_group()


def main() -> None:
    """Start two ranks, unless this is one."""
    if "RANK" in os.environ:
        train()
        return
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*run, __file__], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
