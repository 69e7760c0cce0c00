"""Runs clang-tidy on our sources, in parallel, and only on what changed since it was last clean.

Usage: tidy.py BUILD_DIRECTORY SOURCE_DIRECTORY...

A file that includes torch takes half a minute, so a clean result is remembered in BUILD/tidy: an
empty file named by a hash of the source, of the headers of ours that it includes, of its compile
command and of the configuration. Only clean results are, so a finding is shown until it is gone.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

# Names of the warnings that only GCC has; and no warnings from the compiler, which said its own.
EXTRA_ARGS = ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-everything"]


def own_files(source: Path, roots: list[Path]) -> set[Path]:
    """Returns the source and every header of ours that it includes, directly or not."""
    found: set[Path] = set()
    todo = [source]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found.add(file)
        for name in INCLUDE.findall(file.read_text()):
            todo += [p.resolve() for r in [file.parent, *roots] if (p := r / name).is_file()]
    return found


def key(entry: dict[str, str], roots: list[Path], version: str) -> str:
    """Returns the hash of everything that the result for this source depends on."""
    digest = hashlib.sha256(f"{version} {EXTRA_ARGS} {entry['command']}".encode())
    source = Path(entry["file"]).resolve()
    for file in [Path(".clang-tidy"), *sorted(own_files(source, roots))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Returns 0 where every file is clean."""
    build, directories = Path(sys.argv[1]), [Path(d).resolve() for d in sys.argv[2:]]
    roots = [Path("include"), Path("src"), build / "include"]
    version = subprocess.run(
        ["clang-tidy", "--version"], check=True, capture_output=True, text=True
    ).stdout
    cache = build / "tidy"
    cache.mkdir(exist_ok=True)

    todo: dict[Path, str] = {}
    keys: set[str] = set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"]).resolve()
        # Kernels for CUDA are compiled with options that clang does not know.
        if source.suffix == ".cpp" and any(source.is_relative_to(d) for d in directories):
            keys.add(entry_key := key(entry, roots, version))
            if not (cache / entry_key).exists():
                todo[source] = entry_key
    for old in cache.iterdir():
        if old.name not in keys:
            old.unlink()
    print(f"{len(keys) - len(todo)} files known to be clean, {len(todo)} to check", flush=True)

    def check(source: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
        command = ["clang-tidy", "--quiet", "-p", str(build), *EXTRA_ARGS, str(source)]
        return source, subprocess.run(command, check=False, capture_output=True, text=True)

    dirty = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(check, source) for source in todo]
        for done, job in enumerate(concurrent.futures.as_completed(jobs), start=1):
            source, result = job.result()
            print(f"[{done}/{len(jobs)}] {os.path.relpath(source)}", flush=True)
            if result.returncode == 0:
                (cache / todo[source]).touch()
            else:
                dirty += 1
                print(result.stdout, result.stderr, sep="\n", flush=True)
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
