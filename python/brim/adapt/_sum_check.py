"""Noticing that a loss that was declared a mean is a sum over the items of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SAME = 1e-3  # relative: two losses are the same
_COUNTS = 0.01  # of a sum: the least share of a term, so that no mean of the terms is their sum


class SumCheck:
    """Compares the losses of two pairs of items with that of both, if the loss looks like a sum.

    Most losses show in their graph that they are means, and cost nothing here. One that ends in a
    sum may still be a mean (`sum() / len(part)`), so `loss_fn` is called four times more, with two
    and four items. No mean can seem to be a sum: it lies between the two losses. Losses that draw
    random numbers are not judged. Nor are those in a job of several ranks, of which only some may
    split their batch: a forward with collectives would wait for the others.

    Attributes:
        is_needed: whether the loss that was watched looks like a sum.
    """

    def __init__(self, loss_fn: Callable[[Any], Any], model: torch.nn.Module | None) -> None:
        self._loss_fn, self._model = loss_fn, model
        self.is_needed = False

    def watched(self, part: Any) -> Any:
        """What `loss_fn` returns; looks at its graph."""
        result = self._loss_fn(part)
        self.is_needed = (
            isinstance(result, torch.Tensor) and not _has_other_ranks() and _ends_in_a_sum(result)
        )
        return result

    def run(self, items: int, part: Callable[[int, int], Any]) -> None:
        """Compare.

        Args:
            items: how many items the batch has, 2 or more.
            part: (start, stop) -> a part of the batch.

        Raises:
            ValueError: if the loss of the first items is the sum of those of their halves.
        """
        half, end = min(items, 4) // 2, min(items, 4)
        bounds = ((0, half), (half, end), (0, end), (0, end))
        try:
            # Without a graph: DistributedDataParallel would wait for its backward.
            with undisturbed(self._model), torch.no_grad():
                a, b, together, again = (self._loss_fn(part(*each)).item() for each in bounds)
        except Exception:  # out of memory, a layer that cannot take one item
            return
        is_sum = together == again and math.isclose(a + b, together, rel_tol=_SAME)
        if is_sum and together != 0 and min(a / together, b / together) >= _COUNTS:
            raise ValueError(
                f"loss_fn returns a sum over the items of a batch (that of {end} items is "
                f"{together:.6g}, those of their halves are {a:.6g} and {b:.6g}), but reduction is "
                "'mean': pass reduction=\"sum\", or return the mean"
            )


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _ends_in_a_sum(loss: torch.Tensor) -> bool:
    """Whether one of the terms that the loss consists of is a sum, or may be one."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith("Sum") or getattr(node, "_saved_reduction", 0) == 2:
            return True
        if name.startswith("brim::cross_entropy"):  # does not tell
            return True
        if all(math.prod(made.shape) == 1 for made in node._input_metadata):
            todo += [previous for previous, _ in node.next_functions]
    return False


@contextmanager
def undisturbed(model: torch.nn.Module | None) -> Iterator[None]:
    """In eval mode; modes and random state are put back afterwards."""
    from brim.foresee._kept import Kept  # imports parts of torch that few need

    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    random = Kept()
    if model is not None:
        model.eval()
    try:
        yield
    finally:
        random.restore()
        for module, training in modes:
            module.training = training
