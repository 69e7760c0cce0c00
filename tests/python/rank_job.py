"""One rank of a job of several processes; test_ranks.py starts them and looks at what they return.

Run as `rank_job.py FOLDER CASE...`: calls the cases one after the other and writes what each
returned, or the error that it raised, to FOLDER/RANK.json. Many cases share one job, because
starting one takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext as nothing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import brim
import brim.dist
from brim.data import PackedBatchSampler, SizeAwareBatchSampler
from brim.testing import inject_oom

from even_rank_cases import EVEN_CASES, error_of  # isort: skip: this is run as a script

CASES: dict[str, Callable[[int, int], Any]] = {**EVEN_CASES}


def case(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    CASES[function.__name__] = function
    return function


def tensor_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def room_for(size: int) -> Any:
    """A budget of so many bytes above what is held now."""
    brim.install_cpu_allocator()
    return brim.budget(brim.memory_stats("cpu").allocated + size, device="cpu")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 GiB.")


def sizes_with_half_the_memory_on_the_last_rank(rank: int, world: int, **options: Any) -> Any:
    @brim.batch(256, ranks=True, **options)
    def step(size: int) -> int:
        tensor_of(1000 * size)
        return size

    with room_for(100_000 if rank == world - 1 else 200_000):
        return [step() for _ in range(5)]


@case
def half_budget(rank: int, world: int) -> Any:
    return sizes_with_half_the_memory_on_the_last_rank(rank, world)


@case
def per_rank(rank: int, world: int) -> Any:
    return sizes_with_half_the_memory_on_the_last_rank(rank, world, per_rank=True)


@case
def every_kind(rank: int, world: int) -> Any:
    """All adaptive calls with lengths that differ between ranks, on memory that differs."""
    x, y = torch.zeros(100 + rank, 3), torch.zeros(2000, 3)
    out = torch.zeros(100 + rank)
    steps: dict[str, list[int]] = {"maximize": [], "range": [], "chunked": []}

    @brim.maximize("batch_size", infer="x", ranks=True)
    def nearest(x: torch.Tensor, batch_size: int | None = None) -> torch.Tensor:
        steps["maximize"].append(batch_size or 0)
        return torch.cat([torch.cdist(part, y).amin(1) for part in x.split(batch_size or 1)])

    def fill(start: int, end: int) -> None:
        tensor_of(8000 * (end - start))
        steps["range"].append(end - start)
        out[start:end] += 1

    def fill_chunk(chunk: torch.Tensor, start: int, end: int) -> None:
        tensor_of(8000 * (end - start))
        steps["chunked"].append(end - start)
        chunk += 1

    with room_for(200_000 + 200_000 * rank):
        nearest(x)
        brim.run_range(0, len(out), 64, fill, ranks=True)
        brim.run_chunked(out, 64, fill_chunk, ranks=True)
        size = brim.run_batch(64, lambda n: len(tensor_of(8000 * n)) // 8000, ranks=True)
    return {"steps": steps, "out": out.unique().tolist(), "batch": size}


@case
def settled(rank: int, world: int) -> Any:
    """A rank that runs out of memory between two exchanges goes on alone until the next."""
    failing = False

    @brim.batch(64, ranks=True, sync="settled")
    def step(size: int) -> int:
        if failing and rank == 0 and size > 40:
            out_of_memory()
        return size

    sizes = []
    for call in range(70):
        failing = call >= 20
        sizes.append(step())
    return sizes


@case
def error_on_one_rank(rank: int, world: int) -> Any:
    """The others learn of it, and all can go on afterwards."""

    @brim.batch(64, ranks=True)
    def step(size: int, fail: bool) -> int:
        if fail and rank == world - 1:
            raise KeyError("no such sample " + long)
        return size

    long = "…" * 1000  # longer than a message, which must not be cut inside of a character

    def hasher(arguments: Any) -> int:
        if arguments["fail"] and rank == world - 1:
            raise ValueError("no key")
        return 1

    hashed = brim.batch(64, ranks=True, keys="fail", hasher=hasher)(lambda size, fail: size)
    ahead = error_of(lambda: hashed(fail=True))
    return [error_of(lambda: step(True)), step(False), ahead, hashed(fail=False)]


@case
def does_not_fit(rank: int, world: int) -> Any:
    @brim.batch(4, ranks=True)
    def step(size: int) -> None:
        if rank == 0:
            out_of_memory()

    return error_of(step)


@case
def different_sizes(rank: int, world: int) -> Any:
    return error_of(lambda: brim.run_batch(64 + rank, lambda size: size, ranks=True))


@case
def different_functions(rank: int, world: int) -> Any:
    @brim.batch(64, ranks=True)
    def one(size: int) -> int:
        return size

    @brim.batch(64, ranks=True)
    def two(size: int) -> int:
        return size

    return error_of(one if rank == 0 else two)


@case
def slow_rank(rank: int, world: int) -> Any:
    @brim.batch(64, ranks=True)
    def step(size: int) -> int:
        if rank == 0:
            time.sleep(1.5)
        return size

    return step()


@case
def a_group(rank: int, world: int) -> Any:
    """Only the ranks of a group agree; the others make no such call."""
    group = dist.new_group([0, 1])
    if rank > 1:
        return 0

    @brim.batch(64, ranks=group)
    def step(size: int) -> int:
        if rank == 1 and size > 20:
            out_of_memory()
        return size

    return step()


class Training:
    """Linear regression under DDP, in numbers that are exact: sums do not depend on their order.

    A step runs the samples of this rank in parts without communication, and agrees. All that the
    reduction needs is allocated and agreed on before it, and so is the optimizer's step after it.
    """

    steps, samples = 4, 12
    places = ("forward", "backward", "reduction", "update")

    def __init__(self, rank: int, inject: Callable[[str, int], Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.mul(4).round())
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-9, momentum=0.5)
        generator = torch.Generator().manual_seed(1 + rank)
        self.data = torch.randint(
            -1, 2, (self.steps, self.samples, 4), generator=generator
        ).double()
        self.inject = inject  # (place, size) -> a context in which an allocation may fail
        self.sizes: list[int] = []
        self.backward = brim.batch(12, ranks=True, restore=self.model)(self._backward)
        self.flatten = brim.batch(2, ranks=True)(self._flatten)
        self.update = brim.batch(2, ranks=True, restore=self.optimizer)(self._update)

    def _backward(self, size: int, samples: torch.Tensor) -> int:
        with self.model.no_sync():
            for part in samples.split(size):
                with self.inject("forward", size):
                    loss = (self.model(part[:, :3]) - part[:, 3:]).square().sum()
                with self.inject("backward", size):
                    loss.backward()
        return size

    def _flatten(self, tries: int) -> torch.Tensor:
        with self.inject("reduction", tries):
            return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def _update(self, tries: int) -> None:
        with self.inject("update", tries):
            self.optimizer.step()

    def run(self) -> list[float]:
        for samples in self.data:
            self.optimizer.zero_grad(set_to_none=False)
            self.sizes.append(self.backward(samples))
            flat = self.flatten()
            dist.all_reduce(flat)
            for parameter, grad in zip(self.model.parameters(), flat.split((3, 1)), strict=True):
                parameter.grad.copy_(grad.view_as(parameter))
            self.update()
        return [value for p in self.model.parameters() for value in p.flatten().tolist()]


def no_failure(where: str, size: int) -> Any:
    return nothing()


@case
def failure_in_each_place(rank: int, world: int) -> Any:
    """One rank fails once, in the second step, in the forward pass or behind it."""
    results: dict[str, Any] = {"none": Training(rank, no_failure).run()}
    for place in Training.places:
        visits = 0

        def inject(where: str, size: int, place: str = place) -> Any:
            nonlocal visits
            visits += where == place
            fails = where == place and visits == 2 and rank == 1
            return inject_oom() if fails else nothing()

        training = Training(rank, inject)
        results[place] = training.run()
        results[place + "_sizes"] = training.sizes
    return results


@case
def random_schedules(rank: int, world: int) -> Any:
    """Trainings with failures at random places of random ranks, and one without."""
    expected = Training(rank, no_failure).run()
    results = []
    for schedule in range(20 if world == 2 else 480):  # 500 with --all
        chance = random.Random(schedule * 100 + rank)

        def inject(where: str, size: int, chance: random.Random = chance) -> Any:
            fails = size > 1 and chance.random() < 0.15  # at the floor a failure is final
            return inject_oom(at=chance.randrange(1, 5)) if fails else nothing()

        training = Training(rank, inject)
        results.append([training.run(), training.sizes])
    return {"expected": expected, "results": results}


@case
def random_microbatches(rank: int, world: int) -> Any:
    """As random_schedules, with batches of random lengths; every other one is settled.

    Parameters are rounded after each step, so that sums stay exact over many of them.
    """

    def train(schedule: int, chance: random.Random | None) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.mul(4).round())

        def loss_fn(part: torch.Tensor) -> torch.Tensor:
            fails = chance is not None and len(part) > 1 and chance.random() < 0.12
            with inject_oom(at=chance.randrange(1, 8)) if fails else nothing():
                return (model(part[:, :3]) - part[:, 3:]).square().sum()

        step = brim.Microbatches(
            loss_fn,
            model=model,
            reduction="sum",
            ranks=True,
            sync="settled" if schedule % 2 else "always",
        )
        generator = torch.Generator().manual_seed(schedule * 10 + rank)
        sizes = []
        for _ in range(12):
            length = int(torch.randint(1, 13, (), generator=generator))
            batch = torch.randint(-1, 2, (length, 4), generator=generator).double()
            model.zero_grad()
            step(batch)
            sizes.append((step.size, length))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * 2.0**-9).mul_(64).round_().div_(64)
        return [value for p in model.parameters() for value in p.flatten().tolist()], sizes

    return [
        [train(schedule, None)[0], *train(schedule, random.Random(schedule * 100 + rank))]
        for schedule in range(50 if world > 2 else 12)
    ]


@case
def fully_sharded(rank: int, world: int) -> Any:
    """FSDP2: its collectives are inside of the step, so that sizes grow from small."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))

    @brim.batch(2048, ranks=True, collectives="inside", restore=model)
    def step(size: int) -> int:
        model(torch.ones(size, 64)).sum().backward()
        return size

    with room_for(2_400_000 if rank == 0 else 4_800_000):
        return [step() for _ in range(8)]


