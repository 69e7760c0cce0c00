"""What the batch samplers of `brim.data` have in common: options, epochs, positions."""

from __future__ import annotations

import copy
import json
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch.utils.data import Sampler

from brim import _C
from brim._arguments import flag, shown, whole
from brim._state.undoing import Undoing
from brim._warn import warn
from brim.data.advice import left_out_message as left_out_message
from brim.data.advice import tell_of_misuse
from brim.data.agree import Comparison, facts_of, fingerprint_of
from brim.data.frameworks import (
    LightningAsks,
    asked_by,
    epochs_of_trainer,
    fetched_ahead,
    most_batches,
)
from brim.data.index import Index, IndexPlace, index_place
from brim.data.ranks import RankSource, SamplerType, shared_by_accelerate
from brim.data.sizes import Budget, Cost, Limits, check_oversize, loaded, stored
from brim.data.states import Epoch, Iteration, Opened, Start, check_same_run, check_state

Batch = list[int]


class SamplerOptions(TypedDict, total=False):
    """The keywords that all samplers take; see `BatchSamplerBase` for what they mean."""

    cost: Cost | Sequence[Cost]
    shuffle: bool
    seed: int | None
    generator: torch.Generator | None
    rank: int | None
    world_size: int | None
    max_batch_size: int | None
    batch_multiple: int
    oversize: str
    as_tensors: bool
    index: Index


class Plan(NamedTuple):
    """All batches of one rank: batch b is `indices[offsets[b]:offsets[b + 1]]`.

    Example:
        >>> from brim.data import PackedBatchSampler
        >>> PackedBatchSampler([5, 2, 8], max_total_size=10).plan()
        Plan(offsets=tensor([0, 1, 3]), indices=tensor([2, 0, 1]))
    """

    offsets: torch.Tensor
    indices: torch.Tensor


def _repeated(batches: Iterator[Batch], times: int) -> Iterator[Batch]:
    """Each batch as often as there are processes, of which accelerate gives each one."""
    for batch in batches:
        yield from repeat(batch, times)


