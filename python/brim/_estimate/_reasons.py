"""Why a call cannot be traced, in words that say what to do."""

from __future__ import annotations

import re

from torch._subclasses import fake_tensor

from brim._estimate._errors import EstimateError

_NOT_TRACEABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
# Errors of torch that real tensors do not raise.
_NEEDS_VALUES = re.compile(r"[Ff]ake|\bmeta\b|subclass|swap|NVIDIA driver|primary context|data_ptr")
_SPARSE = re.compile(r"Sparse\w*(Impl|Meta)\b|\b[Ss]parse\b")


def reason_of(error: Exception) -> str:
    """Why a call cannot be traced; empty if the error is the call's own, or says so itself."""
    text = str(error)
    of_torch = isinstance(error, (RuntimeError, NotImplementedError, AssertionError))
    if of_torch and not isinstance(error, EstimateError) and _SPARSE.search(text):
        return (
            "sparse tensors cannot be traced, because what they hold depends on values "
            f"({text.splitlines()[0]}). Estimate the call with layers that have sparse=False"
        )
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return f"the operator {error.func} has no fake kernel, so its outputs are unknown"
    if isinstance(error, _NOT_TRACEABLE):
        return (
            f"the result of {getattr(error, 'func', error)} has a shape or value that is not known "
            "without running it. Use a fixed shape (torch.where instead of a mask), or pass the "
            "value as an argument"
        )
    if isinstance(error, ValueError) and "float NaN" in text:
        return (
            f"the code depends on a tensor's value, which is not known without running it: {text}"
        )
    if of_torch and not isinstance(error, EstimateError) and _NEEDS_VALUES.search(text):
        return f"cannot be traced with fake tensors: {text.splitlines()[0]}"
    return ""
