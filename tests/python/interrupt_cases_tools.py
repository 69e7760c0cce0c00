"""The command line and pictures, as calls that interrupts are tried at."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import re
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch

import brim
from brim.cli import demo, main
from brim.cli.demo import batched, converted
from brim.data import PackedBatchSampler

from .interrupt_cases import LENGTHS, case, fails_above_two, model
from .interrupts import Case


def needs(*packages: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """A case where these are installed."""
    there = all(map(importlib.util.find_spec, packages))
    return case if there else lambda make: make


# -- Files -----------------------------------------------------------------------------------------

ENDS = {".html": b"</html>\n", ".svg": b"</svg>\n", ".png": b"IEND\xaeB`\x82", ".pdf": b"%%EOF\n"}


def is_whole(file: Path) -> bool:
    if file.suffix in ENDS:
        return file.read_bytes().endswith(ENDS[file.suffix])
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(file).num_rows > 0
        if file.suffix in (".npy", ".npz"):
            loaded = np.load(file)
            return len(loaded if file.suffix == ".npy" else loaded["indices"]) > 0
    except (ValueError, OSError, EOFError):
        return False
    return True


class Folder:
    """Files that are there after an interrupt as before, each of them whole."""

    def __init__(self, texts: Mapping[str, str] = MappingProxyType({})) -> None:
        made = tempfile.TemporaryDirectory()
        self._end = weakref.finalize(self, made.cleanup)
        self.path = Path(made.name)
        for name, text in texts.items():
            self.path.joinpath(name).write_text(text)

    def leaves(self) -> dict[str, Any]:
        files = sorted(self.path.rglob("*"))
        return {str(each): is_whole(each) for each in files if "__pycache__" not in each.parts}


# -- The command line ------------------------------------------------------------------------------

STEP = """
import torch

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

def step(size=3):
    net(torch.ones(size, 4)).sum().backward()
"""

TOO_MUCH = """
import sys, torch

print(sys.argv)
raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


CONFIG = """{
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50,
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "torch_dtype": "bfloat16"
}"""


def words_alone(text: str) -> list[str]:
    """Without sizes, times and folders, which vary."""
    return re.findall("[A-Za-z]{4,}", re.sub(r"/\S+", "", text))


def command(*words: str, shown: Callable[[str], Any] = words_alone) -> Case:
    """A call of the command line, which Ctrl-C ends with a status and one line.

    Args:
        words: those after `brim`; {} is a folder with a program of each kind.
        shown: of what it prints, what to compare.
    """
    lengths = " ".join(map(str, LENGTHS))
    files = {"step.py": STEP, "failing.py": TOO_MUCH, "model.json": CONFIG, "lengths.txt": lengths}
    folder = Folder(files)
    arguments = [word.format(folder.path) for word in words]

    def call() -> Any:
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            status = main(arguments)
        if status == 130:
            last = told.getvalue()
            assert last.endswith("brim: interrupted\n"), last
            assert "KeyboardInterrupt" not in last, last
            raise KeyboardInterrupt
        return status, shown(out.getvalue()), words_alone(told.getvalue())

    return Case(call, leaves=folder.leaves)


@case
def cli_info() -> Case:
    return command("info", "--json", shown=lambda text: sorted(json.loads(text)))


@case
def cli_of_wrong_words() -> Case:
    return command("plan", "{}/none.txt", "--max-total-size", "18")


@needs("pyarrow")
def cli_plan() -> Case:
    return command(
        *("plan", "{}/lengths.txt", "--max-total-size", "18", "--output", "{}/plan.parquet")
    )


@case
def cli_plan_in_numpy() -> Case:
    return command("plan", "{}/lengths.txt", "--batch-size", "2", "--method", "bucket",
                   "--output", "{}/plan.npz")  # fmt: skip


@needs("matplotlib")
def cli_plan_with_a_picture() -> Case:
    return command("plan", "{}/lengths.txt", "--max-total-size", "18", "--plot", "{}/plan.svg")


