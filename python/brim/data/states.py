"""Iterations of samplers and streams, and the states that they resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from brim import _C
from brim._arguments import shown, whole
from brim.data.ranks import Ranks


class Start(NamedTuple):
    """Where iterations of an epoch begin: its seed, and a position in it."""

    seed: int
    cursor: list[int]
    segments: list[list[int]]


class Opened(NamedTuple):
    """A run that was opened to check a state, and what it is valid for."""

    run: Any
    batching: _C.SampleBatching | None
    ranks: Ranks


class Epoch(NamedTuple):
    """The epoch of iterations to come, which share it. Each iteration holds its own."""

    start: Start
    basis: object  # what the seed was made of; None if it was loaded
    opened: Opened | None  # for the first iteration of a loaded one


class Iteration(NamedTuple):
    """One iteration, and what it reads; `batching` is None if batches are made one by one."""

    run: Any
    epoch: Epoch
    start: Start
    batching: _C.SampleBatching | None
    ahead: int  # how many batches a DataLoader asks for before it needs them

    def used(self) -> int:
        """How many batches have reached the loop; what a DataLoader has fetched ahead has not."""
        return int(self.run.asked()[0]) - self.ahead

    def ended(self) -> bool:
        """Whether the last batch has reached the loop.

        A DataLoader goes on asking for each batch that it hands on, also after the last.
        """
        asked, given = self.run.asked()
        return bool(self.run.ended()) and asked - given >= self.ahead


class PositionedIterator(ABC):
    """An iterator over batches that remembers its place after each of them."""

    def __init__(self, description: dict[str, Any], begin: int) -> None:
        self._description = description
        self._places = [begin]
        self._finished = False

    @abstractmethod
    def _position(self, place: int) -> dict[str, Any]: ...

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The state after this many of the batches that were given; after all of them if None."""
        given = len(self._places) - 1
        batches = given if batches is None else whole("batches", batches, 0)
        if batches > given:
            raise ValueError(f"batches must be from 0 to {given}, those given, got {batches}")
        return {
            **self._description,
            "finished": self._finished and batches == given,
            **self._position(self._places[batches]),
        }


def check_state(state: object, keys: set[str]) -> None:
    """Check that a state has these keys, and what a file can get wrong about them.

    Raises:
        TypeError: if it is no mapping, or what is in it has not the form.
        ValueError: if it lacks one.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() returned, got {shown(state)}")
    missing = keys - state.keys()
    if missing:
        raise ValueError(f"state is no state of a batch sampler: it lacks {sorted(missing)}")
    forms: dict[str, tuple[type, ...]] = {
        "settings": (Mapping,),
        **dict.fromkeys(("cursor", "segments", "ranks"), (list, tuple)),
    }
    for key in keys & forms.keys():
        if not isinstance(state[key], forms[key]):
            raise TypeError(
                f"state is no state of a batch sampler: its {key} is {shown(state[key])}"
            )


def check_same_run(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that a state is of the same samples and settings as these.

    Raises:
        ValueError: if it is not.
    """
    here, there = {**own, **own["settings"]}, {**state, **state["settings"]}
    for key in dict.fromkeys(
        ("format", "sampler", "samples", *own["settings"], *state["settings"])
    ):
        # A sampler without a length has -1 samples until it has been read.
        unknown = key == "samples" and -1 in (there[key], here[key])
        if there.get(key) != here.get(key) and not unknown:
            raise ValueError(
                f"state is of another run: its {key} is {there.get(key)!r}, here it is "
                f"{here.get(key)!r}"
            )
    # Older states, and samplers that ask for sizes one by one, have no such number.
    if None not in (here.get("data"), there.get("data")) and here["data"] != there["data"]:
        raise ValueError(
            "state is of another run: the sizes of its samples are not those of the samples here, "
            "so it would resume among other batches"
        )
