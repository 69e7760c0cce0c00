"""Every public name has a docstring, and every public class and function an example in it.

`test_doctests.py` runs the examples.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import brim

# How convert knows classes; CONTRIBUTING.md is for those who add one. The command line has --help.
INTERNAL = ("brim.nn.recognisers", "brim.cli", "brim.__main__")
# They import packages that may not be there and take seconds: their source is read instead.
OPTIONAL = ("brim.integrations.", "brim.plot")
# Public, but not in `__all__`: `from brim import *` would replace a builtin.
STARLESS = {brim: ("range",)}


def public_modules() -> Iterator[ModuleType]:
    yield brim
    for found in pkgutil.walk_packages(brim.__path__, "brim."):
        private = any(part.startswith("_") for part in found.name.split("."))
        if not private and not found.name.startswith((*INTERNAL, *OPTIONAL)):
            yield importlib.import_module(found.name)


def public_objects() -> dict[str, Any]:
    """Classes and functions by their shortest name."""
    names: dict[int, str] = {}
    objects: dict[str, Any] = {}
    for module in public_modules():
        for name in (*getattr(module, "__all__", ()), *STARLESS.get(module, ())):
            found = getattr(module, name)
            if (inspect.isclass(found) or inspect.isroutine(found)) and id(found) not in names:
                names[id(found)] = f"{module.__name__}.{name}"
                objects[names[id(found)]] = found
    return objects


OBJECTS = public_objects()


def doc_of(found: Any) -> str:
    """Its own docstring, not that of a base class."""
    inherited = inspect.isclass(found) and "__doc__" not in vars(found)
    return "" if inherited else found.__doc__ or ""


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class and of those of brim that it derives from."""
    for base in kind.__mro__:
        if base.__module__.startswith("brim"):
            for name, value in vars(base).items():
                is_member = inspect.isroutine(value) or inspect.isdatadescriptor(value)
                of_enum = hasattr(base, "__members__") and name == "value"  # pybind11's own
                if is_member and not of_enum and not name.startswith("_"):
                    yield name, value


def test_the_walk_finds_what_is_public() -> None:
    assert {"brim.maximize", "brim.PeakMeter", "brim.nn.ReLU", "brim.nn.functional.relu"} <= {
        *OBJECTS
    }
    assert {"brim.data.PackedBatchSampler", "brim.testing.inject_oom"} <= {*OBJECTS}
    assert {name for name, _ in members_of(brim.MemoryModel)} >= {"fit", "probe", "samples"}


@pytest.mark.parametrize("name", OBJECTS)
def test_has_a_docstring_with_an_example(name: str) -> None:
    assert ">>> " in doc_of(OBJECTS[name]), f"{name} has no example in its docstring"


@pytest.mark.parametrize("name", [name for name, kind in OBJECTS.items() if inspect.isclass(kind)])
def test_methods_and_properties_have_docstrings(name: str) -> None:
    missing = []
    for member, value in members_of(OBJECTS[name]):
        overridden = any(
            getattr(vars(base).get(member), "__doc__", None) for base in OBJECTS[name].__mro__
        )
        if not getattr(value, "__doc__", None) and not overridden:
            missing.append(member)
    assert not missing, f"{name} has no docstring for {', '.join(missing)}"


@pytest.mark.parametrize(
    "path",
    sorted((Path(brim.__file__).parent / "integrations").glob("[!_]*.py")),
    ids=lambda p: p.stem,
)
def test_integrations_have_docstrings_with_examples(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        source = ast.unparse(node.body[0])
        assert ">>> " in source or source.startswith("__doc__ ="), f"{node.name} has no example"


def test_help_of_brim_is_a_map() -> None:
    text = brim.__doc__ or ""
    missing = [
        name
        for name in (*brim.__all__, *STARLESS[brim])
        if not name.startswith("__") and f"`{name}`" not in text and f"brim.{name}" not in text
    ]
    assert not missing, f"brim's docstring does not name {', '.join(missing)}"


def test_star_imports_replace_no_builtin() -> None:
    for module in public_modules():
        replaced = {*getattr(module, "__all__", ())} & {*vars(builtins)}
        assert not replaced, f"from {module.__name__} import * replaces {replaced}"
    names: dict[str, Any] = {}
    exec("from brim import *; from brim.adapt import *; three = [*range(3)]", names)
    assert names["three"] == [0, 1, 2]
    assert brim.range is brim.adapt.range is not range
