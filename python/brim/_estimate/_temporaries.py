"""What kernels allocate inside and release again, or keep: fake tensors do not show that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

Rule: TypeAlias = Callable[[Any, list[torch.Tensor]], Any]
"""What a call takes, given its arguments and outputs: bytes, or those of each output."""


class Temporary(NamedTuple):
    """Memory that an operator takes beside its outputs."""

    bytes: int  # 0 where it takes some at other sizes: traces of two sizes are then alike
    stays: bool = False  # whether it is kept when the operator is done
    outputs: int | None = None  # how many outputs exist when it is taken; None for all


def by_operator(rules: Mapping[str, Rule]) -> dict[Any, Rule]:
    """Rules by operator; "name" stands for all of its overloads, "name.overload" for one."""
    table = {}
    for names, rule in rules.items():
        for name in names.split():
            packet, _, overload = name.partition(".")
            found = getattr(torch.ops.aten, packet)
            overloads = [overload] if overload else found.overloads()
            table.update({getattr(found, each): rule for each in overloads})
    return table


def tensors_in(tree: object) -> list[torch.Tensor]:
    """All tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def by_name(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by their names."""
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def bytes_of(tensor: torch.Tensor) -> int:
    """What a tensor's elements take."""
    return tensor.numel() * tensor.element_size()


def copy_of(tensor: torch.Tensor) -> int:
    """What a contiguous copy takes; nothing if the tensor is contiguous."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


def of_reduced_loss(args: Any, outputs: list[torch.Tensor]) -> int:
    """The losses of single elements."""
    return bytes_of(args[0]) if outputs[0].dim() == 0 else 0


def of_encoder_layer(args: Any, keeps_scores: bool, of_product: int = 0) -> int:
    """What `aten._transformer_encoder_layer_fwd` takes: attention, then the layers after it.

    Args:
        args: its arguments.
        keeps_scores: whether attention makes the whole matrix.
        of_product: what the product with the last weight takes.
    """
    x, heads, weight, mask = args[0], args[2], args[14], args[18] if len(args) > 18 else None
    wide: int = bytes_of(x) // x.size(-1) * weight.size(0)
    attention = of_attention(x, heads, keeps_scores, mask) + (bytes_of(x) if args[8] else 0)
    return max(attention, wide + bytes_of(x) + of_product)


def of_attention(x: torch.Tensor, heads: int, keeps_scores: bool, mask: Any) -> int:
    """What `aten._native_multi_head_attention` takes: queries, keys, values, and the scores."""
    scores = x.size(0) * heads * x.size(1) ** 2
    size = 3 * bytes_of(x)
    if mask is not None:  # for each score, and with another copy of the scores
        return size - bytes_of(x) + scores * (2 * x.element_size() + 1)
    return size + (scores * x.element_size() if keeps_scores else 0)
