"""Files and states that are damaged, or made to do harm: an error that says so, and nothing worse.

Each kind of file is written as brim or its user writes it, changed at random, and read again by a
process of its own. A case is wrong if that process ends or stands still, if its memory grows by
more than a limit, if the error is of a kind that says nothing, or if a result differs from what the
undamaged file gives where the damage should have been noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import multiprocessing
import os
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tally import Tally

PATIENCE = 120.0  # seconds that one case may take; on a busy machine, too
MOST_BYTES = 1 << 30  # that one kind may add to the memory of its process
MOST_ROOM = 8 << 30  # of address space, so that a blow-up is an error and not the machine's end
CHUNK = 250  # cases per process


class WrongError(Exception):
    """What a case should not have done."""


# ---------------------------------------------------------------- damage


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Some bytes changed, lost, repeated or put in."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 4, 20])):
        at = dice.randrange(len(data) + 1)
        many = min(dice.choice([1, 1, 2, 4, 8, 64, 4096]), len(data) - at)
        change = dice.randrange(8)
        if change == 0:
            del data[at : at + many]
        elif change == 1:
            data[at:at] = bytes(dice.randrange(256) for _ in range(many or 1))
        elif change == 2:
            data[at:at] = data[at : at + many]
        elif change == 3:
            data[at : at + many] = bytes(many)
        elif change == 4:
            data[at : at + many] = b"\xff" * many
        elif change == 5:
            del data[at:]
        elif change == 6 and many:
            data[at] ^= 1 << dice.randrange(8)
        elif many:
            number = dice.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), dice.getrandbits(62)])
            data[at : at + 8] = struct.pack("<q", number)
    return bytes(data)


ODD_TEXTS = ["", "0", "-1", "nan", "inf", "1e999", "9" * 30, "9" * 5000, "x", "\x00", "é", "cpu"]
ODD_VALUES: list[Any] = [
    *(0, 1, -1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0),
    *(math.nan, math.inf, 1e308, None, True, False, "", "x", "9" * 400, [], {}, [[]]),
    *([0], [-1], [2**62] * 3, [None], {"x": 1}, [[0, 0, 0]] * 50, [[2**62, 2**62, 1]]),
]


def damaged_words(dice: random.Random, text: str) -> bytes:
    """Words replaced by other words: lines stay lines, which damage of bytes rarely leaves."""
    lines = [line.split(" ") for line in text.splitlines()]
    for _ in range(dice.choice([1, 1, 2, 5])):
        words = dice.choice(lines)
        change = dice.randrange(6)
        if change == 0:
            lines.insert(dice.randrange(len(lines)), list(words))
        elif change == 1 and len(lines) > 1:
            lines.remove(words)
        elif change == 2:
            words.insert(dice.randrange(len(words) + 1), dice.choice(ODD_TEXTS))
        else:
            words[dice.randrange(len(words))] = str(dice.choice([*ODD_TEXTS, *ODD_VALUES[:12]]))
    return "".join(" ".join(line) + "\n" for line in lines).encode(errors="replace")


def damaged_tree(dice: random.Random, tree: Any) -> Any:
    """Members of a state replaced, left out, repeated or added."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.choice([1, 1, 2, 3])):
        holders = [tree, *_holders(tree)]
        holder = dice.choice(holders)
        if isinstance(holder, dict) and holder:
            key: Any = dice.choice(list(holder))
        elif isinstance(holder, list) and holder:
            key = dice.randrange(len(holder))
        else:
            continue
        change = dice.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif change == 2 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += dice.choice([-2, -1, 1, 2, 1000, 2**40])
        elif change == 3:
            other = dice.choice(holders)
            holder[key] = copy.deepcopy(other) if len(repr(other)) < 1000 else None
        else:
            holder[key] = copy.deepcopy(dice.choice(ODD_VALUES))
    return tree


def _holders(tree: Any) -> Iterator[Any]:
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, (dict, list)):
            yield each
            yield from _holders(each)


# ---------------------------------------------------------------- kinds of files


