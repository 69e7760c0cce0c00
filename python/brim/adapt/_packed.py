"""Packed batches: several documents in one row of tokens, which can be cut between documents."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from brim import _C
from brim._arguments import shown

#: What a packed batch may hold, by the names under which other libraries expect it.
KNOWN = {
    "cu_seqlens": "cu_seqlens",
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "cu_seqlens_kv": "cu_seqlens",
    "cu_seqlens_padded": "cu_seqlens_padded",
    "cu_seqlens_q_padded": "cu_seqlens_padded",
    "cu_seqlens_kv_padded": "cu_seqlens_padded",
    "max_seqlen": "max_seqlen",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
    "max_seqlen_kv": "max_seqlen",
    "position_ids": "position_ids",
    "document_ids": "document_ids",
    "seq_idx": "document_ids",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What of a packed batch is known on the host."""

    fields: Mapping[str, str]  # what each member is, by its name; others have a value per place
    lengths: list[int]  # the tokens of each document
    spans: list[int]  # the places that each takes, with its padding
    row_multiple: int = 1
    pads: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of members, where padded
    causal: bool = True
    block: int = 128  # of a BlockMask


class PackedBatch(dict[str, Any]):
    """A batch of documents in one row, as `brim.data.PackedCollator` makes it: a dictionary.

    It can be moved (`to`, `pin_memory`), and `brim.Microbatches` cuts it between documents. Other
    ways to copy it leave a dictionary, which is cut by its `cu_seqlens`; that of a device is then
    read back, once per batch.

    Example:
        >>> from brim.data import PackedCollator
        >>> batch = PackedCollator()([[5, 6, 7], [8, 9]])
        >>> batch.documents, batch["input_ids"]
        (2, tensor([[5, 6, 7, 8, 9]]))
    """

    layout: Layout | None = None

    @property
    def documents(self) -> int:
        """How many documents the row has; the padding at its end is none."""
        return len(layout_of(self).lengths)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedBatch:
        """The same with all tensors on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor) or _is_mask(value):
                return value.to(device, non_blocking=non_blocking)
            return value

        return self._changed(moved)

    def pin_memory(self, *_: object) -> PackedBatch:
        """The same in pinned memory; a DataLoader calls it."""
        return self._changed(
            lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value
        )

    def _changed(self, change: Any) -> PackedBatch:
        made = copy.copy(self)
        made.update({key: change(value) for key, value in self.items()})
        return made


def _is_mask(value: object) -> bool:
    return hasattr(value, "document_ids") and hasattr(value, "kv_num_blocks")


@functools.cache
def _mask_class() -> Any:
    """The class of masks. Made when it is needed: importing FlexAttention takes long."""
    from torch.nn.attention.flex_attention import BlockMask

    class DocumentMask(BlockMask):
        """A BlockMask that takes the document ids along: to a device, through a pickle."""

        document_ids: torch.Tensor
        causal: bool

        def _changed(self, change: Any) -> Any:
            made = copy.copy(self)
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(made, name, change(value))
            made.mask_mod = _mask_mod(made.document_ids, self.causal)
            return made

        def to(self, device: Any, non_blocking: bool = False) -> Any:
            return self._changed(lambda value: value.to(device, non_blocking=non_blocking))

        def pin_memory(self, *_: object) -> Any:
            return self._changed(lambda value: value.pin_memory())

        def __reduce__(self) -> Any:
            lists: list[Any] = [self.kv_num_blocks, self.kv_indices]
            lists += [self.full_kv_num_blocks, self.full_kv_indices]
            return _mask_of_lists, (lists, self.document_ids, self.BLOCK_SIZE[0], self.causal)

    return DocumentMask


def _mask_mod(documents: torch.Tensor, causal: bool) -> Any:
    # Functions and no objects: dynamo and pytrees look at their code.
    def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return documents[q] == documents[k]

    def causal_in_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q >= k)

    return causal_in_document if causal else same_document


def _mask_of_lists(
    lists: list[torch.Tensor], documents: torch.Tensor, block: int, causal: bool
) -> Any:
    made = _mask_class().from_kv_blocks(
        *lists,
        BLOCK_SIZE=block,
        mask_mod=_mask_mod(documents, causal),
        seq_lengths=(len(documents), len(documents)),
    )
    made.document_ids, made.causal = documents, causal
    return made


def block_mask(row: _C.PackedRow, documents: torch.Tensor, block: int, causal: bool) -> Any:
    """FlexAttention's mask of a row, from its bounds: no look at all pairs of places."""
    device = documents.device
    lists = [each.to(device, non_blocking=True) for each in row.blocks(block, causal)]
    return _mask_of_lists(lists, documents, block, causal)


def dense_mask(documents: torch.Tensor, causal: bool) -> torch.Tensor:
    """Which places attend to which, as sdpa takes it: bools of shape [1, 1, places, places]."""
    mask = documents[:, None] == documents[None, :]
    return (mask.tril() if causal else mask)[None, None]


_read: Any = WeakTensorKeyDictionary()  # the version of a tensor, and its values


def _numbers(offsets: torch.Tensor) -> list[int]:
    """The values of a tensor that may be on a device: read once, however often they are needed."""
    version, numbers = cast("tuple[int, list[int]]", _read.get(offsets, (-1, [])))
    if version != offsets._version:
        numbers = offsets.tolist()
        _read[offsets] = (offsets._version, numbers)
    return numbers