@case
def failure_inside(rank: int, world: int) -> Any:
    """Rank 1 fails while the others wait for it in a collective."""

    @brim.batch(64, ranks=True, collectives="inside")
    def step(size: int, call: int) -> None:
        if rank == 1 and call == 2:
            out_of_memory()
        dist.all_reduce(torch.ones(1))

    return error_of(lambda: [step(call) for call in range(4)])


@case
def killed_rank(rank: int, world: int) -> Any:
    @brim.batch(64, ranks=True)
    def step(size: int, call: int) -> None:
        if rank == 1 and call == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return error_of(lambda: [step(call) for call in range(4)])


@case
def killed_rank_settled(rank: int, world: int) -> Any:
    model = torch.nn.Linear(3, 1)
    step = brim.Microbatches(
        lambda part: model(part).mean(), model=model, ranks=True, sync="settled"
    )

    def steps() -> None:
        for call in range(10):
            if rank == 1 and call == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            step(torch.ones(4, 3))

    return error_of(steps)


@case
def restarted(rank: int, world: int) -> Any:
    """torchrun starts the job again after a rank was killed: sizes are remembered in files."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    attempts: list[bool] = []

    @brim.batch(
        256, ranks=True, persist=os.environ["SIZES"], observer=lambda a: attempts.append(a.fitted)
    )
    def step(size: int) -> int:
        tensor_of(1000 * size)
        return size

    with room_for(100_000 if rank == 1 else 200_000):
        sizes = [step() for _ in range(5)]
    brim.SizeMemory.flush()
    dist.barrier()
    if first and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [sizes, attempts] if not first else time.sleep(30)  # until torchrun ends it


@case
def nccl(rank: int, world: int) -> Any:
    """One rank, which exchanges messages with itself, beside NCCL's collectives on its GPU."""
    brim.dist._group = lambda ranks: dist.group.WORLD  # also of one rank

    @brim.batch(64, ranks=True)
    def between(size: int) -> int:
        if size > 20:
            out_of_memory()
        return size

    @brim.batch(640, ranks=True, collectives="inside")
    def inside(size: int, fail: bool) -> int:
        x = torch.ones(size, device="cuda")
        dist.all_reduce(x)
        if fail:
            out_of_memory()
        return int(x.sum())

    return [between(), [inside(False) for _ in range(3)], error_of(lambda: inside(True))]


