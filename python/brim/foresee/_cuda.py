"""What torch chooses on CUDA, where the choice decides which memory is taken."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from brim.foresee import _tracer

aten = torch.ops.aten

_GEMMS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_HOPPER_WORKSPACE = 4096 * 8 * 1024
_OTHER_WORKSPACE = (4096 * 2 + 16 * 8) * 1024


class Temporaries:
    """What CUDA's kernels and libraries take.

    Args:
        device: the device; Hopper is assumed if it is not there.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing was taken yet."""
        there = torch.cuda.is_available()
        self.capability = torch.cuda.get_device_capability(device) if there else (9, 0)
        self._workspaces: set[bool] = set()
        self.assumptions = [] if there else ["kernels are those of a Hopper GPU (sm_90)"]

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterator[tuple[int, bool]]:
        """Bytes, and whether they stay allocated, for one call of an operator."""
        # A workspace for each cuBLAS handle: the engine's thread has its own.
        if func in _GEMMS and backward not in self._workspaces and not there_already():
            self._workspaces.add(backward)
            yield (_HOPPER_WORKSPACE if self.capability[0] == 9 else _OTHER_WORKSPACE), True


def there_already() -> bool:
    """Whether cuBLAS has its workspaces: then they are among what is held before."""
    return False


def allocator_settings() -> dict[str, Any]:
    """The allocator's options out of the environment, as torch reads them."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings: dict[str, Any] = {}
    if re.search(r"expandable_segments\s*:\s*True", text):
        settings["expandable_segments"] = True
    found = re.search(r"max_split_size_mb\s*:\s*(\d+)", text)
    if found:
        settings["max_split_size"] = int(found[1]) << 20
    return settings


@contextlib.contextmanager
def choices(tracer: _tracer.Tracer, moves: bool) -> Iterator[None]:
    """Take CUDA's kernels for composite operators, also where there is no CUDA."""
    library = torch.library.Library("aten", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, key, allow_override=True)
        stack.enter_context(
            mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        )
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        yield


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention with the kernel that CUDA prefers for these tensors."""
    if enable_gqa and key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    half = query.dtype in (torch.float16, torch.bfloat16)
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if half and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -torch.inf)
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.size(-2))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, gradient, dropout_p, is_causal, scale=scale
    )[0]
