"""`index=`: what takes a pass over all sizes is made once, and is never wrong."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

COUNT = 70_000  # more than one entry of the summary stands for
SAMPLERS = ("ordered", "packed", "buckets")


def lengths_in(folder: Path, count: int = COUNT, dtype: Any = np.uint16) -> np.memmap[Any, Any]:
    path = folder / "lengths"
    random = np.random.default_rng(0)
    random.integers(1, 120, count).astype(dtype).tofile(path)
    if count == 0:
        path.write_bytes(b"")
    return np.memmap(path, dtype, "r", shape=(count,))


def sampler_of(kind: str, lengths: Any, budget: int = 900, **options: Any) -> Any:
    options = {"seed": 5, "cost": "sum", **options}
    if kind == "ordered":
        return SizeAwareBatchSampler(range(len(lengths)), lengths, budget, **options)
    if kind == "packed":
        return PackedBatchSampler(lengths, budget, window=700, **options)
    return BucketBatchSampler(lengths, [1, 30, 60, 121], max_total_size=budget, **options)


def records(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (folder / "lengths.brim").iterdir()}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_everything_is_as_without(tmp_path: Path, kind: str, shuffle: bool) -> None:
    lengths = lengths_in(tmp_path)
    for epoch in (0, 3):
        for rank, world_size in ((0, 1), (6, 7)):
            options = {"shuffle": shuffle, "rank": rank, "world_size": world_size}
            plain = sampler_of(kind, lengths, **options)
            kept = sampler_of(kind, lengths, index=True, **options)
            plain.set_epoch(epoch)
            kept.set_epoch(epoch)
            expected = list(plain)
            assert len(kept) == len(expected)
            assert list(kept) == expected
            state = plain.state_dict(batches=len(expected) // 3)
            kept.load_state_dict(state)
            assert len(kept) == len(expected) - len(expected) // 3
            first = len(kept) // 2
            offsets, indices = kept.plan(first, first + 2)
            part = [indices[a:b].tolist() for a, b in pairwise(offsets)]
            assert part == expected[len(expected) // 3 :][first : first + 2]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_samples_padded_in_several_sizes(tmp_path: Path, kind: str) -> None:
    pairs = lengths_in(tmp_path, 10_000).reshape(5000, 2).copy()
    options: dict[str, Any] = {"cost": "padded_product", "max_batch_size": 9, "shuffle": True}
    for _ in range(2):  # the index is of the first sizes, and its epochs of all
        expected = list(sampler_of(kind, pairs, 9999, **options))
        assert 4500 < sum(map(len, expected)) < 5000
        for _ in range(2):
            kept = sampler_of(kind, pairs, 9999, index=tmp_path / "kept", **options)
            assert (len(kept), list(kept)) == (len(expected), expected)
        pairs[-1:, 1] = 1
        pairs[7:99, 1] = 119


@pytest.mark.parametrize("kind", SAMPLERS)
def test_one_makes_it_and_others_read(tmp_path: Path, kind: str) -> None:
    lengths = lengths_in(tmp_path)
    options: dict[str, Any] = {"shuffle": True, "index": True, "rank": 0, "world_size": 4}
    sampler_of(kind, lengths, **options).make_index(range(3))
    before = records(tmp_path)
    assert len([name for name in before if name.startswith("epoch")]) == 3
    other = sampler_of(kind, lengths, **{**options, "rank": 3})
    for epoch in range(3):
        other.set_epoch(epoch)
        assert len(other) == len(other.plan().offsets) - 1
    assert records(tmp_path) == before
    other.set_epoch(3)
    assert len(other) == len(other.plan().offsets) - 1
    assert len(records(tmp_path)) == len(before) + 1


def test_settings_have_epochs_of_their_own(tmp_path: Path) -> None:
    lengths = lengths_in(tmp_path, 6000)
    seen = []
    for options in (
        {},
        {"max_batch_size": 9},
        {"oversize": "alone"},
        {"cost": "padded"},
        {"seed": 6, "shuffle": True},
        {"seed": 7, "shuffle": True},
        {"indices": range(5000)},
        {"indices": range(1, 5001)},
    ):
        sampler = PackedBatchSampler(lengths, 900, index=True, **{"cost": "sum", **options})
        assert len(sampler) == len(list(sampler.plan().offsets)) - 1, options
        seen.append(len(records(tmp_path)))
    assert seen == list(range(2, 10))


def test_changed_data_are_seen(tmp_path: Path) -> None:
    assert len(sampler_of("packed", lengths_in(tmp_path), index=True)) > 0
    path = tmp_path / "lengths"
    changed = np.fromfile(path, np.uint16)
    changed[40_000] += 100  # not one of those that are looked at
    changed.tofile(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    lengths = np.memmap(path, np.uint16, "r")
    with pytest.warns(UserWarning, match="other sizes"):
        sampler = sampler_of("packed", lengths, index=True)
    with pytest.warns(UserWarning, match="other sizes"):
        assert len(sampler) == len(list(sampler_of("packed", lengths)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = sampler_of("packed", lengths, index=True)
        assert len(again) == len(list(again))


def test_damage_is_seen(tmp_path: Path) -> None:
    lengths = lengths_in(tmp_path)
    expected = len(sampler_of("packed", lengths, index=True))
    for name in records(tmp_path):
        file = tmp_path / "lengths.brim" / name
        content = bytearray(file.read_bytes())
        content[-9] ^= 4
        file.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        sampler = sampler_of("packed", lengths, index=True)
    with pytest.warns(UserWarning, match="damaged"):
        assert len(sampler) == expected


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    lengths = lengths_in(tmp_path)
    (tmp_path / "lengths.brim").write_text("no folder")
    with pytest.warns(UserWarning, match="cannot be written"):
        sampler = sampler_of("ordered", lengths, index=True)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert len(sampler) == len(list(sampler_of("ordered", lengths)))


def make_in_process(path: str) -> int:
    lengths = np.memmap(path, np.uint16, "r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return len(sampler_of("packed", lengths, shuffle=True, index=True))


def test_processes_may_make_it_at_once(tmp_path: Path) -> None:
    lengths = lengths_in(tmp_path)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        counts = pool.map(make_in_process, [str(tmp_path / "lengths")] * 3)
    assert set(counts) == {len(list(sampler_of("packed", lengths, shuffle=True)))}
    assert all(name.endswith(".brim-index") for name in records(tmp_path))


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.uint16, np.uint32, np.int64, np.float32, np.float64]
)
@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.filterwarnings("ignore:there are no samples")
def test_types_and_few_samples(tmp_path: Path, dtype: Any, count: int) -> None:
    lengths = np.asarray(lengths_in(tmp_path, max(count, 1), dtype))[:count]
    for kind in SAMPLERS:
        for _ in range(2):
            kept = sampler_of(kind, lengths, index=tmp_path / "kept")
            expected = list(sampler_of(kind, lengths))
            assert len(kept) == len(expected)
            assert list(kept) == expected


def test_sizes_in_memory_are_known_by_all_of_them(tmp_path: Path) -> None:
    sizes = torch.arange(1, 2001) % 50 + 1
    assert len(sampler_of("packed", sizes, index=tmp_path / "kept")) > 0
    sizes[1234] = 51
    with pytest.warns(UserWarning, match="other sizes"):
        counted = len(sampler_of("packed", sizes, index=str(tmp_path / "kept")))
    assert counted == len(list(sampler_of("packed", sizes)))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_copies_have_it_too(tmp_path: Path, kind: str) -> None:
    lengths = lengths_in(tmp_path, 5000)
    sampler = sampler_of(kind, lengths, max_batch_size=7, index=True)
    expected = len(sampler)
    before = records(tmp_path)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert len(other) == expected
    assert records(tmp_path) == before


def test_functions_and_random_epochs_are_not_kept(tmp_path: Path) -> None:
    lengths = lengths_in(tmp_path, 5000)
    for options in (
        {"cost": lambda n, longest: n * longest},
        {"shuffle": True, "seed": None, "generator": torch.Generator()},
        {"indices": lambda epoch: range(10 * (epoch + 1))},
        {"cost": "sum", "work": "flops"},
    ):
        sampler = PackedBatchSampler(lengths, 900, index=True, **options)
        assert len(sampler) > 0
        with pytest.raises(ValueError, match="make_index needs"):
            sampler.make_index()
    assert set(records(tmp_path)) == {"sizes.brim-index"}


def test_wrong_arguments(tmp_path: Path) -> None:
    lengths = lengths_in(tmp_path, 10)
    with pytest.raises(TypeError, match="index must be True or a folder, got 3"):
        sampler_of("packed", lengths, index=3)
    with pytest.raises(ValueError, match="index=True keeps the index beside"):
        sampler_of("packed", [1, 2, 3], index=True)
    with pytest.raises(ValueError, match=r"index is for one budget, got max_total_size=\[3, 4\]"):
        PackedBatchSampler([[1, 2]], [3, 4], index=tmp_path)
    with pytest.raises(TypeError, match="not a function"):
        SizeAwareBatchSampler(range(3), lambda i: i, 9, index=tmp_path)
    with pytest.raises(ValueError, match="make_index needs index="):
        sampler_of("packed", lengths).make_index()


PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests_index import sampler_of

def anonymous():
    text = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in text if line.startswith("Anonymous:")) / 1024

lengths = np.memmap(sys.argv[1], np.uint16, "r")
sampler_of("packed", lengths[:1000]).plan()
before = anonymous()
for kind in ("ordered", "packed", "buckets"):
    for shuffle in (False, True):
        sampler = sampler_of(kind, lengths, shuffle=shuffle, rank=700, world_size=1024)
        for _, batch in zip(range(400), sampler):
            pass
        del sampler
        print(kind, shuffle, round(anonymous() - before, 1))
        assert anonymous() - before < 64
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_samples(tmp_path: Path) -> None:
    """10^8 samples: two bytes for each would be 200 MB."""
    path = tmp_path / "lengths"
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(100):
            file.write(random.integers(1, 120, 1_000_000).astype(np.uint16).tobytes())
    (tmp_path / "tests_index.py").write_text(Path(__file__).read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
