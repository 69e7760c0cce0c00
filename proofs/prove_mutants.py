"""Proves that tests notice changes of the code: mutants of need, adapt and memory.

A mutant is one small change: `<` for `<=`, `+` for `-`, a condition turned round, a statement left
out. All of them are built at once into a copy of the library and of its C++ tests, in
`build/mutants`, and switched on one at a time. A mutant counts as noticed ("killed") if a test
fails, crashes or does not end. Those that the C++ tests let live are tried with Python tests,
unless they are known to be the same as the original.

A mutant that lives shows a missing test, or cannot be told from the original. The latter are in
`same_mutants.txt`, with why; the others are wrong here.

    python prove_mutants.py --seed 1 --count 300
    python prove_mutants.py --only need/need.cpp --count 1000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants import mutate
from tally import ROOT, Tally

from brim import _C

BUILD = ROOT / "build" / "mutants"
TREE = BUILD / "tree"
PROGRAMS = {
    "need": ("test_need",),
    "adapt": ("test_adapt", "test_adapt_allocation"),
    "memory": ("test_memory",),
}
# Half a minute each at most.
PYTHON_TESTS = {
    "need": ("adapt_maximize", "foresee"),
    "adapt": (
        *("adapt_batch", "adapt_maximize", "adapt_restore", "adapt_size_files", "adapt_settings"),
        *("microbatches", "microbatches_joint", "microbatches_ranks"),
    ),
    "memory": ("memory", "adapt_errors", "adapt_host_limit", "explain"),
}
SHARDS = 24
# What only another device reaches.
ELSEWHERE = ("memory/cuda", "memory/accelerator_backend")


@dataclass(frozen=True, order=True)
class Mutant:
    """A mutant of the tree; `line` is its source, without the indentation."""

    path: str
    place: int
    number: int
    line: str
    change: str

    @property
    def module(self) -> str:
        """Whose it is."""
        return self.path.partition("/")[0]

    @property
    def key(self) -> str:
        """That does not change with the lines above."""
        return f"{self.path} | {self.line} | {self.change}"

    def __str__(self) -> str:
        return f"src/{self.path}:{self.place}: {self.change}: {self.line}"


def write(path: Path, text: str) -> None:
    """Only where it differs: what has not changed is not built again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_tree(without: dict[str, set[int]]) -> list[Mutant]:
    """A copy of the repository with all mutants; of what has none, a link to it."""
    for name in ("CMakeLists.txt", "cmake", "include", "tests", "examples"):
        link(TREE / name, ROOT / name)
    for entry in (ROOT / "src").iterdir():
        if entry.name not in PROGRAMS:
            link(TREE / "src" / entry.name, entry)
    result = []
    kept = set()
    number = 0
    for source in sorted(each for name in PROGRAMS for each in (ROOT / "src" / name).rglob("*.*")):
        path = str(source.relative_to(ROOT / "src"))
        text = source.read_text()
        kept.add(TREE / "src" / path)
        if path.startswith(ELSEWHERE):
            write(TREE / "src" / path, text)
            continue
        lines = text.splitlines()
        mutated, found = mutate(
            text,
            number,
            statements=source.suffix == ".cpp",
            without=frozenset(without.get(path, ())),
        )
        write(TREE / "src" / path, mutated)
        same: Counter[tuple[int, str]] = Counter()
        for each in found:
            same[each.line, each.change] += 1
            nth = same[each.line, each.change]
            change = each.change if nth == 1 else f"{each.change}, number {nth}"
            result.append(
                Mutant(path, each.line, each.number, lines[each.line - 1].strip(), change)
            )
        number += 1000  # a change of one source does not number the others anew
    for name in PROGRAMS:
        for copy in (TREE / "src" / name).rglob("*.*"):
            if copy not in kept:
                copy.unlink()
    return result


LAUNCHER = """\
#!/bin/sh
# cmake has this run the compiler: $@. Takes the object of the usual build if that has no mutants.
for each; do
  case $last in -o) object=$each ;; -MF) depends=$each ;; esac
  last=$each
done
case $object in *.gch) exec "$@" ;; esac
if [ -e "REUSED/$object" ]; then
  echo "$object: REUSED/$object" >"$depends"
  exec cp "REUSED/$object" "$object"
fi
exec "$@" -w -include MUTANT_H
"""


def write_launcher(found: list[Mutant]) -> Path:
    """Of a compiler that compiles nothing again that has no mutants."""
    reused = BUILD / "reused"
    shutil.rmtree(reused, ignore_errors=True)
    usual = Path(_C.__file__).parents[2]
    command = ["ninja", "-C", usual, "-t", "deps"]
    text = subprocess.run(command, capture_output=True, text=True).stdout if usual.is_dir() else ""
    for block in text.split("\n\n"):
        name = block.strip().partition(":")[0]
        mutated = any(f"/src/{path}\n" in f"{block}\n" for path in {each.path for each in found})
        if "/brim.dir/" in name and name.endswith(".o") and not mutated:
            link(reused / name, usual / name)
    launcher = BUILD / "launcher"
    text = LAUNCHER.replace("REUSED", str(reused))
    write(launcher, text.replace("MUTANT_H", str(ROOT / "proofs" / "mutant.h")))
    launcher.chmod(0o755)
    return launcher


