"""How the losses of parts add up to that of a batch, where a framework's step gives only a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from brim.adapt import Microbatches

Count: TypeAlias = Callable[[Any], Any]
"""How many items the loss of a part is a mean over."""


class Weights:
    """The factors of parts' losses, by the first of some rules that holds for two samples.

    The rules are checked before a batch is split for the first time: a loss that compares the
    samples of a batch would get wrong gradients otherwise.

    Args:
        rules: what each rule says of a loss, and its count; None for a loss that is a sum.
        loss_of: the loss of some samples, as a number.
        step: whose batches are weighted.
        tolerance: how far off a sum may be, relative to its terms.
        items: counts that tell the rules apart where they differ; a number of samples by default.
    """

    def __init__(
        self,
        rules: Mapping[str, Count | None],
        loss_of: Callable[[Any], float],
        step: Microbatches,
        tolerance: float,
        items: Count | None = None,
    ) -> None:
        self._rules, self._loss_of, self._tolerance = rules, loss_of, tolerance
        self._split, self._length = step._split, step._length
        self._items = items or self._length
        self._rule: Count | None = None
        self._checked = False

    def of(self, part: Any, whole: Any) -> float:
        """The factor of a part's loss in the sum.

        Raises:
            ValueError: if no rule holds.
        """
        if part is whole or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(part)):
            return 1.0  # fake tensors are foresight's, for which only memory counts
        if not self._checked:
            self._rule, self._checked = self._choose(whole), True
        return _share(self._rule, part, whole)

    def _choose(self, whole: Any) -> Count | None:
        samples = [self._split(whole, i, i + 1) for i in range(self._length(whole))]
        counts = [float(self._items(sample)) for sample in samples]
        # Neighbours that tell the rules apart, if there are any.
        at = max(range(len(counts) - 1), key=lambda i: abs(counts[i] - counts[i + 1]))
        pair, both = self._split(whole, at, at + 2), samples[at : at + 2]
        together, *alone = (self._loss_of(inputs) for inputs in (pair, *both))
        sizes = [abs(loss) for loss in (together, *alone) if not math.isnan(loss)]
        most = self._tolerance * max(sizes, default=0.0)
        for rule in self._rules.values():
            shares = [_share(rule, sample, pair) for sample in both]
            # A mean over nothing is NaN, and does not count.
            terms = [share * loss for share, loss in zip(shares, alone, strict=True) if share]
            if abs(sum(terms) - together) <= most:
                return rule
        raise ValueError(
            "this batch does not fit and cannot be run in parts: the loss of two samples "
            f"({together:.6g}) does not follow from their own ({alone[0]:.6g} and {alone[1]:.6g}), "
            f"as it would if it were {' or '.join(self._rules)}. Pass count= if it is a mean over "
            "something else; a loss that compares the samples of a batch has no parts"
        )


def _share(rule: Count | None, part: Any, whole: Any) -> float:
    return 1.0 if rule is None else float(rule(part)) / max(float(rule(whole)), 1.0)


def nothing(model: torch.nn.Module) -> torch.Tensor:
    """A loss of 0 with a graph, for parts that count nothing."""
    leaf = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    return leaf.flatten()[:1].sum() * 0.0


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Without gradients, dropout and traces in the random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
