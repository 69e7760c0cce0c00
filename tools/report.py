"""Brings rows that benchmarks wrote into the documentation; `./dev bench --report` calls this.

    python tools/report.py                      write the pages from docs/explanation/results
    python tools/report.py BENCHMARK ROWS       take these rows in before (benchmarks/results.py)

docs/explanation/results holds a file per benchmark: tables, each of one machine, with date and
versions of each row. In a page, a table stands between `<!-- table: BENCHMARK -->` and
`<!-- end -->`, where only this script writes. The name `others` stands for the benchmarks that no
page names, and `pictures` for the pictures, which `docs/pictures/measured.py` draws.

A row is known by its table's title, its machine and its first cell. A new one replaces an old one;
rows that were not measured again stay, with their date.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[1] / "docs" / "explanation"

Run = dict[str, str]  # the date, and the versions by name
Table = dict[str, Any]  # title, machine, panels, and rows: each a run and cells by column
Data = dict[str, list[Table]]

_MARKER = re.compile(r"^<!-- table: (.+?) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)

# -- Data ------------------------------------------------------------------------------------------


def read(pages: Path) -> Data:
    """The tables of each benchmark."""
    files = sorted((pages / "results").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def write(pages: Path, name: str, tables: Iterable[Table]) -> None:
    """Write a benchmark's file, each row on a line of its own."""
    texts = []
    for table in tables:
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in table["rows"])
        rest = json.dumps({**table, "rows": None}, ensure_ascii=False)
        texts.append(rest.removesuffix("null}") + f"[\n{rows}\n]}}")
    (pages / "results" / f"{name}.json").write_text(f"[{','.join(texts)}]\n")


def put(tables: list[Table], line: Mapping[str, Any], machine: str, run: Run) -> None:
    """Put a row that was measured where it belongs."""
    key = {"title": line["title"], "machine": machine}
    table = next((each for each in tables if key.items() <= each.items()), None)
    if table is None:
        table = {**key, "panels": [], "rows": []}
        tables.append(table)
    table["panels"] = line["panels"]
    cells = {name: re.sub(r"([_<|])", r"\\\1", cell) for name, cell in line["cells"].items()}
    row = {"run": run, "cells": cells}
    rows = {name_of(each): each for each in table["rows"]}
    before = rows.get(name_of(row))
    if before is not None and before["run"] is run:
        raise ValueError(f"two rows of {line['title']!r} are called {name_of(row)!r}")
    rows[name_of(row)] = row
    table["rows"] = list(rows.values())


def name_of(row: Mapping[str, Any]) -> str:
    """The first cell."""
    return str(next(iter(row["cells"].values())))


def machine_of(device: str) -> str:
    """The name of this machine's CPU or accelerator."""
    if device != "cpu":
        import torch

        return str(torch.get_device_module(device).get_device_name())
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def take_in(pages: Path, name: str, rows: Path) -> None:
    """Take the rows of one run into a benchmark's file."""
    import torch

    import brim

    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    if not lines:  # what it measures is not there, such as a GPU
        return
    run: Run = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    run |= {"brim": brim.__version__, "Python": platform.python_version()}
    for line in lines:
        run |= line["peers"]
    tables = read(pages).get(name, [])
    for line in lines:
        put(tables, line, machine_of(line["device"]), run)
    write(pages, name, tables)


# -- Pages -----------------------------------------------------------------------------------------


def lines_of(table: Table) -> Iterator[str]:
    """A table as Markdown, with its title, and below it where its rows are from."""
    if table["title"]:
        yield from (f"**{table['title']}**", "")
    columns = dict.fromkeys(column for row in table["rows"] for column in row["cells"])
    head = [c for c in columns if any(row["cells"].get(c) for row in table["rows"])]
    rows = [[row["cells"].get(column, "") for column in head] for row in table["rows"]]
    for cells in (head, ["---"] * len(head), *rows):
        yield "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
    origins: dict[str, list[str]] = {}
    for row in table["rows"]:
        versions = [f"{name} {each}" for name, each in row["run"].items() if name != "date"]
        origin = " with ".join(filter(None, [row["run"].get("date"), ", ".join(versions)]))
        origins.setdefault(origin, []).append(name_of(row))
    several = [f"{', '.join(names)}: {origin}" for origin, names in origins.items()]
    parts = filter(None, [table["machine"], *(several if len(origins) > 1 else origins)])
    yield ""
    if origin := "; ".join(parts):
        yield from (f"*{origin}*", "")


def others(data: Data, shown: set[str]) -> Iterator[str]:
    """All benchmarks that no page names, under a heading if there are any."""
    names = sorted(data.keys() - shown)
    if names:
        yield from ("## Other benchmarks", "")
    for name in names:
        yield from (f"### `./dev bench {name}`", "")
        for table in data[name]:
            yield from lines_of(table)


def pictures(data: Data) -> Iterator[str]:
    """The pictures of all tables that have one."""
    for file, table in drawn(data):
        title = table["title"]
        yield from (f"## {title}", "", f"```{{image}} ../_generated/pictures/{file}")
        yield from (f":alt: {title}", "```", "", f"*{table['machine']}*", "")


def drawn(data: Data) -> Iterator[tuple[str, Table]]:
    """The file of each picture, and the table that it shows."""
    for name, tables in data.items():
        for place, table in enumerate(tables):
            if table["panels"]:
                yield f"results_{name}_{place}.svg", table


def filled(pages: Path) -> dict[Path, str]:
    """What the pages are to be."""
    data = read(pages)
    texts = {page: page.read_text() for page in sorted(pages.glob("*.md"))}
    shown: set[str] = set()
    for page, text in texts.items():
        names = _MARKER.findall(text)
        if text.count("<!-- table:") != len(names):
            raise ValueError(f"{page.name}: a table has no <!-- end -->")
        shown.update(names)

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name == "others":
            lines = others(data, shown)
        elif name == "pictures":
            lines = pictures(data)
        elif name in data:
            lines = itertools.chain.from_iterable(map(lines_of, data[name]))
        else:
            raise ValueError(f"table {name!r} is none of {', '.join(data)}, others, pictures")
        return "\n".join([f"<!-- table: {name} -->", "", *lines, "<!-- end -->"])

    return {page: _MARKER.sub(fill, text) for page, text in texts.items()}


def main(pages: Path = PAGES) -> None:
    """Take rows in if they are given, then write the pages."""
    if sys.argv[1:]:
        take_in(pages, sys.argv[1], Path(sys.argv[2]))
    for page, text in filled(pages).items():
        if text != page.read_text():
            page.write_text(text)
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
