"""`brim.explain`: around code that may run out of memory, or of a call before it runs."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

import torch

from brim import _C
from brim._arguments import check_decorated, shown
from brim._estimate._target import bytes_of, stats_of, target_device
from brim._explain._explanation import Explanation
from brim._explain._held import Held, held_on
from brim._explain._remedies import Call, Replays
from brim._progress import progress as bar
from brim._warn import warn
from brim._whole_file import write_whole
from brim.memory import DeviceLike

P = ParamSpec("P")
R = TypeVar("R")

_CALLS = 64  # the last ones, whose beginnings are remembered
_GROWTH = "memory that grows"
_LET_GO = "let go of it: keep loss.item() instead of loss, detach what is kept, or clear the list"
_LINES = "put `with brim.explain():` around the code to see the lines that made it"
_STEP = "put the step into a function and decorate it with @brim.explain() to see what would help"


class Explaining(_C.ExplainingBlocks):
    """A block or a function whose out-of-memory errors are explained; `brim.explain()` makes one.

    Attributes:
        explanation: of the last such error; None if there was none.

    Example:
        >>> import brim, torch
        >>> with brim.budget("1MiB", device="cpu"), brim.explain(device="cpu") as told:
        ...     try:
        ...         with told:
        ...             torch.zeros(1 << 20)
        ...     except torch.OutOfMemoryError as error:
        ...         print(error.explanation.cause)
        real need
    """

    def __init__(self, device: DeviceLike = None, *, html: str | Path | None = None) -> None:
        super().__init__(device)
        self._open: list[tuple[Block, _C.BlockWatch]] = []  # of C++, which opens and ends blocks
        self._html = html
        self.explanation: Explanation | None = None

    def _block(self, watch: _C.BlockWatch) -> Block:
        """What `__enter__` opens."""
        return Block(self, watch)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: a call that runs out of memory is replayed, to see what helps.

        Raises:
            TypeError: if it is no function, or one that runs after its call has returned.
        """
        inside = "open `with brim.explain():` inside of it"
        check_decorated("explain()", function, inside)
        # Open from the first call on: what earlier calls left behind has lines, too.
        watch = _C.BlockWatch(self._device)
        held: deque[int] = deque(maxlen=_CALLS)

        @functools.wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            watch.open()
            held.append(watch.in_use)
            call = Call(function, args, kwargs, self._device, held=held[-1])
            with Block(self, watch, call, held, watch.clock):
                return function(*args, **kwargs)

        return explained

    def _tell(self, error: BaseException, block: Block) -> None:
        """Explain an error, once: where it is first seen most is known."""
        if not _C.classify_error(error) or hasattr(error, "explanation"):
            return
        try:
            with _C.BeyondBudget():
                self.explanation = explanation_of(error, self._device, block)
        except Exception as failure:  # the program's own error counts more
            warn(f"brim.explain failed: {type(failure).__name__}: {failure}")
            return
        error.explanation = self.explanation  # type: ignore[attr-defined]
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"\n{self.explanation}")
        else:
            print(f"\n{self.explanation}", file=sys.stderr)
        if self._html is not None:
            page = self.explanation.to_html().encode()
            write_whole(self._html, lambda out: out.write(page))


@dataclass(frozen=True, eq=False)
class Block(_C.ExplainedBlock):
    """A block, a call of a decorated function, or neither: then nothing was watched."""

    told: Explaining
    watch: _C.BlockWatch | None = None
    call: Call | None = None
    held: Sequence[int] = ()  # when this call and those before it began
    began: int | None = None  # this call, by the clock of the watch

    def __post_init__(self) -> None:
        super().__init__()

    def tell(self, error: BaseException) -> None:
        """Have an error explained that leaves the block."""
        self.told._tell(error, self)


def _explain_leaving(error: BaseException, device: torch.device | None) -> None:
    """Explain an error that leaves a budget or an adaptive call, for the block around that."""
    around: Any = _C.explained_block()
    block = around or Block(Explaining(device or _C.classify_error(error).device))
    block.tell(error)


_C.provide(explain_leaving=_explain_leaving)


def explanation_of(error: BaseException, device: torch.device, block: Block) -> Explanation:
    """Why memory ran out, who holds it now, and what would help the call, if it is known."""
    call = block.call
    cause = _C.classify_error(error)
    where = cause.device or device
    if where.type == device.type or stats_of(where) is None:
        where = device
    stats = _C.memory_stats(where)
    resident = _C.host_memory().resident if where.type == "cpu" else 0
    held = held_on(where, block.watch, block.began) if where == device else Held([], 0)
    grown = max(held.grown, _C.left_by_calls(block.held))
    shortage = _C.diagnose(cause, stats, resident, held.holders, grown)
    notes = _notes(shortage, held.holders)
    if call is None or where != device:
        notes += (_LINES, _STEP) if block.watch is None else (_STEP,)
        return Explanation(where, shortage, held.holders, notes=notes)
    return _replayed(call._replace(limit=stats.limit), shortage, held.holders, notes)


