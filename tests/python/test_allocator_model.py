"""The model of torch's CUDA allocator: histories recorded on a GPU, and its bindings."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
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
    options, not_modelled = _C.AllocatorOptions.from_settings(
        record["settings"], capacity=record["capacity"]
    )
    assert not not_modelled
    return options


# ------------------------------------------------------------------ recorded with torch on a GPU


def replayed(record: dict[str, Any], with_addresses: bool) -> Iterator[tuple[int, Any]]:
    """The model after each event; an allocation that fails in one of the two only is an error."""
    model = _C.AllocatorModel(options_of(record))
    if with_addresses:
        model.set_segment_addresses([address for _, address, _ in record["segments"]])
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
        yield event, model


recorded = pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.partition(".")[0])


@recorded
def test_every_event_of_torch_is_reproduced(file: Path) -> None:
    record = json.loads(gzip.decompress(file.read_bytes()))
    expected = {name: list(accumulate(record[name])) for name in STATISTICS if name in record}
    assert "reserved" in expected
    for event, model in replayed(record, with_addresses=True):
        now = model.now
        got = {name: getattr(now, name) for name in expected}
        assert got == {name: column[event] for name, column in expected.items()}, event
    final = record["final"]
    for name in STATISTICS:
        assert getattr(model.now, name) == final[name], name
        assert getattr(model.peak, name) == final[f"peak_{name}"], name
    assert model.retries == final["retries"]


@recorded
def test_peaks_agree_without_the_addresses_of_the_device(file: Path) -> None:
    # Where the driver puts segments decides between free blocks of one size, which is all that a
    # model without the device cannot know. Expandable segments are one range: nothing to know.
    record = json.loads(gzip.decompress(file.read_bytes()))
    expected = list(accumulate(record["reserved"]))
    expandable = "expandable" in record["settings"]
    for event, model in replayed(record, with_addresses=False):
        assert not expandable or model.now.reserved == expected[event], event
    final = record["final"]
    assert model.peak.requested == final["peak_requested"]
    assert model.peak.allocated == pytest.approx(final["peak_allocated"], rel=0.005)
    assert model.peak.reserved == pytest.approx(final["peak_reserved"], rel=0.005)


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


# ------------------------------------------------------------------ beside PeakMeter on the CPU


def test_exact_bytes_are_what_the_meter_shows() -> None:
    rng = random.Random(1)
    trace = _C.MemoryTrace()
    held: list[tuple[int, torch.Tensor]] = []
    with brim.PeakMeter("cpu") as meter:
        for _ in range(200):
            if held and rng.random() < 0.4:
                allocation, tensor = held.pop(rng.randrange(len(held)))
                del tensor
                trace.free(allocation)
            else:
                size = rng.randrange(5000)
                held.append((trace.allocate(size), torch.empty(size, dtype=torch.uint8)))
    report = _C.replay(trace, _C.AllocatorOptions("exact"))
    assert report.peak == meter.peak
    assert report.left == meter.left == sum(tensor.nbytes for _, tensor in held)


# ------------------------------------------------------------------ bindings


def test_model_from_python() -> None:
    model = _C.AllocatorModel()
    small = model.allocate(1)
    large = model.allocate(3 * MIB, stream=1)
    assert small is not None
    assert large is not None
    assert model.now.requested == 1 + 3 * MIB
    assert model.now.allocated == 512 + 3 * MIB
    assert model.now.reserved == 22 * MIB
    model.free(small)
    model.free(large)
    model.empty_cache()
    assert model.now.reserved == 0
    assert model.peak.reserved == 22 * MIB


def test_options_from_python() -> None:
    options = _C.AllocatorOptions(capacity=64 * MIB)
    assert (options.capacity, options.max_split_size) == (64 * MIB, None)
    assert not options.expandable_segments
    assert _C.AllocatorOptions("exact").capacity is None
    read, not_modelled = _C.AllocatorOptions.from_settings(
        "expandable_segments:True,garbage_collection_threshold:0.8", capacity=MIB
    )
    assert read.expandable_segments
    assert read.capacity == MIB
    assert not_modelled == ["garbage_collection_threshold:0.8"]
    model = _C.AllocatorModel(options)
    assert model.allocate(65 * MIB) is None
    assert model.retries == 1


def test_settings_are_those_of_the_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert _C.AllocatorOptions.from_settings()[0].expandable_segments
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:40")  # the newer name wins
    options = _C.AllocatorOptions.from_settings()[0]
    assert (options.expandable_segments, options.max_split_size) == (False, 40 * MIB)


def test_trace_from_python() -> None:
    trace = _C.MemoryTrace()
    kind = _C.MemoryKind
    weight = trace.allocate(1000, kind.parameter, trace.place("fc.weight"))
    start = len(trace)
    output = trace.allocate(3 * MIB, kind.activation, trace.place("step.py:7"))
    trace.free(trace.allocate(MIB))
    assert [trace.place_of(one) for one in (weight, output)] == ["fc.weight", "step.py:7"]
    report = _C.replay(trace, start=start, largest=1)
    assert (report.held_before, report.peak, report.left) == (1024, 4 * MIB, 3 * MIB)
    assert report.reserved == 22 * MIB
    assert report.held[kind.activation] == 3 * MIB
    assert sum(report.held.values()) == 1024 + 4 * MIB
    assert [(a.id, a.place, a.kind) for a in report.largest] == [
        (output, "step.py:7", kind.activation)
    ]
    assert report.fits
    assert report.fragmentation == pytest.approx(1 - (1024 + 4 * MIB) / (22 * MIB))
    tight = _C.replay(trace, _C.AllocatorOptions(capacity=20 * MIB), start)
    assert not tight.fits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _C.AllocatorOptions("slab"), "kind must be 'exact' or 'caching', got 'slab'"),
        (lambda: _C.AllocatorModel(_C.AllocatorOptions(capacity=-1)), "capacity .* got -1"),
        (lambda: _C.AllocatorModel().allocate(-5), "size must be .* got -5"),
        (lambda: _C.AllocatorModel().free(3), "allocation must be .* got 3"),
        (lambda: _C.MemoryTrace().allocate(-5), "size must be .* got -5"),
        (lambda: _C.MemoryTrace().allocate(1, place=9), "place must be .* got 9"),
        (lambda: _C.MemoryTrace().free(0), "allocation must be .* got 0"),
        (lambda: _C.replay(_C.MemoryTrace(), start=1), "start must be from 0 to 0.* got 1"),
    ],
)
def test_wrong_arguments_name_themselves(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_figures_are_of_the_moment_when_they_were_asked_for() -> None:
    model = _C.AllocatorModel()
    before = model.now, model.peak
    model.allocate(2**20)
    assert [each.allocated for each in before] == [0, 0]
    assert model.now.allocated == 2**20
