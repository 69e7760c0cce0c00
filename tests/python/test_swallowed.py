"""No handler of brim swallows out of memory: it would become another error, or another answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import brim

ROOT = Path(__file__).parents[2]
PACKAGE = Path(brim.__file__).resolve().parent
if (ROOT / "python" / "brim").is_dir():
    PACKAGE = ROOT / "python" / "brim"

# torch.OutOfMemoryError is a RuntimeError, and the interpreter may make a SystemError of it.
WIDE = {"RuntimeError", "SystemError", "MemoryError", "Exception", "BaseException"}
ASKS = {"is_out_of_memory", "classify_error"}

ALLOWED = {
    # Python: file and function, and why memory cannot run out there or nobody need know.
    "adapt/_identity.py _configuration": "a text for people",
    "adapt/_microbatches.py _run_pass": "replaces another error of torch alone, by its text",
    "adapt/_options.py _directory": "of Path.expanduser: no tensors",
    "cli/__init__.py _run": "prints it, with the line of the program: the end of the process",
    "cli/audit.py run": "prints its text with the shapes that were asked for: the same",
    "cli/arguments.py function": "an import, whose error becomes an argument's, with its text",
    "compat/bionemo/size_aware_batching/sampler.py _batches": "a RuntimeError from it counts too",
    "data/even.py _read": "kept, and raised after the steps that the other ranks count on",
    "data/sizes.py at_once": "the caller reads the values one by one instead",
    "dist.py _timeout": "of a lookup of a backend",
    "_estimate/_target.py target_device": "of torch.device: no tensors",
    "_estimate/_target.py stats_of": "of statistics: no tensors",
    "_estimate/_estimate.py _trace": "replaces errors of fake tensors alone, by their texts",
    "_estimate/_first_size.py _search": "foresight is a hint, and the call itself will raise it",
    "_state/reach.py attributes_of": "of an attribute that may be a property",
    "_estimate/_surroundings.py _read": "of a setting: no tensors",
    "_estimate/_swap.py _put_back": "a tensor without values is worse; the error names the cause",
    "_explain/_block.py _tell": "the error that is explained counts more, and is raised",
    "_explain/_block.py _replayed": "becomes a note; the error that is explained is raised",
    "_explain/_held.py _storages": "of an attribute of a tensor: no memory is taken",
    "cli/run.py run": "prints it with its traceback, as the interpreter does",
    "nn/_values.py identity": "of an attribute: no memory is taken",
    "nn/_values.py bytes_of": "of an attribute: no memory is taken",
}


def wide_names(kind: ast.expr | None) -> set[str]:
    """Which of the types of a handler catch out of memory."""
    if kind is None:
        return {"BaseException"}
    parts = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return {part.id for part in parts if isinstance(part, ast.Name)} & WIDE


def asks(node: ast.AST) -> bool:
    names = (
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, (ast.Name, ast.Attribute))
    )
    return not ASKS.isdisjoint(names)


def raises_at_the_end(body: list[ast.stmt]) -> bool:
    """Whether a handler ends with a plain `raise`, and has no other way out."""
    last = body[-1]
    leaves = any(isinstance(each, ast.Return) for each in ast.walk(ast.Module(body, [])))
    return isinstance(last, ast.Raise) and last.exc is None and not leaves


def swallowing(tree: ast.AST) -> list[tuple[str, int]]:
    """The function and the line of each handler that would swallow out of memory."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.ExceptHandler) and wide_names(node.type):
            is_fine = raises_at_the_end(node.body) or asks(ast.Module(node.body[:1], []))
            found.extend([] if is_fine else [(function, node.lineno)])
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "suppress"
            and any(wide_names(each) for each in node.args)
        ):
            found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def test_no_handler_of_python_swallows_out_of_memory() -> None:
    unknown, used = [], set()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        for function, line in swallowing(ast.parse(file.read_text(encoding="utf-8"))):
            if f"{name} {function}" in ALLOWED:
                used.add(f"{name} {function}")
            else:
                unknown.append(f"{name}:{line} in {function}")
    advice = "ask is_out_of_memory first, raise, or give a reason in ALLOWED"
    assert not unknown, f"{advice}: {unknown}"
    assert used == ALLOWED.keys(), "these no longer catch anything"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: g()", True),
        ("try: f()\nexcept (KeyError, RuntimeError) as e: raise TypeError() from e", True),
        ("try: f()\nexcept RuntimeError:\n  if g(): return 1\n  raise", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept ValueError: pass", False),
        ("try: f()\nexcept BaseException:\n  g()\n  raise", False),
        ("try: f()\nexcept Exception as e:\n  if is_out_of_memory(e): raise\n  g()", False),
    ],
)
def test_the_lint_finds_what_swallows(code: str, is_found: bool) -> None:
    assert bool(swallowing(ast.parse(code))) == is_found


# C++: a handler is fine if it rethrows, keeps the error for later, or asks. The others have a word
# in a comment on their first line, or right before or after it.
HANDLER = re.compile(r"catch \((?:\.\.\.|const (?:std::exception|c10::Error|std::runtime_error)&)")
PASSES_ON = re.compile(
    r"\bthrow\b|current_exception|is_out_of_memory|classify|rethrow_exception|throw_\w+\(|translate_exception"
)


def block_after(text: str, at: int) -> str:
    """The text of the braces that open after a place."""
    start = text.index("{", at)
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    return text[start:]


def cpp_files() -> list[Path]:
    folders = [ROOT / "src", ROOT / "include", ROOT / "python" / "bindings"]
    files = (each for folder in folders for each in folder.rglob("*"))
    return sorted(each for each in files if each.suffix in (".h", ".cpp"))


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="needs the sources")
def test_no_handler_of_cpp_swallows_out_of_memory() -> None:
    found = []
    for file in cpp_files():
        text = file.read_text(encoding="utf-8")
        for match in HANDLER.finditer(text):
            block = block_after(text, match.start())
            if not PASSES_ON.search(block) and "//" not in block:
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{file.relative_to(ROOT)}:{line}")
    assert not found, f"pass it on, ask is_out_of_memory, or say why not in a comment: {found}"
