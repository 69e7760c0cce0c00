"""Output files: whole, or as before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim._whole_file import write_whole
from brim.cli import main


def half(out: Any, *_: object, **__: object) -> None:
    """Stands for what writes a file, and is interrupted: into a path, or what is open."""
    if hasattr(out, "write"):
        out.write(b"half")
    else:
        Path(out).write_bytes(b"half")
    raise KeyboardInterrupt


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, half)
    assert not list(tmp_path.iterdir())
    write_whole(file, lambda out: out.write(b"old"))
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, half)
    assert [(each, each.read_bytes()) for each in tmp_path.iterdir()] == [(file, b"old")]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    file.chmod(0o600)
    link.symlink_to(file)
    write_whole(link, lambda out: out.write(b"new"))
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, lambda out: out.write(b"text"))
    reader.join()
    assert got == [b"text"]
    assert pipe.is_fifo()


def test_an_open_file_is_written_from_where_it_stands(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(b"before ")
        write_whole(f"/dev/fd/{file.fileno()}", lambda out: out.write(b"text"))
        write_whole(f"/proc/self/fd/{file.fileno()}", lambda out: out.write(b" after"))
    assert (tmp_path / "file").read_bytes() == b"before text after"


def test_standard_output_is_written_after_what_was_printed(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    print("a page:")
    write_whole("/dev/stdout", lambda out: out.write(b"text"))
    assert capfdbinary.readouterr().out == b"a page:\ntext"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder.*missing'$"):
        write_whole(tmp_path / "missing" / "file", half)


def test_a_name_of_any_length_that_a_folder_takes(tmp_path: Path) -> None:
    file = tmp_path / ("n" * 255)
    write_whole(file, lambda out: out.write(b"text"))
    assert file.read_bytes() == b"text"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to it")
def test_what_may_not_be_written_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o400)
    with pytest.raises(PermissionError, match="file"):
        write_whole(file, lambda out: out.write(b"new"))
    assert file.read_bytes() == b"old"


def to_numpy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(np, "savez", half)
    return ["--output", "plan.npz"]


def to_parquet(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "write_table", lambda _, out: half(out))
    return ["--output", "plan.parquet"]


def to_picture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda _, out, **__: half(out))
    return ["--plot", "plan.svg"]


@pytest.mark.parametrize("to", [to_numpy, to_parquet, to_picture])
def test_what_an_interrupted_command_would_write_is_as_before(
    to: Callable[[pytest.MonkeyPatch], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = to(monkeypatch)
    Path("lengths.txt").write_text("1 2 3")
    Path(words[-1]).write_bytes(b"old")
    assert main(["plan", "lengths.txt", "--max-total-size", "4", *words]) == 130
    assert capsys.readouterr().err == "brim: interrupted\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lengths.txt", words[-1]]
    assert Path(words[-1]).read_bytes() == b"old"
