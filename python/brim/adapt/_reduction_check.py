"""Noticing that a loss is a sum over the items of a batch and not a mean, or neither."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from brim._warn import warn
from brim.adapt._random_state import RandomState
from brim.adapt._restore import members_of, writable

_SAME = 1e-3  # relative: two losses are the same
_COUNTS = 0.01  # of a sum: the least share of a term, so that no mean of the terms is their sum
_DIFFERENT = 0.05  # relative: two losses are different, in any precision


class ReductionCheck:
    """Compares the losses of two pairs of items with that of both, if the loss looks wrong.

    Most losses show in their graph that they are what was declared, and cost nothing here. One that
    ends in a sum may still be a mean (`sum() / len(part)`), so `loss_fn` is called four times more,
    with copies of two and four items. No mean can seem to be a sum: it lies between the two losses.
    A loss with a matrix of items by items, which may compare them with each other, is judged in the
    same way. Losses that draw random numbers are not judged. Nor are those in a job of several
    ranks, of which only some may split their batch: a forward with collectives would wait for the
    others.

    Attributes:
        is_needed: whether the loss that was watched looks like the other reduction.
        is_done: whether nothing is left to find out.
    """

    def __init__(
        self, reduction: str, loss_fn: Callable[[Any], Any], model: torch.nn.Module | None
    ) -> None:
        self._reduction, self._loss_fn, self._model = reduction, loss_fn, model
        self._other = _Ending("Sum", 2) if reduction == "mean" else _Ending("Mean", 1)
        self._may_compare: bool | None = None  # items with each other; None before the first part
        self.is_needed = False
        self.is_done = False
        self._left = 3  # batches that may leave it undecided

    def watched(self, size: int, part: Any) -> Any:
        """What `loss_fn` returns; looks at the graph of the first part, which has `size` items."""
        result = self._loss_fn(part)
        if self._may_compare is None and isinstance(result, torch.Tensor):
            self._may_compare = not _has_other_ranks() and _has_matrix_of(result, size)
            self.is_needed = self._may_compare or (
                not _has_other_ranks() and _may_end_in(result, self._other)
            )
        return result

    def run(self, items: int, part: Callable[[int, int], Any]) -> None:
        """Compare.

        Args:
            items: how many items the batch has, 2 or more.
            part: (start, stop) -> a part of the batch.

        Raises:
            ValueError: if the loss of the first items is the other reduction of their halves'.

        Warns if it is neither, because it compares items with each other.
        """
        self._left -= 1
        self.is_done = self._left == 0
        half, end = min(items, 4) // 2, min(items, 4)
        bounds = ((0, half), (half, end), (0, end), (0, end))
        try:
            # Without a graph: DistributedDataParallel would wait for its backward.
            with undisturbed(self._model, self._loss_fn), torch.no_grad():
                parts = [copy.deepcopy(part(*each)) for each in bounds]
                a, b, together, again = (self._loss_fn(each).item() for each in parts)
        except Exception:  # out of memory, a layer that cannot take one item
            return
        if together != again or together == 0:
            return
        self.is_done = True
        is_sum = math.isclose(a + b, together, rel_tol=_SAME)
        mean = (a * half + b * (end - half)) / end
        if self._reduction == "mean":
            is_wrong = is_sum and min(a / together, b / together) >= _COUNTS
        else:
            is_wrong = not is_sum and math.isclose(mean, together, rel_tol=_SAME)
        losses = (
            f"that of {end} items is {together:.6g}, those of their halves are {a:.6g} and {b:.6g}"
        )
        if is_wrong:
            other = "sum" if self._reduction == "mean" else "mean"
            raise ValueError(
                f"loss_fn returns a {other} over the items of a batch ({losses}), but reduction is "
                f'{self._reduction!r}: pass reduction="{other}", or return the {self._reduction}'
            )
        declared = mean if self._reduction == "mean" else a + b
        difference = abs(declared - together)  # NaN where a loss is not finite
        if self._may_compare and difference > _DIFFERENT * abs(together):
            warn(
                f"the loss is no {self._reduction} over the items of a batch ({losses}): loss_fn "
                "seems to compare them with each other, as a contrastive loss does, or to weight "
                "them (then return the loss and its count). Parts of the batch do not have the "
                "gradients of the whole"
            )


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


class _Ending(NamedTuple):
    node: str  # how the names of its nodes begin
    reduction: int  # its number in torch's losses


def _has_matrix_of(loss: torch.Tensor, items: int) -> bool:
    """Whether a value in the graph has two dimensions of so many items, or of two views of them.

    Not of one item: too many shapes have several dimensions of size 1.
    """
    todo, seen = [loss.grad_fn] if items > 1 else [], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        before = [previous for previous, _ in node.next_functions]
        if len(before) == 1 and (before[0] is None or not before[0].next_functions):
            continue  # a function of a parameter alone
        shapes = [list(made.shape) for made in node._input_metadata]
        if any(shape.count(items) > 1 or shape.count(2 * items) > 1 for shape in shapes):
            return True
        todo += before
    return False


def _may_end_in(loss: torch.Tensor, ending: _Ending) -> bool:
    """Whether one of the terms that the loss consists of is of this kind, or may be."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith(ending.node) or getattr(node, "_saved_reduction", 0) == ending.reduction:
            return True
        if name.startswith("brim::cross_entropy"):  # does not tell
            return True
        if all(math.prod(made.shape) == 1 for made in node._input_metadata):
            todo += [previous for previous, _ in node.next_functions]
    return False


@contextmanager
def undisturbed(
    model: torch.nn.Module | None, work: Callable[..., Any] | None = None
) -> Iterator[None]:
    """In eval mode; modes, buffers and random state are put back afterwards.

    Args:
        model: its modules are.
        work: modules that it leads to are too.
    """
    modules = list(model.modules()) if model is not None else []
    if work is not None:
        from brim.foresee._reach import Reachable  # imports parts of torch that few need

        reached = Reachable(lambda: None, (work,), {}).modules
        modules += [part for module in reached for part in module.modules()]
    modules = list(dict.fromkeys(modules))
    modes = [(module, module.training) for module in modules]
    members = [members_of(module) for module in modules]
    buffers = [
        (writable(buffer), writable(buffer).clone())
        for module in modules
        for buffer in module.buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    for module in modules:
        module.training = False
    try:
        with RandomState():
            yield
    finally:
        for put_back in members:
            put_back()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes:
            module.training = training