def link(path: Path, to: Path) -> None:
    """Makes `path` a link, once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(to)


def build(jobs: int) -> list[Mutant]:
    """Builds the tree; leaves mutants out of lines that do not compile with them."""
    options = [
        *("-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "-DBRIM_CUDA=OFF"),
        *(
            "-DBRIM_BUILD_TESTS=ON",
            "-DBRIM_UNITY_BUILD=ON",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        ),
    ]
    without: dict[str, set[int]] = defaultdict(set)
    memory = BUILD / "without.json"
    if memory.exists():
        known = json.loads(memory.read_text())
        for path, texts in known.items():
            source = ROOT / "src" / path
            lines = source.read_text().splitlines() if source.exists() else []
            without[path] = {n for n, line in enumerate(lines, 1) if line.strip() in texts}
    targets = [each for programs in PROGRAMS.values() for each in programs]
    for _ in range(12):
        found = make_tree(without)
        launcher = f"-DCMAKE_CXX_COMPILER_LAUNCHER={write_launcher(found)}"
        command = ["cmake", "-S", TREE, "-B", BUILD / "out", launcher, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        command = ["ninja", "-C", BUILD / "out", "-k", "0", f"-j{jobs}"]
        done = subprocess.run([*command, "brim"], capture_output=True, text=True)
        if done.returncode == 0:
            done = subprocess.run([*command, *targets], capture_output=True, text=True)
        (BUILD / "build.log").write_text(done.stdout)
        if done.returncode == 0:
            return found
        place = r"/src/((?:need|adapt|memory)/[\w/.]+):(\d+):\d+: +(?:error|required from)"
        wrong = {(path, int(line)) for path, line in re.findall(place, done.stdout)}
        if all(line in without[path] for path, line in wrong):  # then it is a neighbour
            wrong |= {(path, line + by) for path, line in wrong for by in (-1, 1)}
        before = sum(map(len, without.values()))
        for path, line in wrong:
            without[path].add(line)
        print(f"  {len(wrong)} lines do not compile with their mutants", flush=True)
        texts = {
            path: sorted(
                {(ROOT / "src" / path).read_text().splitlines()[n - 1].strip() for n in ns}
            )
            for path, ns in without.items()
        }
        memory.write_text(json.dumps(texts, indent=1))
        if sum(map(len, without.values())) == before:
            break
    sys.exit(f"the mutants cannot be built: see {BUILD / 'build.log'}")


@dataclass
class Run:
    """A command that tests: what it takes where nothing is changed, and what it then reaches."""

    command: list[str]
    more: dict[str, str]
    seconds: float = 600.0
    reached: frozenset[int] = frozenset()

    def passes(self, number: int = -1, seen: str = "") -> bool:
        """Whether it does, with this mutant."""
        environment = os.environ | self.more | {
            "BRIM_MUTANT": str(number),
            "LD_LIBRARY_PATH": str(BUILD / "out" / "python" / "brim" / "lib"),
            "OMP_WAIT_POLICY": "passive",
        }  # fmt: skip
        if seen:
            environment["BRIM_MUTANTS"] = seen
        # One that does not end, or that takes all memory, is to hurt nobody else.
        limits = f"ulimit -c 0; ulimit -t {int(3 * self.seconds + 10)}"
        script = f'{limits}; echo 1000 >/proc/self/oom_score_adj; exec "$@"'
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                ["sh", "-c", script, "sh", *self.command],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                return process.wait(5 * self.seconds + 30) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def measure(self) -> set[int]:
        """Runs it without a mutant; which mutants are compiled into it."""
        begin = time.perf_counter()
        with tempfile.NamedTemporaryFile("r") as seen:
            if not self.passes(seen=seen.name):
                sys.exit(f"without a mutant, this fails: {self.more} {' '.join(self.command)}")
            states = [tuple(map(int, line.split())) for line in seen]
        self.seconds = time.perf_counter() - begin
        self.reached = frozenset(number for number, state in states if state == 2)
        return {number for number, _ in states}


def sharded(program: str) -> list[Run]:
    """Its tests in so many processes, of which a mutant is tried with those that reach it."""
    command = [str(BUILD / "out" / "tests" / "cpp" / program), "--gtest_fail_fast"]
    return [
        Run(command, {"GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": str(shard)})
        for shard in range(SHARDS)
    ]


def pytest(name: str) -> Run:
    """A run of a file of tests/python."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    place = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    path = str(ROOT / "tests" / "python" / f"test_{name}.py")
    return Run([sys.executable, "-m", "pytest", *options, *place, path], {})


