"""brim beside other threads, in forked processes, at the end of the interpreter."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import brim

from .patience import FOR_EVER

MIB = 2**20


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=FOR_EVER
    )


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads, on purpose
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + FOR_EVER
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(status[1]) == 0


# ---------------------------------------------------------------- other threads


def test_other_threads_run_while_a_call_waits_for_the_random_generator() -> None:
    numbers = torch.empty(4_000_000)
    drawing, inside, done = (threading.Event() for _ in range(3))
    adaptive = brim.maximize("n")(lambda n: n)

    def draw() -> None:
        while not done.is_set():
            drawing.set()
            numbers.cauchy_()  # holds the generator's lock, not the GIL

    def call() -> None:
        drawing.wait()
        for _ in range(5):
            time.sleep(0.01)
            inside.set()
            adaptive(3)
            inside.clear()
        done.set()

    threads = [threading.Thread(target=target) for target in (draw, call)]
    for thread in threads:
        thread.start()
    ticks = 0
    while not done.is_set():
        time.sleep(0.001)
        ticks += inside.is_set()
    for thread in threads:
        thread.join()
    assert ticks > 10, "with the GIL held there is one a call at most"


class Neighbour:
    """An adaptive call on another thread that holds memory until it is released."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.holds = threading.Event()
        self.release = threading.Event()
        self.released_in_time = False
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        def hold(_n: int) -> None:
            held = torch.empty(self.size, dtype=torch.uint8)
            self.holds.set()
            self.released_in_time = self.release.wait(FOR_EVER / 3)
            del held

        brim.run_batch(1, hold)

    def __enter__(self) -> Neighbour:
        self.thread.start()
        assert self.holds.wait(FOR_EVER)
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self.thread.join()


@pytest.fixture
def room(held: int) -> Iterator[int]:
    with brim.budget(held + 64 * MIB, device="cpu"):
        yield 64 * MIB


@pytest.mark.parametrize("kind", ["maximize", "chunked"])
def test_a_call_waits_for_the_memory_of_other_threads_before_it_gives_up(
    kind: str, room: int
) -> None:
    def work(n: int) -> None:
        torch.empty(n * MIB, dtype=torch.uint8)

    rows = torch.zeros(8)
    with Neighbour(room - rows.nbytes) as neighbour:
        sizes: list[int] = []

        def observer(attempt: brim.Attempt) -> None:
            sizes.append(attempt.size)
            if attempt.size == 1:
                neighbour.release.set()

        if kind == "maximize":
            brim.maximize("n", device="cpu", observer=observer)(work)(n=8)
        else:
            chunked = brim.chunked(8, device="cpu", observer=observer)
            chunked(lambda chunk, _start, _end: work(len(chunk)))(rows)
    assert neighbour.released_in_time
    assert max(sizes[sizes.index(1) + 1 :]) > 1, "and takes what is free then"


def test_memory_that_came_back_before_a_call_could_wait_for_it_is_used(room: int) -> None:
    with Neighbour(room) as neighbour:

        def observer(attempt: brim.Attempt) -> None:
            if attempt.size == 1:
                neighbour.release.set()
                neighbour.thread.join()

        size = brim.run_batch(2, lambda n: torch.empty(n).numel(), device="cpu", observer=observer)
    assert size >= 1
    assert neighbour.released_in_time


def test_what_no_waiting_would_help_is_not_waited_for(room: int) -> None:
    with Neighbour(room) as neighbour:
        with pytest.raises(torch.OutOfMemoryError, match="even with"):
            brim.run_batch(2, lambda n: torch.empty(n * 2 * room), device="cpu")
        neighbour.release.set()
    assert neighbour.released_in_time


