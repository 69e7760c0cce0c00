"""Convolutions: the input is kept only where the weight needs a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.nn._conv import convolve, convolve_transposed, pad, padded

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
]


# `Any`: what the classes share comes from torch.nn.ConvNd, whose stubs do not know it.
def _forward(layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padding = layer.padding
    if layer.padding_mode != "zeros":
        around = layer._reversed_padding_repeated_twice
        input = pad(input, around, layer.padding_mode)
        padding = (0,) * len(layer.stride)
    elif isinstance(padding, str):
        kernel, stride = layer.kernel_size, layer.stride
        input, padding = padded(input, kernel, stride, padding, layer.dilation)
    return convolve(
        input,
        weight,
        bias,
        layer.stride,
        padding,
        layer.dilation,
        layer.groups,
        layer.recompute,
    )


def _forward_transposed(
    layer: Any, input: Tensor, output_size: list[int] | None, dimensions: int
) -> Tensor:
    output_padding = layer.output_padding
    if output_size is not None:
        output_padding = layer._output_padding(
            input,
            output_size,
            layer.stride,
            layer.padding,
            layer.kernel_size,
            dimensions,
            layer.dilation,
        )
    return convolve_transposed(
        input,
        layer.weight,
        layer.bias,
        layer.stride,
        layer.padding,
        output_padding,
        layer.groups,
        layer.dilation,
        layer.recompute,
    )


class Conv1d(torch.nn.Conv1d):
    """`torch.nn.Conv1d` that keeps its input only where the weight needs a gradient.

    Attributes:
        recompute: keep no input where the layer before can give it again in backward.
    """

    recompute: bool = False

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _forward(self, input, weight, bias)


class Conv2d(torch.nn.Conv2d):
    """`torch.nn.Conv2d` that keeps its input only where the weight needs a gradient.

    Attributes:
        recompute: keep no input where the layer before can give it again in backward.

    Example:
        >>> import torch, brim
        >>> layer = brim.nn.Conv2d(3, 8, kernel_size=3, padding="same")
        >>> layer(torch.ones(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
    """

    recompute: bool = False

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _forward(self, input, weight, bias)


class Conv3d(torch.nn.Conv3d):
    """`torch.nn.Conv3d` that keeps its input only where the weight needs a gradient.

    Attributes:
        recompute: keep no input where the layer before can give it again in backward.
    """

    recompute: bool = False

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _forward(self, input, weight, bias)


class ConvTranspose1d(torch.nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` that keeps its input only where the weight needs a gradient.

    Attributes:
        recompute: keep no input where the layer before can give it again in backward.
    """

    recompute: bool = False

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; `output_size` chooses among the possible sizes."""
        return _forward_transposed(self, input, output_size, 1)


class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` that keeps its input only where the weight needs a gradient.

    Attributes:
        recompute: keep no input where the layer before can give it again in backward.
    """

    recompute: bool = False

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; `output_size` chooses among the possible sizes."""
        return _forward_transposed(self, input, output_size, 2)


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` that keeps its input only where the weight needs a gradient.

    Attributes:
        recompute: keep no input where the layer before can give it again in backward.
    """

    recompute: bool = False

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; `output_size` chooses among the possible sizes."""
        return _forward_transposed(self, input, output_size, 3)
