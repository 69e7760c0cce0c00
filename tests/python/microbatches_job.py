"""One rank of a job that test_microbatches_ranks.py starts.

Run as `microbatches_job.py FOLDER [CASE ...]`: calls these cases, or all, and writes what they
returned to FOLDER/RANK.json. They share one job, because starting one takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import brim

from microbatches_rank_cases import (  # isort: skip: this is run as a script
    DEVICE,
    Net,
    batch_of,
    batches,
    error_of,
    expected,
    gradients,
    labels_of,
    layers,
    net,
    result,
    whole_gradients,
)
from microbatches_joint_cases import JOINT  # isort: skip: likewise

CASES: dict[str, Callable[[int], Any]] = {**JOINT}


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES[function.__name__] = function
    return function


@case
def mean(rank: int) -> Any:
    """The mean over all items, not the mean of the ranks' means; with DDP, in layers, without."""
    found = []

    def within(model: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Identity(), DistributedDataParallel(model))

    for wrap in (lambda model: model, DistributedDataParallel, within):
        model = wrap(net())
        step = brim.Microbatches(
            lambda part, model=model: mse_loss(model(part[0]), part[1]),
            model=model,
            ranks=True,
            size=4,
        )
        found.append(result(model, step(batch_of(rank))))
    return found, expected(lambda model: mse_loss(model(batches()[0]), batches()[1]))


@case
def sum_twice(rank: int) -> Any:
    """Gradients that were reduced before are added to, and not reduced again."""
    model = net()
    step = brim.Microbatches(
        lambda part: mse_loss(model(part[0]), part[1], reduction="sum"),
        model=model,
        ranks=True,
        size=3,
        reduction="sum",
    )
    step(batch_of(rank))
    loss = step(batch_of(rank)) * 2
    x, y = batches()
    return [result(model, loss)], expected(lambda model: 2 * mse_loss(model(x), y, reduction="sum"))


@case
def counts(rank: int) -> Any:
    """Each rank reaches a layer of its own, and weighs by what it counts."""
    model = net()

    def loss_fn(part: Any) -> Any:
        return mse_loss(model(part[0], rank), part[1]), 2 * len(part[0]) - rank

    step = brim.Microbatches(loss_fn, model=model, ranks=True)

    def whole(model: Net) -> torch.Tensor:
        weights = [2 * len(batch_of(i)[0]) - i for i in range(2)]
        losses = [mse_loss(model(batch_of(i)[0], i), batch_of(i)[1]) for i in range(2)]
        total = sum(w * loss for w, loss in zip(weights, losses, strict=True))
        return total / sum(weights)  # type: ignore[return-value, operator]

    return [result(model, step(batch_of(rank)))], expected(whole)


@case
def labels(rank: int) -> Any:
    """A mean over labels, read from the graph on each rank."""
    found = []

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)[:, None] * torch.arange(3.0, device=DEVICE).double()
        return nn.functional.cross_entropy(logits, y)

    for size in (3, None):
        model = net()
        step = brim.Microbatches(
            lambda part, model=model: loss_of(model, *part), model=model, ranks=True, size=size
        )
        found.append(result(model, step((batch_of(rank)[0], labels_of(rank)))))
    y = torch.cat([labels_of(i) for i in range(2)])
    return found, expected(lambda model: loss_of(model, batches()[0], y))


@case
def no_parts(rank: int) -> Any:
    """Rank 1 alone splits its batch, and refuses its loss: all hear of it."""
    model = net()
    step = brim.Microbatches(
        lambda part: mse_loss(model(part[0]), part[1]).sqrt(),
        model=model,
        ranks=True,
        per_rank=True,
        size=None if rank == 0 else 3,
    )
    return error_of(lambda: step(batch_of(rank))), gradients(model)


@case
def static_graph(rank: int) -> Any:
    """Torch cannot run it in parts; afterwards it is as before."""
    model = DistributedDataParallel(nn.Linear(4, 1).double(), static_graph=True)
    x = batch_of(rank)[0]
    step = brim.Microbatches(lambda part: model(part).mean(), model=model, ranks=True, size=4)
    error = error_of(lambda: step(x))
    for _ in range(2):
        model.zero_grad()
        model(x).mean().backward()
    return error, gradients(model)


