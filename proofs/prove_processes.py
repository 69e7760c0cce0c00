"""Forks beside busy threads, processes killed as they write, exits while threads run.

    python proofs/prove_processes.py [--forks 10000] [--kills 1000] [--exits 200] [--seed 1]

Forks: threads allocate, are in adaptive calls, budgets and layers, read remembered sizes, make
batches, while the main thread forks. Each child does a little of one of these and ends. Kills: a
process that writes remembered sizes is killed with SIGKILL at a random moment; what is left must be
whole, old or new or nothing, and litter no more than one temporary file per kill, which `clear`
removes. Exits: a process ends in every way that there is while its threads are in brim; its status
is what it would be without them, and nothing is printed.

A child that has not ended after a minute hangs: its stacks are printed, and it counts as wrong.
Children are forked from this process, which is warm, so one takes milliseconds. Locks of torch
outlive a fork locked, in torch alone as well, and a child that needs them waits for ever: that of
the random generator, which adaptive calls look at, if a thread was drawing numbers; and that of
shared memory, where streams keep their epoch, if a thread was making one. So no thread does these
beside forks, unless `--torch-locks` asks to see it. A third is held for a moment at the beginning
of each backward, and adaptive calls need it: children that hang there are counted apart, which
needs gdb. Nor are daemon threads in functions of torch when the interpreter ends, which aborts the
process before Python 3.14. `--plant` shows that faults are found: a child that hangs, a file that
is cut off, a process that prints.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from tally import Tally

import brim
from brim.data import PackedBatchSampler, pack_stream

A_HANG = 60  # seconds
LOCK_OF_TORCH = "GlobalCallbackManager::get()"  # in the stack of a child that waits for it
AT_ONCE = 4
LENGTHS = [3, 9, 4, 7, 1, 8, 2, 6, 5, 9] * 20


class Child:
    """A forked process; `work` returns its exit status, or ends it."""

    def __init__(self, work: Callable[[], int], *, finalize: bool = False) -> None:
        self.errors = os.memfd_create("errors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking beside threads, on purpose
            self.pid = os.fork()
        self.ends = time.monotonic() + A_HANG
        if self.pid == 0:
            os.dup2(self.errors, 2)
            if finalize:
                raise Finalize(work)
            status = 70
            try:
                status = work()
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            os._exit(status)

    def status(self) -> int | None:
        """How it ended; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def said(self) -> str:
        """What it wrote to stderr. Closes the file."""
        with open(self.errors, "rb") as file:
            file.seek(0)
            return file.read().decode(errors="replace")

    def hangs(self) -> str:
        """End it, and tell where it was."""
        text = [f"process {self.pid} hangs"]
        for name in ("wchan", "stack", "syscall"):
            with contextlib.suppress(OSError):
                text.append(f"{name}: {Path(f'/proc/{self.pid}/{name}').read_text()}")
        if gdb := shutil.which("gdb"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [gdb, "-p", str(self.pid), "-batch", "-ex", "thread apply all bt 40"]
                run = subprocess.run(command, capture_output=True, text=True, timeout=A_HANG)
                text.append(run.stdout)
        os.kill(self.pid, signal.SIGUSR1)  # faulthandler writes the stacks of Python
        time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return "\n".join([*text, self.said()])

    def end(self) -> str:
        """Wait for it; what is wrong, if it did not end with 0."""
        while (status := self.status()) is None:
            if time.monotonic() > self.ends:
                return self.hangs()
            time.sleep(0.001)
        said = self.said()
        return f"exit status {status}: {said}" if status or said else ""


class Finalize(BaseException):
    """Unwinds a child to the end of the program, so that it ends as the interpreter does."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.work = work


# -- What threads and children do ------------------------------------------------------------------


class Sizes:
    """Work that fits up to a size that can be changed, and its remembered sizes."""

    def __init__(self, folder: str) -> None:
        @brim.maximize("size", strategy="halving", persist=folder, keys=["x"], device="cpu")
        def work(x: torch.Tensor, size: int = 64) -> int:
            if size > 5:
                raise torch.OutOfMemoryError("CPU out of memory.")
            return size

        self.work = work

    def first(self, keys: int) -> int:
        """What a call tries first."""
        return int(self.work.record(torch.zeros(keys))[1][0].size)


def works(folder: str) -> dict[str, Callable[[], object]]:
    """A little of everything, by name."""
    sizes = Sizes(folder)
    sizes.work(torch.zeros(1))
    adaptive = brim.maximize("n", device="cpu")(lambda n: torch.empty(n))
    told = brim.maximize("n", device="cpu", observer=lambda attempt: None)(lambda n: n)
    shared = PackedBatchSampler(torch.tensor(LENGTHS), 18)
    x = torch.ones(8, 8, requires_grad=True)
    net = torch.nn.Linear(8, 8)
    step = brim.Microbatches(lambda part: net(part).sum(), size=4, check=False, device="cpu")

    def too_much(n: int) -> int:
        if n > 2:
            raise torch.OutOfMemoryError("CPU out of memory.")
        return n

    def budget() -> None:
        with brim.budget("1GiB", device="cpu"), brim.PeakMeter("cpu"):
            torch.empty(100)

    def injected() -> None:
        with contextlib.suppress(torch.OutOfMemoryError), brim.explain(device="cpu"):
            raise torch.OutOfMemoryError("CPU out of memory.")

    def layers() -> None:
        with brim.saving():
            torch.relu(x).sum().backward()
        x.grad = None

    return {
        "allocate": lambda: torch.autograd.grad((x @ x).sum(), x),
        "adaptive calls": lambda: adaptive(8),
        "calls that fail first": lambda: brim.run_batch(8, too_much, device="cpu"),
        "told calls": lambda: told(3),
        "budgets": budget,
        "remembered sizes": lambda: (sizes.work(torch.zeros(1)), brim.SizeMemory.flush()),
        "batches": lambda: list(PackedBatchSampler(LENGTHS, 18, cost="padded")),
        "a shared sampler": lambda: list(shared),
        "streams": lambda: list(pack_stream(LENGTHS, 18, sizeof=lambda length: length)),
        "layers": layers,
        "microbatches": lambda: step(torch.ones(6, 8)),
        "explanations": injected,
        "statistics": lambda: brim.memory_stats("cpu"),
    }


@contextlib.contextmanager
def busy(work: list[Callable[[], object]]) -> Iterator[list[str]]:
    """Each of these in a thread of its own, again and again; gives the errors."""
    done = threading.Event()
    errors: list[str] = []

    def loop(each: Callable[[], object]) -> None:
        try:
            while not done.is_set():
                each()
        except BaseException:
            errors.append(f"a thread ended: {traceback.format_exc()}")

    threads = [threading.Thread(target=loop, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        done.set()
        for thread in threads:
            thread.join()


# -- Forks -----------------------------------------------------------------------------------------


def storm(
    forks: int, until: float, folder: str, work: list[Callable[[], object]], plant: bool
) -> tuple[int, list[str]]:
    """Fork so often beside these threads; how often it was, and what is wrong."""
    small = works(folder)
    wrong: list[str] = []
    torchs: list[str] = []
    each_of = list(small.values())

    def little(each: Callable[[], object]) -> int:
        each()
        return 0

    def hang() -> NoReturn:
        threading.Lock().acquire()
        lock = threading.Lock()
        with lock:
            lock.acquire()
        raise AssertionError

    def reap(children: list[Child], most: int) -> None:
        while len(children) > most:
            for child in list(children):
                if (status := child.status()) is not None:
                    said = child.said()
                    if status or said:
                        wrong.append(f"exit status {status}: {said}")
                    children.remove(child)
                elif time.monotonic() > child.ends:
                    text = child.hangs()
                    (torchs if LOCK_OF_TORCH in text else wrong).append(text)
                    children.remove(child)
            time.sleep(0.0002)  # gives the GIL away

    with busy(work) as errors:
        children: list[Child] = []
        done = 0
        while done < forks and time.monotonic() < until:
            each = each_of[done % len(each_of)]
            children.append(Child(hang if plant and done == 1 else functools.partial(little, each)))
            done += 1
            reap(children, AT_ONCE - 1)
        reap(children, 0)
    if torchs:
        print(f"  {len(torchs)} children hung at a lock of torch's that a backward takes")
    return done, wrong + errors


def prove_forks(tally: Tally, forks: int, seconds: float, locks: bool, plant: bool) -> None:
    """One kind of thread after the other, and all kinds at once."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = works(folder)
        for work in kinds.values():
            work()  # imports what it needs: a child waits for ever for an import of another thread
        numbers = torch.empty(100_000)
        groups = {name: [work, works(folder)[name]] for name, work in kinds.items()}
        streams = groups.pop("streams")
        groups["everything"] = [each for each, _ in groups.values()]
        if locks:
            groups = {"streams": streams, "drawing": [numbers.cauchy_]}
        for name, group in groups.items():
            count = forks // len(groups)
            until = time.monotonic() + seconds / len(groups)
            done, wrong = storm(count, until, folder, group, plant and name == "allocate")
            tally.row(f"forks beside threads: {name}", done, wrong)


# -- Kills -----------------------------------------------------------------------------------------

KEYS = 6
NAME = re.compile(r"[0-9a-f]{16}\.brim-sizes")
LITTER = re.compile(r"[0-9a-f]{16}\.brim-sizes\.[0-9]{1,20}\.tmp")
TRIED = (64, 32, 16, 8, 4)  # what a call may begin with, by what was written before the kill


def files_of(folder: str) -> list[Path]:
    """All files in it, at any depth."""
    return [each for each in Path(folder).rglob("*") if each.is_file()]


def check_files(folder: str, kills: int) -> list[str]:
    """What a directory of sizes holds that it should not."""
    wrong, litter = [], 0
    for file in files_of(folder):
        if NAME.fullmatch(file.name):
            text = file.read_text()
            key = file.name.partition(".")[0]
            if not (text.startswith("brim-sizes ") and key in text and text.endswith("\nend\n")):
                wrong.append(f"{file.name} is not whole: {text!r}")
        elif LITTER.fullmatch(file.name):
            litter += 1
        else:
            wrong.append(f"{file.name} is litter that nothing names")
    if litter > kills:
        wrong.append(f"{litter} temporary files after {kills} kills")
    return wrong


def first_sizes(folder: str) -> dict[int, int]:
    """What another process would try first. A warning, as of a damaged file, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = Sizes(folder)
        return {keys: fresh.first(keys) for keys in range(1, KEYS + 1)}


def prove_kills(tally: Tally, kills: int, seed: int, plant: bool) -> None:
    """Kill processes that write to one directory, one after the other."""
    random.seed(seed)
    wrong: list[str] = []
    outcomes = dict.fromkeys(TRIED, 0)
    litter: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(kills):
            begun, tell = os.pipe()

            def write(tell: int = tell) -> int:
                os.write(tell, b"x")
                while True:
                    fresh = Sizes(folder)
                    for keys in range(1, KEYS + 1):
                        fresh.work.forget(torch.zeros(keys))
                        fresh.work(torch.zeros(keys))  # each of its attempts is written

            child = Child(write)
            os.read(begun, 1)
            time.sleep(random.random() * 0.01)
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            os.close(begun)
            os.close(tell)
            said = child.said()
            if plant and number == kills // 2:
                cut = next(f for f in files_of(folder) if NAME.fullmatch(f.name))
                cut.write_text(cut.read_text()[:-3])
            found = check_files(folder, number + 1)
            if said:
                found.append(said)
            litter |= {each.name for each in files_of(folder) if LITTER.fullmatch(each.name)}
            try:
                for size in first_sizes(folder).values():
                    if size not in outcomes:
                        found.append(f"a call began with {size}")
                    else:
                        outcomes[size] += 1
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
            wrong += [f"kill {number}: {each}" for each in found]
        print(f"  calls then began with {outcomes}; {len(litter)} kills left a temporary file")
        Sizes(folder).work.clear()
        if left := files_of(folder):
            wrong.append(f"clear() leaves {left}")
    tally.row("SIGKILL of a process that writes sizes", kills, wrong)


# -- Exits -----------------------------------------------------------------------------------------


def exits(ways: str, seed: int, plant: bool) -> tuple[Callable[[], int], int]:
    """The program of a process that ends so, and its status."""
    way, _, kind = ways.partition(", ")
    daemon = kind == "daemon threads"

    def run() -> int:
        folder = tempfile.gettempdir()
        warnings.filterwarnings("ignore", ".* or another thread has allocated since")
        random.seed(seed)
        kinds = works(os.path.join(folder, "brim-proof"))
        if daemon:  # torch itself aborts when such a thread comes back from one of its functions
            kinds = {name: kinds[name] for name in WITHOUT_TORCH}
        last = threading.Event()

        def loop(each: Callable[[], object]) -> None:
            rounds = 0
            while daemon or (rounds < 30 and not last.is_set()):
                each()
                rounds += 1

        for each in random.sample(list(kinds.values()), min(len(kinds), 5)):
            threading.Thread(target=loop, args=(each,), daemon=daemon).start()
        if plant:
            os.write(2, b"planted\n")
        time.sleep(random.random() * 0.02)
        if way == "sys.exit":
            sys.exit(3)
        if way == "os._exit":
            os._exit(4)
        if way == "exception":
            raise RuntimeError("the end")
        if way == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(A_HANG)
        return 0

    return run, {"sys.exit": 3, "os._exit": 4, "exception": 1, "SIGTERM": -15, "return": 0}[way]


WITHOUT_TORCH = (
    *("calls that fail first", "told calls", "statistics", "explanations", "a shared sampler"),
)
WAYS = [
    f"{way}, {kind}"
    for way in ("return", "sys.exit", "exception", "os._exit", "SIGTERM")
    for kind in ("daemon threads", "other threads")
]


def prove_exits(tally: Tally, count: int, seed: int, plant: bool) -> None:
    """End processes in each way, with threads in them."""
    for way in WAYS:
        wrong = []
        for number in range(count // len(WAYS)):
            run, expected = exits(way, seed + number, plant and number == 0)
            child = Child(run, finalize=True)
            while (status := child.status()) is None and time.monotonic() < child.ends:
                time.sleep(0.001)
            if status is None:
                wrong.append(child.hangs())
                continue
            said = child.said()
            if way.startswith("exception"):
                tail = "RuntimeError: the end\n"
                is_quiet = said.startswith("Traceback") and said.endswith(tail)
                is_quiet &= said.count("Traceback") == 1
            else:
                is_quiet = not said
            if status != expected or not is_quiet:
                wrong.append(f"number {number}: status {status}, not {expected}: {said}")
        tally.row(f"exits: {way}", count // len(WAYS), wrong)


# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Warm up, then one kind after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forks", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--exits", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="most time of the forks"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torch-locks", action="store_true", help="what torch alone hangs at")
    parser.add_argument("--plant", action="store_true", help="faults, which must be found")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a child has no threads of torch's pool, and would wait for them
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.setswitchinterval(0.0005)
    brim.install_cpu_allocator()
    tally = Tally("Processes: forks, kills and exits")
    print(f"seed {given.seed}")
    gc.collect()
    gc.freeze()  # a child's collections then copy no pages
    # Before there were threads.
    if given.exits:
        prove_exits(tally, given.exits, given.seed, given.plant)
    if given.kills:
        prove_kills(tally, given.kills, given.seed, given.plant)
    prove_forks(tally, given.forks, given.seconds, given.torch_locks, given.plant)
    tally.finish()


if __name__ == "__main__":
    code = 0
    try:
        main()
    except Finalize as child:
        ends = child.work
        del child
        code = -1
    if code:
        sys.exit(ends())
