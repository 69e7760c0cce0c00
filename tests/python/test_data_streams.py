"""Packed and bucketed batches of data that has no length."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from brim.data import BucketBatchSampler, PackedBatchSampler, bucket_stream, pack_stream

SIZES = np.random.default_rng(0).integers(1, 60, 1500).astype(float).tolist()


class Numbers:
    """Samples are their numbers. Counts how often they were read."""

    def __init__(self, count: int = len(SIZES)) -> None:
        self.count = count
        self.read = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.read += 1
            yield number


MAKERS: dict[str, Callable[..., Any]] = {
    "pack": lambda data=None, **o: pack_stream(
        data or Numbers(), 200, sizeof=SIZES.__getitem__, **{"lookahead": 300, **o}
    ),
    "shuffled": lambda data=None, **o: pack_stream(
        data or Numbers(), 200, sizeof=SIZES.__getitem__, shuffle=True, **{"lookahead": 300, **o}
    ),
    "bucket": lambda data=None, **o: bucket_stream(
        data or Numbers(),
        [0, 20, 40, 60],
        300,
        sizeof=SIZES.__getitem__,
        **{"lookahead": 300, **o},
    ),
}


def samples_of(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


@pytest.mark.filterwarnings("ignore:.*left out")
def test_batches_are_those_of_the_windowed_packer_whatever_the_options() -> None:
    random = np.random.default_rng(3)
    for case in range(600):
        count, most = int(random.integers(1, 160)), int(random.choice([1, 9, 60, 70_000]))
        kind = case % 3  # whole, whole as floats, fractions
        columns = 2 if case % 5 == 0 else 1
        drawn = random.integers(0, most + 1, (count, columns)) / (4 if kind == 2 else 1)
        sizes: Any = drawn.astype(int).tolist() if kind == 0 else drawn.tolist()
        cost: Any = random.choice(["sum", "padded", "padded_squared", "count", "flops"], columns)
        scale = {"padded_squared": most, "flops": most + 24576, "count": 1 / most}
        budget: Any = [float(most * random.integers(1, 60) * scale.get(c, 1) + 0.5) for c in cost]
        if case % 2:
            budget = [max(int(b), 1) for b in budget]
        if columns == 1:
            sizes, cost, budget = [size[0] for size in sizes], cost[0], budget[0]
        multiple = 3 if case % 7 == 0 and "sum" not in cost and "count" not in cost else 1
        options: dict[str, Any] = {
            "cost": cost if columns == 1 else list(cost),
            "oversize": str(random.choice(["leave_out", "alone", "truncate"])),
            "batch_multiple": multiple,
            "max_batch_size": 7 if case % 4 == 0 else None,
            "world_size": int(random.integers(1, 4)),
        }
        options["rank"] = int(random.integers(options["world_size"]))
        window = int(random.choice([1, 5, 40, 1000]))
        expected = list(PackedBatchSampler(sizes, budget, window=window, **options))
        data = range(count)
        stream = pack_stream(data, budget, sizeof=sizes.__getitem__, lookahead=window, **options)
        assert list(stream) == expected, (case, options)


def test_bucketed_batches_hold_one_bucket_each_and_stay_within_the_budget() -> None:
    batches = list(MAKERS["bucket"]())
    for batch in batches:
        assert len({int(SIZES[sample]) // 20 for sample in batch}) == 1
        assert len(batch) * max(SIZES[sample] for sample in batch) <= 300
    assert samples_of(batches) == list(range(len(SIZES)))
    by_count = bucket_stream(
        Numbers(), [0, 20, 60], 7, sizeof=SIZES.__getitem__, cost="count", lookahead=1000
    )
    assert {len(batch) for batch in list(by_count)[:-2]} == {7}


@pytest.mark.parametrize("last", [200, 100, 61, 60])
def test_a_truncated_sample_is_in_the_bucket_of_what_is_left_of_it(last: int) -> None:
    """In a sampler as in a stream: of 130, 60 are left, which may have been the last bucket's."""
    sizes = [3, 9, 70, 5, 130, 8, 60, 61, 2, 33, 59]
    given: dict[str, Any] = {"max_total_size": 60, "oversize": "truncate"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of 60 are left out if that is the last boundary
        bounds = [0, 8, 16, 60, last] if last > 60 else [0, 8, 16, 60]
        sampler = [sorted(batch) for batch in BucketBatchSampler(sizes, bounds, seed=1, **given)]
        stream = bucket_stream(range(len(sizes)), bounds, sizeof=sizes.__getitem__, **given)
        streamed = [sorted(batch) for batch in stream]
    assert sorted(sampler) == sorted(streamed)
    assert samples_of(sampler) == [i for i, size in enumerate(sizes) if last > 60 or size < 60]


def test_batches_have_a_multiple_of_samples() -> None:
    packed = PackedBatchSampler(SIZES, 400, cost="padded", batch_multiple=4, window=300)
    options = {"cost": "padded", "batch_multiple": 4, "sizeof": SIZES.__getitem__}
    assert list(pack_stream(Numbers(), 400, lookahead=300, **options)) == list(packed)
    batches = list(bucket_stream(Numbers(), [0, 20, 60], 400, lookahead=10_000, **options))
    assert samples_of(batches) == list(range(len(SIZES)))
    for batch in batches:
        assert len(batch) * max(SIZES[sample] for sample in batch) <= 400
        assert len(batch) % 4 == 0 or len(batch) < 4
    with pytest.raises(ValueError, match="batch_multiple needs a cost"):
        pack_stream(Numbers(), 400, cost="sum", batch_multiple=4)
    with pytest.raises(ValueError, match="batch_multiple must be at least 1, got 0"):
        bucket_stream(Numbers(), [0, 60], 400, batch_multiple=0)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_stream_without_end_is_read_no_further_than_needed(kind: str) -> None:
    read = itertools.count()
    sample = (next(read) % 1500 for _ in itertools.repeat(None))
    for _ in itertools.islice(MAKERS[kind](sample, lookahead=100), 50):
        pass
    assert next(read) < 100 + 50 * 200


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_share_the_samples(kind: str, world_size: int, workers: int) -> None:
    shares = []
    for rank in range(world_size):
        stream = MAKERS[kind](rank=rank, world_size=world_size)
        shares.append(list(DataLoader(stream, batch_size=None, num_workers=workers)))
    assert len({len(share) for share in shares}) == 1
    assert samples_of(itertools.chain(*shares)) == list(range(len(SIZES)))


@pytest.mark.parametrize("kind", MAKERS)
def test_workers_give_the_batches_in_order(kind: str) -> None:
    alone = list(MAKERS[kind]())
    loader = DataLoader(MAKERS[kind](), batch_size=None, num_workers=2)
    assert list(loader) == alone


def test_a_spawned_worker_knows_its_rank() -> None:
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stream = pack_stream(range(50), 100, sizeof=abs)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        expected = list(stream)
        copied = pickle.loads(pickle.dumps(stream))
    finally:
        torch.distributed.destroy_process_group()
    assert list(copied) == expected != list(stream)


def test_data_that_is_sharded_already_is_not_shared_out() -> None:
    mine = MAKERS["pack"](range(0, 1500, 2), rank=0, world_size=2, sharded=True)
    assert samples_of(mine) == list(range(0, 1500, 2))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("before", [1, 4])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 13])
