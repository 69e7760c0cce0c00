"""Texts from outside, read by what libFuzzer makes up: sizes, messages, positions, files, settings.

Needs clang with its sanitizers (Debian: clang-19 and libclang-rt-19-dev) and ./dev build.

    ./dev prove fuzz                      a minute per target
    ./dev prove fuzz -- --seconds 600     longer
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from tally import ROOT, Tally

import brim

TARGETS = {  # the sources that read, and what they read well
    "size_string": (["memory/bytes.cpp"], ["1.5 GiB", "80%", "1048576", "8GB"]),
    "error_message": (
        ["memory/out_of_memory.cpp", "memory/bytes.cpp"],
        [
            "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 "
            "GiB of which 1.96 GiB is free. Of the allocated memory 3.00 GiB is allocated by "
            "PyTorch, and 8.00 MiB is reserved by PyTorch but unallocated.",
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4000000000000 bytes.",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ],
    ),
    "position": (
        ["batching/stream.cpp"],
        ["brim-position cursor 0 segments 1 0 1 end", "brim-position cursor 3 1 2 segments end"],
    ),
    "size_file": (["adapt/size_file.cpp"], []),
    "allocator_settings": (
        ["predict/allocator_settings.cpp"],
        ["expandable_segments:True,max_split_size_mb:128", "roundup_power2_divisions:[256:1,>:4]"],
    ),
}


def compiler() -> str | None:
    """A clang++ that has libFuzzer, the newest first."""
    for name in (*(f"clang++-{version}" for version in range(25, 14, -1)), "clang++"):
        if shutil.which(name):
            with tempfile.NamedTemporaryFile("w", suffix=".cpp") as source:
                source.write('extern "C" int LLVMFuzzerTestOneInput(const char*, long) {}')
                source.flush()
                made = [name, "-fsanitize=fuzzer", "-o", os.devnull, source.name]
                if subprocess.run(made, capture_output=True, check=False).returncode == 0:
                    return name
    return None


def build(clang: str, target: str, folder: Path) -> Path:
    """Compile a target with the sources that it is about; all else is in libbrim."""
    package = Path(brim.__file__).parent
    torch_folder = Path(torch.__file__).parent
    built = Path(package.parent.parent)  # build/VERSION
    program = folder / target
    sources = [str(ROOT / "src" / each) for each in TARGETS[target][0]]
    folders = [ROOT / "include", ROOT / "src", built / "include"]
    system = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    libraries = [package / "lib", torch_folder / "lib"]
    command = [clang, "-std=c++20", "-O1", "-g1", "-fsanitize=fuzzer,address,undefined"]
    command += ["-fno-sanitize-recover=all", "-fno-sanitize=vptr", f"-DBRIM_FUZZ_TARGET={target}"]
    command += [f"-I{each}" for each in folders]
    command += [word for each in system for word in ("-isystem", str(each))]
    command += [str(ROOT / "proofs/fuzz_text.cpp"), *sources, "-o", str(program)]
    command += [word for each in libraries for word in (f"-L{each}", f"-Wl,-rpath,{each}")]
    command += ["-lbrim", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    return program


def corpus_of(target: str, folder: Path) -> Path:
    """Texts to begin with."""
    seeds = folder / f"{target}-corpus"
    seeds.mkdir()
    texts = list(TARGETS[target][1])
    if target == "size_file":
        kept = folder / "sizes"
        brim.maximize("size", persist=kept)(lambda size: size)(8)
        texts += [each.read_text() for each in kept.rglob("*.brim-sizes")]
    for number, text in enumerate(texts):
        (seeds / str(number)).write_text(text)
    return seeds


def main() -> None:
    """Each target in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    options = parser.parse_args()
    clang = compiler()
    if clang is None:
        parser.exit(2, "prove_fuzz: needs clang with libFuzzer (clang-19, libclang-rt-19-dev)\n")
    tally = Tally("Texts from outside: inputs that libFuzzer made up")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for target in options.targets:
            program = build(clang, target, folder)
            corpus = corpus_of(target, folder)
            limits = [f"-max_total_time={options.seconds}", "-timeout=10", "-rss_limit_mb=2048"]
            ran = subprocess.run(
                [program, f"-seed={options.seed}", "-print_final_stats=1", *limits, corpus],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            found = re.search(r"number_of_executed_units: (\d+)", ran.stderr)
            wrong = [] if ran.returncode == 0 else [f"seed {options.seed}\n{ran.stderr[-4000:]}"]
            tally.row(target.replace("_", " "), int(found[1]) if found else 0, wrong)
    tally.finish()


if __name__ == "__main__":
    main()
