"""`brim plan` on the command line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.cli import main
from brim.data import PackedBatchSampler, SizeAwareBatchSampler

from .patience import FOR_EVER

LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, 200, 500)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the same lengths in files of several kinds."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    Path("lengths.csv").write_text(", ".join(map(str, LENGTHS)))
    np.save("lengths.npy", np.array(LENGTHS, dtype=np.int32))
    np.savez("lengths.npz", lengths=LENGTHS, other=[1, 2])
    return tmp_path


def figures_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_report_and_a_histogram(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lengths.txt", "--max-total-size", "1000", "--method", "ordered", "--cost", "sum"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    report = SizeAwareBatchSampler(range(len(LENGTHS)), LENGTHS, 1000, cost="sum").report()
    assert out.startswith(str(report))
    counts = [int(line.split()[-1]) for line in out.splitlines() if "█" in line]
    assert counts == [count for count in report.fill_histogram if count]
    assert sum(counts) == report.batches


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("file", ["lengths.csv", "lengths.npy", "lengths.npz"])
def test_files_with_the_same_lengths_give_the_same_plan(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    column = ["--column", "lengths"] if file.endswith(".npz") else []
    words = ["--max-total-size", "1000", "--shuffle", "--seed", "3"]
    expected = figures_of(capsys, "lengths.txt", *words)
    assert figures_of(capsys, file, *column, *words) == expected
    sampler = PackedBatchSampler(LENGTHS, 1000, cost="padded", shuffle=True, seed=3)
    assert expected["padding"] == sampler.report().padding


@pytest.mark.usefixtures("folder")
def test_columns_of_arrow_and_parquet(capsys: pytest.CaptureFixture[str]) -> None:
    pa = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "length": LENGTHS,
            "tokens": [[0] * length for length in LENGTHS],
            "text": ["x" * length for length in LENGTHS],
            "raw": [b"x" * length for length in LENGTHS],
            "seconds": [float(length) for length in LENGTHS],
            "holes": [*LENGTHS[1:], None],
        }
    )
    pq.write_table(table, "data.parquet")
    feather.write_feather(table, "data.arrow", compression="uncompressed")
    with pa.OSFile("stream.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    expected = figures_of(capsys, "lengths.txt", "--max-total-size", "1000")
    for file in ("data.parquet", "data.arrow", "stream.arrow"):
        for column in ("length", "tokens", "text", "raw", "seconds"):
            words = [file, "--column", column, "--max-total-size", "1000"]
            assert figures_of(capsys, *words) == expected, words
    assert main(["plan", "data.parquet", "--max-total-size", "1000", "--column", "x"]) == 2
    assert "--column must be one of length, tokens, text, raw" in capsys.readouterr().err
    assert main(["plan", "data.parquet", "--max-total-size", "1000", "--column", "holes"]) == 2
    last = len(LENGTHS) - 1
    assert f"data.parquet: column 'holes' is null in row {last}" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("ending", ["npz", "npy", "parquet"])
def test_a_written_plan_has_the_batches_of_the_sampler(
    ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = PackedBatchSampler(LENGTHS, 1000, cost="padded", world_size=2, rank=1)
    sampler.set_epoch(4)
    expected = list(sampler)
    file = f"plan.{ending}"
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    words = ["lengths.npy", "--max-total-size", "1000", "--epoch", "4", "--output", file]
    figures = figures_of(capsys, *words, "--world-size", "2", "--rank", "1")
    assert figures["output"] == file
    if ending == "npz":
        plan = np.load(file)
        batches = np.split(plan["indices"], plan["offsets"][1:-1])
        assert [batch.tolist() for batch in batches] == expected
    elif ending == "npy":
        pairs = np.load(file)
        found: list[list[int]] = [[] for _ in expected]
        for batch, index in pairs.tolist():
            found[batch].append(index)
        assert found == expected
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        assert pq.read_table(file)["indices"].to_pylist() == expected


@pytest.mark.usefixtures("folder")
def test_buckets_of_a_fixed_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lengths.npy", "--method", "bucket", "--boundaries", "0,100,300", "--batch-size", "7"]
    figures = figures_of(capsys, *words, "--drop-last")
    short = sum(length < 100 for length in LENGTHS)
    assert figures["batches"] == short // 7 + (len(LENGTHS) - short) // 7
    dropped = short % 7 + (len(LENGTHS) - short) % 7
    assert figures["left_out"] == {"dropped last": dropped}


@pytest.mark.usefixtures("folder")
def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.txt").write_text("50 60")
    assert main(["plan", "some.txt", "--max-total-size", "10"]) == 1
    assert "left out   2, over budget" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing.txt"], "there is no file nothing.txt"),
        (["lengths.pt"], "must end in .txt, .csv, .npy"),
        (["wrong.txt"], "got 'three' in line 1"),
        (["empty.txt"], "empty.txt holds no lengths"),
        (["negative.txt"], "got '-5' in line 1"),
        (["fractions.txt"], "fractions.txt: must hold whole numbers of at least 0 between spaces"),
        (["nan.npy"], "nan.npy: lengths must be whole numbers of at least 0, got nan at index 1"),
        (["wrong.npy"], "holds no numbers that numpy.save or numpy.savez wrote"),
        (["matrix.npy"], "matrix.npy: lengths must have one dimension, got shape (2, 3)"),
        (["words.npy"], "words.npy: lengths must be ints or floats"),
        (["lengths.npz"], "--column must be one of lengths, other, got none"),
        (["lengths.txt", "--column", "x"], "--column goes with .npz"),
        (["lengths.txt", "--max-total-size", "0"], "must be a positive number such as 16384"),
        (["lengths.txt", "--window", "9", "--method", "ordered"], "goes with --method packed"),
        (["lengths.txt", "--drop-last"], "--drop-last goes with --method bucket, got packed"),
        (["lengths.txt", "--rank", "2"], "--rank must be below --world-size (1), got 2"),
        (["lengths.txt", "--seed", "-1"], "must be a whole number of at least 0, got -1"),
        (["lengths.txt", "--output", "plan.txt"], "must end in .npy, .npz or .parquet"),
        (["lengths.txt", "--output", "nowhere/plan.npy"], "there is no folder nowhere"),
        (["lengths.txt", "--oversize", "error", "--max-total-size", "9"], "exceeds the budget"),
        (["lengths.txt", "--buckets", "3", "--boundaries", "1,2"], "not allowed with argument"),
        (["lengths.txt", "--method", "bucket", "--boundaries", "a"], "must be two or more"),
        (["lengths.txt", "--method", "bucket", "--boundaries", "5,2"], "must be two or more"),
        (["lengths.txt", "--method", "bucket", "--boundaries", "5"], "must be two or more"),
        (["lengths.txt", "--method", "bucket", "--boundaries", "5,inf"], "must be two or more"),
        (
            ["lengths.txt", "--method", "bucket", "--boundaries", "500,600"],
            "no sample is in any bucket: all sizes are outside of the boundaries",
        ),
        (
            ["lengths.txt", "--method", "bucket", "--batch-size", "4"],
            "buckets take either --batch-size or --max-total-size, not both",
        ),
        (
            ["lengths.txt", "--method", "bucket", "--drop-last"],
            "--drop-last needs --batch-size: under --max-total-size no batch",
        ),
        (["lengths.txt", "--seed", str(2**63)], "must be below 2**63"),
        (["lengths.txt", "--output", "folder.npy"], "must be a file, but folder.npy is a folder"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lengths.pt").write_text("")
    Path("wrong.txt").write_text("1 2 three")
    Path("empty.txt").write_text("")
    Path("negative.txt").write_text("1 -5")
    Path("fractions.txt").write_text("1 2.5")
    Path("folder.npy").mkdir()
    np.save("nan.npy", np.array([1, np.nan]))
    Path("wrong.npy").write_text("wrong")
    np.save("matrix.npy", np.ones((2, 3)))
    np.save("words.npy", np.array(["a", "b"]))
    budget = [] if "--max-total-size" in words else ["--max-total-size", "1000"]
    assert main(["plan", *words, *budget]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.usefixtures("folder")
def test_a_budget_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "lengths.txt"]) == 2
    assert "--max-total-size is missing" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_parquet_without_pyarrow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # type: ignore[arg-type]
    Path("x.parquet").write_text("")
    assert main(["plan", "x.parquet", "--max-total-size", "5"]) == 2
    assert "pip install 'brim[arrow]'" in capsys.readouterr().err
    assert main(["plan", "lengths.txt", "--max-total-size", "500", "--output", "p.parquet"]) == 2
    assert "pip install 'brim[arrow]'" in capsys.readouterr().err


def test_standard_input_is_a_file_of_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--max-total-size", "1000")
    expected = figures_of(capsys, "lengths.txt", *words)

    def given(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    given(Path("lengths.csv").read_bytes())
    assert figures_of(capsys, "-", *words) == expected
    given(Path("lengths.txt").read_bytes())
    assert figures_of(capsys, *words) == expected  # a pipe needs no name
    wrong = "standard input: must hold whole numbers of at least 0 .* got"
    for data, text in (
        (b"", "standard input holds no lengths"),
        (b"5 x", f"{wrong} 'x' in line 1"),
        (b"length\n5\n6", f"{wrong} 'length' in line 1"),
        (b"5\n6, 7\n\n8 2.5", f"{wrong} '2.5' in line 4"),
        (b"5\n-6", f"{wrong} '-6' in line 2"),
        (b"5\nnan", f"{wrong} 'nan' in line 2"),
        (b"5\n6\n9223372036854775808", f"{wrong} '9223372036854775808' in line 3"),
        (Path("lengths.npy").read_bytes(), "standard input: is no text"),
    ):
        given(data)
        assert main(["plan", "-", *words]) == 2
        assert re.search(text, capsys.readouterr().err)
    given(b"5")
    assert main(["plan", "-", *words, "--column", "a"]) == 2
    assert "standard input has no columns" in capsys.readouterr().err


def test_a_terminal_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["plan", "--max-total-size", "9"]) == 2
    errors = capsys.readouterr().err
    assert "required: file; for example: brim plan lengths.txt --max-total-size 16384" in errors


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("left_out", [0, 1])
@pytest.mark.parametrize("buffering", [1, -1], ids=["lines", "blocks"])
def test_a_reader_that_leaves_changes_neither_files_nor_the_exit_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: list[str], left_out: int, buffering: int
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering) as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        budget = "1000" if left_out == 0 else "100"
        words = ["plan", "lengths.txt", "--max-total-size", budget, "--output", "plan.npz"]
        assert main([*words, *form]) == left_out
    assert Path("plan.npz").exists()


def test_a_plan_for_a_reader_that_leaves_ends_quietly_with_0(folder: Path) -> None:
    plan = f"{sys.executable} -W error -m brim plan lengths.txt --max-total-size 1000 --json"
    command = ["bash", "-c", f"{plan} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FOR_EVER)
    assert (done.stdout, done.stderr) == ("0\n", "")