def test_a_stream_resumes_with_any_number_of_ranks(
    kind: str, before: int, after: int, steps: int
) -> None:
    done, states = [], []
    for rank in range(before):
        stream = MAKERS[kind](rank=rank, world_size=before)
        done += list(itertools.islice(stream, steps))
        states.append(stream.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        resumed = MAKERS[kind](rank=rank, world_size=after)
        resumed.load_state_dict(states[0])
        assert resumed.state_dict() == states[0]
        done += list(resumed)
    assert samples_of(done) == list(range(len(SIZES)))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_of_fewer_batches_resumes_there(kind: str) -> None:
    whole = list(MAKERS[kind]())
    stream = MAKERS[kind]()
    assert list(itertools.islice(stream, 9)) == whole[:9]
    resumed = MAKERS[kind]()
    resumed.load_state_dict(stream.state_dict(batches=4))
    assert list(resumed) == whole[4:]
    following = list(resumed)
    assert samples_of(following) == samples_of(whole), "the next iteration is a new one"
    ended = MAKERS[kind]()
    assert list(ended) == whole
    resumed.load_state_dict(ended.state_dict())
    assert list(resumed) == following


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_stateful_dataloader_resumes_a_stream(kind: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        return stateful.StatefulDataLoader(MAKERS[kind](), batch_size=None, num_workers=workers)

    whole = list(load())
    loader = load()
    done = list(itertools.islice(loader, 7))
    resumed = load()
    resumed.load_state_dict(loader.state_dict())
    assert done + list(resumed) == whole


def test_epochs_are_passed_on_and_shuffle_anew() -> None:
    data = Numbers()
    stream = MAKERS["shuffled"](data)
    first = list(stream)
    stream.set_epoch(1)
    assert data.epoch == 1
    second = list(stream)
    assert first != second
    assert sorted(map(sorted, first)) != first
    stream.set_epoch(0)
    assert list(stream) == first


def test_samples_left_out_are_told_at_the_end() -> None:
    stream = pack_stream(["aaa", "bbbbbbbbbbbb", "c"], 6)
    with pytest.warns(UserWarning, match="1 of 3 samples are left out, over budget: 1"):
        assert list(stream) == [["aaa", "c"]]
    outside = bucket_stream(["aaa", "bbbbbbbbbbbb", "c"], [0, 5], 100)
    with pytest.warns(UserWarning, match="1 of 3 samples are left out, outside buckets: 1"):
        list(outside)
    strict = pack_stream(["aaa", "bbbbbbbbbbbb"], 5, oversize="error")
    with pytest.raises(ValueError, match="sample 1 exceeds the budget by itself: its size is 12"):
        list(strict)


def test_errors_of_the_iterable_come_through_and_end_the_iteration() -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("no such file")

    iterator = iter(pack_stream(broken(), 5))
    with pytest.raises(OSError, match="no such file"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: pack_stream(5, 10), TypeError, "iterable must be an iterable of samples, got 5"),
        (lambda: pack_stream([], 0), ValueError, "max_total_size must be a positive"),
        (lambda: pack_stream([], 5, lookahead=0), ValueError, "lookahead must be at least 1"),
        (lambda: pack_stream([], 5, sizeof=[1]), TypeError, "sizeof must be a callable"),
        (lambda: pack_stream([], 5, collate_fn=5), TypeError, "collate_fn must be callable"),
        (lambda: pack_stream([], 5, rank=2, world_size=2), ValueError, "rank must be from 0 to"),
        (lambda: pack_stream([], 5, oversize="x"), ValueError, "oversize must be"),
        (lambda: pack_stream([], 5, sharded=1), TypeError, "sharded must be True or False"),
        (lambda: bucket_stream([], [3], 5), ValueError, "boundaries"),
        (lambda: list(pack_stream(["a"], 5, sizeof=lambda s: -1)), ValueError, "got -1"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_states_of_other_streams_are_refused() -> None:
    state = MAKERS["pack"]().state_dict()
    for stream, text in (
        (MAKERS["pack"](lookahead=5), "its lookahead is 300, here it is 5"),
        (MAKERS["bucket"](), "its sampler is 'pack_stream'"),
    ):
        with pytest.raises(ValueError, match=text):
            stream.load_state_dict(state)
    with pytest.raises(ValueError, match="lacks"):
        MAKERS["pack"]().load_state_dict({})
    with pytest.raises(TypeError, match="state must be"):
        MAKERS["pack"]().load_state_dict(5)


@pytest.mark.parametrize("wrong", ["lookahed", "name", "settings"])
def test_a_wrong_keyword_is_named_with_the_function(wrong: str) -> None:
    with pytest.raises(TypeError, match=rf"^pack_stream\(\) got an unexpected .*'{wrong}'"):
        pack_stream([[1]], 3, **{wrong: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"^bucket_stream\(\) got an unexpected .*'{wrong}'"):
        bucket_stream([[1]], [0, 3], 3, **{wrong: 1})  # type: ignore[arg-type]
