"""What kernels allocate inside and release again, or keep: fake tensors do not show that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch


class Temporary(NamedTuple):
    """Memory that an operator takes beside its outputs."""

    bytes: int
    stays: bool = False  # whether it is kept when the operator is done
    outputs: int | None = None  # how many outputs exist when it is taken; None for all


def bytes_of(tensor: torch.Tensor) -> int:
    """What a tensor's elements take."""
    return tensor.numel() * tensor.element_size()


class Temporaries(Protocol):
    """A table of such allocations on one kind of device."""

    assumptions: Any
    known: Any  # operators that have a rule, or are known to take nothing

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterable[Temporary]:
        """What one call of an operator takes, in order."""
        ...
