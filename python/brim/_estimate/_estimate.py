"""`brim.estimate`: the peak memory of a call without running it."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from brim import _C
from brim._arguments import check_recompute, positive, runs_in_parts, shown
from brim._estimate._cpu import CpuTemporaries
from brim._estimate._cuda_kernels import CudaTemporaries
from brim._estimate._errors import EstimateError, LeftBehindError
from brim._estimate._follow import follow
from brim._estimate._log import Allocation, Kind
from brim._estimate._places import line_of
from brim._estimate._reasons import reason_of
from brim._estimate._report import Estimate, GivenUp
from brim._estimate._surroundings import keep_surroundings, keep_thread
from brim._estimate._swap import Swap
from brim._estimate._target import bytes_of, options_of, stats_of, target_device
from brim._estimate._threads import OneThread
from brim._estimate._tracer import Tracer
from brim._progress import progress as bar
from brim._state.kept import Kept
from brim._state.reach import Reachable
from brim._state.undoing import Undoing
from brim.memory import DeviceLike

one_at_a_time = threading.RLock()  # a trace changes choices of torch for its duration


class _WhileForking(threading.local):
    """A process forked in the middle of another thread's trace would keep its choices and lock.

    So a fork waits for the trace, but not for ever: the trace may wait for the thread that forks.
    """

    holds = False

    def before(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # nobody could catch it here
            self.holds = one_at_a_time.acquire(timeout=_PATIENCE)

    def after(self) -> None:
        if self.holds:
            self.holds = False
            one_at_a_time.release()


_PATIENCE = 10.0
_forking = _WhileForking()
os.register_at_fork(
    before=_forking.before, after_in_parent=_forking.after, after_in_child=_forking.after
)


def estimate(
    fn: Callable[..., Any],
    /,
    *args: Any,
    device: DeviceLike = None,
    capacity: int | str | None = None,
    calls: int = 1,
    recompute: str | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Estimate:
    """Predict the peak memory of `fn(*args, **kwargs)` without running it.

    The function runs on fake tensors: no memory is taken and no kernel runs. Parameters, buffers,
    gradients, optimizer state, random state, hooks, modes, settings of torch and the Python objects
    that the function changes are the same afterwards, also if it fails or is interrupted; iterators
    and files are not. Other threads must not use the same objects meanwhile.

    Args:
        fn: what to estimate, such as a training step.
        *args: its arguments.
        device: the device whose memory counts; it need not exist. If the call uses no tensor on it,
            tensors on the CPU are taken to be there. Those on the meta device always are.
        capacity: what the call may take in all, what it holds before included, as bytes or text
            such as `"24GiB"`; by default what is free, if the device is there. Tensors that the
            call does not use are no part of it, other than in the budget of `brim.largest_size`.
        calls: how many calls to trace in a row. With 2, a training step also counts what its first
            call leaves behind, such as an optimizer's state.
        recompute: trace the call inside of `brim.saving(recompute)`: "cheap", "products" or "auto".
            Modules that are converted keep the level that they were converted with.
        progress: whether to show a bar on a terminal if it takes long.
        **kwargs: its keyword arguments.

    Returns:
        The peak above what is held now, and what it consists of; see `Estimate`. Layers with
        `recompute="auto"` keep everything while the capacity lasts. Where it does not, the trace
        gives up as much as a real call would, and computes it again: see `Estimate.given_up`.

    Raises:
        ValueError: if `device`, `capacity`, `calls` or `recompute` is wrong.
        EstimateError: if the code depends on values of tensors, or an operator has no fake kernel,
            or a tensor of the trace is left where it cannot be removed, or threads other than the
            calling one work with its tensors; names the line.

    Example:
        >>> import brim, torch
        >>> def work(x):
        ...     return (x * 2).exp().sum()
        >>> brim.estimate(work, torch.zeros(1024, 1024), device="cpu").peak
        8388608
    """
    check_recompute(recompute)
    with one_at_a_time, bar("estimate", "operator", enabled=progress) as step:
        trace = functools.partial(
            traced, fn, args, kwargs, device, capacity, calls, recompute, step=step
        )
        found = trace()
        result = found.estimate
        if result.given_up is not None:
            kept = trace(room=math.inf)
            result.given_up = result.given_up._replace(
                extra_work=max(found.flops / max(kept.flops, 1) - 1, 0.0),
                peak_without=kept.estimate.peak,
            )
        return result


class Traced(NamedTuple):
    """One trace.

    Attributes:
        estimate: what it tells.
        flops: that the call takes, as torch counts them.
        can_give_up: whether layers keep something only while there is room.
        ran_backward: whether it computed gradients.
    """

    estimate: Estimate
    flops: int
    can_give_up: bool
    ran_backward: bool


def traced(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: DeviceLike,
    capacity: int | str | None,
    calls: int,
    recompute: str | None,
    room: float | None = None,
    step: Callable[[], None] = lambda: None,
) -> Traced:
    """What `estimate` tells, by one trace. Its arguments are those of `estimate`.

    `room` are the bytes beyond which values are given up, if not the capacity; with 0, all go at
    once. `step` is called for each operator.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, as in brim.estimate(fn, *args), got {shown(fn)}")
    calls = positive("calls", calls)
    kind = runs_in_parts(fn)
    if kind:
        raise TypeError(f"fn is {kind} function: it runs after the call has returned, got {fn!r}")
    target = target_device(device)
    limit = None if capacity is None else bytes_of("capacity", capacity, target)
    found = Reachable(fn, args, kwargs)
    moves = target.type != "cpu" and not any(_tensors_on(found, target.type))
    temporaries = CpuTemporaries() if target.type == "cpu" else CudaTemporaries(target)
    # What is collected during the trace would seem to be released by the call.
    gc.collect(2 if limit is None else 1)
    mode, lost = OneThread(), list[str]()
    stats = stats_of(target) if limit is None else None
    rehearsal = _rehearsal(mode, target, limit, stats, room)
    try:
        with Undoing() as settings, Undoing() as state, Undoing() as tensors, Undoing() as undo:
            kept = Kept(state.callback)
            keep_surroundings(settings, kept)
            swap = Swap(tensors, mode, target, moves, lost)
            tracer = Tracer(swap, kept, mode.is_here, target, moves, temporaries, rehearsal, step)
            torch.clear_autocast_cache()  # torch makes no tensor fake that C++ refers to
            keep_thread(undo)
            undo.callback(rehearsal.end)
            undo.callback(tracer.stop)
            rehearsal.begin()
            _take(tracer, kept, found)
            follow(tracer, mode, undo, target, moves)
            _trace(tracer, mode, functools.partial(fn, *args, **kwargs), calls, recompute)
            given_up = GivenUp(*rehearsal.given_up)
            can_give_up = rehearsal.keeps_while_room
    except Exception as error:
        if lost and not isinstance(error, LeftBehindError):
            raise LeftBehindError(lost[0]) from error
        raise
    _check_that_none_is_left(tracer.left)
    if target.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tracer.log.hold_workspaces(torch.cuda.memory_allocated(target) - tracer.log.bytes_held())
    trace, begins = tracer.log.trace()
    if moves:
        tracer.assumptions[f"tensors on the CPU are taken to be on {target}"] = None
    if tracer.values.draws:
        tracer.assumptions[
            "random numbers decide what runs: a call that draws others needs more or less"
        ] = None
    tracer.assumptions.update(dict.fromkeys(temporaries.assumptions))
    for func, count in tracer.unknown.items():
        text = f"temporaries of {func} are not known: {count} call{'s' if count > 1 else ''}"
        tracer.assumptions[text] = None
    if stats is not None:
        limit = tracer.log.bytes_held() + stats.free
    options, unknown = options_of(target, limit, _beyond(stats))
    tracer.assumptions.update({f"the allocator's {one} has no effect": None for one in unknown})
    assumptions = tuple(tracer.assumptions)
    gone = given_up if given_up.bytes else None
    result = Estimate(trace, options, begins, target, limit, assumptions, gone)
    return Traced(result, tracer.flops, can_give_up, tracer.ran_backward)


