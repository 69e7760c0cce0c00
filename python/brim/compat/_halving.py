"""The halving loop that the faces of torch_max_mem and toma share; the core runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from brim import memory
from brim._arguments import positive
from brim.adapt._options import make

Sizes = tuple[int, ...]


def halving(
    names: Sequence[str],
    quanta: Sequence[int],
    is_out_of_memory: Callable[[Exception], bool],
    on_failure: Callable[[Sizes], None] = lambda sizes: None,
) -> Callable[..., tuple[Any, Sizes]]:
    """Make a search that tries the originals' exact sequence of sizes.

    Args:
        names: the names of the sizes, for messages.
        quanta: each size is kept a multiple of its number.
        is_out_of_memory: recognises errors in addition to those that brim recognises.
        on_failure: called with the sizes of each attempt that ran out of memory.

    Returns:
        A function of one upper bound per name and of `call`, which takes a tuple of sizes. It
        returns the result of the first call that fits, and its sizes. If nothing fits, it raises
        `torch.OutOfMemoryError`.
    """

    def attempt(*sizes_and_call: Any) -> tuple[Any, Sizes]:
        sizes, call = sizes_and_call[:-1], sizes_and_call[-1]
        try:
            return call(sizes), sizes
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            on_failure(sizes)
            if memory.is_out_of_memory(error):
                raise
            message = str(error)
        # The core does not recognise the error. Raise one that it does, once the frames are gone.
        raise torch.OutOfMemoryError(message)

    run: Callable[..., tuple[Any, Sizes]] = make(
        "maximize",
        attempt,
        {"strategy": "halving", "remember": "none"},
        name=", ".join(names),
        slots={},
        parameters=[(name, place) for place, name in enumerate(names)],
        quanta=[positive("q", quantum) for quantum in quanta],
        groups=[[place] for place in range(len(names))],
        exact_halving=True,
    )
    return run
