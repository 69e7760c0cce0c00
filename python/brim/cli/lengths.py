"""Lengths of samples from a file: text, NumPy, Arrow or Parquet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from brim._arguments import shown
from brim.data._arrow import lengths_of_column
from brim.data.sizes import one_column
from brim.memory import is_out_of_memory

_STANDARD_INPUT = Path("-")


def lengths_file(text: str) -> Path:
    """A file that `read_lengths` can read; `-` is standard input."""
    path = Path(text)
    if path == _STANDARD_INPUT:
        return path
    if path.suffix.lower() not in _READERS:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(_READERS)}, got {text}")
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def read_lengths(path: Path, column: str | None) -> torch.Tensor:
    """The lengths in a file, one per sample.

    Args:
        path: text has whole numbers between spaces, commas or line ends; `.npy` one array; `.npz`,
            Arrow and Parquet have several columns. Of lists, texts and bytes the lengths are taken.
            `-` is text from standard input.
        column: which of them; may be None if there is only one.

    Raises:
        ValueError: if the file has something else, or no such column; for text it names the line.
    """
    ending = ".txt" if path == _STANDARD_INPUT else path.suffix.lower()
    if column is not None and ending in (".txt", ".csv", ".npy"):
        raise ValueError(
            f"--column goes with .npz, .arrow and .parquet: {name_of(path)} has no columns"
        )
    try:
        lengths = one_column("lengths", _READERS[ending](path, column))
        _refuse_fractions(lengths)
    # A damaged file makes the libraries that read it raise many kinds of errors.
    except Exception as error:
        if isinstance(error, ImportError) or is_out_of_memory(error):
            raise
        raise ValueError(f"{name_of(path)}: {error!s:.300}") from error
    return lengths


def name_of(path: Path) -> str:
    """What messages call the file."""
    return "standard input" if path == _STANDARD_INPUT else str(path)


def _refuse_fractions(lengths: torch.Tensor) -> None:
    wrong = ~(lengths >= 0)
    if lengths.is_floating_point():
        wrong |= ~lengths.isfinite() | (lengths != lengths.trunc())
    if wrong.any():
        at = int(wrong.int().argmax())
        raise ValueError(
            f"lengths must be whole numbers of at least 0, got {lengths[at].item():g} at index {at}"
        )


def _read_text(path: Path, column: str | None) -> Any:
    try:
        data = sys.stdin.buffer.read() if path == _STANDARD_INPUT else path.read_bytes()
        lines = data.decode().replace(",", " ").splitlines()
    except UnicodeDecodeError:
        raise ValueError(
            "is no text: must hold numbers between spaces, commas or line ends"
        ) from None
    numbers: list[float] = []
    for place, line in enumerate(lines, start=1):
        for word in line.split():
            try:
                number = int(word) if word.isdecimal() else float(word)
            except ValueError:
                number = -1
            if not (0 <= number < 2**63 and number % 1 == 0):
                raise ValueError(
                    "must hold whole numbers of at least 0 between spaces, commas or line ends, "
                    f"without a header; got {shown(word)} in line {place}"
                )
            numbers.append(number)
    return numbers


def _read_numpy(path: Path, column: str | None) -> Any:
    import numpy as np

    try:
        loaded = np.load(path, mmap_mode="r" if path.suffix.lower() == ".npy" else None)
    except (ValueError, EOFError):
        raise ValueError("holds no numbers that numpy.save or numpy.savez wrote") from None
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return loaded[_chosen(column, list(loaded))]


def _read_arrow(path: Path, column: str | None) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.feather as feather
        import pyarrow.parquet as pq
    except ImportError:
        raise ImportError(
            "Arrow and Parquet files need pyarrow: pip install 'brim[arrow]'"
        ) from None
    try:
        if path.suffix.lower() == ".parquet":
            name = _chosen(column, pq.read_schema(path).names)
            values = pq.read_table(path, columns=[name])[name]
        else:
            table = _read_ipc(pa, feather, path)
            name = _chosen(column, table.column_names)
            values = table[name]
    except pa.ArrowException as error:
        raise ValueError(error) from None
    return lengths_of_column(values, name)


def _read_ipc(pa: Any, feather: Any, path: Path) -> Any:
    """A file of Arrow, or a stream, as Hugging Face's `datasets` writes."""
    try:
        return feather.read_table(path)
    except pa.ArrowInvalid:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all()


def _chosen(column: str | None, names: list[str]) -> str:
    if column is None and len(names) == 1:
        return names[0]
    if column not in names:
        got = "none" if column is None else repr(column)
        raise ValueError(f"--column must be one of {', '.join(names)}, got {got}")
    return column


_READERS = {
    ".txt": _read_text,
    ".csv": _read_text,
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    ".parquet": _read_arrow,
}
