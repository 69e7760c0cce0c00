"""The model of torch's CUDA allocator: histories recorded on a GPU, and its bindings."""

from __future__ import annotations

import gzip
import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim import _C

MIB = 2**20
RECORDED = sorted((Path(__file__).parents[1] / "data/allocator").glob("*.json.gz"))
STATISTICS = ("allocated", "reserved", "requested", "inactive_split")


def options_of(record: dict[str, Any]) -> _C.AllocatorOptions:
    """The settings of the recorded allocator, as brim calls them."""
    settings = dict(part.split(":") for part in record["settings"].split(",") if part)
    known = {
        "expandable_segments": settings.pop("expandable_segments", "False") == "True",
        "roundup_power2_divisions": int(settings.pop("roundup_power2_divisions", 0)),
    }
    if "max_split_size_mb" in settings:
        known["max_split_size"] = int(settings.pop("max_split_size_mb")) * MIB
    assert not settings
    return _C.AllocatorOptions(capacity=record["capacity"], **known)


# ------------------------------------------------------------------ recorded with torch on a GPU


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.partition(".")[0])
def test_every_event_of_torch_is_reproduced(file: Path) -> None:
    record = json.loads(gzip.decompress(file.read_bytes()))
    model = _C.AllocatorModel(options_of(record))
    model.set_segment_addresses([address for _, address, _ in record["segments"]])
    expected = {name: list(accumulate(record[name])) for name in STATISTICS if name in record}
    assert "reserved" in expected
    held: list[int | None] = []
    for event, (action, value, stream) in enumerate(
        zip(record["actions"], record["values"], record["streams"], strict=True)
    ):
        if action == "a":
            held.append(model.allocate(value, int(stream)))
            assert held[-1] is not None, event
        elif action == "f":
            allocation = held[value]
            assert allocation is not None
            model.free(allocation)
        elif action == "o":
            assert model.allocate(value, int(stream)) is None, event
        else:
            model.empty_cache()
        now = model.now
        got = {name: getattr(now, name) for name in expected}
        assert got == {name: column[event] for name, column in expected.items()}, event
    final = record["final"]
    assert {name: getattr(model.now, name) for name in STATISTICS} == {
        name: final[name] for name in STATISTICS
    }
    assert {name: getattr(model.peak, name) for name in STATISTICS} == {
        name: final[f"peak_{name}"] for name in STATISTICS
    }
    assert model.retries == final["retries"]


def test_recorded_cases_cover_the_rules() -> None:
    records = [json.loads(gzip.decompress(file.read_bytes())) for file in RECORDED]
    assert len(records) >= 15
    assert {record["settings"] for record in records} == {
        "",
        "expandable_segments:True",
        "max_split_size_mb:40",
        "roundup_power2_divisions:4",
    }
    for expandable in (False, True):
        chosen = [r for r in records if ("expandable" in r["settings"]) == expandable]
        assert any("o" in record["actions"] for record in chosen)
        assert any(record["final"]["retries"] > record["final"]["ooms"] for record in chosen)
        assert any("2" in record["streams"] for record in chosen)
