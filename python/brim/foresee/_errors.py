"""The error of a call that cannot be traced."""

from __future__ import annotations


class EstimateError(RuntimeError):
    """A function cannot be estimated without running it; the message names the line and why."""


class LeftBehindError(EstimateError):
    """Tensors of a trace, which have no values, are left where brim cannot put things back."""
