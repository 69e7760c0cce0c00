"""Which modules can run again as a whole when memory is short, and how they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["repeated_blocks", "run_again"]

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def repeated_blocks(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The layers of a transformer, the bottlenecks of a ResNet: what a model repeats.

    These are modules of a class that comes more than once, with at least two weights of matrices or
    filters: one is what the layers before can give again. First those of which a list or sequence
    has several, of blocks inside of blocks the inner ones; then what is neither inside nor around
    these, the outer ones.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> len(repeated_blocks(model))
        3
    """
    large = {m for m in model.modules() if not isinstance(m, _LISTS) and _products(m) > 1}
    lists = [set(m.children()) & large for m in model.modules() if isinstance(m, _LISTS)]
    kinds = {type(m) for each in lists for m in _repeated(each)}
    in_lists = {m for each in lists for m in each if type(m) in kinds}
    blocks = {m for m in in_lists if not any(inner in in_lists for inner in _inside(m))}
    taken = {inner for block in blocks for inner in block.modules()}
    others = {m for m in _repeated(large) - taken if taken.isdisjoint(_inside(m))}
    return blocks | {m for m in others if not any(m in _inside(other) for other in others)}


def _repeated(modules: set[torch.nn.Module]) -> set[torch.nn.Module]:
    times = Counter(type(module) for module in modules)
    return {module for module in modules if times[type(module)] > 1}


def _inside(module: torch.nn.Module) -> set[torch.nn.Module]:
    return set(module.modules()) - {module}


def _products(module: torch.nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def run_again(
    function: Callable[..., Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """A call of a module once more, which leaves nothing behind.

    Args:
        function: the work of the module.
        module: its first argument, a copy of the module as it was at the first call. Parameters and
            buffers are those of the model.
        args: the other arguments.
        kwargs: the named ones.
    """
    for each in module.modules():
        if each.training and isinstance(each, torch.nn.modules.batchnorm._NormBase):
            statistics = each._buffers
            statistics.update({name: _own(buffer) for name, buffer in statistics.items()})
    function(module, *args, **kwargs)


def _own(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()