def _notes(shortage: _C.Shortage | None, held: list[_C.Holder]) -> tuple[str, ...]:
    if shortage is None:
        return ()
    notes: tuple[str, ...] = (_LET_GO,) if shortage.cause == _GROWTH else ()
    rest = shortage.in_use - sum(one.bytes for one in held)
    if held and rest > shortage.in_use // 20:
        gone = (
            f"{_C.format_bytes(rest)} more were in use: released by the error, or in small blocks"
        )
        notes += (gone,)
    return notes


def _replayed(
    call: Call, shortage: _C.Shortage | None, held: list[_C.Holder], told: tuple[str, ...]
) -> Explanation:
    with bar("explain", "operator") as step:
        try:
            replays = Replays(call, step)
        except Exception as error:  # EstimateError, or the program's own on fake tensors
            note = f"the call could not be replayed, so no remedies are known: {error}"
            return Explanation(call.device, shortage, held, limit=call.limit, notes=(*told, note))
        grows = shortage is not None and shortage.cause == _GROWTH
        remedies = [] if shortage is None and replays.fits else replays.remedies(grows=grows)
    notes = (*told, *replays.base.assumptions)
    if shortage is not None and replays.fits:
        notes = ("the replayed call fits: what the cause above names made it fail", *notes)
    return Explanation(
        call.device, shortage, held, replays.base, replays.need, remedies, call.limit, notes
    )


@overload
def explain(*, device: DeviceLike = None, html: str | Path | None = None) -> Explaining: ...


@overload
def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    device: DeviceLike = None,
    capacity: int | str | None = None,
    **kwargs: Any,
) -> Explanation: ...


def explain(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    device: DeviceLike = None,
    capacity: int | str | None = None,
    html: str | Path | None = None,
    **kwargs: Any,
) -> Explaining | Explanation:
    """Say why memory ran out, who holds it, and what would help.

    Around code, `with brim.explain():` names for each out-of-memory error the cause and the holders
    of the memory, by kind and line. As a decorator, `@brim.explain()`, it also replays the call on
    fake tensors, as `brim.estimate` does: as it is, and with each remedy. Both end the error's
    traceback with the report, and leave it in `error.explanation`. The error itself passes on.

    With a function, `brim.explain(step, batch)` runs nothing: it replays the call and tells what it
    needs and what would help.

    While nothing fails, an allocation of a mebibyte or more (less where memory is small) takes half
    a microsecond longer.

    Args:
        fn: what to replay; without it, a block or a decorator is returned.
        *args: its arguments.
        device: whose memory counts; the accelerator, else the CPU.
        capacity: what the call may hold in all, such as `"24GiB"`; by default what the device has.
            Only with `fn`.
        html: a file to which the report of an error is written, as a page. Only without `fn`.
        **kwargs: its keyword arguments.

    Returns:
        A block and decorator (`Explaining`), or an `Explanation`.

    Raises:
        EstimateError: if `fn` cannot be replayed.
        ValueError: if `device` or `capacity` is wrong.

    Example:
        >>> import brim, torch
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
        >>> def step(x):
        ...     model(x).sum().backward()
        >>> told = brim.explain(step, torch.ones(4096, 256), device="cpu", capacity="32MiB")
        >>> [one.name for one in told.remedies if one.fits][0]
        '2 microbatches of 2048'
    """
    if fn is None:
        if args or kwargs or capacity is not None:
            given = "capacity" if capacity is not None else "arguments"
            raise TypeError(f"{given} without a function: write brim.explain(fn, ...)")
        return Explaining(device, html=html)
    if not callable(fn):
        raise TypeError(f"fn must be a function, as in brim.explain(fn, *args), got {shown(fn)}")
    if html is not None:
        raise TypeError("html is for a block: of an Explanation, write told.to_html() to the file")
    target = target_device(device)
    stats = stats_of(target)
    if capacity is not None:
        limit, held = bytes_of("capacity", capacity, target), 0
    elif stats is not None:
        limit, held = stats.limit, stats.allocated
    else:
        raise ValueError(f"capacity must be given, such as 24GiB: {target} is not there")
    with bar("explain", "operator") as step:
        replays = Replays(Call(fn, args, kwargs, target, limit, held), step)
        remedies = [] if replays.fits else replays.remedies()
    return Explanation(
        target, None, [], replays.base, replays.need, remedies, limit, replays.base.assumptions
    )


def explain_uncaught(*, device: DeviceLike = None) -> None:
    """Have out-of-memory errors that end the program explained, from now on.

    What holds the memory is looked up when the error arrives, so nothing is to be paid before, and
    lines are not known: `brim run` and `with brim.explain():` tell more. The hook that was there
    before is called afterwards.

    Args:
        device: whose memory counts; the accelerator, else the CPU.

    Example:
        >>> import sys
        >>> before = sys.excepthook
        >>> explain_uncaught(device="cpu")
        >>> sys.excepthook = before
    """
    told, before = Explaining(device), sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        told._tell(error, Block(told))
        before(kind, error, traceback)

    sys.excepthook = hook
