"""Hugging Face `datasets`: lengths of a column without decoding it, and streams for packing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from brim.data._arrow import lengths_of_column
from brim.data.sizes import index_tensor

__all__ = ["WholeStream", "lengths_of"]


def lengths_of(dataset: Any, column: str) -> torch.Tensor:
    """The length of each sample, for the samplers of `brim.data`.

    Of lists, arrays and bytes only the offsets of the Arrow column are read, not the values: a
    memory-mapped data set stays on the disk. Texts are read, one chunk after the other, to count
    their characters. Selections and shuffles of the data set (`select`, `shuffle`,
    `train_test_split`, …) are followed.

    Args:
        dataset: a `datasets.Dataset`, or a `pyarrow.Table`.
        column: lists or arrays (their lengths), texts (characters), bytes, or numbers, which are
            lengths themselves.

    Returns:
        A tensor with one length per sample: int64, or float64 of a column of floats.

    Raises:
        TypeError: if the data set is streamed or has several splits, or if the column is of a type
            without a length.
        ValueError: if there is no such column, if a row of it is null, or if the data set has a
            transform, which gives samples other lengths than the column has.

    Example:
        >>> import pyarrow
        >>> lengths_of(pyarrow.table({"input_ids": [[1, 2, 3], [], [4]]}), "input_ids")
        tensor([3, 0, 1])
    """
    form = getattr(dataset, "format", None)
    if isinstance(form, Mapping) and form.get("type") == "custom":
        raise ValueError(
            "dataset has a transform (with_transform or set_transform), which may change the "
            f"lengths of column {column!r} as samples are read. If it does not, pass "
            "dataset.with_format(None); if it does, measure what it gives: "
            f"[len(sample[{column!r}]) for sample in dataset]"
        )
    table = getattr(dataset, "data", dataset)  # a datasets.Dataset has a table, which has columns
    names = getattr(table, "column_names", None)
    if not hasattr(table, "column") or names is None:
        raise TypeError(
            f"dataset must be a datasets.Dataset or a pyarrow.Table, got a {type(dataset).__name__}"
            ". Choose one split of several; batch what is streamed with brim.data.pack_stream"
        )
    if column not in names:
        raise ValueError(f"column {column!r} is not among those of the dataset: {', '.join(names)}")
    lengths = lengths_of_column(table.column(column), column)
    chosen = getattr(dataset, "_indices", None)
    if chosen is not None:
        lengths = lengths[index_tensor("indices", chosen.column(0).to_numpy())]
    return lengths


class WholeStream(Iterable[Any]):
    """A streamed data set that gives every worker of a DataLoader all samples.

    A `datasets.IterableDataset` deals its shards out to the workers. `brim.data.pack_stream` and
    `bucket_stream` deal batches out instead, which needs all samples in each worker. They hide the
    workers from the data set, so there it may stand without a `WholeStream`; with `sharded=True`
    every worker packs its own shards.

    Args:
        dataset: a `datasets.IterableDataset` whose samples are dicts (not in the format "arrow",
            "pandas" or "polars").

    Example:
        >>> import datasets
        >>> from brim.data import pack_stream
        >>> texts = datasets.Dataset.from_dict({"text": ["aaa", "bb", "c"]}).to_iterable_dataset()
        >>> batches = pack_stream(WholeStream(texts), 4, sizeof=lambda sample: len(sample["text"]))
        >>> [[sample["text"] for sample in batch] for batch in batches]
        [['aaa'], ['bb', 'c']]
    """

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "iter") and hasattr(dataset, "set_epoch")):
            raise TypeError(
                f"dataset must be a datasets.IterableDataset, got a {type(dataset).__name__}"
            )
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        """Another order of samples, where the data set shuffles."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """The samples one by one, by the only iteration that does not look at workers."""
        for batch in self.dataset.iter(batch_size=1):
            if not isinstance(batch, Mapping):
                raise TypeError(
                    f"samples must be dicts, got {type(batch).__name__}: use another with_format()"
                )
            yield {name: values[0] for name, values in batch.items()}
