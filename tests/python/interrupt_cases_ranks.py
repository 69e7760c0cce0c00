"""Calls of several ranks, as calls that interrupts are tried at: rank 0 is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import brim
from brim.data import PackedBatchSampler, Shards, balance, even, pack_stream
from brim.data.agree import measured_together
from brim.data.ranks import Ranks

from .interrupt_cases import LENGTHS, case, fails_above_two
from .interrupt_ranks import of_two_ranks
from .interrupts import Case


def sizes_of(fails: int, **options: Any) -> Case:
    """Both run with the size that fits on the rank that fails."""

    def make(group: Any, rank: int) -> Callable[[], Any]:
        @brim.batch(8, device="cpu", ranks=group, **options)
        def work(size: int) -> int:
            return fails_above_two(size) if rank == fails else size

        return work

    return of_two_ranks(make)


@case
def ranks() -> Case:
    return sizes_of(fails=2)


@case
def ranks_where_this_one_fails() -> Case:
    return sizes_of(fails=0, remember="none")


@case
def ranks_where_another_fails() -> Case:
    return sizes_of(fails=1, remember="none")


@case
def ranks_with_their_own_sizes() -> Case:
    return sizes_of(fails=0, per_rank=True)


@case
def ranks_that_settled() -> Case:
    return sizes_of(fails=2, sync="settled")


@case
def ranks_with_ranges() -> Case:
    def make(group: Any, rank: int) -> Callable[[], Any]:
        done: list[int] = []

        def work(start: int, end: int) -> None:
            done.append(fails_above_two(end - start) if rank == 1 else end - start)

        def call() -> Any:
            done.clear()
            brim.run_range(0, 7, 4, work, device="cpu", ranks=group)
            return done

        return call

    return of_two_ranks(make)


@case
def ranks_with_chunks() -> Case:
    def make(group: Any, rank: int) -> Callable[[], Any]:
        @brim.chunked(4, device="cpu", ranks=group)
        def work(x: torch.Tensor, start: int, end: int) -> None:
            x += fails_above_two(len(x)) if rank == 0 else 2

        def call() -> Any:
            x = torch.zeros(5)
            work(x)
            return x.tolist()

        return call

    return of_two_ranks(make)


def steps_of(**options: Any) -> Case:
    """Rank 0 ends then: the others may be in a sum of gradients, where nothing can be told."""

    def make(group: Any, rank: int) -> Callable[[], Any]:
        net = nn.Linear(4, 1)
        nn.init.ones_(net.weight)
        x = torch.arange(24.0).reshape(6, 4)[rank:]
        step = brim.Microbatches(
            lambda part: net(part).square().mean(), model=net, device="cpu", ranks=group, **options
        )

        def call() -> Any:
            net.zero_grad()
            nn.init.ones_(net.bias)
            return step(x).item(), [each.grad.tolist() for each in net.parameters()]

        return call

    return of_two_ranks(make)


@case
def ranks_with_microbatches() -> Case:
    return steps_of(size=4)


@case
def ranks_with_microbatches_that_settled() -> Case:
    return steps_of(sync="settled")


@case
def ranks_that_balance() -> Case:
    def make(group: Any, rank: int) -> Callable[[], Any]:
        return lambda: balance(LENGTHS[rank:], cap=12, ranks=group)

    return of_two_ranks(make)


@case
def ranks_that_measure() -> Case:
    """As a fit does; the measurements of a fit itself would be of both threads."""

    def make(group: Any, rank: int) -> Callable[[], Any]:
        def call() -> Any:
            with measured_together(Ranks(rank, 2), alone=False) as together:
                assert together is not None
                together.same("fit")
                return together.least(10 + rank)

        return call

    return of_two_ranks(make)


@case
def ranks_that_iterate() -> Case:
    def make(group: Any, rank: int) -> Callable[[], Any]:
        def call() -> Any:
            sampler = PackedBatchSampler(LENGTHS, 18, shuffle=True, seed=1)
            sampler.set_epoch(0)
            return list(sampler)

        return call

    return of_two_ranks(make)


@case
def ranks_with_even_steps() -> Case:
    """Ranks must end an epoch after the same step: else they are told so in the next one."""

    def make(group: Any, rank: int) -> Callable[[], Any]:
        data = Shards(range(4), lambda shard: range(shard, shard + 3))
        batches = even(pack_stream(data, 2, sizeof=lambda _: 1, sharded="divide"), ahead=2)

        def epoch() -> Any:
            batches.set_epoch(0)
            return list(batches)

        def call() -> Any:
            try:
                return epoch()
            except brim.RankError:
                return epoch()

        return call if rank == 0 else epoch

    return of_two_ranks(make)
