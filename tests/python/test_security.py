"""What SECURITY.md promises: no code out of data, nothing written for others, no network."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.cli import main
from brim.data import PackedBatchSampler

from .remembering import X, make

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "brim"


# ---------------------------------------------------------------- no code out of data

#: What makes code of data, or starts other programs. Ends of dotted names, as they are written.
DANGEROUS = re.compile(
    r"""^( eval | exec | compile | __import__ | .*\.exec_module | .*\.import_module
    | runpy\.run_.* | (c?[pP]ickle|dill|cloudpickle|marshal|shelve|joblib)\.(?!dumps?$|Pick).*
    | os\.(system|popen|exec.*|spawn.*|posix_spawn.*) | pty\..*
    | subprocess\.(?!DEVNULL$|CalledProcessError$).*
    | yaml\.(?!safe_load$).* | torch\.(load|hub\..*|package\..*|jit\.load|ops\.load_library)
    | .*\.(from_pretrained|allow_pickle) | ctypes\..*(DLL|LoadLibrary) | tempfile\.mktemp )$""",
    re.VERBOSE,
)
#: Where it is meant: the file, the name and how often.
ALLOWED = {
    ("cli/arguments.py", "spec.loader.exec_module"): "the user's own file: brim probe file.py:step",
    ("cli/arguments.py", "importlib.import_module"): "the user's own module, named on the line",
    ("cli/run.py", "runpy.run_module"): "brim run -m program",
    ("cli/run.py", "runpy.run_path"): "brim run program.py",
    ("compat/torch_max_mem/version.py", "subprocess.check_output"): "git, without a shell",
}
NETWORK = {"socket", "ssl", "urllib", "http", "requests", "ftplib", "smtplib", "aiohttp", "httpx"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression; "" if it is something else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value) or '?'}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(file: str, source: str) -> Iterator[tuple[str, str]]:
    """What a source does that needs a reason."""
    for node in ast.walk(ast.parse(source)):
        name = dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        if DANGEROUS.match(name):
            yield file, name
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{each.name}" for each in node.names]
            yield from ((file, each) for each in names if DANGEROUS.match(each))
        imported = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for each in imported:
            if each.partition(".")[0] in NETWORK | {"pickle", "marshal", "shelve", "ctypes"}:
                yield file, f"import {each}"
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "?"
            if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and value is not False:
                yield file, f"{keyword.arg}={value}"
            if keyword.arg == "weights_only" and value is not True:
                yield file, f"weights_only={value}"


#: Of the modules that no other line can misuse.
IMPORTS = {
    ("data/readers.py", "import pickle"): "dumps of samples, of which only a checksum is kept"
}


def test_nothing_in_the_package_makes_code_of_data() -> None:
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        found |= set(findings(file.relative_to(PACKAGE).as_posix(), file.read_text()))
    assert found == ALLOWED.keys() | IMPORTS.keys()


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "import pickle\npickle.loads(data)",
        "from pickle import loads",
        "import os\nos.system(text)",
        "import os\nrun = os.popen",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import yaml\nyaml.load(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "numpy.load(file, allow_pickle=True)",
        "torch.hub.load(name)",
        "AutoModel.from_pretrained(name)",
        "import urllib.request",
        "from socket import socket",
        "import ctypes\nctypes.CDLL(name)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(findings("file.py", source))


def test_the_core_starts_no_program_and_loads_one_library() -> None:
    calls = re.compile(
        r"\b(popen|system|exec[lv]\w*|posix_spawnp?|fork|dlopen|mktemp|tmpnam|socket|connect"
        r"|strcpy|strcat|sprintf|gets)\s*\("
    )
    found = set()
    for folder in ("src", "include", "python/bindings"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".cpp", ".h", ".cu"):
                text = re.sub(r"//[^\n]*|\"[^\"\n]*\"", "", file.read_text())
                found |= {(file.name, each[1]) for each in calls.finditer(text)}
    # `connect` is a method of a graph there, and the library is brim's own kernels for CUDA.
    assert found == {("cuda_library.cpp", "dlopen"), ("least_kept.cpp", "connect")}


class Harm:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_lengths_are_not_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    harm = np.array([Harm(mark)], dtype=object)
    np.save(tmp_path / "a.npy", harm, allow_pickle=True)
    np.savez(tmp_path / "a.npz", lengths=harm)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(harm))
    (tmp_path / "a.txt").write_bytes(pickle.dumps(harm))
    for name in ("a.npy", "a.npz", "b.npy", "a.txt"):
        assert main(["plan", str(tmp_path / name), "--max-total-size", "100"]) == 2
        assert name in capsys.readouterr().err
    assert not mark.exists()


def config(tmp_path: Path, **changes: Any) -> str:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {"model_type": "llama", "vocab_size": 64, **dict.fromkeys(sizes, 4)}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **settings, **changes}))
    return str(file)


@pytest.mark.filterwarnings("ignore:::transformers")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["pipeline"]}, "has no pipeline"),
        ({"architectures": ["AutoModelForCausalLM"]}, "has no AutoModelForCausalLM"),
        ({"architectures": ["Trainer"]}, "has no Trainer"),
        ({"architectures": "LlamaForCausalLM"}, "must name a model in 'architectures'"),
        ({"attn_implementation": "someone/kernels"}, "attn_implementation must be eager or sdpa"),
        ({"attn_implementation": "flash_attention_2"}, "must be eager or sdpa"),
        ({"text_config": {"_attn_implementation": "a/b"}}, "must be eager or sdpa"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096"),
        ({"num_attention_heads": 0}, "that can be made"),
        ({"vision_config": {"depths": [2, 10**6]}}, "depths must be at most 4096"),
        ({"backbone": "hf-hub:someone/model"}, "backbone must be a plain name"),
        ({"text_config": {"architecture": "a/b"}}, "architecture must be a plain name"),
        ({"model_args": {"checkpoint_path": "/a/b.pth"}}, "must not name files"),
        ({"backbone_kwargs": {"pretrained": True}}, "must not name files"),
    ],
)
def test_a_config_file_gets_a_model_of_transformers_and_nothing_else(
    changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(["estimate", "--hub-config", config(tmp_path, **changes)]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert "config.json" in errors


@pytest.mark.filterwarnings("ignore:::transformers")
def test_a_model_without_end_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("brim.cli.hub_config._MOST_MODULES", 20)
    assert main(["estimate", "--hub-config", config(tmp_path)]) == 2
    assert "more than 20 modules" in capsys.readouterr().err


OFFLINE = """
import os, socket, sys
def refuse(*args, **options):
    print("a connection to", args)
    os._exit(3)
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from brim.cli import main
sys.exit(main(["estimate", "--hub-config", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_config_that_names_a_backbone_leads_to_no_hub(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    detr = {"architectures": ["DetrModel"], "model_type": "detr", "use_timm_backbone": False}
    file = config(tmp_path, **detr, backbone="resnet50", use_pretrained_backbone=True)
    done = subprocess.run([sys.executable, "-c", OFFLINE, file], capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:::transformers")
def test_code_beside_a_config_file_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    file = config(tmp_path, auto_map={"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.C"})
    main(["estimate", "--hub-config", file, "--device", "cpu", "--capacity", "1GiB"])
    assert not mark.exists()


def test_a_name_in_a_state_is_not_imported() -> None:
    """States are numbers: a checkpoint of theirs is read by torch without pickles."""
    sampler = PackedBatchSampler([3, 4, 5] * 9, 12, shuffle=True)
    next(iter(sampler))
    assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()
    with pytest.raises((TypeError, ValueError)):
        sampler.load_state_dict({**sampler.state_dict(), "sampler": "os.system"})


# ---------------------------------------------------------------- files

#: In a process of its own, to which the mask belongs, and which can be kept from the network.
WRITES = """
import os, socket, sys
def refuse(*args, **options):
    raise AssertionError(f"a connection to {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import torch, brim
from brim.cli import main
from brim.data import PackedBatchSampler
os.umask(0)
@brim.maximize("size", strategy="halving", persist=os.path.join(sys.argv[1], "deep", "sizes"))
def function(x, size=8):
    if size > 5:
        raise torch.OutOfMemoryError("CPU out of memory.")
function(torch.zeros(3))
len(PackedBatchSampler([3, 4] * 99, 12, shuffle=True, index=os.path.join(sys.argv[1], "index")))
brim.convert(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()))
assert main(["info"]) == 0
"""


def modes(folder: Path) -> dict[str, set[int]]:
    """The permissions of what lies in a folder, by kind."""
    found: dict[str, set[int]] = {"folders": {stat.S_IMODE(folder.stat().st_mode)}, "files": set()}
    for each in folder.rglob("*"):
        found["folders" if each.is_dir() else "files"].add(stat.S_IMODE(each.stat().st_mode))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process has written that keeps nothing from anybody."""
    folder = tmp_path_factory.mktemp("written")
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITES, str(folder)], check=True)
    return folder


def test_no_connection_is_opened(written: Path) -> None:
    assert list((written / "index").iterdir())


def test_remembered_sizes_are_private_whatever_the_mask(written: Path) -> None:
    assert modes(written / "deep" / "sizes") == {"folders": {0o700}, "files": {0o600}}


def test_nobody_else_may_write_an_index_whatever_the_mask(written: Path) -> None:
    """Others may read it, which is what it is for; what it says decides where batches begin."""
    found = modes(written / "index")
    assert not any(mode & 0o022 for kind in found.values() for mode in kind)


def only_file(folder: Path, pattern: str) -> Path:
    (file,) = folder.rglob(pattern)
    return file


@pytest.mark.usefixtures("steady_memory")
def test_a_link_in_place_of_a_size_file_is_not_written_through(tmp_path: Path) -> None:
    make(persist=tmp_path / "sizes")(X)
    file, theirs = only_file(tmp_path, "*.brim-sizes"), tmp_path / "theirs"
    file.unlink()
    theirs.write_text("precious")
    file.symlink_to(theirs)
    with pytest.warns(UserWarning, match="ignored"):
        make(persist=tmp_path / "sizes")(X)
    assert theirs.read_text() == "precious"
    assert not file.is_symlink()


def test_a_link_in_place_of_a_record_is_not_written_through(tmp_path: Path) -> None:
    def count() -> int:
        return len(PackedBatchSampler([3, 4] * 99, 12, shuffle=True, index=tmp_path / "index"))

    expected = count()
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    for file in (tmp_path / "index").iterdir():
        file.unlink()
        file.symlink_to(theirs)
    with pytest.warns(UserWarning, match="index"):
        assert count() == expected
    assert theirs.read_text() == "precious"
    assert not any(file.is_symlink() for file in (tmp_path / "index").iterdir())


@pytest.mark.usefixtures("steady_memory")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "itself", "large"])
def test_what_is_no_size_file_is_ignored_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    make(persist=tmp_path)(X)
    file = only_file(tmp_path, "*.brim-sizes")
    text = file.read_text()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "large":
        file.write_text(text * 10_000)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert make(persist=tmp_path).record(X)[1][-1].size == 4
    # A link to itself is as good as no file.
    assert kind == "itself" or any(file.name in str(each.message) for each in said)


@pytest.mark.usefixtures("steady_memory")
def test_only_our_own_files_are_removed(tmp_path: Path) -> None:
    function = make(persist=tmp_path)
    function(X)
    folder = only_file(tmp_path, "*.brim-sizes").parent
    for name in ("notes.txt", "x.brim-sizes", "0123456789abcdef.brim-sizes.txt"):
        (folder / name).write_text("mine")
    function.clear()
    assert {"notes.txt", "x.brim-sizes"} <= {file.name for file in folder.iterdir()}


def test_every_promise_names_a_test_that_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    assert all(callable(globals().get(name)) for name in named)
