"""The command line."""

from __future__ import annotations

import gc
import io
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.cli import demo, info, main
from brim.cli.demo.situation import Situation

from .patience import FOR_EVER


def test_info_shows_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"brim {brim.__version__}, torch {torch.__version__} (")
    assert f"Python {platform.python_version()}" in lines[0]
    assert "device  name" in lines[3]
    row = next(line for line in lines if line.startswith("cpu"))
    assert brim.format_bytes(brim.memory_stats("cpu").limit) in row


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["limits"].keys() == {
        "machine",
        "container (cgroup)",
        "address space (ulimit -v)",
    }
    limits = [limit for limit in figures["limits"].values() if limit is not None]
    assert figures["devices"]["cpu"]["limit"] == min(limits)
    assert figures["kernels"]["cpu"] > 0


def test_runs_as_a_module_and_bears_a_reader_that_leaves() -> None:
    command = f"PYTHONIOENCODING=ascii {sys.executable} -W error -m brim info | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=FOR_EVER)
    assert done.stdout.startswith(f"brim {brim.__version__}")
    assert done.stderr == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"brim {brim.__version__} (torch ")
    for command in ("info", "demo", "probe", "audit", "estimate", "plan"):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"example:\n  brim {command}" in text
        assert "--json" in text


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_tables_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stdout", _Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["info"]) == 0
    output = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" in output
    assert "───" in output
    assert output.startswith(f"brim {brim.__version__}, torch "), "sentences have no colours"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert all(len(line) <= 80 for line in plain.splitlines())


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Terminal())
    monkeypatch.setitem(sys.modules, "rich.console", None)  # type: ignore[arg-type]
    assert main(["info"]) == 0
    output = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" not in output
    assert "------" in output


def test_an_interruption_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "brim: interrupted\n"


SMALL_DEMO = ["demo", "--device", "cpu", "--scale", "32"]


