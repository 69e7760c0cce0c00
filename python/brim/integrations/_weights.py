"""Steps of frameworks in parts: how the losses of parts add up to that of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from brim._state.undo import undisturbed
from brim.adapt import Microbatches
from brim.memory import is_out_of_memory

Count: TypeAlias = Callable[[Any], Any]
"""How many items the loss of a part is a mean over."""

_CLEARLY = 4.0  # times as far off as the best rule: not the rule of this loss
_LARGE = 2**20  # elements of a parameter


class Weights:
    """The factors of parts' losses, by the one of several rules that holds for pairs of samples.

    Neighbours in a batch that is split are compared with both together, by their losses and their
    gradients of one parameter. They are those that differ most in traits that a mean may depend on
    (how many labels count, padding, lengths). Batches are searched for such pairs as long as they
    differ by more than what was compared before.

    Args:
        rules: what each rule says of a loss, and its count; None for a loss that is a sum.
        loss_of: the loss of some samples.
        step: whose batches are weighted; made with `check=False`, since they are compared here.
        model: what is trained; it is in eval mode while samples are compared.
        half: whether losses are computed in half precision though parameters are not.
        check: False to trust the first rule.
    """

    def __init__(
        self,
        rules: Mapping[str, Count | None],
        loss_of: Callable[[Any], torch.Tensor],
        step: Microbatches,
        model: torch.nn.Module,
        half: bool,
        check: bool,
    ) -> None:
        self._rules = dict(rules)  # those that held so far
        self._loss_of, self._model = loss_of, model
        half = half or any(each.dtype.itemsize < 4 for each in model.parameters())
        self._tolerance = 2e-2 if half else 1e-4  # of a sum, relative to its terms
        self._split, self._length = step._split, step._length
        self._compared: dict[int, float] = {}  # by trait: by how much the pairs differed
        self._check, self._checked = check, False
        if not check:
            self._rules = dict(list(rules.items())[:1])

    def next_batch(self) -> None:
        """The parts that follow are of another batch."""
        self._checked = not self._check

    def of(self, part: Any, whole: Any) -> float:
        """The factor of a part's loss in the sum.

        Raises:
            ValueError: if no rule holds, or several that differ.
        """
        if part is whole or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(part)):
            return 1.0  # fake tensors are foresight's, for which only memory counts
        if not self._checked:
            undisturbed(lambda: self._compare_pairs(whole), self._model)
            self._checked = True
        if not self._agree(part, whole):
            raise ValueError(
                "this batch does not fit, and its samples do not show whether the loss is "
                f"{' or '.join(self._rules)}, so that it cannot be run in parts: pass count="
            )
        return _share(next(iter(self._rules.values())), part, whole)

    def _agree(self, part: Any, whole: Any) -> bool:
        shares = [_share(rule, part, whole) for rule in self._rules.values()]
        return max(shares) - min(shares) <= self._tolerance * max(shares)

    def _compare_pairs(self, whole: Any) -> None:
        traits = [_traits(self._split(whole, i, i + 1)) for i in range(self._length(whole))]
        found: dict[int, dict[int, float]] = {}  # pairs, and the traits that they are compared for
        for trait, values in enumerate(zip(*traits, strict=False)):
            steps = [_difference(*both) for both in pairwise(values)]
            most = max(steps)
            if most > 2 * self._compared.get(trait, 0.0):
                found.setdefault(steps.index(most), {})[trait] = most
        if not found and not self._compared:
            found[0] = {-1: 1.0}
        for at, differences in found.items():
            pair = self._split(whole, at, at + 2)
            both = [self._split(whole, i, i + 1) for i in (at, at + 1)]
            if self._compare(pair, both) and self._agree(both[0], pair):
                self._compared.update(differences)

    def _compare(self, pair: Any, both: list[Any]) -> bool:
        """Leave out the rules that do not hold for two samples; False if their loss is NaN."""
        together, *alone = (self._measured(inputs) for inputs in (pair, *both))
        if any(bool(value.isnan().any()) for value in together):
            return False
        off = {
            name: _off([_share(rule, sample, pair) for sample in both], together, alone)
            for name, rule in self._rules.items()
        }
        most = min(max(_CLEARLY * min(off.values()), self._tolerance / 4), self._tolerance)
        if min(off.values()) > self._tolerance:
            self._refuse(pair, together, alone)
        self._rules = {name: rule for name, rule in self._rules.items() if off[name] <= most}
        return True

    def _refuse(self, pair: Any, together: list[torch.Tensor], alone: list[Any]) -> None:
        if _off([1.0], together, [self._measured(pair)]) > self._tolerance:
            raise ValueError(
                "this batch does not fit, and whether it can be run in parts cannot be checked: "
                "the loss is random, even in eval mode (two runs of the same samples differ). Pass "
                "check=False if it is a mean over samples, and count= too if it is another mean"
            )
        losses = [float(value[0]) for value in (together, *alone)]
        raise ValueError(
            "this batch does not fit and cannot be run in parts: the loss of two samples "
            f"({losses[0]:.6g}) or its gradient does not follow from their own ({losses[1]:.6g} "
            f"and {losses[2]:.6g}), as it would if it were {' or '.join(self._rules)}. Pass count= "
            "if it is a mean over something else; a loss that compares the samples of a batch has "
            "no parts"
        )

    def _measured(self, samples: Any) -> list[torch.Tensor]:
        """The loss, and its gradient of one parameter where there is memory for a graph."""
        try:
            return self._with_gradient(self._loss_of(samples))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        with torch.no_grad():
            return [self._loss_of(samples).double().cpu()]

    def _with_gradient(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """For one of the last parameters, where backward ends soon, and none that is large."""
        measured = [loss.detach().double().cpu()]
        parameters = [each for each in self._model.parameters() if each.requires_grad][::-1]
        parameters.sort(key=lambda each: each.numel() > _LARGE)
        for parameter in parameters if loss.requires_grad else ():
            (found,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
            if found is not None:
                return [*measured, found.to_dense().double().cpu()]
        return measured


def labels_kept(first: int, step: Microbatches) -> Count:
    """Counts the labels that are not -100: the members of a batch in which -100 was seen.

    Args:
        first: how many labels at the beginning of each sample never count.
        step: whose batches are counted; while -100 was never seen, samples are counted.
    """
    places: set[int] = set()

    def count(batch: Any) -> float:
        whole = {
            place: leaf
            for place, leaf in enumerate(tree_leaves(batch))
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int32, torch.int64)
        }
        places.update(place for place, leaf in whole.items() if bool((leaf == -100).any()))
        if not places:
            return step._length(batch)
        return labels_that_count([whole[place] for place in places if place in whole], first)

    return count


def labels_that_count(labels: Iterable[torch.Tensor], first: int) -> float:
    """How many labels are not -100, without the `first` ones of each sample."""
    kept = (each[..., first:] if each.ndim > 1 else each for each in labels)
    return float(sum(int((each != -100).sum()) for each in kept))


def _share(rule: Count | None, part: Any, whole: Any) -> float:
    if rule is None:
        return 1.0
    items = float(rule(whole))
    return float(rule(part)) / max(items, 1.0)


def _off(shares: list[float], together: list[torch.Tensor], alone: list[Any]) -> float:
    """How far weighted terms are from what they should add up to, relative to the largest."""
    worst = 0.0
    for whole, *terms in zip(together, *alone, strict=False):  # losses, then gradients
        sizes = [float(each.norm()) for each in (whole, *terms) if not each.isnan().any()]
        # A mean over nothing is NaN, and does not count.
        parts = [share * term for share, term in zip(shares, terms, strict=True) if share]
        off = float((sum(parts) - whole).norm()) / (max(sizes) or 1.0)
        worst = max(worst, off) if off == off else float("inf")
    return worst


def _traits(sample: Any) -> list[float]:
    """What means may depend on: labels that are not -100, what is not padding, lengths, classes."""
    traits: list[torch.Tensor] = []
    for leaf in tree_leaves(sample):
        if isinstance(leaf, torch.Tensor) and not leaf.is_complex():
            leaf = leaf.detach()
            traits += [(leaf != -100).sum().float(), (leaf != 0).sum().float(), leaf.float().sum()]
    return torch.stack([trait.to(traits[0].device) for trait in traits]).tolist() if traits else []


def _difference(one: float, other: float) -> float:
    most = max(abs(one), abs(other))
    return abs(one - other) / most if most > 0 else 0.0


def check_options(callback: str, options: Mapping[str, Any], *own: str) -> None:
    """Raise for options of `Microbatches` that are wrong, or that the callback sets itself."""
    for name in own:
        if name in options:
            raise TypeError(f"{callback} sets {name} itself: leave {name}= out")
    Microbatches(lambda part: part, **options)


def nothing(model: torch.nn.Module) -> torch.Tensor:
    """A loss of 0 with a graph, for parts that count nothing."""
    leaf = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    return leaf.flatten()[:1].sum() * 0.0