@case
def failures(rank: int) -> Any:
    """Rank 1 runs out of memory at each of its allocations in turn, under DDP."""

    def run(size: int, at: int) -> tuple[Any, int, int]:
        inner = net(dropout=0.3)
        inner.last.weight.grad = torch.ones_like(inner.last.weight)
        model = DistributedDataParallel(inner)
        step = brim.Microbatches(
            lambda part: mse_loss(model(part[0]), part[1]),
            model=model,
            ranks=True,
            size=size,
            check=False,
        )
        torch.manual_seed(rank)
        batch = batch_of(rank)
        with brim.testing.inject_oom(at=at if rank == 1 else 2**40) as injector:
            loss = step(batch)
        return result(model, loss), step.size, injector.allocations

    without = {size: run(size, 2**40)[0] for size in (4, 3, 2, 1)}
    # All ranks make as many calls.
    allocations = torch.tensor([run(4, 2**40)[2] if rank == 1 else 0])
    if rank == 0:
        run(4, 2**40)
    dist.all_reduce(allocations)
    wrong, sizes = [], []
    for at in range(1, int(allocations) + 1):
        found, size, _ = run(4, at)
        sizes.append(size)
        if found != without[size]:
            wrong.append(at)
    return {"wrong": wrong, "sizes": sizes}


@case
def short_batches(rank: int) -> Any:
    """Rank 1 has a short batch at first, then one as long as that of rank 0."""
    model = net()
    step = brim.Microbatches(
        lambda part: model(part).square().mean(), model=model, ranks=True, sync="settled"
    )
    found = []
    for length in (100, 100, 100) if rank == 0 else (7, 3, 100):
        _, attempts = step.record(torch.ones(length, 4, dtype=torch.float64))
        found.append((step.size, len(attempts)))
    return found


@case
def settled(rank: int) -> Any:
    """As `failures`, in calls without an exchange; then an error and a wrong batch in one."""
    inner = net()
    model = DistributedDataParallel(inner)
    wrong_part = False

    def loss_fn(part: Any) -> torch.Tensor:
        if wrong_part and rank == 1:
            raise KeyError("mine")
        return mse_loss(model(part[0]), part[1])

    def make(size: int) -> brim.Microbatches:
        return brim.Microbatches(
            loss_fn, model=model, ranks=True, size=size, sync="settled", check=False
        )

    def run(step: brim.Microbatches, at: int = 2**40) -> tuple[Any, int]:
        model.zero_grad()
        batch = batch_of(rank)
        with brim.testing.inject_oom(at=at if rank == 1 else 2**40) as injector:
            loss = step(batch)
        return result(model, loss), injector.allocations

    without = {size: run(make(size))[0] for size in (4, 3, 2, 1)}
    step = make(4)
    for _ in range(5):  # settles
        allocations = run(step)[1]
    counted = torch.tensor([allocations if rank == 1 else 0])
    dist.all_reduce(counted)
    wrong, sizes = [], []
    for at in range(1, int(counted) + 1, 3):
        found, _ = run(step, at)
        sizes.append(step.size)
        if found != without[step.size]:
            wrong.append(at)
        step.clear()
        step = make(4)
        for _ in range(5):
            run(step)
    errors = []
    x, y = batch_of(rank)
    for batch in (x, y), (x, y) if rank == 0 else (x[:0], y[:0]):
        for _ in range(5):
            run(step)
        wrong_part = not errors
        try:
            step(batch)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        wrong_part = False
    return {"wrong": wrong, "sizes": sizes, "errors": errors, "after": run(step)[0] == without[4]}


def interrupted(rank: int, sync: Any) -> Any:
    """How the step ended, the gradients that it left, and those of the next one."""
    model = net()
    pause = 0.0

    def loss_fn(part: Any) -> torch.Tensor:
        time.sleep(pause if rank == 1 else 0.0)
        return mse_loss(model(part[0]), part[1])

    step = brim.Microbatches(loss_fn, model=model, ranks=True, size=4, sync=sync, check=False)
    for _ in range(5):  # settles
        model.zero_grad()
        step(batch_of(rank))
    model.zero_grad()
    pause, ended = 0.4, "fitted"
    try:
        if rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        step(batch_of(rank))
    except (KeyboardInterrupt, brim.RankError) as error:
        ended = type(error).__name__
    pause, left = 0.0, gradients(model)
    model.zero_grad()
    return ended, left, result(model, step(batch_of(rank)))


