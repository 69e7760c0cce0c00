"""Runs the examples in the docstrings of every module."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import brim

MODULES = sorted(
    ["brim"]
    + [
        module.name
        for module in pkgutil.walk_packages(brim.__path__, "brim.")
        if module.name.rpartition(".")[2] not in {"__main__", "_C"}
    ]
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples() -> None:
    assert {"brim", "brim.memory", "brim.testing"} <= set(MODULES)
    finder = doctest.DocTestFinder()
    for name in ("brim", "brim.memory", "brim.testing"):
        assert any(test.examples for test in finder.find(importlib.import_module(name))), name