class Tests:
    """What can notice a mutant, and which mutants it reaches."""

    def __init__(self, python: bool, pool: ThreadPoolExecutor, same: Collection[str]) -> None:
        names = [each for programs in PROGRAMS.values() for each in programs]
        self._same = same
        self._runs = {program: sharded(program) for program in names}
        every = [run for runs in self._runs.values() for run in runs]
        files = sorted({each for files in PYTHON_TESTS.values() for each in files if python})
        self._python = {name: pytest(name) for name in files}
        self.compiled = set().union(*pool.map(Run.measure, [*every, *self._python.values()]))
        self._reached = frozenset().union(*(run.reached for run in every))
        for name, runs in self._runs.items():
            runs.sort(key=lambda run: run.seconds)
            print(f"  {name}: {sum(run.seconds for run in runs):.0f} s", flush=True)
        for name, run in self._python.items():
            print(f"  test_{name}.py: {run.seconds:.0f} s", flush=True)

    def noticed_by(self, mutant: Mutant) -> str:
        """The program that does; empty if none."""
        begin = time.perf_counter()
        name = self._noticed_by(mutant)
        print(f"    {name or 'LIVES'}, {time.perf_counter() - begin:.0f} s: {mutant}", flush=True)
        return name

    def _noticed_by(self, mutant: Mutant) -> str:
        own = PROGRAMS[mutant.module]
        for program in (*own, *(each for each in self._runs if each not in own)):
            for run in self._runs[program]:
                if mutant.number in run.reached and not run.passes(mutant.number):
                    return program
        tries_python = self._python and mutant.key not in self._same
        for name in PYTHON_TESTS[mutant.module] if tries_python else ():
            run = self._python[name]
            if mutant.number in run.reached and not run.passes(mutant.number):
                return f"test_{name}.py"
        return ""

    def reaches(self, mutant: Mutant) -> bool:
        """Whether a C++ test runs what it changes."""
        return mutant.number in self._reached


def judged() -> dict[str, str]:
    """Why mutants that live are no wrong ones, by their key."""
    result = {}
    text = (Path(__file__).parent / "same_mutants.txt").read_text()
    for block in re.split(r"\n\n+", text.strip()):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        keys = [line for line in lines if not line.startswith("    ")]
        why = " ".join(line.strip() for line in lines if line.startswith("    "))
        result |= dict.fromkeys(keys, why)
    return result


def main() -> None:
    """Reads the options, builds, tests and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150, help="how many mutants, of all")
    parser.add_argument("--only", default="", help="what their file:line begins with, without src/")
    parser.add_argument("--numbers", type=int, nargs="*", help="these mutants, of an earlier run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-python", action="store_true", help="leave the Python tests out")
    options = parser.parse_args()
    if not (shutil.which("cmake") and shutil.which("ninja")):
        sys.exit("cmake and ninja must be on PATH: run ./dev prove mutants")

    print(f"seed {options.seed}, {options.count} mutants; building", flush=True)
    found = build(options.jobs)
    pool = ThreadPoolExecutor(options.jobs)
    same = judged()
    tests = Tests(not options.no_python, pool, same)
    found = [each for each in found if each.number in tests.compiled]
    print(
        f"  {len(found)} mutants, {sum(map(tests.reaches, found))} reached by C++ tests", flush=True
    )
    if options.numbers:
        chosen = [each for each in found if each.number in options.numbers]
    else:
        wanted = [each for each in found if f"{each.path}:{each.place}".startswith(options.only)]
        chosen = random.Random(options.seed).sample(wanted, min(options.count, len(wanted)))

    tally = Tally("Mutants of need, adapt and memory: cases that tests must notice")
    for module in PROGRAMS:
        mine = sorted(each for each in chosen if each.module == module)
        noticed = dict(zip(mine, pool.map(tests.noticed_by, mine), strict=True))
        alive = [each for each in mine if not noticed[each]]
        wrong = []
        for each in alive:
            where = "" if tests.reaches(each) else " (no C++ test reaches it)"
            if each.key in same:
                print(f"  same as the original: {each}\n    {same[each.key]}")
            else:
                wrong.append(f"[{each.number}] {each}{where}\n    {each.key}")
        by_python = sum(name.endswith(".py") for name in noticed.values())
        killed = len(mine) - len(alive)
        print(
            f"  {module}: {len(mine)} mutants, {killed} killed ({by_python} by Python tests),"
            f" {len(alive)} live, of which {len(alive) - len(wrong)} are the same as the original;"
            f" score {killed / max(killed + len(wrong), 1):.1%}"
        )
        total = sum(each.module == module for each in found)
        tally.row(f"{module}, of {total:,} mutants", killed + len(wrong), wrong)
    tally.finish()


if __name__ == "__main__":
    main()
