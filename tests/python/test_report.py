"""Figures go from a benchmark's table into the documentation, by one script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from .docs_blocks import ROOT

sys.path += [str(ROOT / "tools"), str(ROOT / "benchmarks"), str(ROOT / "docs" / "pictures")]

import report
from results import Panel, Table

HEAD = ("network", "torch, ms", "brim")
PAGE = """Before.

<!-- table: fake -->
<!-- end -->

<!-- table: kept -->
<!-- end -->

<!-- table: others -->
<!-- end -->

<!-- table: pictures -->
<!-- end -->
After.
"""


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page, and data of a benchmark that is not measured again."""
    (tmp_path / "results").mkdir()
    (tmp_path / "page.md").write_text(PAGE)
    row = {"run": {"torch": "2.11"}, "cells": {"network": "BERT", "brim": "**0.5**"}}
    old = {"title": "Old", "machine": "NVIDIA H200", "panels": [], "rows": [row]}
    report.write(tmp_path, "kept", [old])
    monkeypatch.setenv("BRIM_REPORT", str(tmp_path / "rows"))
    return tmp_path


def measure(pages: Path, *rows: Sequence[str], title: str = "Time", name: str = "fake") -> str:
    """Run a benchmark that finds these rows, and report them; returns the page."""
    (pages / "rows").write_text("")
    table = Table(title, HEAD, panels=[Panel("time", ["brim"], baseline=1)])
    for cells in rows:
        table.row(*cells)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", name, str(pages / "rows")])
        report.main(pages)
    return (pages / "page.md").read_text()


def lines(page: str, name: str) -> list[str]:
    """What stands between the markers of a table."""
    found = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found
    return [line for line in found[1].splitlines() if line]


def test_rows_arrive_with_machine_versions_and_date(pages: Path) -> None:
    page = measure(pages, ("BERT", "31.1", "0.97"), ("a_b | <c>", "2.0"))
    *table, origin = lines(page, "fake")
    assert table == [
        "**Time**",
        "| network | torch, ms | brim |",
        "| --- | --- | --- |",
        "| BERT | 31.1 | 0.97 |",
        r"| a\_b \| \<c> | 2.0 | |",
    ]
    assert re.fullmatch(
        r"\*.+, \d+ cores; \d{4}-\d\d-\d\d with torch 2.*, brim .*, Python .*\*", origin
    )
    assert page.startswith("Before.\n")
    assert page.endswith("After.\n")


def test_a_second_time_changes_nothing(pages: Path) -> None:
    page = measure(pages, ("BERT", "31.1", "0.97"))
    data = (pages / "results" / "fake.json").read_text()
    assert measure(pages, ("BERT", "31.1", "0.97")) == page
    assert (pages / "results" / "fake.json").read_text() == data


def test_only_rows_measured_again_change(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine_of", lambda device: "one")
    measure(pages, ("BERT", "31.1", "0.97"), ("ViT", "5.0", "0.9"))
    tables = report.read(pages)["fake"]
    tables[0]["rows"][0]["run"] = tables[0]["rows"][1]["run"] = {"date": "2020-01-01"}
    report.write(pages, "fake", tables)
    found = lines(measure(pages, ("BERT", "30.0", "0.95")), "fake")
    assert found[3:5] == ["| BERT | 30.0 | 0.95 |", "| ViT | 5.0 | 0.9 |"]
    assert re.fullmatch(r"\*one; BERT: 2.* with torch .*; ViT: 2020-01-01\*", found[5])

    monkeypatch.setattr(report, "machine_of", lambda device: "two")
    both = lines(measure(pages, ("BERT", "9.0", "0.5")), "fake")
    assert both[:6] == found
    assert "| BERT | 9.0 | 0.5 |" in both[6:]


def test_other_benchmarks_keep_their_rows(pages: Path) -> None:
    page = measure(pages, ("BERT", "31.1", "0.97"))
    assert not lines(page, "others")
    expected = ["| BERT | **0.5** |", "*NVIDIA H200; torch 2.11*"]
    assert lines(page, "kept")[-2:] == expected
    page = measure(pages, ("BERT", "1.0", "1.0"), name="more")
    assert lines(page, "kept")[-2:] == expected
    assert lines(page, "others")[:2] == ["## Other benchmarks", "### `./dev bench more`"]
    assert "```{image} ../_generated/pictures/results_more_0.svg" in lines(page, "pictures")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: unknown -->\n<!-- end -->\n", "'unknown' is none of kept, others"),
        ("<!-- table: kept -->\n", "no <!-- end -->"),
        ("<!-- table: kept -->\n<!-- table: kept -->\n<!-- end -->\n", "no <!-- end -->"),
    ],
)
def test_wrong_markers_are_errors(pages: Path, page: str, message: str) -> None:
    (pages / "page.md").write_text(page)
    with pytest.raises(ValueError, match=message):
        report.filled(pages)


def test_a_benchmark_without_rows_leaves_nothing(pages: Path) -> None:
    page = measure(pages, ("BERT", "31.1", "0.97"))
    assert measure(pages, name="more") == page
    assert "more" not in report.read(pages)


def test_rows_of_one_name_are_an_error(pages: Path) -> None:
    with pytest.raises(ValueError, match="two rows of 'Time' are called 'BERT'"):
        measure(pages, ("BERT", "31.1", "0.97"), ("BERT", "31.2", "0.98"))


def test_the_pages_are_what_the_data_says() -> None:
    for page, text in report.filled(report.PAGES).items():
        assert page.read_text() == text, f"{page.name}: run python tools/report.py"


def test_every_picture_of_the_page_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import measured

    measured.draw(tmp_path)
    page = (report.PAGES / "results_pictures.md").read_text()
    names = re.findall(r"_generated/pictures/(\S+)", page)
    assert names
    assert sorted(names) == sorted(file.name for file in tmp_path.iterdir())
    assert measured.value("0.52 / 0.60 / 1.10 to 1.12", 2) == 1.10
    assert measured.value("- / 1.28 checkpoint", 0) is None


@pytest.mark.slow
def test_cpp_writes_the_same_lines(tmp_path: Path, pages: Path) -> None:
    (tmp_path / "table.cpp").write_text(
        '#include "harness.h"\n'
        'int main() { brim::bench::Table("A \\"title\\"", "cpu").row("case\\\\1", "3 ns"); }\n'
    )
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    command = [compiler, "-std=c++20", f"-I{ROOT / 'benchmarks'}", "table.cpp", "-o", "table"]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "table"], check=True)
    Table('A "title"').row("case\\1", "3 ns", "", "")
    theirs, ours = map(json.loads, (pages / "rows").read_text().splitlines())
    del ours["cells"]["note"]
    assert theirs == {**ours, "peers": {}}
