"""Two ranks train one model; the second has half the memory of the first, and both use one size.

Runs by itself, or with `torchrun --nproc-per-node=2 ranks.py`.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import brim


def train() -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    data = torch.rand(1024, 64)

    @brim.batch(1024, ranks=True, restore=model)
    def gradients(batch_size: int) -> float:
        total = 0.0
        with model.no_sync():  # no collective inside: nobody waits for a rank that fails
            for part in data.split(batch_size):
                loss = (model(part) - part.sum(1, keepdim=True)).square().sum() / len(data)
                loss.backward()
                total += loss.item()
        return total

    brim.install_cpu_allocator()
    with brim.budget("3MiB" if rank == 0 else "1.5MiB", device="cpu"):
        for step in range(5):
            loss, attempts = gradients.record()
            for parameter in model.parameters():  # every rank is here, with all of its gradients
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            tried = [f"{a.size}{'' if a.fitted else ' (out of memory)'}" for a in attempts]
            print(f"rank {rank}, step {step}: {', '.join(tried)}; loss {loss:.2f}", flush=True)
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
