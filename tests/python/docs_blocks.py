"""Finds and runs the code blocks of the documentation; test_docs.py says what is asked of them.

A block's first line says what becomes of it:

    ```python                       runs; the blocks of a page share their names, in order, but
                                    those of README.md stand by themselves
    ```python file=train.py         is also written to that file, for commands that follow
    ```python needs=transformers    the page is skipped where that module is not installed
    ```python not run: REASON       is only compiled
    ```text                         what the block before printed; `...` stands for anything
    ```text numbers differ          the same up to numbers, and how often such a line stands there
    ```text of examples/x.py        what something else printed
    ```cpp                          statements: compiled as the body of a function
    ```cpp declarations             compiled as it stands
    ```cpp same as examples/cpp/x.cpp   also: it is that file, word for word (cmake too)
    ```console                      commands after `$`: those of `brim` are run, jobs in a slow test
                                    (a comment behind one is a line that it printed, up to numbers)

A comment behind an expression that is a Python literal is its value: `len(batches)  # 3`. A comment
behind a `print` begins with what was printed, up to numbers: `print(meter)  # 3 MiB: one matrix`.
Blocks in an HTML comment are not shown, and set up what a page leaves out.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
import traceback
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE_WITH = "2.13."
"""The version of torch that the pages show the output of."""
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>.*)$")
_NUMBER = re.compile(r"-?\d[\d.,]*(e-?\d+)?( ?([KMGT]i)?B\b)?( ?%)?")


@dataclass
class Block:
    """A code block: its language, the words after it, its text and where that begins."""

    language: str
    marks: str
    text: str
    line: int
    hidden: bool = False

    @property
    def file(self) -> str | None:
        found = re.search(r"file=(\S+)", self.marks)
        return found[1] if found else None

    @property
    def needs(self) -> str | None:
        found = re.search(r"needs=(\S+)", self.marks)
        return found[1] if found else None

    @property
    def not_run(self) -> str | None:
        found = re.search(r"not run: (.+)", self.marks)
        return found[1] if found else None


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a Markdown page or a notebook, in order."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        return [
            Block("python", "", "".join(cell["source"]), 1)
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    blocks: list[Block] = []
    open_block: Block | None = None
    closing, indent, comment = "", 0, False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = _FENCE.match(line)
        if open_block is not None:
            if line.strip() == closing:
                blocks.append(open_block)
                open_block = None
            else:
                open_block.text += line[indent:] + "\n"
        elif fence:
            language, _, marks = fence["info"].strip().partition(" ")
            open_block = Block(language, marks, "", number + 1, comment)
            closing, indent = fence["fence"], len(fence["indent"])
        elif "<!--" in line:
            comment = "-->" not in line
        elif "-->" in line:
            comment = False
    assert open_block is None, f"{page}: the block that begins at line {open_block} does not end"
    return blocks


def without_numbers(text: str) -> str:
    """The text with every number and its unit as `#`; lines that are then equal become one."""
    text = re.sub(r"[ -]*#[ ]*", " # ", re.sub(r"-{4,}", "----", _NUMBER.sub("#", text)))
    return "\n".join(line for line, _ in itertools.groupby(text.splitlines()))


class Page:
    """Runs the blocks of one page in a folder of its own, which is the current one."""

    def __init__(self, name: str, *, run_jobs: bool = False) -> None:
        self.name = name
        self.run_jobs = run_jobs  # what torchrun starts; else Python blocks
        self.names: dict[str, Any] = {"__name__": "__page__"}
        self.stand_alone = name == "README.md"  # each block by itself
        self.printed: str | None = None  # by the block before, if it was run

    def run(self, block: Block) -> None:
        if block.language == "python":
            self.printed = self._python(block)
        elif block.language == "console":
            self.printed = self._commands(block)
        elif block.language == "text" and self.printed and not block.marks.startswith("of "):
            self._compare(block, self.printed)

    def _python(self, block: Block) -> str | None:
        text, line = block.text, block.line
        if block.file:
            Path(block.file).write_text(text)
            line = 1
        if self.stand_alone:
            self.names = {"__name__": "__page__"}
        tree = ast.parse(text)
        if block.not_run or self.run_jobs:
            return None
        ast.increment_lineno(tree, line - 1)
        comments = _comments(text, line)
        shown: list[str] = []  # what was printed, but for lines that have it in a comment
        filename = block.file or self.name
        for statement in tree.body:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                if isinstance(statement, ast.Expr):
                    code = compile(ast.Expression(statement.value), filename, "eval")
                else:
                    code = compile(ast.Module([statement], []), filename, "exec")
                value = eval(code, self.names)
            printed, comment = output.getvalue(), comments.get(statement.end_lineno or 0)
            where = f"{self.name}:{statement.end_lineno}"
            if comment is None or not isinstance(statement, ast.Expr):
                shown.append(printed)
            elif printed.count("\n") == 1:
                start = without_numbers(printed.strip())
                assert without_numbers(comment).startswith(start), f"{where}: printed {printed}"
            elif printed:
                shown.append(printed)
            else:
                with contextlib.suppress(ValueError, SyntaxError):
                    assert value == ast.literal_eval(comment), f"{where}: {value!r}"
        return "".join(shown)

    def _compare(self, block: Block, printed: str) -> None:
        if not version("torch").startswith(MADE_WITH):
            return  # other versions keep and need other bytes
        seen, expected = printed.strip(), block.text.strip()
        if block.marks == "numbers differ":
            seen, expected = without_numbers(seen), without_numbers(expected)
        same = doctest.OutputChecker().check_output(expected, seen, doctest.ELLIPSIS)
        assert same, f"{self.name}:{block.line}: the block before printed\n{printed}"

    def _commands(self, block: Block) -> str | None:
        printed = None
        for line in block.text.splitlines():
            if line.startswith("$ "):
                printed = self._command(shlex.split(line[2:], comments=True))
                _, _, comment = line.partition("  # ")
                shown = {without_numbers(each.strip()) for each in (printed or "").splitlines()}
                if printed and comment:
                    assert without_numbers(comment) in shown, f"{self.name}: {line}\n{printed}"
        return printed

    def _command(self, words: list[str]) -> str | None:
        """What a command prints, where it is run: those of `brim`, and jobs if they are wanted."""
        command, *arguments = words
        if command == "./dev":
            assert f"cmd_{arguments[0]}()" in (ROOT / "dev").read_text(), words
        elif command == "brim" and not self.run_jobs:
            from brim.cli import main

            with contextlib.redirect_stdout(io.StringIO()) as output:
                status = main(arguments)
            assert status in (0, 1), f"{self.name}: {words} ended with {status}"
            return output.getvalue()
        elif command == "torchrun" and self.run_jobs:
            run = [sys.executable, "-m", "torch.distributed.run", *arguments]
            done = subprocess.run(run, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            return done.stdout
        return None


def _comments(text: str, line: int) -> dict[int, str]:
    """The comments of a block, by the line at whose end they are."""
    return {
        token.start[0] + line - 1: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }


def run_page(page: Path, *, run_jobs: bool = False) -> str | None:
    """Run the blocks of a page in the current folder; returns what the last one printed."""
    import torch

    blocks = blocks_of(page)
    # Frameworks warn of each other.
    warnings.simplefilter("ignore" if any(block.needs for block in blocks) else "error")
    if "integrations" in page.parts:  # frameworks warn of torch and of each other
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="brim|__page__")
    sys.path.insert(0, os.getcwd())  # files that a page writes can be imported by it
    torch.manual_seed(0)
    torch.set_num_threads(1)
    runner = Page(str(page.relative_to(ROOT)), run_jobs=run_jobs)
    for block in blocks:
        runner.run(block)
    return runner.printed


def run_program(program: Path) -> None:
    """Run a program as `python -W error` does; it must print something."""
    warnings.simplefilter("error")
    sys.argv = [str(program)]
    sys.path.insert(0, str(program.parent))
    with open(".printed", "w") as printed:
        os.dup2(printed.fileno(), 1)  # also for the processes that it starts
        runpy.run_path(str(program), run_name="__main__")
        sys.stdout.flush()
    assert Path(".printed").stat().st_size > 0, "an example shows something"


def serve() -> None:
    """Run the pages and programs named on standard input, each with a folder to run in.

    Each runs in a process of its own, which holds no tensors of others and has torch loaded. Writes
    a line of JSON for each: what went wrong, or "".
    """
    import torch._dynamo  # noqa: F401  what many pages import is loaded once: a second each

    import brim.cli  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed does not get in between
    for line in sys.stdin:
        name, folder = json.loads(line)
        error = Path(folder) / ".error"
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            try:
                (run_program if name.endswith(".py") else run_page)(ROOT / name)
            except BaseException:
                error.write_text(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        said = error.read_text() if error.exists() else f"ended with status {status}"
        print(json.dumps(said if status else ""), file=answers, flush=True)


if __name__ == "__main__":
    serve()
