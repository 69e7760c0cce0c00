"""Real programs under a memory limit, and how an adaptive call of `brim.maximize` does on each.

A program is made from random numbers and gives `step(n)`: one call with n items, as a user writes
it. A case is a program, a limit and the largest size to try. On a fresh copy of the program each:
halving from that size on, then six plain calls of `brim.maximize`, then the largest size that
really fits after them, found by counting up.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Iterator
from typing import Any

import programs_gradients  # noqa: F401
import programs_inference  # noqa: F401
import programs_methods  # noqa: F401
import programs_networks  # noqa: F401
import programs_training  # noqa: F401
import torch
from program_parts import PROGRAMS, VARYING, Step

import brim

MULTIPLIERS = (1.3, 3.5, 20.0)
UPPERS = (64, 100, 333, 512)
CALLS = 6


@dataclasses.dataclass
class Attempt:
    size: int
    fitted: bool
    held: int  # bytes of tensors when it began


@dataclasses.dataclass
class Case:
    """What happened. A size of 0: nothing fitted."""

    name: str
    multiplier: float
    seed: int
    upper: int
    room: int  # bytes, those of the program's own tensors included
    halving: int = 0
    halving_failures: int = 0
    calls: list[list[Attempt]] = dataclasses.field(default_factory=list)
    best: int = 0
    exhausted: bool = False  # what the program keeps grew until one item did not fit
    error: str = ""

    @property
    def sizes(self) -> list[int]:
        return [call[-1].size if call and call[-1].fitted else 0 for call in self.calls]

    @property
    def failures(self) -> list[int]:
        return [sum(not attempt.fitted for attempt in call) for call in self.calls]

    def near(self, call: int) -> bool:
        """Whether this call used the largest size, within 3 % or one item."""
        return not self.exhausted and self.sizes[call] >= min(0.97 * self.best, self.best - 1)

    @property
    def varying(self) -> bool:
        return self.name in VARYING

    @property
    def worse(self) -> bool:
        return self.failures[0] > self.halving_failures + 1 or self.sizes[0] < self.halving

    @property
    def late(self) -> bool:
        return not self.exhausted and any(self.failures[2:])

    @property
    def short(self) -> bool:
        return not self.exhausted and not self.near(-1)

    def broken_promises(self) -> list[str]:
        """What the search promises whatever the program does, where it did not keep it."""
        found: list[str] = []
        if self.error:
            return found
        if self.sizes[0] < self.halving:
            found.append(f"call 1 ends at {self.sizes[0]}, halving at {self.halving}")
        failed: list[Attempt] = []
        for number, call in enumerate(self.calls, 1):
            for attempt in call:
                # As much was held as when this size or a smaller one failed, and none fitted since.
                barred = [f for f in failed if f.size <= attempt.size and f.held <= attempt.held]
                if barred:
                    found.append(f"call {number} tries {attempt.size}, {barred[0].size} had failed")
                if attempt.fitted:
                    failed = [f for f in failed if f.size > attempt.size]
                else:
                    failed.append(attempt)
            size, failures = self.sizes[number - 1], self.failures[number - 1]
            halvings = sum(n > size for n in halved(self.upper))
            # If nothing fits, halving fails at each of its sizes, and so may this.
            if failures > max(self.halving_failures, halvings) + 1:
                found.append(f"call {number} fails {failures} times, halving {halvings}")
        return found

    def as_dict(self) -> dict[str, Any]:
        attempts = [[dataclasses.astuple(a) for a in call] for call in self.calls]
        return {
            **dataclasses.asdict(self),
            "calls": attempts,
            "sizes": self.sizes,
            "promises": self.broken_promises(),
        }


def halved(size: int) -> Iterator[int]:
    while size > 0:
        yield size
        size //= 2


def held() -> int:
    # A backward that failed leaves gradients in the thread's queue until the next one.
    torch.zeros((), requires_grad=True).backward()
    gc.collect()
    return brim.memory_stats("cpu").allocated


def out_of_memory(error: Exception) -> bool:
    return "out of memory" in f"{error} {error.__cause__}".lower() or isinstance(error, MemoryError)


class Program:
    """A program and its caller, who keeps the last result until the next call is done."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._step: Step = PROGRAMS[name](random.Random(seed))
        self.attempts: list[Attempt] = []
        self.kept: object = None

    def step(self, n: int) -> object:
        # torch switches oneDNN off for good if memory runs out in its bfloat16 products.
        torch._C._set_mkldnn_enabled(True)
        return self._step(n)

    def attempt(self, n: int) -> object:
        self.attempts.append(Attempt(n, False, brim.memory_stats("cpu").allocated))
        result = self.step(n)
        self.attempts[-1].fitted = True
        return result

    def calling(self) -> Step:
        """The function to adapt: plain, with the size as its argument."""
        return lambda n: self.attempt(n)

    def fits(self, n: int) -> bool:
        gc.collect()
        try:
            self.kept = self.step(n)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return False
        # Torch did without oneDNN, for good and slower, because oneDNN had run out of memory.
        return torch._C._get_mkldnn_enabled()

    def peak(self, n: int) -> int:
        gc.collect()
        brim.reset_peak("cpu")
        self.kept = self.step(n)
        return brim.memory_stats("cpu").peak


