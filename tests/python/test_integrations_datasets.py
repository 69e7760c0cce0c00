"""Hugging Face datasets: lengths of columns, and streams that are packed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from brim.data import PackedBatchSampler, bucket_stream, pack_stream
from brim.integrations.datasets import WholeStream, lengths_of

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

LENGTHS = [(7 * i) % 19 for i in range(50)]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def samples() -> Any:
    return datasets.Dataset.from_dict(
        {
            "input_ids": [list(range(n)) for n in LENGTHS],
            "text": ["é" * n for n in LENGTHS],
            "raw": [b"x" * n for n in LENGTHS],
            "length": LENGTHS,
        }
    )


def by_reading(dataset: Any, column: str) -> list[int]:
    return [row[column] if column == "length" else len(row[column]) for row in dataset]


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # of sort()
@pytest.mark.parametrize("column", ["input_ids", "text", "raw", "length"])
def test_lengths_follow_whatever_was_done_to_the_dataset(column: str) -> None:
    dataset = samples()
    joined = datasets.concatenate_datasets([dataset, dataset.select([3, 1, 40])])
    assert joined.data.column(column).num_chunks > 1
    for each in (
        dataset,
        joined,
        joined.shuffle(seed=1),
        joined.shuffle(seed=1).select(range(5, 30)),
        dataset.select(range(10, 20)),  # a slice, without indices
        dataset.train_test_split(0.3, seed=0)["test"],
        dataset.sort("length"),
        dataset.filter(lambda row: row["length"] % 2 == 0),
        dataset.with_format("torch"),
        dataset.select([]),
    ):
        lengths = lengths_of(each, column)
        assert lengths.dtype == torch.int64
        assert lengths.tolist() == by_reading(each.with_format(None), column)


def test_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = samples().shuffle(seed=0)
    expected = by_reading(dataset, "input_ids")
    for kind in (type(dataset), type(dataset["text"])):
        monkeypatch.setattr(kind, "__getitem__", lambda *_: pytest.fail("a value was read"))
    assert lengths_of(dataset, "input_ids").tolist() == expected


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.int8()),
        pa.list_(pa.int8(), 3),
        pa.large_string(),
        pa.uint16(),
        pa.float32(),
    ],
)
def test_other_types_of_arrow(kind: Any) -> None:
    values: Any = {pa.large_string(): ["abc", "abc"], pa.uint16(): [3, 3], pa.float32(): [3, 3]}
    table = pa.table({"a": pa.array(values.get(kind, [[1, 2, 3], [4, 5, 6]]), kind)})
    assert lengths_of(table, "a").tolist() == [3, 3]
    assert lengths_of(table.slice(1), "a").tolist() == [3]


def test_arrays_have_the_length_of_their_first_dimension() -> None:
    features = datasets.Features({"image": datasets.Array2D((None, 2), "int8")})
    dataset = datasets.Dataset.from_dict({"image": [[[1, 2]], [[1, 2], [3, 4]]]}, features=features)
    assert lengths_of(dataset, "image").tolist() == [1, 2]


def test_what_has_no_lengths_is_an_error() -> None:
    dataset = samples()
    with pytest.raises(ValueError, match=r"column 'tokens' is not among .*: input_ids, text"):
        lengths_of(dataset, "tokens")
    with pytest.raises(TypeError, match="column 'a' is of the type bool"):
        lengths_of(pa.table({"a": [True]}), "a")
    with pytest.raises(ValueError, match="column 'a' is null in row 2"):
        lengths_of(pa.table({"a": [[1], [], None]}), "a")
    with pytest.raises(TypeError, match="got a DatasetDict"):
        lengths_of(datasets.DatasetDict(train=dataset), "text")
    with pytest.raises(TypeError, match="pack_stream"):
        lengths_of(dataset.to_iterable_dataset(), "text")
    with pytest.raises(TypeError, match=r"datasets\.IterableDataset, got a Dataset"):
        WholeStream(dataset)


@pytest.mark.parametrize("way", ["with_transform", "set_transform"])
def test_lengths_that_a_transform_may_change_are_refused(way: str) -> None:
    dataset = samples()
    changed = getattr(dataset, way)(lambda rows: {"text": [text + "!!" for text in rows["text"]]})
    changed = dataset if changed is None else changed
    assert len(changed[0]["text"]) == len(samples()[0]["text"]) + 2
    with pytest.raises(ValueError, match=r"has a transform .*column 'text'"):
        lengths_of(changed, "text")
    assert lengths_of(changed.with_format(None), "text").tolist() == by_reading(samples(), "text")


def test_a_sampler_of_a_shuffled_dataset_stays_within_its_budget() -> None:
    dataset = samples().shuffle(seed=2)
    sampler = PackedBatchSampler(lengths_of(dataset, "input_ids"), 40, shuffle=True)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list)
    batches = [[len(row["input_ids"]) for row in batch] for batch in loader]
    assert max(map(sum, batches)) <= 40
    assert sorted(itertools.chain(*batches)) == sorted(LENGTHS)


def numbers(batches: Any) -> list[list[int]]:
    return [[int(row["length"]) for row in batch] for batch in batches]


@pytest.mark.parametrize(
    "form", [None, *(pytest.param(form, marks=pytest.mark.slow) for form in ("torch", "numpy"))]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_packed_once_whatever_the_workers(workers: int, form: str | None) -> None:
    chosen = samples().remove_columns("raw")  # torch's collate takes no bytes of NumPy
    stream = chosen.to_iterable_dataset(num_shards=4).with_format(form)

    def pack(iterable: Any, **options: Any) -> Any:
        sizeof = {"sizeof": lambda row: int(row["length"])}
        made = pack_stream(iterable, 40, lookahead=20, collate_fn=list, **sizeof, **options)
        return DataLoader(made, batch_size=None, num_workers=workers)

    whole = numbers(pack(WholeStream(stream)))
    assert whole == numbers(pack(samples()))  # the same as of the data set itself
    sharded = numbers(pack(stream, sharded=True))
    for batches in (whole, sharded):
        assert sorted(itertools.chain(*batches)) == sorted(LENGTHS)
    assert numbers(pack(stream)) == whole


@pytest.mark.parametrize("whole", [False, True])
def test_a_data_set_split_by_node_is_refused_unless_it_is_to_stay_so(whole: bool) -> None:
    distributed = pytest.importorskip("datasets.distributed")

    def pack(rank: int, **options: Any) -> Any:
        stream = samples().to_iterable_dataset(num_shards=4)
        part = distributed.split_dataset_by_node(stream, rank, 2)
        given = WholeStream(part) if whole else part
        return pack_stream(given, 40, sizeof=lambda row: len(row["text"]), rank=rank, **options)

    with pytest.raises(ValueError, match=r"split by node.*or pass sharded=True"):
        iter(pack(0, world_size=2))
    parts = [numbers(pack(rank, world_size=2, sharded=True)) for rank in range(2)]
    assert sorted(itertools.chain(*parts[0], *parts[1])) == sorted(LENGTHS)


def test_a_shuffled_stream_has_other_batches_in_each_epoch_and_resumes() -> None:
    def make() -> Any:
        stream = samples().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=20)
        sizeof = {"sizeof": lambda row: row["length"]}
        return bucket_stream(WholeStream(stream), [0, 10, 20], 60, **sizeof)

    batches = make()
    epochs = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        epochs.append(numbers(batches))
    assert epochs[0] != epochs[1]
    done = numbers(itertools.islice(batches, 3))  # of the next epoch
    resumed = make()
    resumed.load_state_dict(batches.state_dict())
    batches.set_epoch(2)
    assert done + numbers(resumed) == numbers(batches) not in epochs
