"""What `recompute` means under torch.compile, whose partitioner decides what is kept.

Layers and regions of brim cannot ask each other in compiled code. While Dynamo traces one of them
with "cheap" or "products", the partitioner is told to recompute what is cheap, whatever it costs in
time, for as long as this graph is compiled. With "products" the layers that would run again without
a compiler have the tag that torch.utils.checkpoint gives.

Not by `activation_memory_budget`: it does nothing where a graph's parameters are larger than what
is kept, as in a language model with a small batch. Not by
`aggressive_recomputation`: it also recomputes random operators (bernoulli), with other numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

__all__ = ["asking", "in_compiled_code", "runs_again"]

IF_SHORT = 2
"""The `recompute` of operators that keep all until memory runs out: C++'s Again::kIfShort."""


def asking(recompute: str | None) -> dict[str, Any]:
    """What `convert` was given, as arguments of linear layers and convolutions."""
    asks = IF_SHORT if recompute == "auto" else recompute is not None
    return {"recompute": asks, "runs_again": recompute in ("products", "auto")}


_SETTINGS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)
"""Of `torch._functorch.config`: where its partitioner keeps cheap results for the sake of time."""

_PENDING = "_CompilationCallbackHandler__pending_callbacks_counter"
"""Of Dynamo's callbacks: how many compilations will tell when they end."""

_before: dict[str, bool] = {}  # what the user asked for, while a graph of ours is compiled


def in_compiled_code(recompute: int | str | None) -> bool:
    """Whether this is traced for a graph. If by Dynamo, `recompute` is meant for that graph.

    Compiled code cannot drop what it keeps: "auto" leaves it to the compiler.
    """
    if recompute and recompute not in (IF_SHORT, "auto") and is_dynamo_compiling():
        _recompute()
    return is_compiling()


def _recompute() -> bool:
    """Runs while Dynamo traces. The end of this compilation puts back what was in force.

    Export and ahead-of-time compilation trace without telling when they end: these are left alone.
    """
    from torch._dynamo.callback import callback_handler
    from torch._functorch import config

    if not getattr(callback_handler, _PENDING, 1):
        return False
    for name in _SETTINGS:
        _before.setdefault(name, getattr(config, name))
        setattr(config, name, False)
    if _put_back not in callback_handler.end_callbacks:  # torch._dynamo.reset() removes it
        callback_handler.register_end_callback(_put_back)
    return True


# What torch.compiler.assume_constant_result does, which imports the compiler: that takes seconds.
_recompute._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _put_back(*_: Any) -> None:
    from torch._functorch import config

    while _before:
        setattr(config, *_before.popitem())


def runs_again(name: str, *args: Any) -> Any:
    """The operator "linear" or "conv", which runs again in backward if its output is larger."""
    run = getattr(torch.ops.brim, name)
    if not _is_larger(*args):
        return run(*args)
    return checkpoint(lambda *given: run(*given), *args, use_reentrant=False)


def _is_larger(input: Tensor, weight: Tensor, bias: Any, *options: Any) -> bool:
    """Whether the output has more elements than the input, but for the edges of a convolution."""
    if weight.dim() == 2:
        return bool(weight.shape[0] > weight.shape[1])
    stride, _, _, transposed, _, groups, *_ = options
    first, second = weight.shape[:2]
    if transposed:
        return bool(second * groups * math.prod(stride) > first)
    return bool(first > second * groups * math.prod(stride))
