"""Mixtures of sources: shares follow weights that change, and a resumed run draws the same."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from brim.data import Shards, mix, pack_stream

COUNTS = [500, 300, 200]


def source(number: int, count: int = 0) -> Shards:
    count = count or COUNTS[number]
    return Shards(
        range(4), lambda shard: range(10_000 * number + shard, 10_000 * number + count, 4)
    )


def shares(samples: Any) -> Counter[int]:
    return Counter(sample // 10_000 for sample in samples)


def three(weights: Any = (5, 3, 2), **options: Any) -> Any:
    return mix([source(number) for number in range(3)], weights, **options)


def size(number: int) -> int:
    return 1 + number * 7 % 23


def stream(mixture: Any, **options: Any) -> Any:
    return pack_stream(mixture, 96, sizeof=size, lookahead=50, **options)


def test_shares_follow_the_weights_at_every_sample() -> None:
    for seed in range(5):
        found = Counter[int]()
        for n, sample in enumerate(three(seed=seed), 1):
            found[sample // 10_000] += 1
            assert all(abs(found[s] - n * w / 10) <= 3 for s, w in enumerate((5, 3, 2)))


def test_the_end_is_as_asked_for() -> None:
    everything = sorted(itertools.chain(*(source(number) for number in range(3))))
    assert sorted(three((1, 1, 1), at_end="drop")) == everything
    stopped = shares(three((1, 1, 1), at_end="stop"))
    assert stopped[2] == 200
    assert max(stopped.values()) <= 201
    found = Counter(three((1, 1, 1), at_end="restart"))
    assert sorted(found) == everything
    assert {found[sample] for sample in source(0)} == {1}
    assert sum(found[sample] for sample in source(2)) in range(495, 501)
    assert set(shares(three((1, 0, 1)))) == {0, 2}


def test_tokens_are_shared_by_their_number() -> None:
    lists = [[[0] * 10] * 4000, [[1] * 90] * 4000]
    found = Counter[int]()
    for sample in itertools.islice(mix(lists, [1, 1], sizeof=len), 3000):
        found[sample[0]] += len(sample)
    assert abs(found[0] - found[1]) <= 180


def test_the_seed_and_the_epoch_decide() -> None:
    assert list(three(seed=1)) == list(three(seed=1))
    epochs = []
    mixture = three(seed=1)
    for epoch in range(4):
        mixture.set_epoch(epoch)
        epochs.append(tuple(mixture))
    assert len({*epochs, *(tuple(three(seed=seed)) for seed in range(2, 6))}) > 3


def test_sources_are_told_the_epoch() -> None:
    shuffled = Shards(range(300), lambda shard: [shard], shuffle=True)
    batches = stream(mix([shuffled], [1]))
    epochs = [tuple(itertools.chain(*batches)) for _ in range(3)]
    assert len(set(epochs)) == 3
    assert {frozenset(epoch) for epoch in epochs} == {frozenset(range(300))}


@pytest.mark.parametrize("first", [0, 3])
def test_weights_hold_from_the_next_sample_on_and_resume_exactly(first: int) -> None:
    def make() -> Any:
        return three((1, 1, 1), seed=4, at_end="drop")

    mixture = make()
    whole = stream(mixture)
    running = iter(whole)
    done = list(itertools.islice(running, first))
    mixture.set_weights([8, 1, 0])
    assert mixture.weights == [8, 1, 0]
    done += itertools.islice(running, 15)
    mixture.set_weights([0, 1, 9])
    mixture.set_weights([0, 1, 1])
    done += itertools.islice(running, 15)
    state = json.loads(json.dumps(whole.state_dict()))
    early = json.loads(json.dumps(whole.state_dict(batches=first)))
    rest = list(running)
    assert len(state["mixture"]["changes"]) == (3 if first else 2)
    for given, before in ((state, done), (early, done[:first])):
        again = make()
        resumed = stream(again)
        resumed.load_state_dict(given)
        assert again.weights == [0, 1, 1]
        assert resumed.state_dict() == given
        assert before + list(resumed) == done + rest
        assert list(resumed) == list(stream_of_next(whole))


def stream_of_next(whole: Any) -> Any:
    """The epoch that follows, each time it is asked for."""
    whole.set_epoch(1)
    return whole


def test_weights_that_are_set_after_loading_hold_after_what_had_been_read() -> None:
    whole = stream(three(seed=4))
    done = list(itertools.islice(whole, 5))
    mixture = three(seed=4)
    resumed = stream(mixture)
    state = whole.state_dict()
    resumed.load_state_dict(state)
    mixture.set_weights([0, 0, 1])
    samples = list(itertools.chain(*done, *resumed))
    read = state["mixture"]["drawn"]
    same = list(itertools.islice(three(seed=4), read))
    assert Counter(same) - Counter(samples) == Counter()
    assert set(shares((Counter(samples) - Counter(same)).elements())) <= {2}


def test_a_state_taken_right_after_weights_were_set_holds_them() -> None:
    mixture = three(seed=4)
    whole = stream(mixture)
    running = iter(whole)
    next(running)
    mixture.set_weights([0, 0, 1])
    state = json.loads(json.dumps(whole.state_dict()))
    again = three(seed=4)
    resumed = stream(again)
    resumed.load_state_dict(state)
    assert again.weights == [0, 0, 1]
    assert resumed.state_dict() == state
    assert list(resumed) == list(running)


@pytest.mark.parametrize("at_end", ["stop", "drop", "restart"])
def test_weights_that_are_set_once_all_is_read_hold_from_the_next_epoch_on(at_end: str) -> None:
    def make() -> Any:
        return mix([range(12), range(100, 160)], [3, 1], seed=4, at_end=at_end)

    mixture = make()
    whole = pack_stream(mixture, 96, sizeof=size, lookahead=10_000)
    running = iter(whole)
    next(running)
    mixture.set_weights([0, 1])
    state = json.loads(json.dumps(whole.state_dict()))
    again = make()
    resumed = pack_stream(again, 96, sizeof=size, lookahead=10_000)
    resumed.load_state_dict(state)
    assert list(resumed) == list(running)
    assert list(resumed) == list(whole)
    assert again.weights == [0, 1]


def test_a_finished_epoch_passes_its_weights_on() -> None:
    mixture = three()
    whole = stream(mixture)
    running = iter(whole)
    next(running)
    mixture.set_weights([1, 0, 1])
    list(running)
    again = stream(three())
    again.load_state_dict(whole.state_dict())
    assert set(shares(itertools.chain(*again))) == {0, 2}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [1, 2])
def test_running_workers_follow_the_weights_and_resume(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        mixture = three((1, 1, 0), seed=2, at_end="drop")
        batches = stream(mixture, sharded="divide")
        return mixture, stateful.StatefulDataLoader(batches, batch_size=None, num_workers=workers)

    mixture, loader = make()
    running = iter(loader)
    done = [next(running) for _ in range(3)]
    mixture.set_weights([0, 0, 1])
    done += [next(running) for _ in range(40)]
    assert 2 in shares(itertools.chain(*done[20:]))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = list(running)
    _, resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    everything = list(itertools.chain(*done, *rest))
    assert len(everything) == len(set(everything))


def test_divided_sources_are_read_once_over_all_ranks_and_workers() -> None:
    found = []
    for rank in range(2):
        batches = stream(three(at_end="drop"), sharded="divide", rank=rank, world_size=2)
        found += itertools.chain(*DataLoader(batches, batch_size=None, num_workers=2))
    assert sorted(found) == sorted(itertools.chain(*(source(number) for number in range(3))))


def test_readers_of_the_same_samples_change_weights_between_epochs_alone() -> None:
    expected = three(seed=3, at_end="drop")
    mixture = three(seed=3, at_end="drop")
    loader = DataLoader(stream(mixture), batch_size=None, num_workers=2)
    running = iter(loader)
    first = [next(running), next(running)]  # both workers have begun
    with pytest.warns(UserWarning, match="hold from the next epoch on"):
        mixture.set_weights([0, 1, 1])
    first += running
    batches = stream(expected)
    assert first == list(batches)
    expected.set_weights([0, 1, 1])
    assert list(loader) == list(batches)


def test_wrong_arguments_are_named() -> None:
    lists = [[1], [2]]
    for call, error, text in (
        (lambda: mix(lists, [1]), ValueError, "weights must be 2, one per source, got 1"),
        (lambda: mix(lists, [1, -1]), ValueError, "finite and not negative, got -1"),
        (lambda: mix(lists, [0, 0]), ValueError, "must not all be 0"),
        (lambda: mix(lists, [1, "x"]), TypeError, "weights must be a number, got 'x'"),
        (lambda: mix(lists, "12"), TypeError, "weights must be a list"),
        (lambda: mix(lists, [1, 1], at_end="go"), ValueError, 'at_end must be "stop"'),
        (lambda: mix([iter([1])], [1]), TypeError, "source 0 must be an iterable that can"),
        (lambda: mix([mix(lists, [1, 1])], [1]), TypeError, "source 0 is a mixture itself"),
        (lambda: mix(7, [1]), TypeError, "sources must be a list of iterables"),
        (lambda: mix([], []), TypeError, "sources must be a list of iterables, got"),
        (
            lambda: list(mix([[], [1]], [1, 1], at_end="restart")),
            ValueError,
            "source 0 .* no samples",
        ),
        (lambda: list(mix(lists, [1, 1], sizeof=lambda _: -1)), ValueError, "not negative, got -1"),
    ):
        with pytest.raises(error, match=text):
            call()  # type: ignore[no-untyped-call]