def size_files(folder: Path) -> Callable[[random.Random], None]:
    """Files of remembered sizes: read, or ignored with a warning, and no size beyond the given."""
    import torch

    import brim

    def make(strategy: str) -> Any:
        @brim.maximize("size", strategy=strategy, persist=folder / "sizes", device="cpu")
        def function(x: object, size: int = 64) -> int:
            tried.append(size)
            if size > 5:
                raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1 MiB.")
            return size

        return function

    tried: list[int] = []
    originals = {}
    for strategy in ("halving", "predictive", "bisect"):
        make(strategy)(torch.zeros(3))
        for file in (folder / "sizes").rglob("*.brim-sizes"):
            originals.setdefault(file, (strategy, file.read_bytes()))
    files = list(originals)

    def case(dice: random.Random) -> None:
        file = dice.choice(files)
        strategy, data = originals[file]
        kind = dice.randrange(20)
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
        if kind == 0:
            file.symlink_to(dice.choice(["/dev/zero", "/dev/urandom", str(file), "/nowhere"]))
        elif kind == 1:
            os.mkfifo(file)
        elif kind == 2:
            file.mkdir()
        elif kind == 3:
            file.write_bytes(data[:-4] * dice.randrange(1, 2000) + data[-4:])
        elif kind < 10:
            file.write_bytes(damaged(dice, data))
        else:
            file.write_bytes(damaged_words(dice, data.decode()))
        tried.clear()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            result = make(strategy)(torch.zeros(3))
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        if not 1 <= result <= 5 or not all(1 <= size <= 64 for size in tried):
            raise WrongError(f"tried {tried}, result {result}")
        if len(tried) > 20:
            raise WrongError(f"{len(tried)} attempts: {tried}")

    return case