def fitted(kind: Any, held: int, **options: Any) -> Any:
    """A sampler fitted on all ranks, of which this one holds some bytes more."""
    brim.install_cpu_allocator()
    torch.manual_seed(0)
    lengths = torch.randint(10, 300, (400,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 64))
    kept = tensor_of(held)

    def step(samples: list[torch.Tensor]) -> None:
        batch = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        model(batch).square().mean().backward()

    data = [torch.ones(n, 8) for n in lengths.tolist()]
    budget = brim.memory_stats("cpu").allocated - held + 4 * 2**20
    made = kind.fit(data, step, options.pop("sizeof", lengths), budget, "cpu", **options)
    del kept
    return made


@case
def fit_together(rank: int, world: int) -> Any:
    held = 2**20 if rank == world - 1 else 0
    results = {}
    for name, kind, options in (
        ("packed", PackedBatchSampler, {"shuffle": True}),
        ("ordered", SizeAwareBatchSampler, {}),
        ("sum", PackedBatchSampler, {"cost": "sum"}),
    ):
        sampler = fitted(kind, held, **options)
        batches = [list(map(int, batch)) for batch in sampler]
        results[name] = [sampler.max_total_size, sampler.state_dict()["fitted"], batches]
    return results


@case
def fit_fails(rank: int, world: int) -> Any:
    def failing(index: int) -> int:
        raise KeyError("no such sample")

    last = rank == world - 1
    wrong = {"sizeof": failing} if last else {}
    errors = [error_of(lambda: fitted(PackedBatchSampler, 0, **wrong))]
    sizes = [10 + (index + rank) % 90 for index in range(400)]
    errors.append(error_of(lambda: fitted(PackedBatchSampler, 0, sizeof=sizes)))
    held = 2**23 if last else 0  # more than the budget
    errors.append(error_of(lambda: fitted(PackedBatchSampler, held)))
    alone = fitted(PackedBatchSampler, 0, rank=0, world_size=1)
    return errors, sum(len(batch) for batch in alone)


@case
def samplers_are_compared(rank: int, world: int) -> Any:
    sizes = [1 + 7 * index % 19 for index in range(200)]
    sampler = PackedBatchSampler(sizes, 40, shuffle=True)
    if rank == 0:
        next(iter(sampler))
    epochs = [list(sampler) for _ in range(2)]
    # One rank alone has a sampler of its own, and one for its eyes only.
    if rank == 0:
        list(PackedBatchSampler(sizes, 40, rank=0, world_size=1))
    other = PackedBatchSampler(sizes if rank else sizes[::-1], 40, shuffle=True)
    return epochs, error_of(lambda: list(other))


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    backend, where = "nccl" if names == ["nccl"] else "gloo", {}
    if attempt := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        # torchrun's store still has the addresses of the run before, which gloo would try.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(f"attempt_{attempt}", dist.TCPStore(address, port))
        where = {"store": store, "rank": int(os.environ["RANK"]), "world_size": 2}
    dist.init_process_group(backend, timeout=timedelta(seconds=600), **where)
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in names:
        begun = time.monotonic()
        results[name] = CASES[name](rank, world)
        results[name + "_seconds"] = time.monotonic() - begun
        (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
