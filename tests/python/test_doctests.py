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
        if module.name.rpartition(".")[2] != "__main__"
    ]
)


#: What the examples of a module need beside torch.
NEEDED = {
    "brim._progress": "tqdm",
    "brim.data._arrow": "pyarrow",
    "brim.integrations._lightning_finder": "lightning",
    "brim.integrations._lightning_steps": "lightning",
    "brim.integrations.datasets": "datasets",
    "brim.integrations.lightning": "lightning",
    "brim.integrations.pyg": "torch_geometric",
    "brim.integrations.pytorch_lightning": "pytorch_lightning",
    "brim.integrations.transformers": "transformers",
}


@pytest.mark.filterwarnings("ignore:::(datasets|lightning|pytorch_lightning|torch_geometric)")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("lightning" in name))  # to import
        for name in MODULES
    ],
)
def test_examples_in_docstrings(name: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples() -> None:
    assert {"brim", "brim.memory", "brim.testing"} <= set(MODULES)
    finder = doctest.DocTestFinder()
    for name in ("brim", "brim.memory", "brim.testing"):
        assert any(test.examples for test in finder.find(importlib.import_module(name))), name