def states(folder: Path) -> Callable[[random.Random], None]:
    """States of samplers, streams and models: refused, or batches within the budget that end."""
    import brim
    from brim.data import (
        BucketBatchSampler,
        PackedBatchSampler,
        SizeAwareBatchSampler,
        bucket_stream,
        even,
        mix,
        pack_stream,
    )

    sizes = [(13 * i) % 29 + 1 for i in range(300)]
    shapes = [(1, 16), (2, 32), (32, 16), (1, 512), (8, 128), (32, 512)]
    peaks = [10_000 + 64 * n * length for n, length in shapes]

    def mixture() -> Any:
        return mix([range(100), range(100, 300)], [1, 2], at_end="drop")

    makers: dict[str, Callable[[], Any]] = {
        "ordered": lambda: SizeAwareBatchSampler(range(300), sizes, 60, shuffle=True, seed=2),
        "asked": lambda: SizeAwareBatchSampler(range(300), sizes.__getitem__, 60),
        "packed": lambda: PackedBatchSampler(sizes, 60, window=50, shuffle=True, world_size=2),
        "bucket": lambda: BucketBatchSampler(sizes, [0, 8, 16, 30], max_total_size=60, seed=2),
        "pack_stream": lambda: pack_stream(
            range(300), 60, sizeof=sizes.__getitem__, lookahead=50, shuffle=True
        ),
        "bucket_stream": lambda: bucket_stream(
            range(300), [0, 8, 16, 30], 60, sizeof=sizes.__getitem__, lookahead=50
        ),
        "mixture": lambda: pack_stream(mixture(), 60, sizeof=sizes.__getitem__, lookahead=50),
        "even": lambda: even(pack_stream(range(300), 60, sizeof=sizes.__getitem__, lookahead=50)),
        "model": lambda: brim.MemoryModel().fit(shapes, peaks),
    }
    saved: dict[str, list[Any]] = {}
    for name, make in makers.items():
        made = make()
        if name == "model":
            saved[name] = [json.loads(json.dumps(made.state_dict()))]
            continue
        saved[name] = [json.loads(json.dumps(made.state_dict()))]
        for number, _ in enumerate(made):
            if number in (0, 3, 9):
                saved[name].append(json.loads(json.dumps(made.state_dict())))

    words = "state cursor position epoch seed finished weights segments drawn done degree loader"
    words += " changes steps total read world_size step_offset sizes peaks base MemoryModel"
    named = [*words.split(), *saved["model"][0]]

    def case(dice: random.Random) -> None:
        name = dice.choice(list(makers))
        state = damaged_tree(dice, dice.choice(saved[name]))
        if dice.random() < 0.01:
            state = dice.choice(ODD_VALUES)
        made = makers[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made.load_state_dict(state)
                if name == "model":
                    made.peak(2, 100), made.safe_peak(2, 100), made.largest_batch(64, "1MiB")
                    return
                seen = []
                for batch in made:
                    if sum(0 * s for s in batch) or len(batch) * max(sizes[s] for s in batch) > 60:
                        raise WrongError(f"{name}: batch {batch} is over the budget: {state}")
                    seen += batch
                    if len(seen) > 1200:
                        raise WrongError(f"{name}: no end: {state}")
            except (TypeError, ValueError) as error:
                if not any(word in str(error) for word in named):
                    raise WrongError(f"{name}: says only {error!r}: {state}") from error
            except WrongError:
                raise
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                at = f"{Path(place.filename).name}:{place.lineno}"
                raise WrongError(f"{name}: {error!r} at {at} for {state}") from error

    return case


def _mix(seed: int, stream: int) -> int:
    x = (seed + (stream + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def sealed(record: bytes) -> bytes:
    """A record of an index with the right checksums, whatever is in it: damage that is meant."""
    payload = record[64:]
    words = [*struct.unpack("<8Q", record[:64])]
    lanes = [1, 2, 3, 4]
    padded = payload + bytes(32 - len(payload) % 32)
    for at in range(0, len(padded), 32):
        for lane, word in enumerate(struct.unpack_from("<4Q", padded, at)):
            mixed = ((lanes[lane] ^ word) * 0x9E3779B97F4A7C15) % 2**64
            lanes[lane] = mixed ^ (mixed >> 32)
    total = _mix(1, len(payload))
    for lane in lanes:
        total = _mix(total, lane)
    words[4], words[5] = len(payload), total
    own = 0
    for word in words[:7]:
        own = _mix(own, word)
    words[7] = own
    return struct.pack("<8Q", *words) + payload


def index_folders(folder: Path) -> Callable[[random.Random], None]:
    """Records of an index: batches are those without one; damage that is meant, no crash."""
    from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

    sizes = [(13 * i) % 29 + 1 for i in range(3000)]
    place = folder / "index"
    makers: dict[str, Callable[..., Any]] = {
        "ordered": lambda **o: SizeAwareBatchSampler(
            range(3000), sizes, 60, shuffle=True, seed=2, **o
        ),
        "packed": lambda **o: PackedBatchSampler(sizes, 60, window=200, shuffle=True, **o),
        "bucket": lambda **o: BucketBatchSampler(
            sizes, [0, 8, 16, 30], max_total_size=90, seed=2, **o
        ),
    }
    expected = {name: list(make()) for name, make in makers.items()}
    originals: dict[str, dict[Path, bytes]] = {}
    for name, make in makers.items():
        made = make(index=place / name)
        len(made)
        originals[name] = {file: file.read_bytes() for file in (place / name).iterdir()}
        assert all(sealed(data) == data for data in originals[name].values())

    def case(dice: random.Random) -> None:
        name = dice.choice(list(makers))
        meant = dice.random() < 0.5
        for file, data in originals[name].items():
            file.write_bytes(data)
        for file, data in originals[name].items():
            if dice.random() < 0.6:
                changed = damaged(dice, data[64:] if meant else data)
                file.write_bytes(sealed(data[:64] + changed) if meant else changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = makers[name](index=place / name)
                batches = list(made)
                made = makers[name](index=place / name)
                count = len(made)
                plan = made.plan(dice.randrange(10), dice.randrange(10, 400))
            except (TypeError, ValueError, RuntimeError) as error:
                if not meant or len(str(error)) < 10:
                    raise WrongError(f"{name}: {error!r}") from error
                return
        if meant:
            return  # lengths and places may lie; nothing is read or written where it should not be
        if batches != expected[name] or count != len(batches) or len(plan.indices) == 0:
            raise WrongError(f"{name}: other batches than without an index")

    return case


def lengths_files(folder: Path) -> Callable[[random.Random], None]:
    """Files for `brim plan`: a plan, or one line that names the file."""
    import numpy as np

    from brim.cli import main

    lengths = [int(length) for length in np.random.default_rng(0).integers(1, 200, 300)]
    (folder / "a.txt").write_text("\n".join(map(str, lengths)))
    (folder / "a.csv").write_text(", ".join(map(str, lengths)))
    np.save(folder / "a.npy", np.array(lengths, dtype=np.int32))
    np.savez(folder / "a.npz", lengths=lengths)
    np.savez_compressed(folder / "b.npz", lengths=lengths)
    with contextlib.suppress(ImportError):
        import pyarrow as pa
        from pyarrow import feather
        from pyarrow import parquet as pq

        table = pa.table({"lengths": lengths})
        feather.write_feather(table, folder / "a.feather")
        pq.write_table(table, folder / "a.parquet")
        with (
            pa.OSFile(str(folder / "a.arrow"), "wb") as out,
            pa.ipc.new_stream(out, table.schema) as writer,
        ):
            writer.write_table(table)
    originals = {file: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}

    def case(dice: random.Random) -> None:
        file = dice.choice(list(originals))
        data = originals[file]
        if file.suffix in (".txt", ".csv") and dice.random() < 0.7:
            file.write_bytes(damaged_words(dice, data.decode()))
        else:
            file.write_bytes(damaged(dice, data))
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            status = main(["plan", str(file), "--max-total-size", "1000", "--json"])
        said = err.getvalue()
        if status in (0, 1):
            json.loads(out.getvalue())
        elif status != 2 or file.name not in said or said.count("\n") != 1:
            raise WrongError(f"{file.name}: status {status}: {said[:500]!r}")
        elif len(said) > 1500:
            raise WrongError(f"{file.name}: {len(said)} characters of error: {said[:200]!r}")

    return case


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def hub_configs(folder: Path) -> Callable[[random.Random], None]:
    """Config files of models: a training step is built, or one error names the file."""
    import transformers

    from brim.cli import hub_config

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    file = folder / "config.json"
    text = json.dumps(LLAMA, indent=2).encode()

    def case(dice: random.Random) -> None:
        if dice.random() < 0.4:
            file.write_bytes(damaged(dice, text))
        else:
            file.write_text(json.dumps(damaged_tree(dice, LLAMA)))
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                hub_config.training(file)
            except (ValueError, FileNotFoundError) as error:
                ours = str(error).startswith(("brim makes no inputs", "--length"))
                if (file.name not in str(error) and not ours) or len(str(error)) > 2000:
                    raise WrongError(f"{str(error)[:300]!r} for {file.read_bytes()!r}") from error
            except Exception as error:
                raise WrongError(f"{error!r:.300} for {file.read_bytes()!r}") from error

    return case


def planted(folder: Path) -> Callable[[random.Random], None]:
    """One fault of each kind, by the number of the case: all have to be noticed."""

    def case(dice: random.Random) -> None:
        fault = int(os.environ["BRIM_PLANTED"])
        if fault == 0:
            os.abort()
        elif fault == 1:
            while True:
                time.sleep(1)
        elif fault == 2:
            held = bytearray(MOST_BYTES + (100 << 20))
            held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        else:
            raise WrongError("a wrong result")

    return case


KINDS: dict[str, tuple[str, Callable[[Path], Callable[[random.Random], None]]]] = {
    "sizes": ("files of remembered sizes", size_files),
    "states": ("states of samplers, streams, models", states),
    "index": ("index folders, half with right checksums", index_folders),
    "lengths": ("lengths for brim plan", lengths_files),
    "hub": ("--hub-config", hub_configs),
}


# ---------------------------------------------------------------- running them apart


def work(kind: str, first: int, count: int, at: Any, found: Any) -> None:
    """Run some cases in this process; `at` is the one that runs."""
    make = planted if kind == "planted" else KINDS[kind][1]
    before_all = sys.stdout.flush
    before_all()
    with tempfile.TemporaryDirectory(prefix="brim-proof-") as name:
        case = make(Path(name))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for number in range(first, first + count):
            at.value = number
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                case(random.Random(number))
            except WrongError as error:
                found.put(f"seed {number}: {error}")
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                found.put(f"seed {number}: {type(error).__name__}: {error} ({where})")
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            if grown > MOST_BYTES:
                found.put(f"seed {number}: memory grew by {grown >> 20} MiB")
        at.value = -1


def run(kind: str, first: int, cases: int, patience: float = PATIENCE) -> list[str]:
    """What went wrong. A case that ends or stops its process counts, and the others go on."""
    context = multiprocessing.get_context("spawn")
    wrong: list[str] = []
    next_, end = first, first + cases
    while next_ < end and len(wrong) < 50:
        count = min(CHUNK, end - next_)
        at, found = context.Value("q", -2), context.Queue()
        process = context.Process(target=work, args=(kind, next_, count, at, found))
        process.start()
        seen, since = -2, time.monotonic()
        while process.is_alive():
            process.join(0.2)
            while not found.empty():
                wrong.append(found.get())
            if at.value != seen:
                seen, since = at.value, time.monotonic()
            elif time.monotonic() - since > patience:
                process.kill()
                process.join()
                wrong.append(f"seed {seen}: no end after {patience:.0f} s")
        while not found.empty():
            wrong.append(found.get())
        if at.value == -1 and process.exitcode == 0:
            next_ += count
        elif at.value == -2:
            wrong.append(f"the process for {kind} ended with {process.exitcode} before a case")
            break
        else:
            if process.exitcode != -9:
                wrong.append(f"seed {at.value}: the process ended with {process.exitcode}")
            next_ = at.value + 1
    return wrong


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cases", type=int, default=3000, help="of each kind")
    options.add_argument("--only", choices=KINDS)
    chosen = options.parse_args()
    tally = Tally("Damaged and hostile files")
    first = chosen.seed * 1_000_000
    unnoticed = []
    for fault in range(4):
        os.environ["BRIM_PLANTED"] = str(fault)
        if not run("planted", 0, 1, patience=20):
            unnoticed.append(f"fault {fault} is not noticed")
    tally.row("planted faults, all noticed", 4, unnoticed)
    for kind, (what, _) in KINDS.items():
        if chosen.only in (None, kind):
            tally.row(what, chosen.cases, run(kind, first, chosen.cases))
    tally.finish()


if __name__ == "__main__":
    main()
