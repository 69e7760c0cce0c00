"""Python has floors: nothing imports what is above it, also inside of functions."""

from __future__ import annotations

import ast
import importlib
import pickle
import pkgutil
import re
from pathlib import Path

import brim

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "brim"

# Lowest first, as in CONTRIBUTING.md. What stands on one floor does not import each other.
FLOORS = [
    "_C _build_info",
    "_torch_version _arguments _plots _progress _table _users_code _warn _whole_file",
    "_state",
    "memory dist",
    "predict testing",
    "_estimate",
    "adapt _explain",
    "nn data",
    "brim",  # the public names: python/brim/__init__.py
    "plot",
    "cli integrations compat",
    "__main__",
]
FLOOR_OF = {name: height for height, names in enumerate(FLOORS) for name in names.split()}
LATE = ("_plots", "plot")  # the one late import


def part_of(module: str) -> str:
    return [*module.split("."), "brim"][1]


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {part_of(each.name) for each in node.names if re.match(r"brim\b", each.name)}
        elif isinstance(node, ast.ImportFrom) and node.module == "brim":
            inner = {each.name for each in node.names}
            found |= {name if name in FLOOR_OF else "brim" for name in inner}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("brim."):
            found.add(part_of(str(node.module)))
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"relative import in {file}"
    return found


def test_nothing_imports_what_is_above() -> None:
    upward = []
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).with_suffix("").parts[0].replace("__init__", "brim")
        for other in imports_of(file) - {own}:
            if FLOOR_OF[other] >= FLOOR_OF[own] and (own, other) != LATE:
                upward.append(f"{file.relative_to(PACKAGE)} imports {other}")
    assert not upward


def test_bindings_import_no_module_of_ours() -> None:
    for file in (ROOT / "python" / "bindings").iterdir():
        assert not re.search(r'[iI]mport\w*\("brim', file.read_text()), file.name


def test_no_variable_of_the_bindings_is_initialised_by_python_late() -> None:
    """Two threads that need it first would wait for each other: see `provided`."""
    runs_python = re.compile(r"import\(|attr\(|attribute\(|invoke\(|eval\(")
    for file in (ROOT / "python" / "bindings").iterdir():
        for found in re.findall(r"\bstatic\b[^;(]*=[^;]*;", file.read_text()):
            assert not runs_python.search(found), f"{file.name}: {found}"


def test_contributing_draws_the_floors() -> None:
    drawn = (ROOT / "CONTRIBUTING.md").read_text()
    for name in FLOOR_OF.keys() - {"_build_info", "_torch_version", "_C", "__main__", "brim"}:
        assert f"`{name}`" in drawn, name


def test_estimate_is_the_function_whatever_is_imported() -> None:
    for module in pkgutil.iter_modules(brim._estimate.__path__, "brim._estimate."):
        importlib.import_module(module.name)
    assert brim.estimate(lambda: None, device="cpu").peak == 0
    assert pickle.loads(pickle.dumps(brim.estimate)) is brim.estimate