@case
def cli_run() -> Case:
    return command("run", "{}/step.py", "--epochs", "3")


@case
def cli_run_of_what_fails() -> Case:
    return command("run", "--html", "{}/page.html", "{}/failing.py", "--epochs", "3")


@needs("matplotlib")
def cli_probe() -> Case:
    options = "--sizes 2,2000,9000 --device cpu --budget 1GiB --json"
    return command("probe", "{}/step.py:step", *options.split(), shown=sizes_probed)


def sizes_probed(text: str) -> Any:
    return [each["size"] for each in json.loads(text)["measured"]]


@needs("matplotlib")
def cli_audit() -> Case:
    options = "--input 3,4 --train-only 0* --eval --device cpu --html {}/a.html --plot {}/a.png"
    return command("audit", "{}/step.py:net", *options.split(), shown=str)


@needs("matplotlib")
def cli_estimate() -> Case:
    options = "--device cpu --convert --capacity 1GiB --html {}/e.html --plot {}/e.pdf"
    return command("estimate", "{}/step.py:step", "3", *options.split(), shown=str)


@needs("transformers")
def cli_estimate_of_a_config() -> Case:
    options = "--batch 2 --length 8 --device cpu --capacity 1GiB --optimizer sgd"
    return command("estimate", "--hub-config", "{}/model.json", *options.split(), shown=str)


@needs("matplotlib")
def cli_demo() -> Case:
    """With two of the four situations: the others are cases of their own, and take seconds."""
    both = (("Batches", batched.run), ("A model", converted.run))
    situations = {str(number): both[number % 2] for number in range(4)}
    made = command("demo", "--device", "cpu", "--scale", "64", "--plot", "{}/demo.svg")

    def call() -> Any:
        with mock.patch.object(demo, "_SITUATIONS", situations):
            return made.call()

    return Case(call, leaves=made.leaves)


# -- Pictures and pages ----------------------------------------------------------------------------


@functools.cache
def things_to_draw() -> dict[str, Any]:
    net, x = model(), torch.ones(64, 4)
    record = brim.maximize("size", device="cpu", remember="none")(fails_above_two).record
    measured = brim.MemoryModel().fit([1, 2, 3], [30, 50, 70])
    report = PackedBatchSampler(LENGTHS, 18, seed=1).report()
    pressure = brim.nn.record_pressure(lambda: net(x).sum().backward(), device="cpu")
    options: dict[str, Any] = {"device": "cpu", "capacity": "1GiB"}
    return {
        "attempts": record(8)[1],
        "model": measured,
        "plan": report,
        "pressure": pressure,
        "audit": brim.audit(net, x, progress=False),
        "estimate": brim.estimate(lambda: net(x).sum().backward(), **options),
    }


def labels(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()]


def drawn(thing: str, **options: Any) -> None:
    """Adds a case of a thing's picture."""

    def make() -> Case:
        return Case(functools.partial(things_to_draw()[thing].plot, **options), labels)

    make.__name__ = f"picture_of_{thing}"
    needs("matplotlib")(make)


drawn("attempts", budget=1000)
drawn("model", budget=500)
for thing in ("plan", "pressure", "audit", "estimate"):
    drawn(thing)


@needs("matplotlib")
def picture_in_a_file() -> Case:
    folder = Folder()
    file = folder.path / "attempts.svg"
    call = functools.partial(things_to_draw()["attempts"].plot, file, budget=1000)
    return Case(call, labels, folder.leaves)


@case
def pages() -> Case:
    things = things_to_draw()
    return Case(lambda: things["audit"].to_html() + things["estimate"].to_html())


@case
def page_of_an_explanation() -> Case:
    folder = Folder()
    told = functools.partial(brim.explain, device="cpu", html=folder.path / "page.html")

    def call() -> str:
        with contextlib.suppress(torch.OutOfMemoryError), told() as block:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return str(block.explanation.cause)

    return Case(call, leaves=folder.leaves)