@case
def ctrl_c(rank: int) -> Any:
    """Rank 0 gets it while it waits for rank 1, in an exchange or in a vote."""
    return [interrupted(rank, sync) for sync in ("always", "settled")], expected(
        lambda model: mse_loss(model(batches()[0]), batches()[1])
    )


@case
def settled_each_with_its_own_size(rank: int) -> Any:
    """Rank 1 fails alone, before and after all count as settled: the other must not skip more."""
    model = net()
    step = brim.Microbatches(
        lambda part: mse_loss(model(part[0]), part[1]),
        model=model,
        ranks=True,
        per_rank=True,
        sync="settled",
        size=4,
    )
    batch = batch_of(rank)
    found = []
    for call in range(8):
        model.zero_grad()
        with brim.testing.inject_oom(at=3 if rank == 1 and call in (1, 6) else 2**40):
            loss = step(batch)
        found.append(result(model, loss))
    return found, expected(lambda model: mse_loss(model(batches()[0]), batches()[1]))


@case
def budgets(rank: int) -> Any:
    """Rank 1 has half of the memory: the same size on both, or each its own."""
    brim.install_cpu_allocator()
    found = []
    for per_rank in (False, True):
        w = nn.Linear(1024, 64).double()
        torch.nn.init.ones_(w.weight)
        torch.nn.init.zeros_(w.bias)
        step = brim.Microbatches(
            lambda part, w=w: w(part).square().mean(), model=w, ranks=True, per_rank=per_rank
        )
        room = (8 if rank == 0 else 4) * 2**20
        x = torch.ones(4096, 1, dtype=torch.float64).expand(4096, 1024)
        sizes = []
        with brim.budget(brim.memory_stats("cpu").allocated + room, "cpu"):
            for _ in range(3):
                w.zero_grad()
                step(x)
                sizes.append(step.size)
        assert w.weight.grad is not None
        found.append({"sizes": sizes, "gradient": w.weight.grad[0, 0].item()})
    return found


@case
def fully_sharded(rank: int) -> Any:
    """FSDP2 reduces its gradients itself, part by part."""
    x = torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for options in ({"collectives": "inside"}, {}):  # which is what such a model needs
        model = layers(sharded=True)
        step = brim.Microbatches(
            lambda part, model=model: model(part).square().mean(),
            model=model,
            ranks=True,
            size=3,
            **options,
        )
        for _ in range(2):  # the gradients of both add up
            step(x[rank])
        found.append(whole_gradients(model))
    plain = layers(sharded=False)
    (2 * plain(x.flatten(0, 1)).square().mean()).backward()
    return found, gradients(plain)


