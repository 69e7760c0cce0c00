"""Packed and bucketed batches of data that has no length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brim._arguments import flag, whole
from brim.data.collate import PackedCollator
from brim.data.ranks import RankSource
from brim.data.sizes import Budget, Cost, Limits, Sizes, sorted_boundaries
from brim.data.stream_batches import StreamBatches


def pack_stream(
    iterable: Iterable[Any],
    max_total_size: Budget,
    *,
    sizeof: Callable[[Any], Any] | Mapping[Any, Any] = len,
    cost: Cost | Sequence[Cost] | None = None,
    max_batch_size: int | None = None,
    batch_multiple: int = 1,
    lookahead: int = 10_000,
    shuffle: bool = False,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    sharded: bool | str = False,
    oversize: str = "leave_out",
    blocks: bool = False,
) -> StreamBatches:
    """Pack the samples of an iterable into full batches, looking a bounded number of them ahead.

    The batches are those of a `PackedBatchSampler` with a window of `lookahead` samples. For data
    that fits no index: files that are read one after the other, other streams.

    Args:
        iterable: the samples. It is iterated anew for each epoch, and by each rank and worker.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        sizeof: the size of a sample: a function of it, or a mapping from it. With several budgets
            it gives one size for each. With a `PackedCollator`, `len` counts tokens.
        cost: what a batch costs; see `BatchSamplerBase`. None is `"padded"`, and `"sum"` with a
            `PackedCollator`.
        max_batch_size: the most samples in a batch, beside the budget.
        batch_multiple: batches have a multiple of this many samples, unless fewer fit the budget or
            are left. Not under a sum.
        lookahead: how many samples are packed together. Up to twice as many are held.
        shuffle: give the batches of one look-ahead in random order, not the longest samples first.
        seed: determines that order together with the epoch: each iteration is the next one, unless
            `set_epoch` is called before it.
        collate_fn: makes a batch of a list of samples; a batch is the list if None. A
            `PackedCollator` makes one row of them; its padding counts as `max_total_size` does.
        rank: the rank of this process; see `BatchSamplerBase`.
        world_size: how many ranks share the batches; see `BatchSamplerBase`.
        sharded: `"divide"`: each rank and each worker reads its own shards only, of a `Shards`, a
            data set of Hugging Face, a WebDataset, an object with `shard(num_shards, index)`, or a
            `mix` of these. True: the iterable gives each of them other samples already, and is to
            go on doing so. Either way they get different numbers of batches: iterate over
            `even(loader)`. An iterable that divides its samples by `get_worker_info` alone needs
            no `sharded`.
        oversize: what to do with a sample that exceeds the budget by itself; see
            `BatchSamplerBase`. Samples left out are reported at the end. `"split"` cuts it into
            parts that fit, each a `DocumentPart` in a pack with others: no token is lost.
        blocks: the iterable gives blocks of samples, such as arrays or record batches of Arrow, and
            `sizeof` the sizes of all samples in a block; if it is `len`, the block itself holds
            them. A batch is a list of `(block, rows)`, with `rows` an int64 tensor. Python is then
            asked once per block and per batch, which is several times as fast.

    Returns:
        A torch `IterableDataset` of batches, which can be iterated over and resumed.

    Example:
        >>> words = ["aaaaaa", "bbbb", "ccccc", "ddd", "eeeeeee"]
        >>> list(pack_stream(words, 10, cost="sum"))
        [['eeeeeee', 'ddd'], ['aaaaaa', 'bbbb'], ['ccccc']]
    """
    collator = collate_fn if isinstance(collate_fn, PackedCollator) else None
    if cost is None:
        cost = "padded" if collator is None else "sum"
    if flag("blocks", blocks):
        _check_blocks(collator, oversize)
        sizeof = _itself if sizeof is len else sizeof
    if collator is not None and sizeof is len:
        sizeof = collator.size
    limits = Limits.read(cost, max_total_size, max_batch_size)
    if collator is not None:
        _check_rows(collator, limits)
    settings = {
        "lookahead": whole("lookahead", lookahead, 1),
        "batch_multiple": whole("batch_multiple", batch_multiple, 1, 2**31),
        "shuffle": flag("shuffle", shuffle),
        "seed": whole("seed", seed, 0),
        **limits.settings(),
    }
    # States of streams that do neither have neither.
    if collator is not None and collator.document_multiple > 1:
        settings["size_multiple"] = collator.document_multiple
    if oversize == "split":
        settings["oversize"] = oversize
    if blocks:
        settings["blocks"] = True
    return StreamBatches(
        "pack_stream",
        iterable,
        limits,
        settings,
        sizeof=sizeof,
        collate_fn=collate_fn,
        ranks=RankSource(rank, world_size),
        sharded=sharded,
        oversize=oversize,
        splits=True,
        blocks=blocks,
    )


def _itself(block: Any) -> Any:
    return block


def _check_blocks(collator: PackedCollator | None, oversize: str) -> None:
    """Refuse what needs samples one by one."""
    if collator is not None:
        raise ValueError("blocks=True does not go with a PackedCollator, which takes samples")
    if oversize == "split":
        raise ValueError('blocks=True does not go with oversize="split", which cuts samples')


def _check_rows(collator: PackedCollator, limits: Limits) -> None:
    """Refuse rows that are padded to more than the budget, or cannot hold what it allows."""
    for cost, budget in zip(limits.costs, limits.maxima, strict=True):
        if cost != "sum":
            continue
        if budget % collator.row_multiple != 0:
            raise ValueError(
                f"max_total_size must be a multiple of the collator's row_multiple = "
                f"{collator.row_multiple}, got {budget}: rows would be padded to more"
            )
        if 0 < collator.row_length < budget:
            raise ValueError(
                f"max_total_size must not exceed the collator's row_length = "
                f"{collator.row_length}, got {budget}"
            )


def bucket_stream(
    iterable: Iterable[Any],
    bucket_boundaries: Sizes,
    max_total_size: Budget,
    *,
    sizeof: Callable[[Any], Any] | Mapping[Any, Any] = len,
    cost: Cost | Sequence[Cost] = "padded",
    max_batch_size: int | None = None,
    batch_multiple: int = 1,
    lookahead: int = 10_000,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    sharded: bool | str = False,
    oversize: str = "leave_out",
    blocks: bool = False,
) -> StreamBatches:
    """Batch samples of similar size from an iterable, so that there is little padding.

    Each sample joins the open batch of its bucket, which is given when the next does not fit. If
    more than `lookahead` samples wait in open batches, the fullest of these is given.

    Args:
        iterable: the samples. It is iterated anew for each epoch, and by each rank and worker.
        bucket_boundaries: bucket b holds the sizes in [boundary b, boundary b + 1). They are
            sorted. The last may be infinite. Samples outside are left out, with a warning.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`. With
            `cost="count"` it is the number of samples in a batch.
        sizeof: the size of a sample; see `pack_stream`. The first size determines the bucket.
        cost: what a batch costs; see `BatchSamplerBase`.
        max_batch_size: the most samples in a batch, beside the budget.
        batch_multiple: batches have a multiple of this many samples, unless fewer fit the budget or
            are left.
        lookahead: how many samples may wait.
        collate_fn: makes a batch of a list of samples; a batch is the list if None.
        rank: the rank of this process; see `BatchSamplerBase`.
        world_size: how many ranks share the batches; see `BatchSamplerBase`.
        sharded: whether each rank and each worker reads other samples; see `pack_stream`.
        oversize: what to do with a sample that exceeds the budget by itself; see
            `BatchSamplerBase`. Samples left out are reported at the end.
        blocks: whether the iterable gives blocks of samples; see `pack_stream`.

    Returns:
        A torch `IterableDataset` of batches, which can be iterated over and resumed.

    Example:
        >>> list(bucket_stream(iter(["a", "bbbb", "cc", "ddddd", "e"]), [0, 3, 10], 6))
        [['bbbb'], ['a', 'cc', 'e'], ['ddddd']]
    """
    if isinstance(collate_fn, PackedCollator):
        raise ValueError(
            "collate_fn is a PackedCollator, whose rows mix samples of all sizes: use pack_stream"
        )
    if flag("blocks", blocks):
        sizeof = _itself if sizeof is len else sizeof
    limits = Limits.read(cost, max_total_size, max_batch_size)
    settings = {
        "lookahead": whole("lookahead", lookahead, 1),
        "batch_multiple": whole("batch_multiple", batch_multiple, 1, 2**31),
        "bucket_boundaries": sorted_boundaries(bucket_boundaries).tolist(),
        **limits.settings(),
    }
    if blocks:
        settings["blocks"] = True
    return StreamBatches(
        "bucket_stream",
        iterable,
        limits,
        settings,
        sizeof=sizeof,
        collate_fn=collate_fn,
        ranks=RankSource(rank, world_size),
        sharded=sharded,
        oversize=oversize,
        blocks=blocks,
    )
