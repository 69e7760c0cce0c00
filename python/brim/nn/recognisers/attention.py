"""Self-attention of torch.nn as two linear layers of brim around torch's attention kernel.

torch runs `MultiheadAttention` as one function, inside of which brim would see nothing. What brim
does not take over (masks, weights that are asked for, other keys and values) stays that function.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from brim.nn import functional
from brim.nn._attention import attention
from brim.nn._derived import MAKERS, Kind
from brim.nn._elsewhere import is_traced
from brim.nn._functions import outside
from brim.nn.saving import PLAIN

__all__: list[str] = []


def _members(kind: Kind) -> tuple[tuple[Kind, ...], Mapping[str, Any]]:
    work = kind.forward

    @functools.wraps(work)
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        is_bare = key_padding_mask is None and attn_mask is None
        is_of_one = query is key and key is value
        mixed = None
        if is_bare and is_of_one and not need_weights and not is_causal:
            mixed = outside(_attend, self, query)
        return work(self, query, key, value, *options) if mixed is None else (mixed, None)

    return (kind,), {"forward": forward, "_brim_recompute": None}


MAKERS["attention"] = _members


def _is_ours(module: Any, x: Tensor) -> bool:
    weight = module.in_proj_weight
    return (
        type(x) in PLAIN
        and x.dim() == 3
        and x.numel() > 0
        and torch.is_grad_enabled()  # without, torch has one kernel for all of it
        and type(weight) in PLAIN
        and type(module.out_proj.weight) in PLAIN
        and module.bias_k is None
        and module.bias_v is None
        and not module.add_zero_attn
        and x.shape[-1] == module.embed_dim
        and not is_traced()
    )


def _attend(module: Any, x: Tensor) -> Tensor | None:
    """The operators of torch's function in their order: the same bits. None if it is not ours."""
    if not _is_ours(module, x):
        return None
    recompute = module._brim_recompute is not None
    x = x.transpose(1, 0) if module.batch_first else x
    length, batch, width = x.shape
    heads = module.num_heads
    packed = functional.linear(x, module.in_proj_weight, module.in_proj_bias, recompute=recompute)
    packed = (
        packed.view(length, batch, 3, width).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    )
    query, key, value = (
        part.view(length, batch * heads, width // heads)
        .transpose(0, 1)
        .view(batch, heads, length, width // heads)
        for part in packed
    )
    dropout = module.dropout if module.training else 0.0
    attend = attention if recompute else nn.functional.scaled_dot_product_attention
    mixed = attend(query, key, value, None, dropout)
    mixed = mixed.permute(2, 0, 1, 3).contiguous().view(batch * length, width)
    last = module.out_proj
    result = functional.linear(mixed, last.weight, last.bias, recompute=recompute)
    result = result.view(length, batch, width)
    return result.transpose(1, 0) if module.batch_first else result
