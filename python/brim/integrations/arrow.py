"""Arrow and Parquet files as shards, and blocks of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from brim._arguments import flag, shown
from brim.data import Shards
from brim.data._arrow import lengths_of_column

__all__ = ["arrow_shards", "column_lengths"]


def arrow_shards(
    source: Any,
    columns: Sequence[str] | None = None,
    *,
    blocks: bool = False,
    row_groups: bool = False,
    file_format: str = "parquet",
    shuffle: bool = False,
    seed: int = 0,
) -> Shards:
    """The rows of Arrow or Parquet files, each of which is a shard.

    For `brim.data.pack_stream` with `sharded="divide"`: each rank and worker reads its own files.

    Args:
        source: files, a folder, or a `pyarrow.dataset.Dataset`.
        columns: those to read; all if None.
        blocks: give record batches, for `blocks=True` of the stream, and not rows as dicts.
        row_groups: make each row group of a Parquet file a shard, where there are few files. Reads
            the metadata of all files first.
        file_format: of files: `"parquet"`, `"ipc"` (`"arrow"`), …; see `pyarrow.dataset`.
        shuffle: open the shards in another order in each epoch.
        seed: determines that order.

    Example:
        >>> import pyarrow, pyarrow.parquet, tempfile
        >>> table = pyarrow.table({"text": ["a", "bb", "ccc"]})
        >>> with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        ...     pyarrow.parquet.write_table(table, file.name, row_group_size=2)
        ...     shards = arrow_shards([file.name], row_groups=True)
        ...     shards.num_shards, list(shards)[0]
        (2, {'text': 'a'})
    """
    from pyarrow import dataset as arrow

    flag("blocks", blocks)
    if not hasattr(source, "get_fragments"):
        one = isinstance(source, (str, PathLike))
        source = arrow.dataset(source if one else list(source), format=file_format)
    fragments = list(source.get_fragments())
    if flag("row_groups", row_groups):
        if not all(hasattr(fragment, "split_by_row_group") for fragment in fragments):
            raise ValueError("row_groups=True is for Parquet files alone")
        fragments = [part for fragment in fragments for part in fragment.split_by_row_group()]
    opener = _Opener(source.schema, None if columns is None else list(columns), blocks)
    return Shards(fragments, opener, shuffle=shuffle, seed=seed)


class _Opener:
    """Opens a shard, also in a worker that was spawned."""

    def __init__(self, schema: Any, columns: list[str] | None, blocks: bool) -> None:
        missing = set(columns or ()) - set(schema.names)
        if missing:
            raise ValueError(
                f"columns {sorted(missing)} are not among those of the files: "
                f"{', '.join(schema.names)}"
            )
        self._schema, self._columns, self._blocks = schema, columns, blocks

    def __call__(self, fragment: Any) -> Iterator[Any]:
        batches = fragment.to_batches(schema=self._schema, columns=self._columns, use_threads=False)
        for batch in batches:
            if self._blocks:
                yield batch
            else:
                yield from batch.to_pylist()


def column_lengths(column: str) -> Callable[[Any], torch.Tensor]:
    """For `sizeof` of a stream with `blocks=True`: the lengths of this column's rows in a block.

    Of lists and bytes only the offsets are read. Numbers are lengths themselves.

    Example:
        >>> import pyarrow
        >>> column_lengths("text")(pyarrow.record_batch({"text": ["a", "ccc"]}))
        tensor([1, 3])
    """
    if not isinstance(column, str):
        raise TypeError(f"column must be the name of a column, got {shown(column)}")
    return _ColumnLengths(column)


class _ColumnLengths:
    def __init__(self, column: str) -> None:
        self._column = column

    def __call__(self, block: Any) -> torch.Tensor:
        import pyarrow as pa

        if self._column not in block.schema.names:
            raise ValueError(
                f"column {self._column!r} is not among those of the block: "
                f"{', '.join(block.schema.names)}"
            )
        column = block.column(self._column)
        return lengths_of_column(
            column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column]),
            self._column,
        )
