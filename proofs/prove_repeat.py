"""Tests that can be trusted: again and again, in random order, on a machine that is busy.

    python proofs/prove_repeat.py [--rounds 20] [--only "threads or fork"] [--seed 1]

Each round runs the C++ tests and the fast Python tests, each in one order, in three times as many
processes as there are cores, so that each waits for the others. A test that depends on time, on
another test or on what is free fails sooner or later. Python's files stay together, for what their
tests share; files, and tests in a file, are in another order each round. `--only` is pytest's -k,
and the C++ tests are left out then. `--plant` runs tests instead that pass in one order only.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEED = "BRIM_ORDER"  # the environment variable that tells pytest's processes
PROCESSES = 3 * (os.cpu_count() or 1)
PLANTED = """
import pytest
ran = [-1]
@pytest.mark.parametrize("n", range(99))
def test_in_order(n): ran.append(n); assert ran[-2] < n
"""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Called by pytest, for which this file is a plugin."""
    order = random.Random(int(os.environ[SEED]))
    rank: dict[Any, float] = {}
    for item in items:
        rank.setdefault(item.path, order.random())
    order.shuffle(items)
    items.sort(key=lambda item: rank[item.path])


def results(file: Path) -> tuple[int, list[str]]:
    """How many tests ran, and those that failed."""
    if not file.exists():
        return 0, [f"{file.name}: the program broke off"]
    ran, failed = 0, []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        if case.get("status") == "notrun" or case.find("skipped") is not None:
            continue
        ran += 1
        for kind in ("failure", "error"):
            for each in case.findall(kind):
                name = f"{case.get('classname')}::{case.get('name')}"
                failed.append(f"{name}: {each.get('message')}"[:500])
    return ran, failed


def python_round(seed: int, only: str, folder: Path, tests: Path) -> tuple[int, list[str]]:
    file = folder / "pytest.xml"
    environment = {
        **os.environ,
        SEED: str(seed),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'proofs'}:{os.environ['PYTHONPATH']}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "prove_repeat", "-m", "not slow"]
    command += ["-n", str(PROCESSES), "--dist", "worksteal", f"--junitxml={file}", "-k", only]
    with (folder / "output").open("w") as output:
        subprocess.run(
            [*command, str(tests)], cwd=ROOT, env=environment, stdout=output, check=False
        )
    return results(file)


def cpp_round(seed: int, folder: Path) -> Iterator[tuple[int, list[str]]]:
    import brim

    programs = sorted(Path(brim.__file__).parents[2].glob("tests/cpp/test_*"))
    running = []
    for program in [each for each in programs if each.is_file() and os.access(each, os.X_OK)]:
        file = folder / f"{program.name}.xml"
        environment = {
            **os.environ,
            "GTEST_SHUFFLE": "1",
            "GTEST_RANDOM_SEED": str(seed),
            "GTEST_OUTPUT": f"xml:{file}",
            "OMP_NUM_THREADS": "1",
        }
        devnull = subprocess.DEVNULL
        running.append((file, subprocess.Popen([program], env=environment, stdout=devnull)))
    for file, process in running:
        status = process.wait()
        ran, failed = results(file)
        if status != 0 and not failed:
            failed = [f"{file.stem}: status {status}"]
        yield ran, failed


def main() -> None:
    """Run the rounds, and count."""
    from tally import Tally

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="Python tests of such names, as pytest's -k")
    parser.add_argument("--seed", type=int, default=1, help="of the first round's order")
    parser.add_argument("--plant", action="store_true", help="a fault, which must be found")
    given = parser.parse_args()

    tally = Tally("Every test again and again, in random order, beside each other")
    kinds = {"C++ tests": 0, f"Python tests{f': {given.only}' if given.only else ''}": 0}
    cpp, python = kinds
    wrong: dict[str, list[str]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        tests = ROOT / "tests" / "python"
        if given.plant:
            tests = Path(temporary) / "test_planted.py"
            tests.write_text(PLANTED)
        for seed in range(given.seed, given.seed + given.rounds):
            folder = Path(temporary) / str(seed)
            folder.mkdir()
            rounds = [(python, python_round(seed, given.only, folder, tests))]
            if not given.only and not given.plant:
                rounds += [(cpp, each) for each in cpp_round(seed, folder)]
            for kind, (ran, failed) in rounds:
                kinds[kind] += ran
                wrong[kind] += [f"seed {seed}: {each}" for each in failed]
                for each in failed:
                    print(f"  seed {seed}: {each}", flush=True)
            print(f"  round {seed}: {sum(kinds.values()):,} in all", flush=True)
    for kind, count in kinds.items():
        if count:
            tally.row(f"{given.rounds} rounds of {kind}", count, wrong[kind])
    tally.finish()


if __name__ == "__main__":
    main()