def _rehearsal(
    mode: OneThread,
    target: torch.device,
    limit: int | None,
    stats: _C.MemoryStats | None,
    room: float | None,
) -> _C.Rehearsal:
    grows = limit is None and room is None
    if room is None:
        room = limit if stats is None else stats.free
    capacity = None if room is None or room == math.inf else int(room)
    options, _ = options_of(target, capacity, _beyond(stats))
    return _C.Rehearsal(options, grows, target, target.type != "cpu", mode)


def _beyond(stats: _C.MemoryStats | None) -> int:
    """What torch's cache may take beyond what is free: under a budget on CUDA."""
    return 0 if stats is None else stats.reservable - stats.allocated - stats.free


def _take(tracer: Tracer, kept: Kept, found: Reachable) -> None:
    """Make what the call reaches fake, and keep what else it may change."""
    for module in found.modules:
        tracer.take_module(module)
    for optimizer in found.optimizers:
        tracer.take_optimizer(optimizer)
    for helper in found.helpers:
        kept.keep(helper)
    for thing, own in found.state:
        kept.keep(thing, own)
    for tensor in found.tensors:
        tracer.take(tensor, Kind.input, "")


def _trace(
    tracer: Tracer, mode: OneThread, call: Callable[[], Any], calls: int, recompute: str | None
) -> None:
    """Run a call on fake tensors."""
    region = nullcontext() if recompute is None else _C.Region(recompute)
    try:
        with mode, tracer, region:
            for i in range(calls):
                if i > 0:
                    tracer.log.begin_call()
                result = call()
                is_loss = isinstance(result, torch.Tensor) and result.numel() == 1
                if is_loss and result.requires_grad and not tracer.ran_backward:
                    tracer.assumptions["the call returns a loss and runs no backward"] = None
                del result
    except Exception as error:
        mode.check_alone(error)
        reason = reason_of(error)
        if not reason:
            raise
        raise EstimateError(f"{line_of(error)}: {reason}") from error
    mode.check_alone()
    tracer.name_gradients()


def _check_that_none_is_left(live: list[tuple[weakref.ref[Any], Allocation]]) -> None:
    if any(storage() is not None for storage, _ in live):
        gc.collect()
    places = {one.place: None for storage, one in live if storage() is not None}
    if places:
        raise LeftBehindError(
            "tensors of the trace, which have no values, are left in something that brim cannot "
            "put back (an object of C++, an iterator). Remove them "
            f"before real calls. They were made at {', '.join(places)}"
        )


def _tensors_on(found: Reachable, kind: str) -> Iterator[bool]:
    for module in found.modules:
        yield from (t.device.type == kind for t in (*module.parameters(), *module.buffers()))
    yield from (tensor.device.type == kind for tensor in found.tensors)
