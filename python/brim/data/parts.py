"""Items divided into parts of nearly equal cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from brim import _C
from brim._arguments import flag, real, whole
from brim.data.agree import agreed_most
from brim.data.sizes import Sizes, one_column

Work: TypeAlias = "Sizes | str | Callable[[torch.Tensor], Sizes]"


def balance(
    costs: Sizes,
    parts: int | None = None,
    equal_count: bool = False,
    *,
    cap: float | str | None = None,
    sizes: Sizes | None = None,
    multiple_of: int = 1,
    ranks: Any = False,
) -> list[list[int]]:
    """Divide items into parts of nearly equal cost: samples among microbatches or ranks.

    The costliest part costs no more than with the better of two methods: the costliest item first,
    each to the part that costs least (LPT), and the largest differencing method (Karmarkar and
    Karp), which merges the latest of the divisions whose differences are equal; or it is within a
    billionth of a perfect balance. The same everywhere, so that ranks agree without communication.

    With `cap` no part is over it. If that division holds it, it is the result; if not, items go to
    the part that costs least of those with room, and are exchanged as long as the costliest part
    gets cheaper.

    Args:
        costs: the cost of each item: finite numbers that are not negative.
        parts: how many parts; some are empty if there are fewer items, and only then. None needs a
            `cap`: the fewest that hold all items, rounded up to `multiple_of`.
        equal_count: let the numbers of items in two parts differ by one at most.
        cap: the most that the sizes of a part may sum up to, such as tokens or bytes (`"8GiB"`).
        sizes: what counts against the cap, one for each item; the costs if None.
        multiple_of: what the number of parts must be a multiple of, such as the microbatches that
            all stages of a pipeline need at a time.
        ranks: True, or a process group: its ranks, each with items of its own, all take the number
            of parts that the rank needs which needs most. All must call it. Not with `parts`.

    Returns:
        The indices of the items in each part, ascending.

    Raises:
        ValueError: if an item exceeds the cap by itself, or no division into `parts` was found
            under it; the error then says how many would do.
        brim.RankError: if another of the `ranks` failed.

    Example:
        >>> balance([8, 7, 5, 4], 2)
        [[0, 3], [1, 2]]
        >>> balance([9, 1, 1, 1], 2, equal_count=True)
        [[0, 3], [1, 2]]
        >>> lengths = [700, 300, 300, 200, 200, 100]
        >>> balance(flops(lengths), cap=1000, sizes=lengths)
        [[0, 4], [1, 2, 3, 5]]
    """
    column = one_column("costs", costs).double()
    equal = flag("equal_count", equal_count)
    multiple = whole("multiple_of", multiple_of, 1)
    if cap is None:
        for name, given in (("sizes", sizes is not None), ("ranks", ranks is not False)):
            if given:
                raise ValueError(f"{name} needs cap, the most that a part may hold")
        if parts is None:
            raise ValueError("parts must be given without cap, which decides how many are needed")
    most = _C.parse_bytes(cap, name="cap") if isinstance(cap, str) else real("cap", cap or 0.0)
    capped = None
    if cap is not None:
        capped = column if sizes is None else one_column("sizes", sizes).double()
    if parts is not None:
        if ranks is not False:
            raise ValueError(f"ranks agree on the number of parts, so leave parts out: got {parts}")
        if multiple > 1 and whole("parts", parts, 1) % multiple != 0:
            raise ValueError(f"parts must be a multiple of multiple_of={multiple}, got {parts}")
        return _C.balance(column, parts, equal, capped, most)
    assert capped is not None
    with agreed_most(ranks, "balance", f"multiple_of={multiple}") as agree:
        if len(capped) != len(column):
            raise ValueError(f"sizes must be as many as costs, {len(column)}, got {len(capped)}")
        if not bool(((column >= 0) & column.isfinite()).all()):
            _C.balance(column, 1, equal)  # names the first, while the other ranks still listen
        needed = agree(_C.fewest_parts(capped, most, multiple, equal))
    return _C.balance(column, needed, equal, capped, most)


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


def work_column(work: Work, sizes: torch.Tensor) -> torch.Tensor:
    """The work of each sample: what was given, or what a formula makes of the sizes."""
    if isinstance(work, str):
        if work != "flops":
            raise ValueError(
                f'work must be "flops", a function of the sizes or numbers, got {work!r}'
            )
        work = flops
    numbers = one_column("work", work(sizes) if callable(work) else work).double()
    if len(numbers) != len(sizes):
        raise ValueError(f"work must be as many as sizes, {len(sizes)}, got {len(numbers)}")
    return numbers
