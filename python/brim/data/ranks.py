"""Which rank a sampler serves, and how Lightning and accelerate share batches out."""

from __future__ import annotations

import sys
from abc import ABCMeta
from itertools import islice
from traceback import walk_stack
from typing import Any, NamedTuple

import torch

from brim._arguments import whole


class Ranks(NamedTuple):
    """One of the ranks that share the samples."""

    rank: int
    world_size: int


def process_group() -> Ranks:
    """This process in torch.distributed's default group; rank 0 of 1 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Ranks(0, 1)


class RankSource:
    """Where a sampler's rank comes from: its arguments, else a framework, else the process group.

    It is looked up whenever it is needed: samplers are often made before the group.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        self._world_size = None if world_size is None else whole("world_size", world_size, 1)
        self._rank = None if rank is None else whole("rank", rank, 0)
        self._framework: Ranks | None = None
        self.now()

    @property
    def given(self) -> bool:
        """Whether arguments decide."""
        return self._rank is not None or self._world_size is not None

    def now(self) -> Ranks:
        """The rank and the number of ranks.

        Raises:
            ValueError: if arguments and process group do not fit each other.
        """
        found = self._framework or process_group()
        world_size = found.world_size if self._world_size is None else self._world_size
        rank = found.rank if self._rank is None else self._rank
        if rank >= world_size:
            raise ValueError(
                f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}"
            )
        return Ranks(rank, world_size)

    def use(self, ranks: Ranks) -> None:
        """Take what a framework says, which may leave ranks of the process group out."""
        self._framework = ranks


def shared_by_accelerate(source: RankSource) -> bool:
    """Whether the caller is a part of accelerate that takes one of world_size batches.

    Its ranks are then those of `source`, unless arguments say that there is one rank.

    Raises:
        ValueError: if it would lose samples, or overfill batches.
    """
    for frame, _ in islice(walk_stack(sys._getframe(2)), 16):
        if frame.f_globals.get("__name__") != "accelerate.data_loader":
            continue
        owner: Any = frame.f_locals.get("self")
        kind = type(owner).__name__
        cuts = kind in ("DataLoaderDispatcher", "IterableDatasetShard")
        if cuts and source.now().world_size > 1:
            raise ValueError(
                "accelerate would join the batches of all processes and cut them anew, which no "
                "budget allows for: set dispatch_batches=False in its DataLoaderConfiguration; do "
                "not pass the loader of a stream to prepare()"
            )
        if kind == "BatchSamplerShard":
            theirs = Ranks(owner.process_index, owner.num_processes)
            if not source.given:
                source.use(theirs)
            ours = source.now()
            if ours not in (theirs, (0, 1)):
                raise ValueError(
                    f"accelerate shares batches out among its {theirs.world_size} processes, of "
                    f"which this is number {theirs.rank}, but the sampler was made with rank="
                    f"{ours.rank} and world_size={ours.world_size}: leave both out, or do not pass "
                    "the loader to prepare()"
                )
            return ours.world_size > 1
    return False


# Lightning makes batch samplers anew from these attributes, with another `sampler`. The names are
# Lightning's; set by setattr because Python would change them inside of a class.
_SAVED = {
    "__pl_saved_args": lambda self: (),
    "__pl_saved_kwargs": lambda self: {"sampler": None, "brim_made": self, **self._drops_nothing()},
    "__pl_saved_default_kwargs": lambda self: {},
    "__pl_saved_arg_names": lambda self: (),
}


class SamplerType(ABCMeta):
    """The type of sampler classes, which returns the same sampler to Lightning.

    In distributed runs, Lightning puts a DistributedSampler below each batch sampler. Batches under
    a budget must be shared out after they are made instead, which the sampler does by itself.
    """

    def __init__(cls, *arguments: Any) -> None:
        super().__init__(*arguments)
        for name, read in _SAVED.items():
            setattr(cls, name, property(read))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a sampler, or return the one that Lightning wants to make anew."""
        made = kwargs.get("brim_made")
        if made is None:
            return super().__call__(*args, **kwargs)
        theirs = kwargs["sampler"]
        if hasattr(theirs, "num_replicas"):
            made._ranks.use(Ranks(theirs.rank, theirs.num_replicas))
        return made