class BatchSamplerBase(Sampler[Batch], metaclass=SamplerType):
    """Iterates over the batches of a C++ batching; resumes, shards and reports.

    For `batch_sampler=` of a DataLoader. Without samples there are no batches, and a warning says
    so. Iterations that run at the same time are independent. A
    sampler can be pickled and copied if its arguments can. A copy starts at the next epoch, or at a
    loaded position that no iteration has used yet.

    Args:
        max_total_size: the budget of a batch. A list or tuple sets several budgets; sizes then have
            one column for each (or are tuples). Under one budget, columns are sizes in each of
            which samples are padded: source and target, height and width.
        cost: what a batch costs: `"padded"` (n × longest, the default), `"sum"` of the sizes
            (samples laid end to end, graphs), `"padded_squared"` (n × longest²), `"flops"`
            (n × (24576 · longest + longest²), the work of a transformer), `"count"`, a fitted
            `MemoryModel` with a budget in bytes, or a function of n and the longest size that does
            not fall with either. Several budgets share one cost or take a list of costs. Of samples
            padded in several sizes, `longest` is the sum of the longest of each; their product for
            `"padded_product"` (n × height × width); functions get n and the longest of each.
        shuffle: whether to take the samples in random order.
        seed: determines the order together with the epoch. Call `set_epoch` before each epoch, else
            all have the same batches (with a warning, once). Lightning and accelerate call it.
        generator: draws a seed for each epoch instead; not for several ranks, which must shuffle
            alike. If both are None, torch's default generator draws; several ranks use the seed 0
            and count epochs: an epoch is over when the last batch of an iteration has reached the
            loop, so that a look at a batch on one rank changes nothing.
        rank: the rank of this process; by default the one that Lightning or accelerate names, else
            that of torch.distributed's process group, else 0.
        world_size: how many ranks share the samples; by default as for `rank`, else 1. All get the
            same number of batches.
        max_batch_size: the most samples in a batch, beside the budget.
        batch_multiple: batches have a multiple of this many samples, unless fewer fit the budget or
            are left. Not for a `PackedBatchSampler` under a sum.
        oversize: what to do with a sample that exceeds the budget by itself: `"leave_out"` or
            `"skip"` (with a warning, and counted in `report()`), `"error"`, `"alone"` (a batch of
            its own, over the budget) or `"truncate"`: it counts as `largest_size`, to which the
            program cuts it.
        as_tensors: yield batches as int64 tensors, which is faster than lists.
        index: a folder for what takes a pass over all sizes, such as `len` of an epoch, so that one
            process makes it and all others read it; True for one beside the file that sizes are
            mapped from (`lengths.u16.brim` beside `lengths.u16`). Batches are the same. For one
            budget; of samples padded in several sizes, the index holds the first.

    Example:
        >>> from brim.data import PackedBatchSampler
        >>> sampler = PackedBatchSampler([5, 2, 8, 3], max_total_size=10)
        >>> len(sampler), list(sampler)
        (3, [[2], [0, 3], [1]])
    """

    _budget_required: ClassVar[bool] = True
    # Used without `seed` and `generator`. Each iteration is then the next epoch.
    _default_seed: ClassVar[int | None] = None
    _batching: _C.SampleBatching | None = None
    _index_place: IndexPlace | None = None
    _index: _C.SampleIndex | None = None

    def __init__(
        self,
        max_total_size: Budget | None,
        *,
        cost: Cost | Sequence[Cost] = "padded",
        shuffle: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        max_batch_size: int | None = None,
        batch_multiple: int = 1,
        oversize: str = "leave_out",
        as_tensors: bool = False,
        index: Index = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument "
                f"{next(iter(unknown))!r}: all samplers take max_total_size, "
                f"{', '.join(SamplerOptions.__annotations__)}"
            )
        if seed is not None and generator is not None:
            raise ValueError(
                f"give either seed or generator, not both: got seed={shown(seed)} and "
                f"generator={shown(generator)}"
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {shown(generator)}")
        self.shuffle = flag("shuffle", shuffle)
        # Whether nothing was given to shuffle by.
        self._seed_is_default = seed is None and generator is None
        seed = self._default_seed if self._seed_is_default else seed
        self._seed = None if seed is None else whole("seed", seed, 0)
        self.generator = generator
        self._ranks = RankSource(rank, world_size)
        self._fixed_seed()
        self.as_tensors = flag("as_tensors", as_tensors)
        self._oversize = check_oversize(oversize)
        self.max_total_size = max_total_size
        self.cost = cost
        self.max_batch_size = max_batch_size
        self.batch_multiple = whole("batch_multiple", batch_multiple, 1, 2**31)
        budgets = self._budget_required or max_total_size is not None
        self._limits = Limits.read(cost, max_total_size, max_batch_size) if budgets else Limits()
        self._index_given = index
        if index and self._limits.several:
            raise ValueError(f"index is for one budget, got max_total_size={shown(max_total_size)}")
        self.epoch = 0
        self._next: Epoch | None = None  # the coming one, once it is known
        self._iterations: list[Iteration] = []  # of that, and others that loops still hold
        self._latest: Any = None  # the run that was opened last
        # Whether the user knows about epochs, or was told.
        self._epoch_was_set = False
        self._counted: tuple[object, int] | None = None
        self._comparison = Comparison()
        self._data: int | None = None  # the fingerprint of the sizes

    def __getstate__(self) -> dict[str, Any]:
        """All but what C++ made. It is made again when needed."""
        self._settle()
        state = {**self.__dict__, **dict.fromkeys(("_batching", "_latest", "_counted", "_index"))}
        state["_next"] = self._next and self._next._replace(opened=None)
        state["_iterations"] = []
        state["_comparison"] = copy.copy(self._comparison)
        made: dict[int, Any] = {}
        for name in ("sizes", "_columns"):
            if name in state:
                state[name] = stored(state[name], made)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The other half of `__getstate__`."""
        self.__dict__.update(state)
        made: dict[int, Any] = {}
        for name in ("sizes", "_columns"):
            if name in state:
                self.__dict__[name] = loaded(state[name], made)

    @property
    def largest_size(self) -> Any:
        """The largest size of a sample that fits the budget; one for each if there are several.

        Raises:
            ValueError: if samples are padded in several sizes under one budget.
        """
        columns: Sequence[Any] = getattr(self, "_columns", None) or ()
        if len(columns) > len(self._limits.costs) > 0:
            raise ValueError(
                "largest_size needs a max_total_size for each size of a sample: of several sizes "
                "under one, none has a largest that fits"
            )
        maxima = self._limits.maxima
        whole_sizes = all(isinstance(maximum, int) for maximum in maxima)
        sizes = _C.largest_sizes(self._limits.costs, maxima, whole_sizes)[: self._limits.measured]
        return sizes if self._limits.several else sizes[0]

    # ---- ranks ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank that batches are for."""
        return self._ranks.now().rank

    @property
    def world_size(self) -> int:
        """How many ranks share the samples."""
        return self._ranks.now().world_size

    def _drops_nothing(self) -> dict[str, bool]:
        """Tells Lightning, which asks before it predicts, that all samples are in batches."""
        return {"drop_last": False}

    # ---- epochs ----------------------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """This sampler: Lightning and accelerate call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; with `seed`, each epoch has its own order.

        A loaded position is kept if it belongs to this epoch, and dropped otherwise.
        """
        epoch = whole("epoch", epoch, 0)
        self._epoch_was_set = True
        self._settle()
        if epoch != self.epoch:
            self._next = None
        self._iterations = self._of_next()
        self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch

    def _settle(self) -> None:
        """Advance to the next epoch if the coming one has begun; on several ranks, if it has ended.

        One rank takes its first batch for the beginning, and not its iterator: a DataLoader with
        workers makes two iterators and uses the second. On several ranks a look at some batches on
        one of them must not put it ahead of the others.
        """
        begun = [each for each in self._of_next() if each.run.begun()]
        if begun and (self.world_size == 1 or any(each.ended() for each in begun)):
            self._forget()
        # What nobody holds goes no further. Two are enough to see that loops end early.
        left = [each for each in self._of_next() if each.run.begun() and not each.run.held()]
        held = [each for each in self._iterations if each.run.held()]
        self._iterations = [*left[-2:], *held]

    def _of_next(self) -> list[Iteration]:
        """The iterations of the coming epoch: those that were made since the last one."""
        return [each for each in self._iterations if each.epoch is self._next]

    def _forget(self) -> None:
        self._next = None
        if self._counts_epochs:
            self.epoch += 1

    def _in_use(self) -> Iteration | None:
        """The latest iteration that has begun, and that a loop or a loader holds.

        Whether it has ended does not matter: a DataLoader's workers fetch ahead.
        """
        used = [each for each in self._iterations if each.run.begun() and each.run.held()]
        return used[-1] if used else None

    def _fixed_seed(self) -> int | None:
        """The seed that decides all epochs, if there is one."""
        if self._seed is not None or not self.shuffle or self.world_size == 1:
            return self._seed
        if not self._seed_is_default:
            raise ValueError("seed must be given when world_size > 1: ranks must shuffle equally")
        return 0

    @property
    def _counts_epochs(self) -> bool:
        return self._seed_is_default and self._fixed_seed() is not None

    def _coming_seed(self) -> int:
        if not self.shuffle:
            return 0
        seed = self._fixed_seed()
        if seed is not None:
            return _C.epoch_seed(seed, self.epoch)
        drawn = torch.empty((), dtype=torch.int64, device="cpu")
        return int(drawn.random_(generator=self.generator).item())

    def _coming(self) -> Start:
        self._settle()
        # accelerate replaces the generator by one that its processes share.
        basis = (self.epoch, self._fixed_seed(), self.shuffle, self.generator)
        if self._next is None or self._next.basis not in (None, basis):
            self._next = Epoch(Start(self._coming_seed(), [], []), basis, None)
        return self._next.start

    @abstractmethod
    def _make(self) -> _C.SampleBatching: ...

    def _ready(self) -> _C.SampleBatching:
        self._settle()
        if self._batching is None:
            self._batching = self._make()
            self._tell_of_index()
        return self._batching

    def _tell_of_left_out(self) -> None:
        batching = self._ready()
        if batching.samples == 0:
            warn(f"there are no samples, so the {type(self).__name__} has no batches")
        for reason, indices in batching.left_out.items():
            warn(left_out_message(indices, batching.samples, reason))

    # ---- the index -------------------------------------------------------------------------

    def _place_index(self, sizes: object) -> None:
        """Read the argument `index` for these sizes, as the user gave them."""
        self._index_place = index_place(self._index_given, sizes)

    def _open_index(self, column: torch.Tensor) -> _C.SampleIndex | None:
        """The index of these sizes, as a tensor; None without one."""
        if self._index is None and self._index_place is not None:
            self._index = _C.SampleIndex(column, *self._index_place)
        return self._index

    def _tell_of_index(self) -> None:
        for note in self._index.take_notes() if self._index is not None else ():
            warn(note)

    def _fingerprint(self, numbers: torch.Tensor) -> int:
        if self._index is not None and numbers is self._data_tensors()[0]:
            return self._index.fingerprint
        return _C.fingerprint(numbers)

    def _epochs_kept(self) -> tuple[_C.SampleIndex | None, str]:
        """The index, and all that batches depend on beside the seed and the ranks."""
        costs = self._limits.costs
        told = all(isinstance(cost, (str, _C.MemoryModel)) for cost in costs)
        if self._index is None or not told or not self._epochs_are_known():
            return None, ""
        sizes, *others = self._data_tensors()
        orders = [_C.fingerprint(each) for each in others if each is not sizes]
        facts = [type(self).__name__, self._sample_count(), orders, self._settings()]
        return self._index, json.dumps(facts)

    def make_index(self, epochs: Iterable[int] | None = None) -> None:
        """Make what `index=` keeps, ahead of a job: also the numbers of batches of these epochs.

        Takes a pass over all samples per epoch, which then no rank has to make. Without `shuffle`
        all epochs are alike, and one pass is enough.

        Args:
            epochs: numbers of epochs; the coming one if None.

        Raises:
            ValueError: without `index=`, or if epochs are not kept: with a `generator`, `work=`, or
                a function as cost or as `indices`.
        """
        batching = self._ready()
        index, settings = self._epochs_kept()
        if index is None:
            raise ValueError(
                "make_index needs index=, a seed if samples are shuffled, costs and indices that "
                "are not functions, and no work=: otherwise epochs are not kept"
            )
        seed = self._fixed_seed()
        for epoch in [self.epoch] if epochs is None else epochs:
            number = whole("epochs", epoch, 0)
            of_epoch = _C.epoch_seed(seed, number) if self.shuffle and seed is not None else 0
            index.make_epoch(batching, settings, of_epoch, self.world_size)
        self._tell_of_index()

    # ---- batches ---------------------------------------------------------------------------

    def __repr__(self) -> str:
        limit = f"max_total_size={self.max_total_size!r}, cost={self.cost!r}"
        return f"{type(self).__name__}({limit}, shuffle={self.shuffle}, epoch={self.epoch})"

    def __iter__(self) -> Iterator[Batch]:
        """Batches as lists of indices, or as tensors with `as_tensors=True`."""
        shared = shared_by_accelerate(self._ranks)
        start = self._coming()
        caller = sys._getframe(1)
        tell_of_misuse(self, caller)
        epoch = self._next
        assert epoch is not None
        opened = epoch.opened
        if opened is not None:  # for this one alone
            self._next = epoch = epoch._replace(opened=None)
        if opened is None or opened[1:] != (self._batching, self._ranks.now()):
            opened = Opened(self._open(start), self._batching, self._ranks.now())
        self._latest = run = opened.run
        # Opening may have made the batching, which has positions of its own.
        start = start if self._batching is None else self._coming()
        if self.world_size > 1:
            self._comparison.check(self._ranks.now(), facts_of(self, start))
        iterator: Iterator[Batch] = run.iterator()
        ahead = fetched_ahead(caller)
        self._iterations.append(Iteration(run, epoch, start, self._batching, ahead))
        return _repeated(iterator, self.world_size) if shared else iterator

    def _here(self, start: Start) -> tuple[int, int, int, list[int], list[list[int]]]:
        """The arguments for this rank's part of the iteration from `start` on."""
        return start.seed, *self._ranks.now(), start.cursor, start.segments

    def _open(self, start: Start) -> Any:
        description = self._description(start.seed)
        return self._ready().iterate(*self._here(start), self.as_tensors, description)

    def __len__(self) -> int:
        """The exact number of batches on this rank: of the running iteration, else of the next.

        An iteration is running for as long as a loop or a DataLoader holds its iterator. A
        DataLoader with persistent workers holds it until the next one, so between epochs this is
        the number of the last; call `set_epoch` first where epochs differ.
        """
        times = self.world_size if shared_by_accelerate(self._ranks) else 1
        self._settle()
        running = self._in_use()
        if running is not None and running.batching is not None:
            batching, start = running.batching, running.start
        else:
            batching = self._ready()
            start = self._coming()
        # The batching itself, not its id, which the next one may get.
        key = (start.seed, tuple(start.cursor), str(start.segments), batching, self._ranks.now())
        if self._counted is None or self._counted[0] != key:
            self._counted = (key, batching.count(*self._here(start), *self._epochs_kept()))
            self._tell_of_index()
        count = self._counted[1]
        asking = asked_by()
        if lightning := LightningAsks.now(asking):
            count += lightning.done if start.cursor else 0
            lightning.set_limit(self, count)
        elif epochs := epochs_of_trainer(asking, count):
            count = most_batches(self, epochs, count)
        return count * times

    def _epochs_are_known(self) -> bool:
        """Whether the batches of epochs to come can be made now."""
        return not self.shuffle or self._fixed_seed() is not None

    def plan(self, start: int = 0, stop: int | None = None) -> Plan:
        """The batches of the next iteration on this rank, as two tensors.

        Args:
            start: the first batch. With `index=`, those before are not made if `len` or
                `make_index` has made the index of the epoch.
            stop: the batch to end before; None for all that there are.
        """
        first = whole("start", start, 0)
        end = None if stop is None else whole("stop", stop, 0)
        batching = self._ready()
        here = (*self._here(self._coming()), *self._epochs_kept())
        return Plan(*batching.plan(*here, first, end))

    def report(self) -> _C.PlanReport:
        """What becomes of the samples in the next iteration, over all ranks. Print it.

        After `load_state_dict` it covers the rest of the epoch.
        """
        batching = self._ready()
        start = self._coming()
        return batching.report(start.seed, self.world_size, start.cursor, start.segments)

    # ---- saving and resuming ---------------------------------------------------------------

    def _epoch_decides(self) -> bool:
        """Whether epochs of other numbers have other batches."""
        return self.shuffle and self._fixed_seed() is not None

    @abstractmethod
    def _data_tensors(self) -> list[torch.Tensor]:
        """The sizes, and the indices of the samples if they are given; nothing if not known."""

    def _order_of_epoch(self) -> torch.Tensor | None:
        """The indices of the samples, if a sampler gives others in each epoch."""
        return None

    def _description(self, seed: int) -> dict[str, Any]:
        return {
            "format": 1,
            "sampler": type(self).__name__,
            "samples": self._sample_count(),
            "data": fingerprint_of(self),
            "settings": self._settings(),
            "epoch": self.epoch,
            "seed": seed,
        }

    def _settings(self) -> dict[str, Any]:
        """What the batches depend on beside samples and ranks. A position is valid for these."""
        return {
            "shuffle": self.shuffle,
            "batch_multiple": self.batch_multiple,
            "oversize": "leave_out" if self._oversize == "error" else self._oversize,
            **self._limits.settings(),
        }

    def _sample_count(self) -> int:
        return self._ready().samples

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position of the latest iteration, to resume from; plain numbers and lists.

        The state is the same on every rank, and can be loaded with another number of ranks.

        Args:
            batches: how many batches of that iteration are done. None means all that were yielded,
                which is too many with a DataLoader that has workers: they fetch ahead.
        """
        self._settle()
        if self._latest is None:
            if batches is not None and whole("batches", batches, 0) > 0:
                raise ValueError(f"batches must be 0 before an iteration begins, got {batches}")
            start = self._coming()
            return {**self._description(start.seed), "finished": False, **start._asdict()}
        return self._latest.state_dict(batches)  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where the state was taken.

        `len` is then what is left. The cost is that of a few batches, at any position.

        Raises:
            ValueError: if the state is of another sampler, other samples (by their number and
                sizes), or other settings that batches depend on.
        """
        check_state(state, {*self._description(0), "finished", "cursor", "segments"} - {"data"})
        loaded: list[tuple[int, Epoch | None]] = []

        def settle(previous: int = self.epoch) -> None:
            if loaded:
                self._latest, self._iterations = None, []
                self.epoch, self._next = loaded[0]
            else:
                self._enter(previous)

        with Undoing() as undo:  # opened at once, so that a wrong state changes nothing
            undo.callback(settle)
            self._enter(whole("epoch", state["epoch"], 0))
            check_same_run(state, self._description(0))
            seed = whole("seed", state["seed"], 0, below=2**64)
            cursor = [whole("cursor", word, 0) for word in state["cursor"]]
            start = Start(seed, cursor, list(state["segments"]))
            if flag("finished", state["finished"]):
                loaded.append((self.epoch + self._counts_epochs, None))
            else:
                opened = Opened(self._open(start), self._batching, self._ranks.now())
                loaded.append((self.epoch, Epoch(start, None, opened)))
