"""What would help: changes to a call, each replayed before it is recommended."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from brim import _C
from brim._estimate import Estimate, EstimateError
from brim._estimate._estimate import Traced, one_at_a_time, traced
from brim._estimate._largest import Traces
from brim._state.reach import Reachable

Kind = _C.MemoryKind

_CALLS = 2  # the second one also holds what the first leaves: gradients, an optimizer's state
_WORTH = 0.005  # a remedy that saves less than this share of the need is none
# bitsandbytes keeps one byte per value, and a float32 for each 256.
_OF_8_BIT = (1 + 4 / 256) / 4


class Remedy(NamedTuple):
    """A change that would help, and what it was found to need.

    Attributes:
        name: in a few words.
        code: the line to change, or to run.
        peak: bytes that the device has to hold with it, at most.
        saves: bytes less than without it.
        fits: whether that is within the limit.
        extra_work: what it computes in addition, as a share of the call's floating-point
            operations; None if the call does less at once, or other work.
        note: what else changes; "" if nothing.

    Example:
        >>> import brim
        >>> brim.Remedy("half the batch", "batch[:8]", 3 << 30, 1 << 30, True).saves
        1073741824
    """

    name: str
    code: str
    peak: int
    saves: int
    fits: bool
    extra_work: float | None = 0.0
    note: str = ""


class Call(NamedTuple):
    """A call that can be replayed.

    Attributes:
        fn: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        device: whose memory counts.
        limit: bytes that the device may hold; looked up when the call has failed.
        held: by all tensors of this process before the call.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    limit: int = 0
    held: int = 0


