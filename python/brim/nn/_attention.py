"""Attention that keeps its inputs where torch keeps the matrix of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from brim.nn._gated import rerun

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """`scaled_dot_product_attention` that runs again in backward where torch has no fused kernel.

    A fused kernel keeps little. Without one, as with dropout on a CPU, torch keeps the weights of
    each query and key several times over.
    """

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)

    given = (query, key, value)
    if (
        not (query.is_cpu and key.is_cpu and value.is_cpu)
        or (attn_mask is not None and attn_mask.requires_grad)
        or _choice(*given, attn_mask, *args, **options) != _WRITTEN_OUT
    ):
        return run(*given)
    return rerun(_Repeatable(run, attn_mask), *given, recompute=True, is_cheap=False)


def _choice(*args: Any, **options: Any) -> int:
    """The kernel that torch takes. It does not tell for fake tensors, so real ones ask instead."""
    if any(isinstance(each, FakeTensor) for each in args):
        with _disable_current_modes(), torch.no_grad():
            return int(torch._fused_sdp_choice(*map(_stand_in, args), **options))
    return int(torch._fused_sdp_choice(*args, **options))


def _stand_in(value: Any) -> Any:
    """A real tensor that takes one row of memory."""
    if not isinstance(value, FakeTensor) or value.dim() == 0:
        return value
    row = torch.empty(value.shape[-1], value.stride(-1) or 1, dtype=value.dtype)[:, 0]
    return row.expand(value.shape)


_WRITTEN_OUT = 0  # torch.nn.attention.SDPBackend.MATH, which takes a second to import


class _Repeatable:
    """A function that draws the same random numbers whenever it runs."""

    def __init__(self, function: Callable[..., Tensor], mask: Tensor | None) -> None:
        self._function = function
        self._random_state: Tensor | None = None
        self._mask = mask
        self._version = self._mask_version()

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self._random_state is None:
            self._random_state = torch.get_rng_state()
            return self._function(*inputs)
        if self._mask_version() != self._version:
            raise RuntimeError(
                "attn_mask was written to between forward and backward, which needs it as it was"
            )
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._random_state)
            return self._function(*inputs)

    def _mask_version(self) -> int:
        # Tensors of inference mode have none.
        return 0 if self._mask is None or self._mask.is_inference() else self._mask._version
