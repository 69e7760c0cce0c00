"""The error of a call that cannot be traced."""

from __future__ import annotations


class EstimateError(RuntimeError):
    """A function cannot be estimated without running it; the message names the line and why.

    Example:
        >>> import brim, torch
        >>> try:
        ...     brim.estimate(lambda x: x.numpy(), torch.ones(4), device="cpu")
        ... except brim.EstimateError:
        ...     print("needs the values")
        needs the values
    """


class LeftBehindError(EstimateError):
    """Tensors of a trace, which have no values, are left where brim cannot put things back."""