def test_a_call_that_stands_still_is_not_waited_for(room: int) -> None:
    """It may have started the thread of this call and wait for it, or be in `backward`."""
    with Neighbour(room) as neighbour:
        with pytest.raises(torch.OutOfMemoryError, match="even with"):
            brim.run_batch(2, lambda _n: torch.empty(room // 4), device="cpu")
        neighbour.release.set()
    assert neighbour.released_in_time


def test_a_signal_ends_the_waiting(room: int) -> None:
    def observer(attempt: brim.Attempt) -> None:
        if attempt.size == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # other libraries set theirs
    try:
        with Neighbour(room) as neighbour:
            with pytest.raises(KeyboardInterrupt):
                brim.run_batch(
                    2, lambda _n: torch.empty(room // 4), device="cpu", observer=observer
                )
            neighbour.release.set()
    finally:
        signal.signal(signal.SIGINT, before)
    assert neighbour.released_in_time


def test_many_threads_share_what_one_would_take(room: int) -> None:
    results: list[int] = []

    @brim.maximize("n", device="cpu")
    def work(n: int) -> int:
        held = torch.empty(n * MIB, dtype=torch.uint8)
        time.sleep(0.002)
        return held.numel() // MIB

    def calls() -> None:
        for _ in range(5):
            results.append(work(n=room // MIB))

    threads = [threading.Thread(target=calls) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40


def test_threads_can_begin_streams_while_others_do() -> None:
    errors: list[BaseException] = []
    before = sys.getswitchinterval()
    stream = brim.data.pack_stream([3, 1, 2], 4, sizeof=lambda size: size)
    open_ones = [iter(stream) for _ in range(300)]
    assert [len(next(each)) for each in open_ones] == [len(next(iter(stream)))] * 300

    def begin() -> None:
        try:
            for _ in range(100):
                list(brim.data.pack_stream([3, 1, 2], 4, sizeof=lambda size: size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors


# ---------------------------------------------------------------- forked processes


def test_a_forked_process_has_the_budget_and_a_count_of_its_own(held: int) -> None:
    inherited = [torch.empty(50 * MIB, dtype=torch.uint8)]
    budget = brim.budget(held + 100 * MIB, device="cpu")

    def work() -> None:
        assert brim.memory_stats("cpu").allocated == 0
        own = torch.empty(90 * MIB, dtype=torch.uint8)
        assert brim.memory_stats("cpu").allocated == own.numel()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(held + 11 * MIB, dtype=torch.uint8)
        inherited.clear()
        assert brim.memory_stats("cpu").allocated == own.numel(), "what was never counted"
        del own
        assert brim.memory_stats("cpu").allocated == 0
        budget.__exit__()
        torch.empty(held + 101 * MIB, dtype=torch.uint8)

    with budget:
        in_child(work)
        assert brim.memory_stats("cpu").allocated == held + 50 * MIB


def test_a_meter_in_a_forked_process_counts_what_that_allocates(held: int) -> None:
    def work() -> None:
        torch.empty(2 * MIB, dtype=torch.uint8)
        assert meter.peak == 2 * MIB
        assert brim.memory_stats("cpu").peak == 2 * MIB

    assert held >= 0
    with brim.PeakMeter("cpu") as meter:
        kept = torch.empty(3 * MIB, dtype=torch.uint8)
        in_child(work)
        assert meter.peak == kept.numel()


def test_a_fork_beside_allocating_threads_and_an_injector_does_not_hang() -> None:
    stop = threading.Event()

    def allocate() -> None:
        torch.empty(3)

    def churn() -> None:
        x = torch.rand(8, 8, requires_grad=True)
        while not stop.is_set():
            torch.autograd.grad((x @ x).sum(), x)  # allocates without the GIL

    with brim.testing.inject_oom(at=2**60):
        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(30):
                in_child(allocate)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_an_adaptive_call_in_a_forked_process_waits_for_no_thread_of_the_parent(room: int) -> None:
    def work() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            brim.run_batch(2, lambda _n: torch.empty(room), device="cpu")
        with brim.testing.inject_oom(at=1):
            assert brim.run_batch(2, lambda n: torch.empty(n).numel(), device="cpu") == 1

    with Neighbour(room) as neighbour:
        in_child(work)
        neighbour.release.set()
    assert neighbour.released_in_time


def test_a_forked_process_can_call_what_another_thread_was_about_to() -> None:
    done = threading.Event()

    def loop() -> None:
        while not done.is_set():
            brim.run_batch(2, lambda n: n)

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(5):
        in_child(lambda: brim.run_batch(2, lambda n: n))
    done.set()
    thread.join()


def test_a_fork_waits_for_the_estimate_of_another_thread() -> None:
    inside, forking = threading.Event(), threading.Event()
    # What is registered last is called first, and the other thread cannot run before the fork.
    os.register_at_fork(before=forking.set)
    net, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def traced() -> None:
        inside.set()
        forking.wait(FOR_EVER)
        net(x).sum().backward()

    def work() -> None:
        assert type(net.weight) is torch.nn.Parameter
        assert brim.estimate(net, x, device="cpu").peak > 0

    thread = threading.Thread(target=brim.estimate, args=(traced,), kwargs={"device": "cpu"})
    thread.start()
    assert inside.wait(FOR_EVER)
    in_child(work)
    thread.join()


# ---------------------------------------------------------------- the process


def test_threads_that_are_told_of_their_first_calls_do_not_wait_for_each_other() -> None:
    code = """
import logging, threading, time, torch, brim
usual = logging.getLogger
def slowly(*name):
    time.sleep(0.3)  # the other thread comes meanwhile
    return usual(*name)
logging.getLogger = slowly
told = brim.maximize("n", observer=lambda attempt: None)(lambda n: n)
threads = [threading.Thread(target=told, args=(4,)) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    ended = run(code)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_daemon_threads_in_adaptive_calls_end_quietly_with_the_interpreter() -> None:
    code = """
import threading, time, torch, brim
work = brim.maximize("n")(lambda n: sum(range(2000)))
told = brim.maximize("n", observer=lambda attempt: sum(range(2000)))(lambda n: n)
def loop(f, *args):
    while True: f(*args)
sampler = brim.data.PackedBatchSampler(list(range(1, 10)) * 50, 18)  # threads wait for each other
for call in ((work, 64), (told, 64), (brim.SizeMemory.flush,), *[(list, sampler)] * 3):
    threading.Thread(target=loop, args=call, daemon=True).start()
time.sleep(0.1)
"""
    ended = run(code)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_tuples_that_other_threads_fill_are_left_alone() -> None:
    done, errors = threading.Event(), []

    def build() -> None:
        while not done.is_set():
            try:
                tuple(i for i in range(50))
            except SystemError as error:  # it has a second owner before it is full
                errors.append(error)
                return

    threads = [threading.Thread(target=build) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(50):
            assert isinstance(brim._C.live_objects(torch.Tensor), list)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert errors == []


@pytest.mark.slow
def test_daemon_threads_end_quietly_in_any_python_code_of_a_call() -> None:
    # Each ends inside the sleep, with brim's frames above it: in an observer, a log, a hasher, the
    # text of an error, a finaliser, a length.
    code = """
import logging, threading, time, warnings, torch, brim
warnings.simplefilter("ignore")  # of results that range drops
def pause(*args):
    time.sleep(0.002)
    return 1
class Slow:
    __len__ = pause
    def __del__(self): pause()
class Out(MemoryError):
    def __str__(self): return str(pause())
def fail(n):
    if n > 1: raise Out
    return Slow()
logging.getLogger("brim").setLevel(logging.INFO)
logging.getLogger("brim").addHandler(handler := logging.Handler())
handler.emit = pause
calls = [
    (brim.maximize("n", observer=pause)(lambda n: n), 64),
    (brim.maximize("n", keys=("n",), hasher=pause)(lambda n: n), 64),
    (brim.maximize("n", infer="of")(lambda n=None, of=None: n), None, Slow()),
    (brim.maximize("n")(fail), 4),
    (brim.range(1)(lambda start, end: Slow()), 0, 8),
]
def loop(f, *args):
    while True: f(*args)
for call in calls * 3:
    threading.Thread(target=loop, args=call, daemon=True).start()
time.sleep(0.3)
"""
    ended = run(code)
    assert (ended.returncode, ended.stderr) == (0, "")


LIBRARY = pathlib.Path(brim._C.__file__).parent / "lib" / "libbrim.so"


def second_copy(folder: pathlib.Path) -> pathlib.Path:
    """libbrim under another name; without it the loader would take the one that it has."""
    copy = folder / "libbrin.so"
    copy.write_bytes(LIBRARY.read_bytes().replace(b"libbrim.so\0", b"libbrin.so\0"))
    return copy


@pytest.mark.slow
def test_a_second_libbrim_does_no_harm(tmp_path: pathlib.Path) -> None:
    code = f"""
import ctypes, torch, brim
ctypes.CDLL({str(second_copy(tmp_path))!r})
with brim.budget("1GiB", device="cpu"), brim.PeakMeter("cpu") as meter:
    x = torch.ones(8, requires_grad=True)
    brim.nn.ReLU()(x).sum().backward()
assert meter.peak > 0
"""
    ended = run(code)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_using_a_second_libbrim_says_what_is_wrong(tmp_path: pathlib.Path) -> None:
    code = f"""
import ctypes, brim
ctypes.CDLL({str(second_copy(tmp_path))!r})._ZN4brim21install_cpu_allocatorEv()
"""
    ended = run(code)  # a C++ exception that nobody catches
    assert ended.returncode != 0
    assert "libbrin.so is the second copy of libbrim in this process" in ended.stderr


def test_importing_brim_beside_another_libbrim_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    code = f"""
import ctypes, torch
ctypes.CDLL({str(second_copy(tmp_path))!r})
try:
    import brim
except ImportError as error:
    assert "second copy of libbrim" in str(error), error
else:
    raise AssertionError("imported")
"""
    ended = run(code)
    assert ended.returncode == 0, ended.stderr
