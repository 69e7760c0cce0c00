"""Rows of packed documents: tokens per second of collating, beside transformers' flattening.

Documents have log-normal lengths (median 400, from 20 to 4000), rows 16,384 tokens. Times are
processor time on one core, from the samples to the tensors that attention takes; both give the same
input_ids, labels, position_ids and bounds of documents. The row with a mask has no counterpart in
transformers: its own is made by the model, in every step.

    ./dev bench packed
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
from harness import Work, medians, milliseconds, peer, progress
from results import Table

from brim import data

BUDGET = 16384
ROWS = 16

cpu_medians = partial(medians, clock=time.process_time)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(2000, generator=generator).exp().mul(400).long().clamp(20, 4000).tolist()
    return [torch.randint(1, 50_000, (length,), generator=generator) for length in lengths]


def batches_of(samples: list[Any], lengths: list[int]) -> list[list[Any]]:
    sampler = data.PackedBatchSampler(lengths, BUDGET, cost="sum", shuffle=True)
    return [[samples[index] for index in batch] for batch in list(sampler)[:ROWS]]


def collating(kind: str, samples: list[Any], lengths: list[int], flatten: Any) -> None:
    batches = batches_of([{"input_ids": sample} for sample in samples], lengths)
    tokens = sum(len(sample["input_ids"]) for batch in batches for sample in batch)

    def every(collate: Any) -> Work:
        return lambda: [collate(batch) for batch in batches]

    works: dict[str, Work] = {}
    if flatten is not None:
        theirs = flatten.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        works["transformers, DataCollatorWithFlattening"] = every(theirs)
        ours = data.PackedCollator()(batches[0])
        for key, value in theirs(batches[0]).items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours[key])), key
    works["brim, PackedCollator"] = every(data.PackedCollator())
    works["brim, aligned to 16, for Megatron"] = every(
        data.PackedCollator("megatron", document_multiple=16)
    )
    works["brim, with a BlockMask"] = every(data.PackedCollator("flex"))
    table = Table(f"documents as {kind}, {ROWS} rows of {BUDGET:,} tokens")
    progress(kind)
    times = cpu_medians(works, 5)
    for name, seconds in times.items():
        note = f"{milliseconds(seconds / len(batches))} a row"
        if flatten is not None and name.startswith("brim"):
            note += f", {times[next(iter(times))] / seconds:.1f}×"
        table.row(name, f"{tokens / seconds / 1e6:.1f} M tokens/s", note)


def masking(samples: list[torch.Tensor], lengths: list[int]) -> None:
    """A BlockMask from the bounds of documents, beside torch's look at all pairs of places."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch = batches_of(samples, lengths)[0]
    made = data.PackedCollator("flex")(batch)
    mask, size = made["attention_mask"], made["input_ids"].shape[1]
    works: dict[str, Work] = {
        "torch, create_block_mask": lambda: create_block_mask(
            mask.mask_mod, None, None, size, size, device="cpu"
        ),
        "brim, PackedCollator('flex')": lambda: data.PackedCollator("flex")(batch),
    }
    table = Table(f"a BlockMask of a row of {size:,} tokens")
    progress("masks")
    for name, seconds in cpu_medians(works, 3).items():
        table.row(name, milliseconds(seconds))


def streaming(samples: list[list[int]]) -> None:
    tokens = sum(map(len, samples))
    title = f"pack_stream of {len(samples):,} documents, collated, {tokens / 1e6:.1f} M tokens"
    table = Table(title)
    works: dict[str, Work] = {}
    for name, options in {
        "rows of 16,384": {},
        "rows of 2,048, long documents split": {"oversize": "split"},
    }.items():
        budget = 2048 if options else BUDGET
        stream = partial(data.pack_stream, samples, budget, collate_fn=data.PackedCollator())
        works[name] = lambda make=stream, options=options: list(make(**options))  # type: ignore[misc]
    for name, seconds in cpu_medians(works, 3).items():
        table.row(name, f"{tokens / seconds / 1e6:.1f} M tokens/s")


def main() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    flatten = peer("transformers")
    made = documents()
    lengths = [len(each) for each in made]
    lists = [each.tolist() for each in made]
    collating("lists", lists, lengths, flatten)
    collating("arrays", [each.int().numpy() for each in made], lengths, flatten)
    collating("tensors", made, lengths, flatten)
    masking(made, lengths)
    streaming(lists)


if __name__ == "__main__":
    main()