@case
def fully_sharded_labels(rank: int) -> Any:
    """A mean over labels, of which the ranks have different numbers."""
    x = torch.rand(2, 7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(14).reshape(2, 7) % 3
    y[0, :5] = y[1, 6] = -100

    def loss_of(model: nn.Module, part: Any) -> torch.Tensor:
        logits = model(part[0]) * torch.arange(3.0).double()
        return nn.functional.cross_entropy(logits, part[1])

    model, plain = layers(sharded=True), layers(sharded=False)
    step = brim.Microbatches(lambda p: loss_of(model, p), model=model, ranks=True, size=2)
    step.accumulate([(x[rank, :3], y[rank, :3]), (x[rank, 3:], y[rank, 3:])])
    loss_of(plain, (x.flatten(0, 1), y.flatten())).backward()
    return whole_gradients(model), gradients(plain)


@case
def sharded_and_waiting(rank: int) -> Any:
    """What would wait for ever, or mix kinds of tensors."""
    x = torch.rand(6 - 3 * rank, 4, dtype=torch.float64)
    model = layers(sharded=False)
    early = brim.Microbatches(lambda part: model(part).mean(), model=model, ranks=True, size=3)
    sharded = layers(sharded=True)

    def loss_fn(part: Any) -> torch.Tensor:
        return sharded(part).square().mean()  # type: ignore[no-any-return]

    errors = [
        error_of(lambda: brim.Microbatches(loss_fn, model=sharded, size=3)(x)),
        error_of(lambda: brim.Microbatches(loss_fn, size=3)(x)),
        error_of(
            lambda: brim.Microbatches(loss_fn, model=sharded, ranks=True, collectives="between")
        ),
    ]
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    errors.append(error_of(lambda: early(x)))
    return errors


@case
def fully_sharded_of_any_length(rank: int) -> Any:
    """As many parts on each rank, also of fewer items; weighed by items or by counts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 8, 4, generator=generator, dtype=torch.float64)
    count = torch.randint(1, 9, (2, 8), generator=generator)  # of each item
    outcome = []
    for counts in (False, True):
        model, plain = layers(sharded=True), layers(sharded=False)

        def weighed(model: nn.Module, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            return (model(x).square().squeeze(1) * count).sum() / count.sum()

        def loss_fn(part: Any, model: nn.Module = model, counts: bool = counts) -> Any:
            return (
                (weighed(model, *part), part[1].sum()) if counts else model(part[0]).square().mean()
            )

        step = brim.Microbatches(loss_fn, model=model, ranks=True, collectives="inside", size=3)
        for lengths in ((8, 8), (8, 5), (2, 8), (7, 1)):
            model.zero_grad()
            plain.zero_grad()
            step((x[rank, : lengths[rank]], count[rank, : lengths[rank]]))
            all_x = torch.cat([x[i, :n] for i, n in enumerate(lengths)])
            all_counts = torch.cat([count[i, :n] for i, n in enumerate(lengths)])
            weighed(plain, all_x, all_counts if counts else torch.ones_like(all_counts)).backward()
            outcome.append((whole_gradients(model), gradients(plain)))
    return outcome


@case
def error_on_one_rank(rank: int) -> Any:
    model = net()
    model.last.weight.grad = torch.ones_like(model.last.weight)

    def loss_fn(part: Any) -> torch.Tensor:
        if rank == 1 and len(part[0]) < 4:
            raise KeyError("mine")
        return mse_loss(model(part[0]), part[1])

    step = brim.Microbatches(loss_fn, model=model, ranks=True, size=4)
    try:
        step(batch_of(rank))
    except Exception as error:
        return type(error).__name__, gradients(model)
    return "none", []


@case
def refused(rank: int) -> Any:
    """Errors ahead of the parts reach all ranks, and the next call is in step again."""
    model = net()
    step = brim.Microbatches(
        lambda part: mse_loss(model(part[0]), part[1]), model=model, ranks=True, size=4
    )
    batch = batch_of(rank)
    empty, unequal = (batch[0][:0], batch[1][:0]), (batch[0], batch[1][1:])
    errors = []
    for wrong in (empty, unequal):
        try:
            step(wrong if rank == 1 else batch)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return (
        errors,
        result(model, step(batch)),
        expected(lambda model: mse_loss(model(batches()[0]), batches()[1])),
    )


@case
def model_of_the_step(rank: int) -> Any:
    """What `loss_fn` uses must be in `model=`, as it is now."""
    errors = []
    parallel, other = DistributedDataParallel(net()), nn.Parameter(torch.ones(()).double())
    whole = net()
    first = DistributedDataParallel(whole.first)
    losses: list[tuple[nn.Module, Callable[[Any], torch.Tensor]]] = [
        (parallel.module, lambda part: mse_loss(parallel(part[0]), part[1])),
        (whole, lambda part: whole.last(first(part[0]).tanh()).mean()),
        (parallel, lambda part: mse_loss(parallel(part[0]) * other, part[1])),
    ]
    for model, loss_fn in losses:
        try:
            brim.Microbatches(loss_fn, model=model, ranks=True, size=4)(batch_of(rank))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    model = net()
    step = brim.Microbatches(
        lambda part: mse_loss(model(part[0]), part[1]), model=model, ranks=True, size=4
    )
    step(batch_of(rank))
    model.zero_grad()
    model.last = nn.Linear(8, 1, dtype=torch.float64)
    model.load_state_dict(net().state_dict())
    return (
        errors,
        result(model, step(batch_of(rank))),
        expected(lambda model: mse_loss(model(batches()[0]), batches()[1])),
    )


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    results = {name: CASES[name](rank) for name in sys.argv[2:] or CASES}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