def test_demo_shows_four_situations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL_DEMO, "--json", "--plot", "brim_demo.svg"]) == 0
    figures = json.loads(capsys.readouterr().out)
    calls, budget = figures["adapted"]["calls"], figures["adapted"]["budget"]
    assert [call["size"] for call in calls if call["peak"] is None] == [65536 // 32]
    assert [call["call"] for call in calls[-2:]] == ["… called again", 'objective="throughput"']
    assert all(call["peak"] <= budget for call in calls if call["peak"])
    foreseen = figures["foreseen"]["compared"]
    assert [each["fits"] for each in foreseen] == [True, True, False]
    assert [each["measured"] is None for each in foreseen] == [False, False, True]
    kept = figures["converted"]["kept"]
    assert kept["brim.convert(model)"] < kept["torch.nn"] / 10
    assert figures["converted"]["difference"] < 1e-5
    padding = {name: each["padding"] for name, each in figures["batched"].items()}
    assert padding["PackedBatchSampler"] < padding["SizeAwareBatchSampler"]
    assert figures["picture"] == "brim_demo.svg"
    picture = Path("brim_demo.svg").read_text()
    assert f"{calls[-2]['size']} fit" in picture  # what the text says too
    assert "objective=&quot;throughput&quot;" in picture or 'objective="throughput"' in picture


def demo_calls(*seconds: float | None) -> list[dict[str, Any]]:
    sizes = [256, 4096, 16384, 65536, 32768, 48640, 4096]
    names = [*["by hand"] * 4, "@brim.maximize", "… called again", 'objective="throughput"']
    return [
        {"call": name, "size": size, "seconds": each, "peak": each and 2**20}
        for name, size, each in zip(names, sizes, seconds, strict=True)
    ]


def test_the_demo_says_whether_its_largest_size_is_the_fastest() -> None:
    slower = demo_calls(4.0, 0.5, 0.8, None, 0.9, 0.75, 0.5)
    assert demo.adapted._speed(slower) == (
        "The largest batch is not the fastest: 48640 took 0.75 s, 4096 took 0.50 s.\n"
        'objective="throughput" looks for speed: after 8 calls it takes 4096, in 0.50 s.'
    )
    faster = demo_calls(4.0, 0.9, 0.8, None, 0.9, 0.75, 0.9)
    assert demo.adapted._speed(faster).startswith("No smaller batch was faster.\n")


def test_the_demo_s_first_picture_has_the_time_of_each_call_and_no_line_through_them() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    demo.adapted._paint(axes, demo_calls(4.0, 0.5, 0.8, None, 0.9, 0.75, 0.5), 2**21)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[2:6] == ["16,384\n800 ms", "65,536\nfailed", "32,768\n900 ms", "48,640\n750 ms"]
    assert figure.axes == [axes]
    assert [line.get_label() for line in axes.lines] == ["budget 2.00 MiB"]


def test_demo_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # type: ignore[arg-type]
    told = []

    def batched(device: torch.device, scale: int) -> Situation:
        told.append(capsys.readouterr().out)
        return demo.batched.run(device, scale)

    monkeypatch.setattr(demo, "_SITUATIONS", {"batched": ("Batches", batched)})
    assert main(SMALL_DEMO) == 0
    assert told == ["1. Batches …\n"]  # ahead of the work, which takes long
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("At most 16384 tokens in a batch")
    assert lines[-1] == ("no picture was drawn: pictures need matplotlib: pip install 'brim[plot]'")
    assert list(tmp_path.iterdir()) == []
    assert main([*SMALL_DEMO, "--plot", "x.png"]) == 2
    assert "pip install 'brim[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND, one of info, demo, probe, audit, estimate, plan, run (see"),
        (["--nonsense"], "required: COMMAND, one of info, demo, probe"),
        (["probe", "torch:empty"], "required: --sizes; for example: brim probe train.py:step --s"),
        (["audit", "torch.nn:ReLU", "4,10"], "required: --input; for example: brim audit torchvi"),
        (["nonsense"], "nonsense"),
        (["demo", "--scale", "0"], "--scale"),
        (["demo", "--scale", "x"], "--scale"),
        (["demo", "--device", "meta"], "--device"),
        (["demo", "--plot", "x.doc"], "must end in .png, .svg or .pdf, got x.doc"),
        (["demo", "--plot", "no_folder/x.png"], "there is no folder no_folder"),
        (["info", "--nonsense"], "brim info: unknown argument --nonsense (see brim info --help)"),
        (["info", "--plot", "x.png"], "brim info: unknown argument --plot x.png"),
        (["info", "--cmake"], "brim info: unknown argument --cmake"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1


STEP_FILE = """
import torch

from neighbour_of_a_test import width

layer = torch.nn.Linear(256, width)
x = torch.zeros(64, 256)


def step():
    layer(x).sum().backward()


def branches(positive):
    if x.sum() > 0 or positive:
        step()


def fails():
    return {}["key"]


def parts():
    yield 1


def shapes():
    return x @ x


def overloads():
    return torch.addmm(x, x)


def silent():
    raise MemoryError


def sized(size):
    return torch.randn(size, 256)
"""


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    (tmp_path / "step_of_a_test.py").write_text(STEP_FILE)
    (tmp_path / "neighbour_of_a_test.py").write_text("width = 256")
    return tmp_path / "step_of_a_test.py"


def test_estimate_prints_the_peak_and_whether_it_fits(
    step_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "neighbour_of_a_test", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "neighbour_of_a_test")
    command = ["estimate", f"{step_file}:step", "--device", "cuda"]
    assert main([*command, "--capacity", "1GiB"]) == 0
    told = capsys.readouterr().out
    assert "fits the capacity of 1.00 GiB" in told
    assert re.search(r"cuBLAS keeps a workspace of \S+ MiB for all matrix products, and", told)
    assert main([*command, "--capacity", "1MiB", "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is False
    assert figures["device"] == "cuda:0"


def test_estimate_asks_for_a_capacity(
    step_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim._estimate._estimate.stats_of", lambda _: None)  # there may be a GPU
    step_file.write_text("import torch\ndef step():\n    torch.zeros(3)\n")
    assert main(["estimate", f"{step_file}:step", "--device", "cuda", "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["fits"] is None
    assert "give --capacity, such as --capacity 24GiB: cuda:0 is not there" in told.err


def test_estimate_compares_with_a_converted_model(
    step_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step_file.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())\n"
        "def step():\n    model(torch.zeros(256, 64)).sum().backward()\n"
        "def alone():\n    torch.zeros(3)\n"
    )
    words = ["estimate", f"{step_file}:step", "--device", "cpu", "--convert"]
    page = tmp_path / "step.html"
    assert main([*words, "--json", "--html", str(page)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (
        f"brim.convert: peak {brim.format_bytes(figures['converted']['peak'])}" in page.read_text()
    )
    assert page.read_text().count('class="line"') == 1
    assert figures["converted"]["peak"] <= figures["peak"]
    assert figures["converted"]["held_before"] == figures["held_before"]
    assert main(["estimate", f"{step_file}:alone", "--device", "cpu", "--convert"]) == 2
    assert "the function uses no module" in capsys.readouterr().err


def test_a_file_does_not_outlive_its_command(step_file: Path, held: int) -> None:
    path = sys.path.copy()
    assert main(["estimate", f"{step_file}:step", "--device", "cpu"]) == 0
    gc.collect()
    assert brim.memory_stats("cpu").allocated == held
    assert sys.path == path
    assert step_file.stem not in sys.modules


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["step_of_a_test.py:branches", "True"], "estimate: step_of_a_test.py:15: the code"),
        (["step_of_a_test.py:branches"], "branches takes (positive), but is called as branches()"),
        (["step_of_a_test.py:step", "1"], "step takes (), but is called as step(1)"),
        (
            ["step_of_a_test.py:step", "x"],
            "must be a Python literal such as 64 or (3, 224, 224), got x",
        ),
        (["step_of_a_test.py:fails"], "step_of_a_test.py:20: KeyError: 'key'"),
        (["step_of_a_test.py:parts"], "is a generator function"),
        (["step_of_a_test.py:shapes"], "step_of_a_test.py:28: RuntimeError: a and b must have"),
        (
            ["step_of_a_test.py:overloads"],
            "step_of_a_test.py:32: TypeError: addmm() received an invalid combination of arguments "
            "- got (FakeTensor, FakeTensor)\n",
        ),
        (["step_of_a_test.py:silent"], "step_of_a_test.py:36: MemoryError\n"),
        (["step_of_a_test.py:layer", "64"], "this is a model, which takes tensors: name a"),
        (
            ["step_of_a_test.py:sized", "-4"],
            "sized(-4) fails, and -4 is below 0: step_of_a_test.py:40: RuntimeError: ",
        ),
        (["step_of_a_test.py:step", "--capacity", "lots"], 'argument --capacity: "lots" is not'),
        (
            ["step_of_a_test.py:step", "--device", "cuda:99", "--capacity", "50%"],
            "--capacity must be bytes, such as 24GiB: cuda:99 is not there, got '50%'",
        ),
        (["step_of_a_test.py:step", "--device", "meta"], "must be cpu or cuda, got meta"),
        (["step_of_a_test.py:step", "--device", "x"], "must be cpu or cuda, got x"),
        (["step_of_a_test.py:step", "--calls", "0"], "must be a whole number of at least 1, got 0"),
        (["step_of_a_test.py:missing"], "missing was not found in"),
        (["step_of_a_test.py:x"], "is not a function but a Tensor"),
        (["nothing.py:step"], "was not found: there is no file"),
        (["no_package.module:step"], "was not found: No module named 'no_package'"),
        (["imports.py:f"], "could not be loaded: imports.py:2: ModuleNotFoundError: No module"),
        (["wrong.py:f"], "could not be loaded: wrong.py:1: "),
        (["exits.py:f"], "could not be loaded: exits.py:1: SystemExit: 3"),
    ],
)
def test_wrong_input_of_estimate_is_one_line_and_status_2(
    step_file: Path,
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(step_file.parent)
    Path("imports.py").write_text("# a comment\nimport no_module_of_a_test")
    Path("wrong.py").write_text("def f(:")
    Path("exits.py").write_text("raise SystemExit(3)")
    assert main(["estimate", "--device", "cpu", *words]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1
