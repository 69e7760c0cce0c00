"""Operators whose result is known without torch's way to it, which takes up to 15 ms for one.

On tensors of one device, most operators return what their kernel for the meta device returns. The
layers below consist of many operators there, so rules say what comes out. A test compares all with
torch's own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

aten = torch.ops.aten

_Results: TypeAlias = "tuple[torch.Tensor | None, ...]"

# Besides those that make views or work element by element.
_ON_META = """
_softmax _softmax_backward_data _unsafe_view addmm baddbmm bmm cat clone mm roll select_backward
slice_backward
"""


@functools.cache
def on_meta(func: Any, on_cpu: bool) -> Callable[..., Any] | None:
    """What gives an operator's result on tensors of the meta device; None if torch has to.

    It raises where it does not know.

    Args:
        func: the operator.
        on_cpu: whether the tensors stand for those on the CPU.
    """
    if func in _RULES:
        return functools.partial(_RULES[func], on_cpu)
    name = func._schema.name.removeprefix("aten::")
    known = func.is_view or torch.Tag.pointwise in func.tags or name in _ON_META.split()
    moves = any(argument.name == "device" for argument in func._schema.arguments)
    return func if known and not moves and func.namespace == "aten" else None


def _sum_type(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _batch_norm(on_cpu: bool, x: torch.Tensor, *args: Any) -> _Results:
    dtype = x.dtype if on_cpu else _sum_type(x)
    size = x.size(1) if args[4] or not on_cpu else 0
    return torch.empty_like(x), *(x.new_empty(size, dtype=dtype) for _ in range(2))


def _batch_norm_backward(
    on_cpu: bool, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *args: Any
) -> _Results:
    mask = args[-1]
    dtype = x.dtype if weight is None else weight.dtype
    return (
        torch.empty_like(x) if mask[0] or not on_cpu else None,
        *(x.new_empty(x.size(1), dtype=dtype) if wanted else None for wanted in mask[1:]),
    )


def _layer_norm(on_cpu: bool, x: torch.Tensor, shape: Sequence[int], *args: Any) -> _Results:
    dtype = x.dtype if on_cpu else _sum_type(x)
    outer = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    return x.new_empty(x.shape), *(x.new_empty(outer, dtype=dtype) for _ in range(2))


def _layer_norm_backward(
    on_cpu: bool, grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], *args: Any
) -> _Results:
    mask = args[-1]
    if not (grad.is_contiguous() and x.is_contiguous()):
        raise NotImplementedError
    return (
        torch.empty_like(x) if mask[0] else None,
        *(x.new_empty(shape) if wanted else None for wanted in mask[1:]),
    )


_RULES: dict[Any, Callable[..., _Results]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