def room_for(name: str, seed: int, multiplier: float) -> int:
    """Bytes for two items and some more.

    Below 2 a share of what two need beyond what stays, else so many items where the need grows: in
    small calls an optimizer may need most.
    """
    base = held()
    program = Program(name, seed)
    for _ in range(2):
        program.kept = program.step(2)
    level = held() - base
    two = program.peak(2) - base
    if multiplier < 2:
        return int(level + multiplier * (two - level))
    some, many = program.peak(34) - base, program.peak(130) - base
    slope = max((some - two) / 32, (many - some) / 96, 1)
    return int(two + (multiplier - 1) * slope)


def seed_of(name: str, multiplier: float, seed: int) -> int:
    """A seed for a case that stays the same whichever other programs there are."""
    return random.Random(f"{name} {multiplier:g} {seed}").randrange(2**31)


def run(name: str, multiplier: float, seed: int) -> Case | None:
    """Run one case; None if not even one item fits by halving."""
    upper = random.Random(f"upper {seed}").choice(UPPERS)
    case = Case(name, multiplier, seed, upper, room_for(name, seed, multiplier))
    with brim.budget(held() + case.room, device="cpu"):
        program = Program(name, seed)
        for size in halved(upper):
            if program.fits(size):
                case.halving = size
                break
            case.halving_failures += 1
    del program
    if not case.halving:
        return None
    with brim.budget(held() + case.room, device="cpu"):
        program = Program(name, seed)
        step = brim.maximize("n")(program.calling())
        for _ in range(CALLS):
            gc.collect()
            program.attempts = []
            try:
                program.kept = step(upper)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            case.calls.append(program.attempts)
            if not case.sizes[-1] and not program.fits(1):
                case.exhausted = True
                return case
        del step
        case.best = case.sizes[-1]
        while case.best < upper and program.fits(case.best + 1):
            case.best += 1
    del program
    if case.short:
        confirm(case)
    return case


def confirm(case: Case) -> None:
    """Lower `best` if it did not fit when the last call began: what a call leaves may vary."""
    for size in (case.best, max(case.sizes[-1] + 1, int(0.97 * case.best))):
        with brim.budget(held() + case.room, device="cpu"):
            program = Program(case.name, case.seed)
            for attempt in itertools.chain(*case.calls[:-1]):
                program.fits(attempt.size)
            fits = program.fits(size)
        del program
        if fits:
            case.best = size
            return
    case.best = case.sizes[-1]


def prepare(names: list[str]) -> None:
    """Run everything once, so that later collections need not look at what is imported lazily."""
    torch.set_num_threads(1)  # kernels take scratch memory per thread
    brim.install_cpu_allocator()
    for name in names:
        Program(name, 0).step(2)
    gc.collect()
    gc.freeze()


def run_guarded(name: str, multiplier: float, seed: int) -> Case | None:
    """As `run`; a case whose program broke says so."""
    try:
        return run(name, multiplier, seed)
    except Exception as error:
        return Case(name, multiplier, seed, 0, 0, error=f"{type(error).__name__}: {error}"[:200])