class Replays:
    """Replays of a call: as it is, and with one thing changed.

    Args:
        call: which one.
        step: called for each operator.
    """

    def __init__(self, call: Call, step: Callable[[], None] = lambda: None) -> None:
        self._call = call
        self._step = step
        self._made = self._traced(call.fn)
        self.base = self._made.estimate
        self._outside = max(call.held - self.base.held_before, 0)
        self.need = self._need(self.base)

    @property
    def fits(self) -> bool:
        """Whether the call fits as it is."""
        return self.need <= self._call.limit

    def remedies(self, *, grows: bool = False) -> list[Remedy]:
        """What would help, best first: what fits before what does not, then by what it costs.

        Where memory grows from call to call, less per call only puts the failure off.
        """
        found = list[Remedy]()
        ways = (
            self._without_graph,
            self._without_gradients,
            self._expandable,
            self._recomputing,
            self._optimizer_in_8_bit,
            self._smaller_batch,
            self._in_bfloat16,
        )
        for way in ways[:1] if grows else ways:
            try:
                found += way()
            except EstimateError:
                continue  # this change cannot be traced: it is not recommended
        worth = [one for one in found if one.saves >= _WORTH * self.need]
        return sorted(worth, key=lambda one: not one.fits)  # stable: in the order of the ways

    def _traced(
        self, fn: Callable[..., Any], *, recompute: str | None = None, room: float = math.inf
    ) -> Traced:
        call = self._call
        with one_at_a_time:
            return traced(
                fn,
                call.args,
                call.kwargs,
                call.device,
                call.limit,
                _CALLS,
                recompute,
                room,
                self._step,
            )

    def _need(self, estimate: Estimate) -> int:
        return self._outside + estimate.held_before + estimate.peak

    def _remedy(self, name: str, code: str, found: Traced, **more: Any) -> Remedy:
        peak = self._need(found.estimate)
        work = found.flops / max(self._made.flops, 1) - 1
        return Remedy(
            name, code, peak, self.need - peak, peak <= self._call.limit, max(work, 0.0), **more
        )

    def _without_graph(self) -> Iterator[Remedy]:
        if self._made.ran_backward or not torch.is_grad_enabled():
            return

        def quiet(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return self._call.fn(*args, **kwargs)

        yield self._remedy(
            "no graph",
            "with torch.no_grad():",
            self._traced(quiet),
            note="no gradients: for evaluation",
        )

    def _without_gradients(self) -> Iterator[Remedy]:
        optimizers = Reachable(self._call.fn, self._call.args, self._call.kwargs).optimizers
        if not self._made.ran_backward or not optimizers:
            return

        def fresh(*args: Any, **kwargs: Any) -> Any:
            for each in optimizers:
                each.zero_grad(set_to_none=True)
            return self._call.fn(*args, **kwargs)

        yield self._remedy(
            "gradients released before the forward",
            "optimizer.zero_grad(set_to_none=True)  # first in the step",
            self._traced(fresh),
            note="not if gradients of several calls add up",
        )

    def _expandable(self) -> Iterator[Remedy]:
        if self._call.device.type != "cuda":
            return
        trace, options, start = self.base._replayed
        if options.expandable_segments:
            return
        changed, _ = _C.AllocatorOptions.from_settings("expandable_segments:True")
        now = self._outside + self.base.reserved
        peak = self._outside + _C.replay(trace, changed, start).reserved
        yield Remedy(
            "expandable segments",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            peak,
            now - peak,
            peak <= self._call.limit,
            note="of what torch reserves, which exceeds what tensors hold",
        )

    def _recomputing(self) -> Iterator[Remedy]:
        if self._made.ran_backward and not self._made.can_give_up:
            room = max(self._call.limit - self._outside, 1)
            found = self._traced(self._call.fn, recompute="auto", room=room)
            yield self._remedy(
                'recompute="auto"',
                'brim.convert(model, recompute="auto")',
                found,
                note="the same gradients; gives up only what has to go",
            )

    def _optimizer_in_8_bit(self) -> Iterator[Remedy]:
        trace, options, start = self.base._replayed
        smaller = trace.scaled(Kind.optimizer_state, _OF_8_BIT)
        report = _C.replay(smaller, options, start)
        peak = self._outside + report.held_before + report.peak
        yield Remedy(
            "optimizer state in 8 bits",
            "bitsandbytes.optim.AdamW8bit(…) for AdamW",
            peak,
            self.need - peak,
            peak <= self._call.limit,
            note="other rounding of the optimizer's state",
        )

    def _smaller_batch(self) -> Iterator[Remedy]:
        size = batch_size_of(self._call.args, self._call.kwargs)
        if size is None or size < 2:
            return
        call = self._call

        def part(*args: Any, size: int, **kwargs: Any) -> Any:
            def rows(tensor: torch.Tensor) -> torch.Tensor:
                return tensor[:size] if tensor.ndim > 0 else tensor

            args, kwargs = tree_map_only(torch.Tensor, rows, (args, kwargs))
            return call.fn(*args, **kwargs)

        limit = max(call.limit - self._outside, 1)
        traces = Traces(
            part, "size", limit, call.args, call.kwargs, call.device, 1, size - 1, _CALLS
        )
        traces._others = 0  # what is outside of the call is taken off the limit here
        asked = size - 1
        while not traces.search.finished:
            traces.trace(asked)
            asked = traces.search.next
        best = traces.search.best or 0
        if not best:
            return
        peak = self._outside + traces.needs[best]
        saves = self.need - peak
        if self._made.ran_backward:
            parts = math.ceil(size / best)
            rows = math.ceil(size / parts)
            yield self._remedy(
                f"{parts} microbatches of {rows}",
                "brim.Microbatches(loss_fn, model=model)(batch)",
                self._traced(functools.partial(part, size=rows)),
                note="the gradients of the whole batch; the optimizer's step stays outside of "
                "loss_fn",
            )
        yield Remedy(
            f"batch {best} instead of {size}",
            f"batch_size={best}",
            peak,
            saves,
            True,
            None,
            "" if not self._made.ran_backward else "other gradients: of a smaller batch",
        )

    def _in_bfloat16(self) -> Iterator[Remedy]:
        kind = self._call.device.type
        if torch.is_autocast_enabled(kind):
            return

        def cast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, torch.bfloat16):
                return self._call.fn(*args, **kwargs)

        yield self._remedy(
            "autocast",
            f'with torch.autocast("{kind}", torch.bfloat16):',
            self._traced(cast),
            note="less exact"
            + ("; its kernels may take scratch memory beyond this" if kind == "cpu" else ""),
        )


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The length that all tensors among the arguments have first; None if they differ."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    sizes = {each.shape[0] for each in tensors if each.ndim > 0}
    return sizes.pop() if len(sizes) == 1 else None
