"""Noticing that a loss is a sum over the items of a batch and not a mean, or neither."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from brim._warn import warn
from brim.adapt._undo import undisturbed

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
        is_done: whether nothing is left to find out.
    """

    def __init__(
        self, reduction: str, loss_fn: Callable[[Any], Any], model: torch.nn.Module | None
    ) -> None:
        self._reduction, self._loss_fn, self._model = reduction, loss_fn, model
        self._other = "sum" if reduction == "mean" else "mean"
        self._is_suspect = False  # looks like the other reduction, or may compare items
        self._may_compare: bool | None = None  # items with each other; None before the first part
        self._left = 3  # batches that may leave it undecided
        self.is_done = False

    def watched(self, size: int, part: Any) -> Any:
        """What `loss_fn` returns; looks at the graph of the first part, which has `size` items."""
        result = self._loss_fn(part)
        if self._may_compare is None and isinstance(result, torch.Tensor):
            is_alone = not _has_other_ranks()
            self._may_compare = is_alone and _has_matrix_of(result, size)
            self._is_suspect = self._may_compare or (is_alone and _may_end_in(result, self._other))
        return result

    def run(self, items: int, part: Callable[[int, int], Any]) -> None:
        """Compare, if the loss that was watched looks wrong.

        Args:
            items: how many items the batch has, 2 or more.
            part: (start, stop) -> a part of the batch.

        Raises:
            ValueError: if the loss of the first items is the other reduction of their halves'.

        Warns if it is neither, because it compares items with each other.
        """
        self._left -= 1
        self.is_done = self._left == 0 or not self._is_suspect
        if not self._is_suspect:
            return
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
            raise ValueError(
                f"loss_fn returns a {self._other} over the items of a batch ({losses}), but "
                f'reduction is {self._reduction!r}: pass reduction="{self._other}", or return the '
                f"{self._reduction}"
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


def _nodes(loss: torch.Tensor, leads_on: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes of the graph of a loss, last first; what is before one only if it leads on."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if leads_on(node):
            todo += [previous for previous, _ in node.next_functions]


def _has_matrix_of(loss: torch.Tensor, items: int) -> bool:
    """Whether a value in the graph has two dimensions of so many items, or of two views of them.

    Not of one item: too many shapes have several dimensions of size 1.
    """

    def is_more_than_a_parameter(node: Any) -> bool:
        before = [previous for previous, _ in node.next_functions]
        return len(before) != 1 or bool(before[0] is not None and before[0].next_functions)

    nodes = filter(is_more_than_a_parameter, _nodes(loss, is_more_than_a_parameter))
    shapes = (list(made.shape) for node in nodes for made in node._input_metadata)
    return items > 1 and any(
        shape.count(items) > 1 or shape.count(2 * items) > 1 for shape in shapes
    )


def _may_end_in(loss: torch.Tensor, reduction: str) -> bool:
    """Whether one of the terms that the loss consists of is such a reduction, or may be."""
    prefix, number = ("Sum", 2) if reduction == "sum" else ("Mean", 1)  # as torch's nodes have them

    def is_one(node: Any) -> bool:
        unknown = "brim::cross_entropy"  # which does not tell
        return (
            node.name().startswith((prefix, unknown))
            or getattr(node, "_saved_reduction", 0) == number
        )

    def is_scalar(node: Any) -> bool:
        return all(math.prod(made.shape) == 1 for made in node._input_metadata)

    return any(map(is_one, _nodes(loss, is_scalar)))
