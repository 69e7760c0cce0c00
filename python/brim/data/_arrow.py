"""Lengths from a column of Arrow, for data sets of Hugging Face and for the command line."""

from __future__ import annotations

from typing import Any

import torch

from brim.data.sizes import one_column


def lengths_of_column(column: Any, name: str) -> torch.Tensor:
    """The length of each row of a `pyarrow.ChunkedArray`: int64, or float64 of a column of floats.

    Args:
        column: lists or arrays, texts (characters), bytes, or numbers, which are lengths
            themselves.
        name: of the column.

    Raises:
        TypeError: if the rows have no length.
        ValueError: if a row is null.

    Example:
        >>> import pyarrow
        >>> lengths_of_column(pyarrow.chunked_array([["a", "abc"], ["ab"]]), "text")
        tensor([1, 3, 2])
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if isinstance(column.type, pa.ExtensionType):  # Array2D and its like
        column = pa.chunked_array(
            [chunk.storage for chunk in column.chunks], column.type.storage_type
        )
    kind = column.type
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        lengths = pc.utf8_length(column)
    elif kinds.is_binary(kind) or kinds.is_large_binary(kind):
        lengths = pc.binary_length(column)
    elif kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        lengths = pc.list_value_length(column)
    elif kinds.is_integer(kind) or kinds.is_floating(kind):
        lengths = column
    else:
        raise TypeError(
            f"column {name!r} is of the type {kind}: lengths are those of lists, texts or bytes, "
            "or numbers"
        )
    if lengths.null_count:
        row = pc.index(pc.is_null(lengths), True).as_py()
        raise ValueError(f"column {name!r} is null in row {row}, which has no length")
    return one_column(f"column {name!r}", lengths.to_numpy())
