"""What README.md and docs/ show is what happens: every block runs, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

import brim

from .docs_blocks import NOTEBOOKS, PAGES, ROOT, Block, blocks_of, run_page

LANGUAGES = {"python", "text", "cpp", "cmake", "console", "mermaid"}
SHOWN_WHOLE = [
    page for page in PAGES if page.name == "README.md" or "howto" in page.parts
]  # what people copy


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_blocks(*languages: str) -> list[Path]:
    return [
        page
        for page in [*PAGES, *NOTEBOOKS]
        if any(block.language in languages for block in blocks_of(page))
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Runs pages one after the other: see `docs_blocks.serve`."""
    run = [sys.executable, str(Path(__file__).with_name("docs_blocks.py"))]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the pages are about a CPU
    with subprocess.Popen(run, stdin=PIPE, stdout=PIPE, text=True, env=without_gpu) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def takes_long(page: Path) -> bool:
    """Frameworks take seconds to import, and estimates of large models too. They have tests."""
    return "integrations" in page.parts or page.name in ("command_line.md", "estimate.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if takes_long(page) else ())
        for page in with_blocks("python", "console")
    ],
    ids=name_of,
)
def test_blocks_run(page: Path, tmp_path: Path, server: subprocess.Popen[str]) -> None:
    for block in blocks_of(page):
        if block.needs and importlib.util.find_spec(block.needs) is None:
            pytest.skip(f"needs {block.needs}")
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([name_of(page), str(tmp_path)]), file=server.stdin, flush=True)
    wrong = json.loads(server.stdout.readline())
    assert not wrong, wrong


@pytest.mark.slow
def test_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_page(ROOT / "docs" / "howto" / "several_ranks.md", run_jobs=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks_of(page):
        known = block.language in LANGUAGES or block.language.startswith("{")
        assert known, f"{name_of(page)}:{block.line}: {block.language!r} is none of {LANGUAGES}"
        assert page not in SHOWN_WHOLE or not block.hidden, f"{name_of(page)}:{block.line}"


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub and MyST make of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists() or "_generated" in path, f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{name_of(page)}: {link}"


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("module", [brim, brim.data, brim.nn, brim.nn.functional, brim.testing])
def test_every_public_name_is_in_the_reference(module: object) -> None:
    reference = (ROOT / "docs" / "reference" / "python.md").read_text()
    modules = {"data", "nn", "testing", "functional"}
    for name in (*module.__all__, *(["range"] if module is brim else [])):  # type: ignore[attr-defined]
        if name not in modules | {"DeviceLike"}:
            assert re.search(rf"^(   |.. \w+:?\w*:: ){name}\b", reference, re.MULTILINE), name


def test_every_header_is_in_the_reference() -> None:
    folder = ROOT / "docs" / "reference" / "cpp"
    listed = re.findall(r"{doxygenfile} (\S+)", "".join(p.read_text() for p in folder.glob("*.md")))
    headers = (ROOT / "include" / "brim").glob("*/*.h")
    assert sorted(listed) == sorted(header.name for header in headers)


def test_shown_files_are_those_of_the_examples() -> None:
    shown = [
        (block, match[1])
        for page in PAGES
        for block in blocks_of(page)
        if (match := re.search(r"same as (\S+)", block.marks))
    ]
    assert shown
    for block, path in shown:
        assert block.text == (ROOT / path).read_text(), path


def as_source(pages: list[Path]) -> str:
    """One C++ file of all blocks: a namespace for each page, a function for each block."""
    includes: list[str] = []
    body: list[str] = []

    def add(block: Block, page: Path, number: int) -> None:
        lines = block.text.splitlines()
        includes.extend(line for line in lines if line.startswith("#include"))
        lines = ["" if line.startswith("#include") else line for line in lines]
        if "declarations" not in block.marks:
            lines = [f"[[maybe_unused]] void block_{number}() {{", *lines, "}"]
        body.append(f'#line {block.line} "{name_of(page)}"')
        body.extend(lines)

    for number, page in enumerate(pages):
        body.append(f"namespace page_{number} {{")
        for count, block in enumerate(blocks_of(page)):
            if block.language == "cpp":
                add(block, page, count)
        body.append("}")
    return "\n".join([*dict.fromkeys(includes), *body, ""])


@pytest.mark.slow
def test_cpp_blocks_compile(tmp_path: Path) -> None:
    from torch.utils.cpp_extension import include_paths

    source = tmp_path / "blocks.cpp"
    source.write_text(as_source(with_blocks("cpp")))
    built = Path(brim._C.__file__).parents[2] / "include"  # version.h, made by CMake
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-w", f"-I{ROOT / 'include'}", f"-I{built}"]
        + [f"-isystem{path}" for path in include_paths()]
        + [str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for module in ("breathe", "furo", "myst_nb", "sphinxcontrib.mermaid", "matplotlib"):
        pytest.importorskip(module)
    if not shutil.which("doxygen"):
        pytest.skip("needs doxygen")
    (ROOT / "build" / "doxygen").mkdir(parents=True, exist_ok=True)
    subprocess.run(["doxygen", "docs/Doxyfile"], cwd=ROOT, check=True)
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-q",
        "docs",
        str(tmp_path),
    ]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
