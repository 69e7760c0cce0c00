"""Documents in one row of tokens: what the row says about itself, and documents that are cut."""

from __future__ import annotations

import array
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from brim.data import (
    DocumentPart,
    PackedBatch,
    PackedBatchSampler,
    PackedCollator,
    SplitDocuments,
    bucket_stream,
    pack_stream,
)

EVERYTHING = {
    name: name
    for name in (
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
    )
}

# Token t of document d is 1000 · d + t + 1: no two are equal, and none is padding.
Lengths = list[int]


def document(number: int, length: int) -> list[int]:
    return [1000 * number + token + 1 for token in range(length)]


def documents(lengths: Lengths) -> list[list[int]]:
    return [document(number, length) for number, length in enumerate(lengths)]


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    document_multiple=st.sampled_from([1, 1, 4, 6]),
    row_multiple=st.sampled_from([1, 1, 8]),
    fixed=st.booleans(),
    own_labels=st.booleans(),
    starts=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    more=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    continued=st.booleans(),
)
def test_every_place_is_what_a_plain_loop_says(
    lengths: Lengths,
    document_multiple: int,
    row_multiple: int,
    fixed: bool,
    own_labels: bool,
    starts: Lengths,
    more: Lengths,
    continued: bool,
) -> None:
    samples: list[Any] = []
    for number, length in enumerate(lengths):
        start, size = starts[number], starts[number] + length + more[number]
        whole: Any = {"input_ids": document(number, size)}
        if own_labels:
            whole["labels"] = [-token for token in whole["input_ids"]]
        samples.append(DocumentPart(whole, start, start + length, size))
    collator = PackedCollator(
        EVERYTHING,
        document_multiple=document_multiple,
        row_multiple=row_multiple,
        row_length=400 if fixed else None,
        positions="continue" if continued else "restart",
        pad_id=7777,
    )
    batch = collator(samples)

    # One entry per place: token, label, label of the next, position, document, real?
    places: list[tuple[int, int, int, int, int]] = []
    bounds, tokens_before = [0], [0]
    order = sorted(range(len(lengths)), key=lambda i: -starts[i]) if continued else None
    for place, number in enumerate(order or range(len(lengths))):
        sample = samples[number]
        ids = sample.document["input_ids"]
        labels = sample.document.get("labels", ids)
        for token in range(up(lengths[number], document_multiple)):
            at = sample.start + token
            position = at if continued else token
            if token < lengths[number]:
                own = labels[at] if token > 0 else -100
                after = labels[at + 1] if at + 1 < sample.size else -100
                places.append((ids[at], own, after, position, place))
            else:
                places.append((7777, -100, -100, position, place))
        bounds.append(len(places))
        tokens_before.append(tokens_before[-1] + lengths[number])
    tail = (400 if fixed else up(len(places), row_multiple)) - len(places)
    places += [(7777, -100, -100, token, len(lengths)) for token in range(tail)]
    if tail:
        bounds.append(len(places))
        tokens_before.append(tokens_before[-1] + tail)
    columns = [list(column) for column in zip(*places, strict=True)]
    names = ("tokens", "labels", "shifted_labels", "position_ids", "document_ids")
    for name, column in zip(names, columns, strict=True):
        assert batch[name].tolist() == [column], name
    assert batch["loss_mask"].tolist() == [[float(label != -100) for label in columns[2]]]
    assert batch["cu_seqlens"].dtype == batch["cu_seqlens_padded"].dtype == torch.int32
    assert batch["cu_seqlens_padded"].tolist() == bounds
    assert batch["cu_seqlens"].tolist() == tokens_before
    assert batch["max_seqlen"] == max(np.diff(bounds))
    assert type(batch["max_seqlen"]) is int
    ids = torch.tensor(columns[4])
    mask = (ids[:, None] == ids[None]) & torch.ones(len(ids), len(ids)).tril().bool()
    assert torch.equal(batch["mask"], mask[None, None])
    # transformers takes what goes on by one for the same document, where there is no mask.
    positions = torch.tensor(columns[3])
    begins = (positions.diff() != 1).nonzero().flatten() + 1
    assert begins.tolist() == bounds[1:-1]


def test_names_are_those_that_each_family_expects() -> None:
    keys = {
        "transformers": "input_ids labels position_ids cu_seq_lens_q cu_seq_lens_k max_length_q "
        "max_length_k",
        "sdpa": "input_ids labels position_ids attention_mask",
        "flex": "input_ids labels position_ids attention_mask",
        "flash_attn": "input_ids labels position_ids document_ids cu_seqlens_q cu_seqlens_k "
        "max_seqlen_q max_seqlen_k",
        "megatron": "tokens labels loss_mask position_ids cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv",
    }
    for family, expected in keys.items():
        batch = PackedCollator(family)(documents([3, 4]))
        assert list(batch) == expected.split(), family
        assert isinstance(batch, PackedBatch)
        assert batch.documents == 2
    shifted = PackedCollator("megatron")([DocumentPart([1, 2, 3, 4], 0, 2, 4), [5, 6]])["labels"]
    assert shifted.tolist() == [[2, 3, 6, -100]]  # the next part begins with 3


