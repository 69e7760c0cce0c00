"""Progress bars: on a terminal only, and never where they are switched off."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import torch

import brim
from brim import _progress
from brim.data import PackedBatchSampler

pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, delay: float = 0) -> Terminal:
    """Takes the place of stderr; not as a fixture, because pytest replaces stderr after those."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(_progress, "_DELAY", delay)
    monkeypatch.delenv("BRIM_PROGRESS", raising=False)
    return stream


def probe(**options: bool) -> None:
    brim.MemoryModel.probe(lambda size: torch.empty(size), [1, 10, 100], "cpu", **options)


def fit(**options: bool) -> None:
    PackedBatchSampler.fit(
        [torch.ones(10)] * 50, lambda batch: torch.stack(batch), [10] * 50, "1GiB", "cpu", **options
    )


def estimate(**options: bool) -> None:
    brim.estimate(torch.exp, torch.ones(4), device="cpu", **options)


def largest_size(**options: bool) -> None:
    brim.largest_size(lambda n: torch.empty(n), "n", "1MiB", device="cpu", **options)


def audit(**options: bool) -> None:
    brim.audit(torch.nn.ReLU(), torch.ones(4), **options)


WORK = [probe, fit, estimate, largest_size, audit]


@pytest.mark.parametrize("work", WORK)
def test_a_terminal_sees_a_bar_and_a_switch_turns_it_off(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = terminal(monkeypatch)
    work(progress=False)
    monkeypatch.setenv("BRIM_PROGRESS", "0")
    work()
    assert stream.getvalue() == ""
    monkeypatch.delenv("BRIM_PROGRESS")
    work()
    assert f"{work.__name__}: " in stream.getvalue()


def test_a_pipe_sees_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "_DELAY", 0)
    for work in WORK:
        work()
    assert capsys.readouterr().err == ""


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, delay=60)
    audit()
    assert "audit" not in stream.getvalue()


def test_without_tqdm_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # type: ignore[arg-type]
    audit()
    assert stream.getvalue() == ""