def is_packed(batch: Any) -> bool:
    """Whether a batch is one row of documents: ours, or one that says so by its `cu_seqlens`."""
    if isinstance(batch, PackedBatch) and batch.layout is not None:
        return True
    return isinstance(batch, Mapping) and any(
        KNOWN.get(key) == "cu_seqlens"
        and isinstance(value, torch.Tensor)
        and value.ndim == 1
        and not value.is_floating_point()
        for key, value in batch.items()
        if isinstance(key, str)
    )


def layout_of(batch: Any) -> Layout:
    """Where the documents of a packed batch are.

    Raises:
        ValueError: if its members contradict each other.
    """
    if isinstance(batch, PackedBatch) and batch.layout is not None:
        return batch.layout
    fields = {key: KNOWN[key] for key in batch if key in KNOWN}
    bounds: dict[str, list[int]] = {}
    for key, field in fields.items():
        if field in ("cu_seqlens", "cu_seqlens_padded"):
            numbers = _numbers(batch[key])
            bounds.setdefault(field, numbers)
            pairs = itertools.pairwise(numbers)
            if len(numbers) < 2 or numbers[0] != 0 or any(a > b for a, b in pairs):
                raise ValueError(f"{key} must be ascending from 0, got {shown(numbers)}")
            if bounds[field] != numbers:
                raise ValueError(
                    f"{key} must be the bounds of the same documents as the others, got "
                    f"{shown(numbers)} and {shown(bounds[field])}"
                )
    lengths = _differences(bounds["cu_seqlens"])
    spans = _differences(bounds.get("cu_seqlens_padded", bounds["cu_seqlens"]))
    if len(spans) != len(lengths):
        raise ValueError(
            f"cu_seqlens has {len(lengths)} documents and cu_seqlens_padded {len(spans)}"
        )
    return Layout(fields, lengths, spans)


def _differences(bounds: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(bounds)]


def part_of(batch: Any, start: int, stop: int) -> PackedBatch:
    """The documents from `start` to `stop`, as a packed batch again.

    Members with a value per place are views, unless the row must be padded.

    Raises:
        ValueError: for a member that has no value per place.
    """
    layout = layout_of(batch)
    place, places = sum(layout.spans[:start]), sum(layout.spans[start:stop])
    spans, lengths = layout.spans[start:stop], layout.lengths[start:stop]
    row = _C.PackedRow(spans, row_multiple=layout.row_multiple)
    whole = _row_size(batch, layout)
    padding = row.size - places
    part = PackedBatch()
    part.layout = dataclasses.replace(layout, lengths=lengths, spans=spans)
    documents: torch.Tensor | None = None

    def cut(key: str, value: torch.Tensor) -> torch.Tensor:
        dims = [dim for dim in range(min(value.ndim, 2)) if value.shape[dim] == whole]
        pairs = dims == [0, 1] and whole > 1  # a mask, of which a row is no part
        if not dims or pairs or (dims == [1] and value.shape[0] != 1):
            raise ValueError(
                f"{key} has shape {list(value.shape)}: members of a packed batch have a value for "
                f"each of its {whole} places, and others can be cut by split= only"
            )
        return value.narrow(dims[-1], place, places)

    def padded(value: torch.Tensor, pad: Any) -> torch.Tensor:
        if padding == 0:
            return value
        dim = 1 if value.ndim > 1 else 0
        shape = [*value.shape[:dim], padding, *value.shape[dim + 1 :]]
        tail = pad if isinstance(pad, torch.Tensor) else value.new_full(shape, pad)
        return torch.cat([value, tail.expand(shape).to(value.dtype)], dim)

    for key, value in batch.items():
        field = layout.fields.get(key, "")
        if field == "cu_seqlens" and "cu_seqlens_padded" in layout.fields.values():
            own = torch.tensor(
                [0, *itertools.accumulate([*lengths, padding][: len(row.offsets()) - 1])]
            )
            part[key] = own.to(value)
        elif field in ("cu_seqlens", "cu_seqlens_padded"):
            part[key] = row.offsets().to(value.device, value.dtype, non_blocking=True)
        elif field == "max_seqlen":
            part[key] = torch.full_like(value, row.longest) if _tensor(value) else row.longest
        elif field == "document_ids":
            part[key] = padded(cut(key, value) - start, stop - start)
        elif field == "position_ids":
            part[key] = padded(cut(key, value), torch.arange(padding, device=value.device))
        elif field in ("mask", "block_mask"):
            if documents is None:
                device = (value.document_ids if field == "block_mask" else value).device
                documents = row.document_ids().to(device, non_blocking=True)
            part[key] = (
                dense_mask(documents, layout.causal)
                if field == "mask"
                else block_mask(row, documents, layout.block, layout.causal)
            )
        elif isinstance(value, torch.Tensor) and value.ndim > 0:
            part[key] = padded(cut(key, value), layout.pads.get(key, 0))
        elif isinstance(value, (str, bytes, bool, int, float, type(None))) or _tensor(value):
            part[key] = value
        else:
            raise ValueError(
                f"{key} is a {type(value).__name__}, which cannot be cut between documents; pass "
                "split= and length="
            )
    return part


def _tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _row_size(batch: Any, layout: Layout) -> int:
    """How many places the row has; those after the documents are padding."""
    places = sum(layout.spans)
    ours = isinstance(batch, PackedBatch) and batch.layout is not None
    for key, value in batch.items():
        per_place = layout.fields.get(key, "tokens") in ("tokens", "position_ids", "document_ids")
        if per_place and isinstance(value, torch.Tensor) and value.ndim in (1, 2):
            size = value.shape[-1]
            if size < places or (size > places and not ours):
                raise ValueError(f"{key} has {size} places, but the documents take {places}")
            return size
    raise ValueError("a packed batch must have a tensor with a value for each place")
