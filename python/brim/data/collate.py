"""Documents in one row of tokens, with what attention must know about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.data import Dataset

from brim import _C
from brim._arguments import flag, shown, whole
from brim._warn import warn
from brim.adapt._packed import Layout, PackedBatch, block_mask, dense_mask
from brim.data.sizes import Sizes, one_column

Names: TypeAlias = "Mapping[str, str | Sequence[str]]"

_ROW = {"tokens": "input_ids", "labels": "labels", "position_ids": "position_ids"}

#: What each family of libraries expects, and under which names.
FAMILIES: dict[str, Names] = {
    "transformers": {
        **_ROW,
        "cu_seqlens": ("cu_seq_lens_q", "cu_seq_lens_k"),
        "max_seqlen": ("max_length_q", "max_length_k"),
    },
    "sdpa": {**_ROW, "mask": "attention_mask"},
    "flex": {**_ROW, "block_mask": "attention_mask"},
    "flash_attn": {
        **_ROW,
        "document_ids": "document_ids",
        "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
        "max_seqlen": ("max_seqlen_q", "max_seqlen_k"),
    },
    "megatron": {
        "tokens": "tokens",
        "shifted_labels": "labels",
        "loss_mask": "loss_mask",
        "position_ids": "position_ids",
        "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_kv"),
        "cu_seqlens_padded": ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
        "max_seqlen": ("max_seqlen_q", "max_seqlen_kv"),
    },
}
_FIELDS = (
    "tokens",
    "labels",
    "shifted_labels",
    "loss_mask",
    "position_ids",
    "document_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "mask",
    "block_mask",
)
_IGNORED = -100  # the label that losses leave out


class DocumentPart(NamedTuple):
    """The tokens from `start` to `stop` of a document that is cut over several packs.

    `pack_stream(…, oversize="split")` and `SplitDocuments` give it where a document is longer than
    a pack; `PackedCollator` takes it. `cut` gives the part as the document's own type.

    Args:
        document: the whole sample.
        start: the first token of this part.
        stop: the end of it.
        size: how many tokens the document has.

    Example:
        >>> DocumentPart([5, 6, 7, 8], 2, 4, 4).cut()
        [7, 8]
    """

    document: Any
    start: int
    stop: int
    size: int

    def cut(self) -> Any:
        """The part as a sample: of a mapping, all members that are as long as the document."""
        if not isinstance(self.document, Mapping):
            return self.document[self.start : self.stop]

        def part(value: Any) -> Any:
            tokens = isinstance(value, Sized) and not isinstance(value, str)
            return value[self.start : self.stop] if tokens and len(value) == self.size else value

        return {key: part(value) for key, value in self.document.items()}


class SplitDocuments(Dataset[Any]):
    """A data set whose long documents are cut into parts, each a sample of its own.

    For batch samplers, which know samples by their index: pass `sizes` to the sampler and this to
    the DataLoader. No token is lost: parts follow each other, all but the last of `largest` tokens.
    A `pack_stream` does the same with `oversize="split"`.

    Args:
        dataset: the documents, by index.
        sizes: how many tokens each of them has.
        largest: the most tokens in a part; with `PackedCollator(document_multiple=…)` a multiple
            of that.

    Example:
        >>> parts = SplitDocuments([[1, 2, 3, 4, 5], [6, 7]], [5, 2], largest=3)
        >>> parts.sizes, [sample.cut() for sample in (parts[0], parts[1])], parts[2]
        (tensor([3, 2, 2]), [[1, 2, 3], [4, 5]], [6, 7])
    """

    def __init__(self, dataset: Any, sizes: Sizes, largest: int) -> None:
        column = one_column("sizes", sizes)
        if column.is_floating_point():
            raise TypeError("sizes must be whole numbers: a document is cut between tokens")
        if isinstance(dataset, Sized) and len(dataset) != len(column):
            raise ValueError(
                f"dataset has {len(dataset)} documents, and sizes are of {len(column)}"
            )
        self.dataset = dataset
        self._lengths, self._largest = column, whole("largest", largest, 1)
        self._parts = _C.DocumentParts(column, self._largest)

    def __getstate__(self) -> dict[str, Any]:
        """All but what C++ made, which is made again."""
        return {**self.__dict__, "_parts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The other half of `__getstate__`."""
        self.__dict__.update(state)
        self._parts = _C.DocumentParts(self._lengths, self._largest)

    @property
    def sizes(self) -> torch.Tensor:
        """How many tokens each part has, for a sampler."""
        return self._parts.sizes()

    def __len__(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    def __getitem__(self, index: int) -> Any:
        """A document if it is whole, else a `DocumentPart`."""
        document, start, stop = self._parts[index]
        return self._part(self.dataset[document], document, start, stop)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several at once; a DataLoader asks so, and the data set may read them together."""
        places = [self._parts[int(index)] for index in indices]
        numbers = [document for document, _, _ in places]
        at_once = getattr(self.dataset, "__getitems__", None)
        samples = at_once(numbers) if at_once else [self.dataset[number] for number in numbers]
        return [self._part(sample, *place) for sample, place in zip(samples, places, strict=True)]

    def _part(self, sample: Any, document: int, start: int, stop: int) -> Any:
        size = int(self._lengths[document])
        return sample if stop - start == size else DocumentPart(sample, start, stop, size)


class _Document(NamedTuple):
    """A document or a part of one, as the collator reads it."""

    sample: Mapping[str, Any]
    start: int
    length: int
    size: int


class PackedCollator:
    """Puts the documents of a batch into one row of tokens, ready for attention.

    Without padding, and without attention between documents: a model that gets what the row says
    about itself computes the same for each document as if it was alone. All of it is made once per
    batch on the host. The row is a `PackedBatch`, a dictionary that `brim.Microbatches` can cut.

    A sample is a list, an array or a tensor of token ids, or a mapping with `input_ids` and, if the
    loss is not over all tokens, `labels`. Parts of longer ones come as `DocumentPart`.

    Args:
        names: the family of names: `"transformers"` (also its FlashAttention), `"sdpa"` (a mask of
            all pairs), `"flex"` (a BlockMask), `"flash_attn"` (the arguments of its varlen
            functions), `"megatron"` (the fields of its PackedSeqParams, with labels moved to the
            token before); or a mapping from what a batch may hold (`tokens`, `labels`,
            `shifted_labels`, `loss_mask`, `position_ids`, `document_ids`, `cu_seqlens`,
            `cu_seqlens_padded`, `max_seqlen`, `mask`, `block_mask`) to names, as those in
            `PackedCollator.families`.
        document_multiple: each document takes a multiple of this many places, with padding at its
            end: 2 · CP · TP for context and tensor parallelism. The sampler must count them:
            `pack_stream` does, others get `sizes(lengths)`.
        row_multiple: the row has a multiple of this many places. Its padding is one more document.
        row_length: the row has this many places, as compiled models and CUDA graphs need it. A
            batch that is longer is an error.
        positions: `"restart"` at each part of a document, or `"continue"` where the part before
            ended. Parts then come first in the row, those that begin latest before others, so that
            no position follows from the one before it in another document.
        causal: whether masks let tokens attend to earlier ones only. Without it there is no
            `document_multiple`, whose padding later tokens would see.
        pad_id: the token at padded places.
        columns: further members with one value per token, with what they are padded with: ints, or
            floats if that is a float. Others are left out of the batch, with a warning.
        block_size: of a BlockMask.

    Raises:
        ValueError: if there are no tokens in a sample, or members of it differ in length.

    Example:
        >>> batch = PackedCollator(row_multiple=8)([[5, 6, 7], [8, 9]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
        >>> batch["labels"]
        tensor([[-100,    6,    7, -100,    9, -100, -100, -100]])
        >>> batch["cu_seq_lens_q"], batch["max_length_q"]
        (tensor([0, 3, 5, 8], dtype=torch.int32), 3)
    """

    #: What each family's batches hold, and under which names: to start a mapping of one's own from.
    families: ClassVar[Mapping[str, Names]] = FAMILIES

    def __init__(
        self,
        names: str | Names = "transformers",
        *,
        document_multiple: int = 1,
        row_multiple: int = 1,
        row_length: int | None = None,
        positions: Literal["restart", "continue"] = "restart",
        causal: bool = True,
        pad_id: int = 0,
        columns: Mapping[str, float] | None = None,
        block_size: int = 128,
    ) -> None:
        self._names = _read_names(names)
        self.document_multiple = whole("document_multiple", document_multiple, 1, 2**31)
        self.row_multiple = whole("row_multiple", row_multiple, 1, 2**31)
        self.row_length = 0 if row_length is None else whole("row_length", row_length, 1, 2**31)
        if positions not in ("restart", "continue"):
            raise ValueError(f'positions must be "restart" or "continue", got {shown(positions)}')
        self._continue = positions == "continue"
        self._causal = flag("causal", causal)
        if not causal and document_multiple > 1:
            raise ValueError(
                f"document_multiple must be 1 with causal=False, got {document_multiple}: tokens "
                "would attend to the padding of their document"
            )
        if self.row_length % self.row_multiple != 0:
            raise ValueError(
                f"row_length must be a multiple of row_multiple = {row_multiple}, got {row_length}"
            )
        self._pad = whole("pad_id", pad_id, -(2**63))
        self._columns = dict(columns or {})
        for key in self._columns:
            if key in ("input_ids", "labels"):
                raise ValueError(f"columns must not name {key!r}, which is packed anyway")
        self._block = whole("block_size", block_size, 1, 2**31)
        self._told = False

    def __repr__(self) -> str:
        return f"PackedCollator({', '.join(sum(self._names.values(), ()))})"

    def size(self, sample: Any) -> int:
        """How many tokens a sample has; `sizeof` of a stream.

        Example:
            >>> PackedCollator().size({"input_ids": [1, 2, 3]})
            3
        """
        if isinstance(sample, DocumentPart):
            return sample.stop - sample.start
        return len(_members(sample)["input_ids"])

    def sizes(self, lengths: Sizes) -> torch.Tensor:
        """The places that documents of these lengths take, as the sizes for a sampler.

        Example:
            >>> PackedCollator(document_multiple=8).sizes([3, 8, 9])
            tensor([ 8,  8, 16])
        """
        column = one_column("lengths", lengths)
        multiple = self.document_multiple
        return torch.div(column + multiple - 1, multiple, rounding_mode="floor") * multiple

    def __call__(self, samples: Iterable[Any]) -> PackedBatch:
        """The row of these samples."""
        documents = [self._read(sample) for sample in samples]
        if not documents:
            raise ValueError("samples is empty: a packed batch needs at least one document")
        if self._continue:
            # Where a part began right after the position before it, the two would be taken for one
            # document by what goes by positions alone, as transformers does for sdpa.
            documents.sort(key=lambda document: -document.start)
        lengths = [document.length for document in documents]
        if 0 in lengths:
            raise ValueError(
                f"sample {lengths.index(0)} of the batch has no tokens: leave such samples out"
            )
        row = _C.PackedRow(lengths, self.document_multiple, self.row_multiple, self.row_length)
        starts = [document.start for document in documents]
        made: dict[str, Any] = {}
        self._make_tokens(row, documents, starts, made)
        if "position_ids" in self._names:
            made["position_ids"] = row.positions(starts if self._continue else [])[None]
        self._make_bounds(row, made)
        return self._batch(row, documents, starts, lengths, made)

    def _read(self, sample: Any) -> _Document:
        """A sample or a part of one, with what it cannot hold refused."""
        start, stop, size = 0, -1, -1
        if isinstance(sample, DocumentPart):
            sample, start, stop, size = sample
        members = _members(sample)
        tokens = members["input_ids"]
        if size >= 0 and len(tokens) != size:
            raise ValueError(
                f"a DocumentPart is of a document with {size} tokens, but its input_ids are "
                f"{len(tokens)}"
            )
        for key, value in members.items():
            if key in ("labels", *self._columns) and len(value) != len(tokens):
                raise ValueError(
                    f"{key} must be as long as input_ids, got {len(value)} and {len(tokens)}"
                )
        if len(members) > 1:
            self._tell_of_others(members)
        stop = len(tokens) if stop < 0 else stop
        return _Document(members, start, stop - start, len(tokens))

    def _tell_of_others(self, members: Mapping[str, Any]) -> None:
        mask = members.get("attention_mask")
        if mask is not None and (0 in mask if isinstance(mask, list) else not all(mask)):
            raise ValueError(
                "attention_mask of a sample has zeros: packed documents are not padded before; "
                "give the tokens alone"
            )
        if not self._told:
            known = {"input_ids", "labels", "attention_mask", *self._columns}
            if others := sorted(set(members) - known):
                self._told = True
                warn(
                    f"packed batches leave {', '.join(others)} of the samples out: name in "
                    "columns= what has a value per token and the batch should hold"
                )

    def _make_tokens(
        self, row: _C.PackedRow, documents: list[_Document], starts: list[int], made: dict[str, Any]
    ) -> None:
        tokens = row.gather(
            [d.sample["input_ids"] for d in documents], "input_ids", starts, self._pad
        )
        if "tokens" in self._names:
            made["tokens"] = tokens[None]
        if not {"labels", "shifted_labels", "loss_mask"} & set(self._names):
            return
        own = ["labels" in document.sample for document in documents]
        if any(own) and not all(own):
            raise ValueError(
                f"either all samples of a batch have labels or none, got none for sample "
                f"{own.index(False)} of the batch"
            )
        source = "labels" if own[0] else "input_ids"
        labels = tokens.clone()
        if own[0]:
            labels = row.gather([d.sample["labels"] for d in documents], "labels", starts, _IGNORED)
        if {"shifted_labels", "loss_mask"} & set(self._names):
            following = [_label_after(document, source) for document in documents]
            shifted = labels.clone() if "labels" in self._names else labels
            row.shift(shifted, following, _IGNORED)
            made["shifted_labels"] = shifted[None]
            made["loss_mask"] = (shifted != _IGNORED).float()[None]
        if "labels" in self._names:
            row.mask_first(labels, _IGNORED)
            made["labels"] = labels[None]

    def _make_bounds(self, row: _C.PackedRow, made: dict[str, Any]) -> None:
        both = "cu_seqlens_padded" in self._names
        if "cu_seqlens" in self._names:
            made["cu_seqlens"] = row.token_offsets() if both else row.offsets()
        if both:
            made["cu_seqlens_padded"] = row.offsets()
        made["max_seqlen"] = row.longest
        if {"document_ids", "mask", "block_mask"} & set(self._names):
            ids = row.document_ids()
            made["document_ids"] = ids[None]
            if "mask" in self._names:
                made["mask"] = dense_mask(ids, self._causal)
            if "block_mask" in self._names:
                made["block_mask"] = block_mask(row, ids, self._block, self._causal)

    def _batch(
        self,
        row: _C.PackedRow,
        documents: list[_Document],
        starts: list[int],
        lengths: list[int],
        made: dict[str, Any],
    ) -> PackedBatch:
        batch = PackedBatch()
        fields: dict[str, str] = {}
        pads: dict[str, Any] = {}
        defaults = {"tokens": self._pad, "labels": _IGNORED, "shifted_labels": _IGNORED}
        for field, keys in self._names.items():
            for key in keys:
                batch[key] = made[field]
                if field in ("tokens", "labels", "shifted_labels", "loss_mask"):
                    pads[key] = defaults.get(field, 0)
                else:
                    fields[key] = field
        for key, pad in self._columns.items():
            values = [_member(document.sample, key) for document in documents]
            batch[key] = _column(row, values, key, starts, pad)
            pads[key] = pad
        spans = row.offsets().diff().tolist()[: len(lengths)]
        batch.layout = Layout(
            fields, lengths, spans, self.row_multiple, pads, self._causal, self._block
        )
        return batch


def _members(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ValueError(f"a sample must have input_ids, got {', '.join(map(str, sample))}")
        return sample
    if isinstance(sample, str) or not isinstance(sample, Sized):
        raise TypeError(f"a sample must be token ids or a mapping with them, got {shown(sample)}")
    return {"input_ids": sample}


def _member(sample: Mapping[str, Any], key: str) -> Any:
    if key not in sample:
        raise ValueError(f"columns names {key!r}, which a sample does not have")
    return sample[key]


def _label_after(document: _Document, source: str) -> int:
    """What the last token of a part predicts: the next part begins with it."""
    end = document.start + document.length
    return int(document.sample[source][end]) if end < document.size else _IGNORED


def _column(
    row: _C.PackedRow, values: list[Any], key: str, starts: list[int], pad: float
) -> torch.Tensor:
    if isinstance(pad, int):
        return row.gather(values, key, starts, pad)[None]
    result = torch.full((row.size,), float(pad))
    offsets = row.offsets().tolist()
    for i, value in enumerate(values):
        length = row.length(i)
        own = torch.as_tensor(value)[starts[i] : starts[i] + length]
        result[offsets[i] : offsets[i] + length] = own
    return result[None]


def _read_names(names: Any) -> dict[str, tuple[str, ...]]:
    if isinstance(names, str):
        if names not in FAMILIES:
            known = ", ".join(f'"{family}"' for family in FAMILIES)
            raise ValueError(f"names must be one of {known} or a mapping, got {shown(names)}")
        names = FAMILIES[names]
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a text or a mapping, got {shown(names)}")
    result: dict[str, tuple[str, ...]] = {}
    for field, keys in names.items():
        if field not in _FIELDS:
            raise ValueError(f"names must be of {', '.join(_FIELDS)}, got {shown(field)}")
        result[field] = (keys,) if isinstance(keys, str) else tuple(keys)
    if "tokens" not in result:
        raise ValueError("names must say under which name the tokens are, got none for 'tokens'")
    every = sum(result.values(), ())
    if len(set(every)) < len(every):
        raise ValueError(f"names must differ from each other, got {', '.join(every)}")
    return result