def test_tokens_come_in_any_container() -> None:
    ids = [[1, 2, 3], [70_000, 5], [6]]
    expected = [[1, 2, 3, 70_000, 5, 6]]
    makers: list[Any] = [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda x: np.array(x, np.uint32),
        lambda x: np.array(x)[::1],
        lambda x: np.repeat(np.array(x, np.int32), 2)[::2],
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: array.array("q", x),
        lambda x: np.array(x, np.int64).view(np.uint64),
    ]
    for make in makers:
        assert PackedCollator()([make(x) for x in ids])["input_ids"].tolist() == expected
        assert PackedCollator()([{"input_ids": make(x)} for x in ids])["input_ids"].tolist() == (
            expected
        )
    assert PackedCollator()([bytes([1, 255])])["input_ids"].tolist() == [[1, 255]]


def test_wrong_samples_are_errors() -> None:
    collate = PackedCollator()
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([], ValueError, "samples is empty"),
        ([[1], []], ValueError, "sample 1 of the batch has no tokens"),
        (["text"], TypeError, "must be token ids or a mapping with them, got 'text'"),
        ([{"text": [1]}], ValueError, "must have input_ids, got text"),
        ([[1.5]], TypeError, "input_ids must be ints, got 1.5 at sample 0"),
        ([[1], [2, None]], TypeError, "input_ids must be ints, got None at sample 1"),
        ([[2**70]], ValueError, "must fit 64 bits"),
        ([np.array([1.5])], TypeError, "whole numbers in one dimension, got an array"),
        ([np.array([[1]])], TypeError, "whole numbers in one dimension, got an array"),
        ([np.array([1, 2**64 - 1], np.uint64)], TypeError, "whole numbers in one dimension"),
        ([torch.ones(2)], TypeError, "whole numbers in one dimension, got a tensor"),
        ([torch.ones(1, 2, dtype=torch.int64)], TypeError, "in one dimension, got a tensor"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, "labels must be as long as input_ids"),
        (
            [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
            ValueError,
            "either all samples of a batch have labels or none, got none for sample 1",
        ),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], ValueError, "attention_mask .* zeros"),
        ([DocumentPart([1, 2], 0, 2, 3)], ValueError, "with 3 tokens, but its input_ids are 2"),
    ]
    for samples, kind, message in cases:
        with pytest.raises(kind, match=message):
            collate(samples)
    with pytest.raises(ValueError, match="documents take 5 places, but row_length is 4"):
        PackedCollator(row_length=4)(documents([3, 2]))
    with pytest.raises(ValueError, match="columns names 'weight', which a sample does not have"):
        PackedCollator(columns={"weight": 0.0})([[1]])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"names": "jax"}, ValueError, 'names must be one of "transformers", .* or a mapping'),
        ({"names": 5}, TypeError, "names must be a text or a mapping, got 5"),
        ({"names": {"x": "y"}}, ValueError, "names must be of tokens, .*, got 'x'"),
        ({"names": {"labels": "y"}}, ValueError, "none for 'tokens'"),
        ({"names": {"tokens": "y", "labels": "y"}}, ValueError, "must differ .*, got y, y"),
        ({"document_multiple": 0}, ValueError, "document_multiple must be at least 1, got 0"),
        ({"row_multiple": 1.5}, TypeError, "row_multiple must be an int, got 1.5"),
        ({"row_multiple": 8, "row_length": 12}, ValueError, "multiple of row_multiple = 8, got 12"),
        ({"positions": "x"}, ValueError, 'positions must be "restart" or "continue", got \'x\''),
        ({"causal": False, "document_multiple": 2}, ValueError, "must be 1 with causal=False"),
        ({"columns": {"labels": 0}}, ValueError, "must not name 'labels'"),
    ],
)
def test_wrong_options_are_errors(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        PackedCollator(**options)


def test_columns_are_packed_too_and_others_are_told() -> None:
    collate = PackedCollator(columns={"kind": 9, "weight": -1.0}, document_multiple=4)
    batch = collate(
        [
            {"input_ids": [1, 2], "kind": [3, 4], "weight": [0.5, 0.25], "attention_mask": [1, 1]},
            {"input_ids": [5], "kind": [6], "weight": torch.tensor([2.0]), "attention_mask": [1]},
        ]
    )
    assert batch["kind"].tolist() == [[3, 4, 9, 9, 6, 9, 9, 9]]
    assert batch["weight"].tolist() == [[0.5, 0.25, -1.0, -1.0, 2.0, -1.0, -1.0, -1.0]]
    assert "attention_mask" not in batch
    again = PackedCollator()
    with pytest.warns(UserWarning, match="leave text, url of the samples out"):
        again([{"input_ids": [1], "text": "x", "url": "y"}])
    again([{"input_ids": [1], "text": "x"}])  # once


def test_the_block_mask_is_torchs_own() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    random = np.random.default_rng(0)
    for case in range(2):
        lengths = random.integers(1, 300, 6).tolist()
        causal = case % 2 == 0
        collator = PackedCollator("flex", causal=causal, row_multiple=8, block_size=64)
        batch = collator(documents(lengths))
        mask = batch["attention_mask"]
        size = batch["input_ids"].shape[1]
        expected = flex.create_block_mask(
            mask.mask_mod, None, None, size, size, device="cpu", BLOCK_SIZE=64
        )
        assert isinstance(mask, flex.BlockMask)
        assert mask.seq_lengths == expected.seq_lengths
        assert torch.equal(mask.to_dense(), expected.to_dense())
        pairs = ["kv", "full_kv", "q", "full_q"]
        for name in pairs:
            counts = getattr(mask, f"{name}_num_blocks")
            assert torch.equal(counts, getattr(expected, f"{name}_num_blocks")), name
            indices, own = getattr(expected, f"{name}_indices"), getattr(mask, f"{name}_indices")
            for row, count in enumerate(counts[0, 0].tolist()):
                assert sorted(own[0, 0, row, :count]) == sorted(indices[0, 0, row, :count])
        for other in (pickle.loads(pickle.dumps(batch)), batch.to("cpu"), copy.copy(batch)):
            assert torch.equal(other["attention_mask"].to_dense(), mask.to_dense())
            assert other.layout == batch.layout
        part = batch.to("cpu")["attention_mask"]
        dense = PackedCollator("sdpa", causal=causal, row_multiple=8)(documents(lengths))
        ids = torch.arange(size)
        seen = part.mask_mod(0, 0, ids[:, None], ids[None, :])
        assert torch.equal(seen, dense["attention_mask"][0, 0])


class Documents:
    """An iterable of documents with given lengths."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        return (document(number, length) for number, length in enumerate(self.lengths))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=25),
    budget=st.integers(4, 40),
    multiple=st.sampled_from([1, 1, 4]),
    lookahead=st.integers(1, 50),
    shuffle=st.booleans(),
    world_size=st.integers(1, 3),
    cut=st.integers(0, 100),
)
@pytest.mark.filterwarnings("ignore:each rank counts", "ignore:.* are left out")
def test_split_documents_lose_no_token_and_resume_exactly(
    lengths: Lengths,
    budget: int,
    multiple: int,
    lookahead: int,
    shuffle: bool,
    world_size: int,
    cut: int,
) -> None:
    def stream(rank: int, ranks: int = world_size) -> Any:
        return pack_stream(
            Documents(lengths),
            budget,
            lookahead=lookahead,
            shuffle=shuffle,
            oversize="split",
            collate_fn=PackedCollator("megatron", document_multiple=multiple),
            rank=rank,
            world_size=ranks,
        )

    def key(batch: PackedBatch) -> Any:
        return {name: torch.as_tensor(value).tolist() for name, value in batch.items()}

    rows = list(stream(0, 1))
    seen = [token for row in rows for token in row["tokens"].flatten().tolist() if token]
    expected = [token for each in documents(lengths) for token in each]
    assert sorted(seen) == sorted(expected)
    assert all(row["tokens"].shape[1] <= budget for row in rows)
    # Each token but the first of a document is the label of the one before it, also over a cut.
    targets = [label for row in rows for label in row["labels"].flatten().tolist()]
    firsts = {1000 * number + 1 for number in range(len(lengths))}
    assert sorted(label for label in targets if label != -100) == sorted(set(expected) - firsts)

    for rank in range(world_size):
        whole = [key(row) for row in stream(rank)]
        done = cut % (len(whole) + 1)
        first = stream(rank)
        iterator = iter(first)
        for _ in range(done):
            next(iterator)
        state = copy.deepcopy(first.state_dict(done))
        resumed = stream(rank)
        resumed.load_state_dict(state)
        if not state["finished"] and done < len(whole):
            assert [key(row) for row in resumed] == whole[done:]


def test_what_a_pack_stream_does_with_a_collator() -> None:
    samples = [{"input_ids": document(n, 30)} for n in range(20)]
    rows = list(pack_stream(samples, 100, collate_fn=PackedCollator()))
    assert [row["input_ids"].shape[1] for row in rows] == [90] * 6 + [60]  # by tokens, as a sum
    rows = list(pack_stream(samples, 96, collate_fn=PackedCollator(document_multiple=32)))
    assert [row["input_ids"].shape[1] for row in rows] == [96] * 6 + [64]
    with pytest.raises(ValueError, match="multiple of the collator's row_multiple = 8, got 100"):
        pack_stream(samples, 100, collate_fn=PackedCollator(row_multiple=8))
    with pytest.raises(ValueError, match="must not exceed the collator's row_length = 64, got 100"):
        pack_stream(samples, 100, collate_fn=PackedCollator(row_length=64))
    with pytest.raises(ValueError, match="parts are multiples of 128"):
        pack_stream(
            samples, 100, oversize="split", collate_fn=PackedCollator(document_multiple=128)
        )
    with pytest.raises(ValueError, match="needs one max_total_size"):
        pack_stream(
            samples, [100, 5], cost=["sum", "count"][:1] * 2, sizeof=lambda s: (30, 1),
            oversize="split",
        )  # fmt: skip
    with pytest.raises(ValueError, match='oversize="split" is for pack_stream'):
        PackedBatchSampler([3], 2, oversize="split")
    with pytest.raises(ValueError, match="use pack_stream"):
        bucket_stream(samples, [0, 50], 100, collate_fn=PackedCollator())
    with pytest.raises(ValueError, match='oversize="split" is for pack_stream'):
        bucket_stream(samples, [0, 50], 100, oversize="split")


def test_workers_share_split_documents_out() -> None:
    lengths = [50, 3, 77, 20, 9, 31, 64, 1, 2] * 3
    collate = PackedCollator(row_multiple=8)
    stream = pack_stream(Documents(lengths), 32, oversize="split", lookahead=9, collate_fn=collate)
    alone = [row["input_ids"].tolist() for row in stream]
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    assert [row["input_ids"].tolist() for row in loader] == alone


def test_parts_of_any_sample_are_cut_without_a_collator() -> None:
    packs = list(pack_stream(["abcdefg", "hi"], 3, cost="sum", oversize="split", lookahead=100))
    parts = [part for pack in packs for part in pack]
    whole = sorted(
        (part.document, part.start, part.cut()) if isinstance(part, DocumentPart) else (part,)
        for part in parts
    )
    assert whole == [
        ("abcdefg", 0, "abc"),
        ("abcdefg", 3, "def"),
        ("abcdefg", 6, "g"),
        ("hi",),
    ]
    part = DocumentPart({"input_ids": [1, 2, 3], "text": "abc", "n": 3, "w": [1.0]}, 1, 3, 3)
    assert part.cut() == {"input_ids": [2, 3], "text": "abc", "n": 3, "w": [1.0]}


def test_a_state_is_refused_where_documents_are_cut_otherwise() -> None:
    def stream(**options: Any) -> Any:
        return pack_stream(Documents([9, 3, 4]), 6, cost="sum", lookahead=2, **options)

    split = stream(oversize="split")
    next(iter(split))
    padded = stream(collate_fn=PackedCollator(document_multiple=3))
    with pytest.raises(ValueError, match="its oversize is 'split', here it is None"):
        stream(oversize="alone").load_state_dict(split.state_dict())
    with pytest.raises(ValueError, match="another run: its size_multiple is 3, here it is None"):
        stream().load_state_dict(padded.state_dict())


def test_split_documents_for_samplers() -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 60).tolist()
    data = SplitDocuments(documents(lengths), lengths, largest=16)
    sampler = PackedBatchSampler(data.sizes, 16, cost="sum", shuffle=True)
    for workers in (0, 2):
        loader = DataLoader(
            data, batch_sampler=sampler, collate_fn=PackedCollator("flex"), num_workers=workers
        )
        rows = list(loader)
        tokens = sorted(token for row in rows for token in row["input_ids"].flatten().tolist())
        assert tokens == sorted(token for each in documents(lengths) for token in each)
        assert all(row["input_ids"].shape[1] <= 16 and row.documents for row in rows)
    assert pickle.loads(pickle.dumps(data))[3] == data[3]
    with pytest.raises(ValueError, match="dataset has 2 documents, and sizes are of 1"):
        SplitDocuments([[1], [2]], [1], 3)
    with pytest.raises(ValueError, match="part must be from 0 to 0, got 1"):
        SplitDocuments([[1]], [1], 3)[1]
    with pytest.raises(TypeError, match="sizes must be whole numbers"):
        SplitDocuments([[1]], [1.0], 3)
