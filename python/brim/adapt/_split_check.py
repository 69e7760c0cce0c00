"""Whether the losses of parts add up to that of a batch: a few items together and apart."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from brim import _C
from brim._state.uncompiled import run_uncompiled
from brim._state.undo import undisturbed
from brim._state.undoing import Undoing
from brim._warn import warn
from brim.adapt._packed import is_packed
from brim.adapt._parts import Split, members, rebuilt
from brim.memory import is_out_of_memory

_MOST = 64  # items that are looked at where each must be cut out


class SplitCheck:
    """Runs the core's check in eval mode, and puts back what the items' losses change.

    Args:
        loss_fn: a part -> its loss.
        model: put into eval mode, as modules are that `loss_fn` leads to.
        split: cuts a batch.
        dim: of the batch's tensors, along which its items are; None where only `split` knows.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        model: torch.nn.Module | None,
        split: Split,
        dim: int | None,
    ) -> None:
        self._loss_fn, self._model, self._split, self._dim = loss_fn, model, split, dim
        self._core = _C.SplitCheck()

    def run(self, batch_pass: _C.BatchPass, batch: Any, items: int, size: int) -> None:
        """Compare items of a batch that is run in parts of `size`.

        Raises:
            ValueError: if the loss has no parts, or not those that `reduction` says.
        """
        places = self._places(batch, items)
        if not places and not self._core.is_open:
            return

        def loss_of(start: int, stop: int) -> Any:
            return self._loss_fn(_copied(self._split(batch, start, stop)))

        def compare() -> str:
            return self._core.run(batch_pass, items, size, places, loss_of, _gradients)

        body = functools.partial(_eagerly, compare)
        result = undisturbed(body, self._model, self._loss_fn)
        if result == "failed":  # some models have a loss in training mode only
            result = undisturbed(body, self._model, self._loss_fn, training=True)
        if result == "unknown":
            warn(_C.SplitCheck.UNKNOWN)

    def _places(self, batch: Any, items: int) -> list[int]:
        """Where neighbours are that differ more than those that were compared before."""
        if (dim := self._dim) is not None and not is_packed(batch):
            leaves = [leaf for leaf in _leaves(batch) if _has_items(leaf, dim, items)]
            return self._core.pairs([leaf.movedim(dim, 0) for leaf in leaves], 0)
        if not self._core.is_open or items > _MOST:
            return []
        traits = [_traits(self._split(batch, at, at + 1)) for at in range(items)]
        return self._core.pairs_of([list(each) for each in zip(*traits, strict=False)])


def _eagerly(body: Callable[[], str]) -> str:
    """`body()` without what few items cause: warnings of their shapes, compilations for them."""
    with Undoing() as undo:
        filters: Any = warnings.filters
        undo.callback(functools.partial(_hear_warnings, filters))
        filters.insert(0, _SILENCE)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes long
            run_uncompiled(undo)
        return body()


def _gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
    try:
        return torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return ()  # a reentrant checkpoint, which knows backward() only


# One for each check that runs: to put all filters back as they were would undo another thread's.
# Unlike that of warnings.simplefilter, which moves one that is equal.
_SILENCE = ("ignore", re.compile(""), Warning, None, 0)


def _hear_warnings(changed: list[Any]) -> None:
    """Also beside a thread in `warnings.catch_warnings`, which works on a copy for a while."""
    now: Any = warnings.filters
    for filters in [changed] if now is changed else [changed, now]:
        with contextlib.suppress(ValueError):
            filters.remove(_SILENCE)


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for each in (members(value) or {}).values() for leaf in _leaves(each)]


def _has_items(leaf: torch.Tensor, dim: int, items: int) -> bool:
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and not leaf.is_nested
    return plain and -leaf.ndim <= dim < leaf.ndim and leaf.shape[dim] == items


def _traits(sample: Any) -> list[float]:
    """What means may depend on: labels that are not -100, what is not padding, lengths."""
    traits: list[float] = []
    for leaf in _leaves(sample):
        if not leaf.is_complex():
            values = leaf.detach()
            traits += [
                float((values != -100).sum()),
                float((values != 0).sum()),
                float(values.float().sum()),
            ]
    return traits


def _copied(part: Any) -> Any:
    """Of a part that `loss_fn` may write to."""
    if isinstance(part, torch.Tensor):
        return part.clone()
    if members(part) is not None:
        return rebuilt(part, _copied)
    try:
        return copy.deepcopy(part)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return part
