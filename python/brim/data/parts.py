"""Items divided into parts of nearly equal cost."""

from __future__ import annotations

import torch

from brim import _C
from brim._arguments import flag, real
from brim.data.sizes import Sizes, one_column


def balance(costs: Sizes, parts: int, equal_count: bool = False) -> list[list[int]]:
    """Divide items into parts of nearly equal cost: samples among microbatches or ranks.

    The costliest part costs no more than with the better of two methods: the costliest item first,
    each to the part that costs least (LPT), and the largest differencing method (Karmarkar and
    Karp), which merges the latest of the divisions whose differences are equal; or it is within a
    billionth of a perfect balance. The same everywhere, so that ranks agree without communication.

    Args:
        costs: the cost of each item: finite numbers that are not negative.
        parts: how many parts; some are empty if there are fewer items.
        equal_count: let the numbers of items in two parts differ by one at most.

    Returns:
        The indices of the items in each part, ascending.

    Example:
        >>> balance([8, 7, 5, 4], 2)
        [[0, 3], [1, 2]]
        >>> balance([9, 1, 1, 1], 2, equal_count=True)
        [[0, 3], [1, 2]]
    """
    column = one_column("costs", costs).double()
    return _C.balance(column, parts, flag("equal_count", equal_count))


def flops(lengths: Sizes, linear: float = 24576.0, squared: float = 1.0) -> torch.Tensor:
    """The work of a transformer on sequences, up to a factor: linear · length + squared · length².

    For `balance`, or as sizes of a sampler with `cost="sum"`. The default is the ratio for a hidden
    size of 4096: 6 · 4096 to 1.

    Example:
        >>> flops([100, 2000], linear=10, squared=1)
        tensor([  11000., 4020000.], dtype=torch.float64)
    """
    return _C.flops(
        one_column("lengths", lengths), real("linear", linear), real("squared", squared)
    )
