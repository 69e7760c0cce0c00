"""What holds for all of `brim.integrations`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from .patience import FOR_EVER

FRAMEWORKS = ["accelerate", "datasets", "lightning", "pyarrow", "pytorch_lightning"]
FRAMEWORKS += ["torch_geometric", "torchdata", "transformers"]


def test_frameworks_are_imported_only_where_they_are_asked_for() -> None:
    code = f"""
import sys
import brim
assert "brim.integrations" not in sys.modules
from brim.integrations import accelerate, datasets, pyg
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=FOR_EVER
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("pytorch_lightning", "pytorch_lightning", "lightning"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_a_framework_that_is_missing_is_one_sentence(
    module: str, framework: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (framework, f"{framework}.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"brim.integrations.{module}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"brim.integrations.{module}")
    sentence = f"brim.integrations.{module} needs {framework}: pip install 'brim[{extra}]'"
    assert str(caught.value) == sentence
