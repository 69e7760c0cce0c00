"""Every allocation of every public call fails in turn: once, three times in a row, and for good.

    ./dev prove faults
    ./dev prove faults -- --cases 'microbatches' --seconds 60

After each failure the call has either given the right result, bit for bit, or ended with
torch.OutOfMemoryError and nothing else. Then nothing may be left behind: bytes that tensors hold,
fake tensors, open budgets, hooks, modes, or changes to what the call promises to put back. The next
call, without a failure, must be right as well. `--seconds` takes an evenly spread share of the
calls of each kind, in an order that `--seed` chooses; the rest is left out, and said to be.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import re
import signal
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tally import Tally

import brim  # isort: skip
import torch  # isort: skip
from fault_cases import Call, Make, calls  # isort: skip
from torch._subclasses.fake_tensor import FakeTensor  # isort: skip

from tests.python.interrupts import state_of_process  # isort: skip

FOR_GOOD = 1 << 40
COUNTS = (1, 3, FOR_GOOD)
ENDLESS = 120  # seconds, where every call takes less than one


class Endless(BaseException):
    """A call did not end."""


@contextlib.contextmanager
def ends() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise Endless

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(ENDLESS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Swept:
    """What came of the failures of one call."""

    served: int = 0  # calls that gave the right result all the same
    refused: int = 0  # calls that ended with torch.OutOfMemoryError
    wrong: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return self.served + self.refused + len(self.wrong)


def held_by_tensors(device: str) -> int:
    gc.collect()
    # After a backward pass that failed, autograd's queue keeps what was ready until the next one.
    with torch.enable_grad():
        torch.zeros(1, device=device, requires_grad=True).sum().backward()
    return brim.memory_stats(device).allocated


def fakes() -> int:
    """Fake tensors that are alive, of those made since `gc.freeze`."""
    return sum(issubclass(type(each), FakeTensor) for each in gc.get_objects())


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


class Sweep:
    """One call, made again and again with failures in other places.

    Args:
        made: the call.
        device: whose allocations fail.
    """

    def __init__(self, made: Call, device: str = "cpu") -> None:
        self._made, self._device = made, device
        for _ in range(2):  # what the first calls learn or cache is there then
            made.start()
            made.result(made.call())
        gc.collect()
        gc.freeze()  # so that a collection looks at little; for good, or the next would look at all
        made.start()
        before = made.leaves()
        self._process, self._begin = state_of_process(), held_by_tensors(device)
        with brim.testing.inject_oom(at=FOR_GOOD, device=device) as counting:
            value = made.call()
        self._expected = made.result(value)
        del value
        self.allocations = counting.allocations
        self._held = held_by_tensors(device)
        self._changes_nothing = before == made.leaves()
        if device != "cpu":  # some kernels there add up in any order
            self.refuse_if_it_varies(3)

    def refuse_if_it_varies(self, calls: int) -> None:
        if any(self._call(FOR_GOOD, 1)[1] for _ in range(calls)):
            raise NotImplementedError("its bits vary without a failure")

    def run(self, places: Sequence[int], counts: Sequence[int] = COUNTS) -> Swept:
        swept = Swept()
        for count in counts:
            for at in places:
                self._once(at, count, swept)
        return swept

    def _once(self, at: int, count: int, swept: Swept) -> None:
        made = self._made
        made.start()
        before = made.leaves()
        ended, problems = self._call(at, count)
        problems += changes(self._process, state_of_process())
        if ended is not None or self._changes_nothing:
            problems += changes(before, made.leaves())
        if ended is None:
            wanted = self._held
        else:
            wanted = self._begin if made.puts_back else max(self._begin, self._held)
        left = self._held_beyond(wanted, may_be_less=ended is not None and not made.puts_back)
        if left:
            problems.append(f"{left} bytes left")
        if fakes():
            problems.append("fake tensors left")
        ended_next, wrong = self._call(FOR_GOOD, 1)
        wrong += [ended_next] if ended_next else []
        problems += [f"the next call: {each}" for each in wrong]
        if not problems and self._held_beyond(self._held):
            problems.append("the next call leaves other bytes")
        if problems:
            how = "on" if count == FOR_GOOD else f"and {count - 1} more"
            what = ended or "a result"
            swept.wrong.append(f"allocation {at} {how}: {'; '.join(problems)} (after {what})")
        elif ended is None:
            swept.served += 1
        else:
            swept.refused += 1

    def _held_beyond(self, wanted: int, *, may_be_less: bool = False) -> int:
        """Bytes that stay, for a second: threads of autograd and gloo let go of tensors later."""
        end = time.monotonic() + 1
        while True:
            left = held_by_tensors(self._device) - wanted
            if left == 0 or (left < 0 and may_be_less):
                return 0
            if time.monotonic() > end:
                return left

    def _call(self, at: int, count: int) -> tuple[str | None, list[str]]:
        """How the call ended: None for a result; and what is wrong with that."""
        made = self._made
        if at == FOR_GOOD:
            made.start()
        try:
            with (
                warnings.catch_warnings(record=True) as told,
                ends(),
                brim.testing.inject_oom(at=at, count=count, device=self._device),
            ):
                warnings.simplefilter("always")
                value = made.call()
        except torch.OutOfMemoryError as error:
            return f"torch.OutOfMemoryError: {str(error).splitlines()[0][:100]}", []
        except Endless:
            return "no end", [f"still running after {ENDLESS} s"]
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__}: {str(error)[:200]} at {last.filename}:{last.lineno}"
            return place, ["another error"]
        problems = [
            f"warns: {each.message}"
            for each in told
            if not made.tells or made.tells not in str(each.message)
        ]
        if not made.right(made.result(value), self._expected):
            problems.append("a wrong result")
        return None, problems


def swept_call(make: Make, device: str = "cpu", places: int | None = None) -> tuple[int, Swept]:
    """Allocations of a call, and what came of their failures; of at most so many of them."""
    sweep = Sweep(make(), device)
    step = max(1, sweep.allocations // places) if places else 1
    swept = sweep.run(places=range(1, sweep.allocations + 1, step))
    if swept.wrong and device != "cpu":
        Sweep(make(), device).refuse_if_it_varies(100)  # anew: a failure may have damaged the first
    return sweep.allocations, swept


def spread(found: list[Any], seed: int) -> list[Any]:
    """In an order that has something of everything at the start."""
    order = list(found)
    random.Random(seed).shuffle(order)
    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default="", metavar="PATTERN", help="a regular expression")
    parser.add_argument("--seconds", type=float, help="per kind of call; all calls without it")
    parser.add_argument("--seed", type=int, default=0, help="of the order, with --seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device == "cpu":
        brim.install_cpu_allocator()
    torch.backends.cudnn.enabled = False  # chooses by free memory, and so rounds in other ways

    kinds: dict[str, list[tuple[str, Make]]] = defaultdict(list)
    for kind, name, make in calls(arguments.device):
        if re.search(arguments.cases, f"{kind}: {name}"):
            kinds[kind].append((name, make))
    tally = Tally(
        "every allocation of every public call fails in turn, once, three times and for good",
        device=arguments.device,
    )
    for kind, cases in kinds.items():
        total, wrong, done = Swept(), [], 0
        allocations = 0
        begin = time.perf_counter()
        for name, make in spread(cases, arguments.seed) if arguments.seconds else cases:
            if arguments.seconds and time.perf_counter() - begin > arguments.seconds:
                break
            try:
                count, swept = swept_call(make, arguments.device)
            except NotImplementedError as error:  # of the call without a failure
                print(f"  left out: {name}: {error}")
                continue
            done += 1
            allocations += count
            total.served += swept.served
            total.refused += swept.refused
            wrong += [f"{name}: {each}" for each in swept.wrong]
        tally.row(kind, total.served + total.refused + len(wrong), wrong)
        print(
            f"  {done:,} of {len(cases):,} calls with {allocations:,} allocations: "
            f"{total.served:,} right results, {total.refused:,} clean errors"
        )
    if arguments.seconds:
        print(f"seed {arguments.seed}")
    tally.finish()


if __name__ == "__main__":
    main()
