"""Streams whose ranks and workers read their own shards: every sample on exactly one of them."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from brim.data import Shards, bucket_stream, even, mix, pack_stream
from brim.data.shards import Reader, own_part


def numbers(shard: int, count: int = 40) -> range:
    return range(1000 * shard, 1000 * shard + count)


def size(number: int) -> int:
    return 1 + number * 7 % 23


class Counted:
    """Shards by the protocol alone, which counts what is opened."""

    num_shards = 6

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.part: range = range(self.num_shards)

    def shard(self, num_shards: int, index: int) -> Counted:
        part = Counted()
        part.opened, part.part = self.opened, self.part[index::num_shards]
        return part

    def __iter__(self) -> Iterator[int]:
        for shard in self.part:
            self.opened.append(shard)
            yield from numbers(shard)


def load(data: Any, rank: int, world: int, workers: int = 0, **options: Any) -> list[list[int]]:
    options = {"sharded": "divide", "sizeof": size, "lookahead": 50, **options}
    stream = pack_stream(data, 96, rank=rank, world_size=world, **options)
    return list(DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=None))


def seen(*shares: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(itertools.chain(*shares)))


def test_each_rank_opens_its_own_shards_only() -> None:
    opened = []
    for rank in range(4):
        data = Counted()
        load(data, rank, 4)
        opened.append(data.opened)
    assert opened == [[0, 4], [1, 5], [2], [3]]


@pytest.mark.parametrize(
    ("world", "workers", "kind"),
    [(2, 2, "pack"), (3, 0, "bucket"), pytest.param(2, 2, "bucket", marks=pytest.mark.slow)],
)
def test_every_sample_is_read_once(kind: str, world: int, workers: int) -> None:
    shares = []
    for rank in range(world):
        options = {"rank": rank, "world_size": world, "sharded": "divide", "sizeof": size}
        data = Shards(range(7), numbers, shuffle=True)
        stream = (
            pack_stream(data, 96, lookahead=50, **options)
            if kind == "pack"
            else bucket_stream(data, [0, 8, 30], 96, lookahead=50, **options)
        )
        shares.append(list(DataLoader(stream, batch_size=None, num_workers=workers)))
        assert all(shares[-1])
    assert seen(*shares) == sorted(itertools.chain(*map(numbers, range(7))))


def test_readers_of_all_numbers_of_shards_share_them_exactly() -> None:
    for shards, world, workers in itertools.product(range(1, 8), range(1, 5), range(1, 4)):
        data = Shards(range(shards), lambda shard: numbers(shard, 5 + shard))
        found: Counter[int] = Counter()
        ranks: Counter[int] = Counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for rank, worker in itertools.product(range(world), range(workers)):
                own = list(own_part(data, Reader(rank, world, worker, workers)))
                found.update(own)
                ranks[rank] += len(own)
        assert found == Counter(dict.fromkeys(data, 1))
        assert min(ranks[rank] for rank in range(world)) > 0


def test_fewer_shards_than_readers_are_told_and_divided_by_samples() -> None:
    data = Shards(range(2), numbers)
    with pytest.warns(UserWarning, match="5 ranks and workers read 2 shards"):
        first = load(data, 0, 5)
    shares = [first, *(load(data, rank, 5) for rank in range(1, 5))]
    assert seen(*shares) == sorted(data)
    assert all(shares)


def test_shuffled_shards_are_another_order_in_each_epoch_and_still_divided() -> None:
    orders = set()
    for epoch in range(5):
        data = Shards(range(9), lambda shard: [shard], shuffle=True, seed=3)
        data.set_epoch(epoch)
        parts = [list(data.shard(2, index)) for index in range(2)]
        assert sorted(parts[0] + parts[1]) == list(range(9))
        orders.add(tuple(data))
    assert len(orders) == 5


def test_epochs_of_a_stream_reach_its_parts() -> None:
    def epochs(rank: int) -> list[set[int]]:
        stream = pack_stream(
            Shards(range(8), numbers, shuffle=True),
            96,
            sizeof=size,
            sharded="divide",
            rank=rank,
            world_size=2,
        )
        return [set(itertools.chain(*stream)) for _ in range(3)]

    first, second = epochs(0), epochs(1)
    assert first[0] != first[1] != first[2]
    for mine, theirs in zip(first, second, strict=True):
        assert not mine & theirs
        assert len(mine | theirs) == 320


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reader_resumes_its_own_shards(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make(rank: int, world: int = 2, workers: int = workers) -> Any:
        data = Shards(range(7), numbers, shuffle=True)
        stream = pack_stream(
            data, 96, sizeof=size, lookahead=50, sharded="divide", rank=rank, world_size=world
        )
        return stateful.StatefulDataLoader(stream, batch_size=None, num_workers=workers)

    for rank in range(2):
        whole = make(rank)
        epochs = [list(whole) for _ in range(2)]
        loader = make(rank)
        list(loader)
        done = list(itertools.islice(loader, 5))
        state = json.loads(json.dumps(loader.state_dict())) if workers == 0 else loader.state_dict()
        resumed = make(rank)
        resumed.load_state_dict(state)
        assert done + list(resumed) == epochs[1]
    if workers == 0:
        for other in (make(0), make(1, 3)):
            other.load_state_dict(state)
            with pytest.raises(ValueError, match=r"state is of rank 1 of 2.*here is rank"):
                list(other)


def test_a_state_of_own_shards_is_refused_where_all_samples_are_read() -> None:
    def make(sharded: Any) -> Any:
        data = Shards(range(7), numbers)
        options = {"sizeof": size, "lookahead": 50, "rank": 0, "world_size": 2}
        return pack_stream(data, 96, sharded=sharded, **options)

    divided, whole = make("divide"), make(False)
    for stream in (divided, whole):
        assert len(list(itertools.islice(stream, 3))) == 3
    for stream, other, text in (
        (divided, make(False), "here all samples are read"),
        (whole, make("divide"), "without sharded"),
    ):
        other.load_state_dict(stream.state_dict())
        with pytest.raises(ValueError, match=text):
            next(iter(other))


def test_what_cannot_be_divided_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"shards that can be divided, and a range has none"):
        load(range(5), 0, 2)
    with pytest.raises(ValueError, match="sharded must be True, False or \"divide\", got 'own'"):
        pack_stream([1], 10, sharded="own")
    with pytest.raises(TypeError, match="shards must be a list of at least one shard"):
        Shards([], numbers)
    with pytest.raises(TypeError, match="open must be callable"):
        Shards([1], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="index must be below num_shards = 2, got 2"):
        Shards([1], numbers).shard(2, 2)


# ---------------------------------------------------------------- libraries


@pytest.mark.parametrize("shards", [4, 3])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_streamed_data_set_of_hugging_face_is_divided(shards: int, workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"n": list(range(50))})
    for streamed in (True, False):
        for shuffled in (False, True):
            data = rows.to_iterable_dataset(num_shards=shards) if streamed else rows
            data = data.shuffle(seed=1, buffer_size=9) if streamed and shuffled else data
            options = {"sizeof": lambda row: size(row["n"]), "collate_fn": list}
            shares = [load(data, rank, 2, workers, **options) for rank in range(2)]
            assert all(shares)
            found = [row["n"] for batch in itertools.chain(*shares) for row in batch]
            assert sorted(found) == list(range(50))


def test_a_data_set_split_for_another_rank_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"n": list(range(50))}).to_iterable_dataset(num_shards=4)
    part = split_dataset_by_node(rows, 0, 2)
    options = {"sizeof": lambda row: size(row["n"])}
    assert [row["n"] for batch in load(part, 0, 2, **options) for row in batch]
    with pytest.raises(ValueError, match="split for rank 0 of 2, and this is rank 1 of 2"):
        load(part, 1, 2, **options)


def tar_files(folder: Path, count: int) -> list[str]:
    names = []
    for number in range(count):
        names.append(str(folder / f"{number}.tar"))
        with tarfile.open(names[-1], "w") as tar:
            for key in range(10 * number, 10 * number + 10):
                text = str(key).encode()
                entry = tarfile.TarInfo(f"{key:04d}.txt")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    return names


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_webdataset_is_divided(tmp_path: Path, workers: int) -> None:
    webdataset = pytest.importorskip("webdataset")
    names = tar_files(tmp_path, 5)

    def make() -> Any:
        return webdataset.WebDataset(names, shardshuffle=False).decode()

    options = {"sizeof": lambda sample: len(sample["txt"]), "collate_fn": list}
    shares = [load(make(), rank, 2, workers, **options) for rank in range(2)]
    assert all(shares)
    found = [int(each["txt"]) for batch in itertools.chain(*shares) for each in batch]
    assert sorted(found) == list(range(50))
    with pytest.raises(ValueError, match="WebDataset of 5 shards cannot be divided among 6"):
        load(make(), 0, 6, **options)


@pytest.mark.parametrize("row_groups", [False, True])
def test_files_of_arrow_are_shards(tmp_path: Path, row_groups: bool) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from brim.integrations.arrow import arrow_shards, column_lengths

    files = []
    for number in range(4):
        rows = numbers(number, 30)
        table = pa.table({"n": list(rows), "ids": [list(range(size(n))) for n in rows]})
        files.append(tmp_path / f"{number}.parquet")
        parquet.write_table(table, files[-1], row_group_size=8)
    shards = arrow_shards(files, ["n", "ids"], row_groups=row_groups)
    assert shards.num_shards == (16 if row_groups else 4)
    every = sorted(itertools.chain(*(numbers(number, 30) for number in range(4))))
    by_row = [load(shards, rank, 2, sizeof=lambda row: len(row["ids"])) for rank in range(2)]
    assert sorted(row["n"] for share in by_row for batch in share for row in batch) == every
    blocks = arrow_shards(tmp_path, ["n", "ids"], row_groups=row_groups, blocks=True)
    found = []
    for rank in range(2):
        for batch in load(blocks, rank, 2, sizeof=column_lengths("ids"), blocks=True, cost="sum"):
            taken = [block.take(pa.array(rows.numpy())) for block, rows in batch]
            assert sum(len(ids) for part in taken for ids in part["ids"].to_pylist()) <= 96
            found += [n for part in taken for n in part["n"].to_pylist()]
    assert sorted(found) == every
    with pytest.raises(ValueError, match=r"columns \['m'\] are not among .*: n, ids"):
        arrow_shards(files, ["m"])
    with pytest.raises(ValueError, match="column 'm' is not among"):
        column_lengths("m")(pa.record_batch({"n": [1]}))


# ---------------------------------------------------------------- blocks


def random_blocks(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = [0, 1, 300, 7, 0, 900, 64, 0]
    return [torch.randint(0, 90, (count,), generator=generator) for count in counts]


@pytest.mark.parametrize("kind", ["pack", "shuffled", "bucket"])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_batches_of_blocks_are_those_of_their_samples_one_by_one(kind: str) -> None:
    def make(data: Any, **options: Any) -> Any:
        if kind == "bucket":
            return bucket_stream(data, [0, 20, 50, 80], 500, lookahead=200, **options)
        return pack_stream(data, 500, lookahead=200, shuffle=kind == "shuffled", **options)

    for seed in range(2):
        blocks = random_blocks(seed)
        sizes = torch.cat(blocks).tolist()
        begins = [0, *itertools.accumulate(map(len, blocks))]
        place = {id(block): begin for block, begin in zip(blocks, begins, strict=False)}
        for world in (1, 3):
            for rank in range(world):
                ranks = {"rank": rank, "world_size": world}
                one_by_one = make(range(len(sizes)), sizeof=sizes.__getitem__, **ranks)
                in_blocks = make(blocks, blocks=True, **ranks)
                found = []
                for batch in in_blocks:
                    assert all(rows.dtype == torch.int64 and len(rows) for _, rows in batch)
                    found.append(
                        [place[id(block)] + row for block, rows in batch for row in rows.tolist()]
                    )
                assert list(map(sorted, found)) == list(map(sorted, one_by_one))


def test_blocks_resume_and_have_several_sizes() -> None:
    blocks = random_blocks(1)

    def make() -> Any:
        return pack_stream(
            blocks,
            [500, 9],
            sizeof=lambda block: (block, torch.ones(len(block))),
            cost="sum",
            lookahead=100,
            blocks=True,
        )

    def rows(batches: Any) -> list[Any]:
        return [[(len(block), part.tolist()) for block, part in batch] for batch in batches]

    whole = rows(make())
    assert max(sum(len(part) for _, part in batch) for batch in whole) == 9
    stream = make()
    done = rows(itertools.islice(stream, 11))
    resumed = make()
    resumed.load_state_dict(stream.state_dict())
    assert done + rows(resumed) == whole


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (lambda block: -block, "finite and not negative, got -"),
        (lambda block: block / 0, "finite and not negative, got (nan|inf)"),
    ],
)
def test_wrong_sizes_of_a_block_are_named(sizes: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        list(pack_stream([torch.arange(1, 5)], 10, sizeof=sizes, blocks=True))


def test_blocks_refuse_what_needs_samples() -> None:
    with pytest.raises(ValueError, match='blocks=True does not go with oversize="split"'):
        pack_stream([], 10, blocks=True, oversize="split", cost="sum")
    with pytest.raises(TypeError, match="blocks must be True or False"):
        pack_stream([], 10, blocks=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sizeof must give 2 columns .* got 1"):
        list(pack_stream([torch.ones(3)], [9, 9], sizeof=lambda b: [b], cost="sum", blocks=True))


# ---------------------------------------------------------------- even, on one rank


def test_one_rank_has_the_batches_of_its_loader_and_resumes() -> None:
    def make() -> Any:
        data = mix([Shards(range(3), numbers), Shards(range(3, 6), numbers)], [1, 2], at_end="drop")
        return even(pack_stream(data, 96, sizeof=size, lookahead=50, sharded="divide"))

    whole = make()
    epochs = [list(whole) for _ in range(3)]
    assert len(epochs[0]) > 10
    for steps in (0, 1, 5, len(epochs[1]) - 1):
        stopped = make()
        list(stopped)
        done = list(itertools.islice(stopped, steps)) if steps else []
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert steps == 0 or resumed.state_dict() == state
        assert [done + list(resumed), list(resumed)] == epochs[1:]
    ended = make()
    list(ended)
    resumed = make()
    resumed.load_state_dict(ended.state_dict())
    assert list(resumed) == epochs[1]


def test_wrong_arguments_of_even_are_named() -> None:
    stream = pack_stream([1], 10, sizeof=abs)
    with pytest.raises(ValueError, match='at_end must be "stop" or "repeat", got \'pad\''):
        even(stream, at_end="pad")
    with pytest.raises(ValueError, match="ahead must be at least 1, got 0"):
        even(stream, ahead=0)
    with pytest.raises(TypeError, match="loader must be iterable, and more than once"):
        even(iter(stream))
    with pytest.raises(TypeError, match="DataLoader with workers cannot be saved"):
        even(DataLoader(stream, batch_size=None, num_workers=1)).state_dict()
    state = even(stream).state_dict()
    with pytest.raises(ValueError, match=r"state is of rank 1 of 3, and this is rank 0 of 1"):
        even(stream).load_state_dict({**state, "ranks": [1, 3]})
    with pytest.raises(ValueError, match="at_end is 'stop', here it is 'repeat'"):
        even(stream, at_end="repeat").load_state_dict(state)
