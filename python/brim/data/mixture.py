"""Samples of several sources, in shares that follow weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from brim import _C
from brim._arguments import check_callable, real, shown, whole
from brim._warn import warn
from brim.data.readers import SourceEpoch
from brim.data.shards import Reader, own_part

_SEVERAL = 1  # the shared word that says whether several readers read the same samples


class Mixture(Iterable[Any]):
    """Samples of several sources, in shares that follow weights; `mix` makes it.

    Example:
        >>> mixture = mix([["a"] * 4, ["b"] * 4], [1, 0])
        >>> mixture.set_weights([0, 1])
        >>> mixture.weights, list(mixture)
        ([0.0, 1.0], ['b', 'b', 'b', 'b'])
    """

    def __init__(
        self,
        sources: Sequence[Iterable[Any]],
        weights: Sequence[float],
        *,
        seed: int,
        at_end: str,
        sizeof: Callable[[Any], Any] | None,
    ) -> None:
        if isinstance(sources, (str, bytes)) or not isinstance(sources, Sequence) or not sources:
            raise TypeError(f"sources must be a list of iterables, got {shown(sources)}")
        for number, source in enumerate(sources):
            if isinstance(source, Mixture):
                raise TypeError(f"source {number} is a mixture itself: mix all sources at once")
            if isinstance(source, Iterator) or not isinstance(source, Iterable):
                raise TypeError(
                    f"source {number} must be an iterable that can be begun anew, got "
                    f"{shown(source)}"
                )
        if at_end not in ("stop", "restart", "drop"):
            raise ValueError(f'at_end must be "stop", "restart" or "drop", got {shown(at_end)}')
        if sizeof is not None:
            check_callable("sizeof", sizeof)
        self.sources = list(sources)
        self._seed = whole("seed", seed, 0)
        self._at_end = at_end
        self._sizeof = sizeof
        self._epochs = [SourceEpoch(source) for source in self.sources]
        words: Any = torch.zeros(3 + len(self.sources), dtype=torch.int64)
        self._words: Any = words.share_memory_()
        self.epoch = 0
        _C.set_weights(self._words, self._checked(weights), 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy that was not made for a worker has weights of its own."""
        self.__dict__.update(state)
        if not self._words.is_shared():
            self._words.share_memory_()

    def _checked(self, weights: Sequence[float]) -> list[float]:
        if isinstance(weights, (str, bytes)) or not isinstance(weights, Iterable):
            raise TypeError(f"weights must be a list of numbers, got {shown(weights)}")
        numbers = [real("weights", weight) for weight in weights]
        if len(numbers) != len(self.sources):
            raise ValueError(
                f"weights must be {len(self.sources)}, one per source, got {len(numbers)}"
            )
        return numbers

    @property
    def weights(self) -> list[float]:
        """The weights that hold now, as they were given."""
        while not (weights := _C.weights_now(self._words)):
            pass  # another process is setting them
        return weights

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set other weights, from the next sample that is read on, also in running workers.

        The loop gets that sample some batches later: streams and loaders read ahead. A state holds
        the weights, and where they were set. If all ranks and workers read the same samples
        (without `sharded=`), the weights hold from the next epoch on: set the same on all ranks.
        """
        numbers = self._checked(weights)
        if int(self._words[_SEVERAL]):
            warn(
                "all ranks and workers read the same samples of this mixture, so these weights "
                "hold from the next epoch on: with sharded= they hold from the next sample on"
            )
        stamp = max(time.time_ns() // 1000, int(self._words[2]) + 1)
        _C.set_weights(self._words, numbers, stamp)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration, which is passed on to the sources."""
        self.epoch = epoch
        for source in self._epochs:
            source.tell(int(epoch), by_user=True)

    def __iter__(self) -> Iterator[Any]:
        """All samples, in this process."""
        return self.read(Reader(0, 1, 0, 1))

    def read(
        self,
        reader: Reader,
        *,
        sharded: bool = False,
        divide: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> _C.MixedSamples:
        """The samples that this reader reads, for a stream."""
        several = not sharded and reader.readers > 1
        self._words[_SEVERAL] = int(several)
        sources = [own_part(each, reader) if divide else each for each in self.sources]
        seed = _C.epoch_seed(self._seed, int(self.epoch))
        # Readers of different samples do not all draw from the same source at once.
        seed = _C.epoch_seed(seed, reader.number) if sharded else seed
        changes = [] if state is None else self._changes_of(state)
        drawn = 0 if state is None else whole("drawn", state["drawn"], 0)
        return _C.MixedSamples(
            lambda number: iter(sources[number]),
            self._words,
            seed,
            self._at_end,
            self._sizeof,
            changes,
            drawn,
            not several,
        )

    def state_dict(self) -> dict[str, Any]:
        """The weights that hold now, for an epoch that has not begun."""
        return {"changes": [[0, int(self._words[2]), self.weights]], "drawn": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the latest weights of a state, unless later ones were set here.

        Raises:
            TypeError: if it is no state of a mixture.
            ValueError: if it is that of another one.
        """
        _, stamp, weights = self._changes_of(state)[-1]
        _C.set_weights(self._words, weights, stamp)

    def _changes_of(self, state: object) -> list[tuple[int, int, list[float]]]:
        """The weights of a state, with when they were set: a file may hold anything."""
        changes = state.get("changes") if isinstance(state, Mapping) else None
        rows = isinstance(changes, list) and all(
            isinstance(each, (list, tuple)) and len(each) == 3 for each in changes
        )
        if not rows or not changes or not isinstance(state, Mapping) or "drawn" not in state:
            raise TypeError(f"state must be that of a mixture, got {shown(state)}")
        return [
            (whole("changes", taken, 0), whole("changes", stamp, 0), self._checked(weights))
            for taken, stamp, weights in changes
        ]


def state_of(samples: _C.MixedSamples, mixture: Mixture, *, to_the_end: bool) -> dict[str, Any]:
    """The weights of an iteration so far, and how many samples it has read.

    Args:
        samples: what the iteration reads.
        mixture: where they are from.
        to_the_end: whether no change holds before the next epoch: if several readers read the same
            samples, of which they have read different numbers, or if all were read.
    """
    drawn = 2**62 if to_the_end else samples.taken
    changes = [[number, stamp, weights] for number, stamp, weights in samples.changes]
    # Set after the last sample that was read: they hold from the next one on, also after a resume.
    _, stamp, weights = mixture.state_dict()["changes"][0]
    if stamp > changes[-1][1]:
        changes.append([drawn, stamp, weights])
    return {"changes": changes, "drawn": drawn}


def mix(
    sources: Sequence[Iterable[Any]],
    weights: Sequence[float],
    *,
    seed: int = 0,
    at_end: str = "stop",
    sizeof: Callable[[Any], Any] | None = None,
) -> Mixture:
    """Mix the samples of several sources, in shares that follow weights.

    For `pack_stream` and `bucket_stream`, which divide the shards of each source with
    `sharded="divide"`, and resume it. The sources take turns at equal distances: of n samples, a
    source of share w has given w·n, give or take one per source, at any n. The weights can be
    changed while samples are read (`set_weights`).

    Args:
        sources: iterables that can be begun anew. Change their samples (`map`, …) before they are
            mixed: a stream resumes exactly if the mixture itself is its iterable.
        weights: one per source, of any sum. A source of weight 0 is not read.
        seed: decides, together with the epoch, which source begins.
        at_end: what happens when a source has no more samples. `"stop"`: the epoch ends.
            `"restart"`: the source begins anew, and the epoch ends when all have ended once.
            `"drop"`: the others go on in their proportion, and each sample comes once.
        sizeof: what a sample counts, as its tokens. If None each counts 1. With blocks, the number
            of samples or tokens in a block.

    Returns:
        An iterable, with `weights`, `set_weights` and `set_epoch`.

    Example:
        >>> mixture = mix([["a"] * 6, ["b"] * 6], [3, 1], at_end="drop")
        >>> "".join(mixture).count("b"), "".join(mixture)[:8].count("b")
        (6, 2)
    """
    return Mixture(sources, weights, seed=seed, at_end=at_end, sizeof=sizeof)
