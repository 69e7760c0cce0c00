"""What it costs that two ranks agree, per call: part of `./dev bench dist`.

python benchmarks/rank_agreement.py      starts both ranks on this machine
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from harness import Work, medians, milliseconds
from results import Table

import brim


def start() -> None:
    """Run this file on two ranks, which print what follows."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*run, __file__], check=True, env=env)


def call_of_nothing(show: bool) -> None:
    def nothing(size: int) -> None:
        return None

    numbers = torch.zeros(30, dtype=torch.int64)
    works: dict[str, Work] = {
        "brim.batch, alone": brim.batch(64)(nothing),
        "a gloo all_reduce of 30 numbers": lambda: dist.all_reduce(numbers),
        "brim.batch, ranks=True": brim.batch(64, ranks=True)(nothing),
        'brim.batch, ranks=True, sync="settled"': brim.batch(64, ranks=True, sync="settled")(
            nothing
        ),
    }
    times = medians(works, 31, calls=64, warmup=3)
    if show:
        table = Table("A call that does nothing, on two ranks of one machine")
        reduction = times["a gloo all_reduce of 30 numbers"]
        for name, seconds in times.items():
            table.row(
                name, f"{seconds * 1e6:.1f} µs", f"{seconds / reduction:.2f} × the all_reduce"
            )


def training_step(show: bool) -> None:
    """Forward, backward and reduction of an MLP, 256 items per rank in parts of 64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()),
        torch.nn.Linear(512, 10),
    )
    x = torch.rand(256, 256)

    def gradients(size: int) -> None:
        for part in x.split(size):
            model(part).square().mean().backward()

    def step(compute: Work) -> Work:
        def whole() -> None:
            model.zero_grad()
            compute()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

        return whole

    def microbatches(**options: str) -> Work:
        """Also weighs the gradients, and sends them in one bucket."""
        run = brim.Microbatches(
            lambda part: model(part).square().mean(), model=model, size=64, ranks=True, **options
        )

        def whole() -> None:
            model.zero_grad()
            run(x)

        return whole

    works = {
        "by hand": step(lambda: gradients(64)),
        "ranks=True": step(brim.batch(64, ranks=True)(gradients)),
        'ranks=True, sync="settled"': step(brim.batch(64, ranks=True, sync="settled")(gradients)),
        "brim.Microbatches": microbatches(),
        'brim.Microbatches, sync="settled"': microbatches(sync="settled"),
    }
    times = medians(works, 41, calls=4, warmup=3)
    if show:
        table = Table("A training step with its reduction, on two ranks of one machine")
        for name, seconds in times.items():
            table.row(name, milliseconds(seconds), f"{seconds / times['by hand']:.3f} ×")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    show = dist.get_rank() == 0
    call_of_nothing(show)
    training_step(show)
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if "RANK" in os.environ else start()
