"""The layers as functions, under the original's names.

The original's `torch.autograd.Function` classes are not included: brim has operators in C++.

Example:
    >>> from brim.compat.memsave_torch.nn.functional.ReLU import reluMemSave
    >>> reluMemSave(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brim.nn import functional
from brim.nn._conv import conv, conv_transpose
from brim.nn._numbers import Numbers, over

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...  # the functions of `_FUNCTIONS`


def _relu(x: Tensor) -> Tensor:
    """As `torch.nn.functional.relu`; keeps one bit per element.

    Example:
        >>> reluMemSave(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    return functional.relu(x)


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """As `torch.nn.functional.dropout`; keeps one bit per element.

    Example:
        >>> dropoutMemSave(torch.ones(2), 0.5, False)
        tensor([1., 1.])
    """
    return functional.dropout(x, p, training)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`; keeps the input only where the weight needs a gradient.

    Example:
        >>> linearMemSave(torch.ones(2), torch.ones(1, 2))
        tensor([2.])
    """
    return functional.linear(x, weight, bias)


def _conv_transpose(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional`'s, with the dilation before the groups."""
    return conv_transpose(
        dimensions, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    groups: int,
    transposed: bool,
    output_padding: Numbers,
) -> Tensor:
    """A convolution; the weight's shape gives the number of dimensions.

    Example:
        >>> x, weight = torch.ones(1, 2, 8), torch.ones(4, 2, 3)
        >>> convMemSave(x, weight, None, 1, 0, 1, 1, False, 0).shape
        torch.Size([1, 4, 6])
    """
    if weight.dim() not in (3, 4, 5):
        raise ValueError(f"weight must have 3, 4 or 5 dimensions, got {weight.dim()}")
    size = weight.dim() - 2
    if transposed:
        return conv_transpose(
            size, input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return conv(size, input, weight, bias, stride, padding, dilation, groups)


def _rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-05) -> Tensor:
    """Division by the root mean square over the last dimension, times the weight.

    Example:
        >>> rms_normMemSave(torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor([0.8485, 1.1314])
    """
    return rms_norm_with(functional.rms_norm, input, weight, eps)


def rms_norm_with(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call `norm` directly if the dtypes match and the weight has one dimension.

    Otherwise do as transformers: normalise in float32, cast to the weight's dtype if that is a half
    precision one, then multiply.
    """
    shape = (x.size(-1),)
    if weight.dim() == 1 and weight.dtype == x.dtype:
        return norm(x, shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    normalised = norm(x.to(wide), shape, None, eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalised = normalised.to(weight.dtype)
    return weight * normalised


_EXAMPLE = "torch.ones(1, 2, 8…), torch.ones(2, 4, 2…), None, 2, 0, 0, 1, 1", "1, 4, 16…"
_FUNCTIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "BatchNorm": {"batch_norm": functional.batch_norm},
    "Conv": {
        "conv1d": functional.conv1d,
        "conv2d": functional.conv2d,
        "conv3d": functional.conv3d,
        "conv": _conv,
    },
    "ConvTranspose": {
        own.__name__: own for own in over(_conv_transpose, _EXAMPLE, __name__, "MemSave")
    },
    "Dropout": {"dropout": _dropout},
    "LayerNorm": {"layer_norm": functional.layer_norm, "rms_norm": _rms_norm},
    "Linear": {"linear": _linear},
    "MaxPool": {"maxpool2d": functional.max_pool2d},
    "ReLU": {"relu": _relu},
}
__all__ = [f"{name}MemSave" for functions in _FUNCTIONS.values() for name in functions]


def add_submodule(parent: str, name: str, members: Mapping[str, Any]) -> None:
    """Add a module of the original that has no file here; `parent` gets its members too."""
    module = ModuleType(f"{parent}.{name}", f"A part of `{parent}`.")
    vars(module).update(members, __all__=[*members])
    sys.modules[module.__name__] = module
    vars(sys.modules[parent]).update(members, **{name: module})


for _module, _members in _FUNCTIONS.items():
    add_submodule(__name__, _module, {f"{name}MemSave": own for name, own in _members.items()})
