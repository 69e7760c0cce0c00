"""Activations: one bit per element, or nothing where the next layer keeps the output.

Those that need their input or output for backward keep it, as torch.nn: nothing smaller is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brim.nn._activation import gives, operator, prelu

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "SELU",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Tanh",
    "Threshold",
]


class Activation:
    """What the activations have in common.

    Attributes:
        recompute: keep nothing where the layer before can recompute its output in backward.
    """

    recompute: bool = False


@gives("0., 2.")
class ReLU(Activation, torch.nn.ReLU):
    """`torch.nn.ReLU` that keeps one bit per element, or nothing where the next layer keeps it."""

    def forward(self, input: Tensor) -> Tensor:
        """The rectified input."""
        return operator("relu", self.inplace)(input, self.recompute)


@gives("-1.,  1.")
class Hardtanh(Activation, torch.nn.Hardtanh):
    """`torch.nn.Hardtanh` that keeps one bit per element, or nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The input held between two bounds."""
        run = operator("hardtanh", self.inplace)
        return run(input, self.min_val, self.max_val, self.recompute)


@gives("0., 2.")
class ReLU6(Activation, torch.nn.ReLU6):
    """`torch.nn.ReLU6` that keeps one bit per element, or nothing."""

    forward = Hardtanh.forward


@gives("-0.0100,  2.0000")
class LeakyReLU(Activation, torch.nn.LeakyReLU):
    """`torch.nn.LeakyReLU` that keeps one bit per element, or nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, with another slope below zero."""
        return operator("leaky_relu", self.inplace)(input, self.negative_slope, self.recompute)


@gives("0.3333, 0.8333")
class Hardsigmoid(Activation, torch.nn.Hardsigmoid):
    """`torch.nn.Hardsigmoid` that keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        """A sigmoid of straight lines."""
        return operator("hardsigmoid", self.inplace)(input, self.recompute)


class Threshold(Activation, torch.nn.Threshold):
    """`torch.nn.Threshold` that keeps one bit per element, or nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.Threshold(0.5, 7.0)(torch.tensor([-1.0, 2.0]))
        tensor([7., 2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input, another value where it is not above a threshold."""
        run = operator("threshold", self.inplace)
        return run(input, self.threshold, self.value, self.recompute)


class PReLU(torch.nn.PReLU):
    """`torch.nn.PReLU` that keeps one bit per element if its weight is frozen.

    Example:
        >>> import torch, brim
        >>> brim.nn.PReLU().requires_grad_(False)(torch.tensor([-1.0, 2.0]))
        tensor([-0.2500,  2.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input, times the weight below zero."""
        return prelu(input, self.weight)


@gives("-0.1587,  1.9545")
class GELU(Activation, torch.nn.GELU):
    """`torch.nn.GELU`; keeps its input."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times the share of a normal distribution below it."""
        return operator("gelu", False)(input, self.approximate, self.recompute)


@gives("-0.2689,  1.7616")
class SiLU(Activation, torch.nn.SiLU):
    """`torch.nn.SiLU`; keeps its input."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times its sigmoid."""
        return operator("silu", self.inplace)(input, self.recompute)


@gives("-0.3333,  1.6667")
class Hardswish(Activation, torch.nn.Hardswish):
    """`torch.nn.Hardswish`; keeps its input."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times a sigmoid of straight lines."""
        return operator("hardswish", self.inplace)(input, self.recompute)


@gives("-0.3034,  1.9440")
class Mish(Activation, torch.nn.Mish):
    """`torch.nn.Mish`; keeps its input."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times the tanh of its softplus."""
        return operator("mish", self.inplace)(input, self.recompute)


@gives("0.3133, 2.1269")
class Softplus(Activation, torch.nn.Softplus):
    """`torch.nn.Softplus`; keeps its input."""

    def forward(self, input: Tensor) -> Tensor:
        """A smooth ReLU."""
        return operator("softplus", False)(input, self.beta, self.threshold, self.recompute)


@gives("-0.6321,  2.0000")
class ELU(Activation, torch.nn.ELU):
    """`torch.nn.ELU`; keeps its input, or in place its output."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, below zero an exponential function."""
        return operator("elu", self.inplace)(input, self.alpha, self.recompute)


@gives("-0.6321,  2.0000")
class CELU(Activation, torch.nn.CELU):
    """`torch.nn.CELU`; keeps its input, or in place its output."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, below zero an exponential function."""
        return operator("celu", self.inplace)(input, self.alpha, self.recompute)


@gives("-1.1113,  2.1014")
class SELU(Activation, torch.nn.SELU):
    """`torch.nn.SELU`; keeps its input, or in place its output."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, below zero an exponential function, times a factor."""
        return operator("selu", self.inplace)(input, self.recompute)


@gives("-1.3133, -0.1269")
class LogSigmoid(Activation, torch.nn.LogSigmoid):
    """`torch.nn.LogSigmoid`; keeps its input, where torch keeps two tensors on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """The logarithm of the sigmoid of the input."""
        return operator("logsigmoid", False)(input, self.recompute)


@gives("-0.5000,  0.6667")
class Softsign(Activation, torch.nn.Softsign):
    """`torch.nn.Softsign`; keeps its input, where torch keeps two tensors."""

    def forward(self, input: Tensor) -> Tensor:
        """The input divided by 1 and its size."""
        return operator("softsign", False)(input, self.recompute)


@gives("0.2689, 0.8808")
class Sigmoid(Activation, torch.nn.Sigmoid):
    """`torch.nn.Sigmoid`; keeps its output."""

    def forward(self, input: Tensor) -> Tensor:
        """The sigmoid of the input."""
        return operator("sigmoid", False)(input, self.recompute)


@gives("-0.7616,  0.9640")
class Tanh(Activation, torch.nn.Tanh):
    """`torch.nn.Tanh`; keeps its output."""

    def forward(self, input: Tensor) -> Tensor:
        """The hyperbolic tangent of the input."""
        return operator("tanh", False)(input, self.recompute)
