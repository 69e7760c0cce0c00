"""Memory foreseen: the peak of a call, and the largest size that fits, without running it.

Traces run on fake tensors; what an allocator makes of them is worked out by the C++ core
(`include/brim/predict/memory_trace.h`).
"""

from __future__ import annotations

from brim._estimate._errors import EstimateError
from brim._estimate._estimate import estimate
from brim._estimate._first_size import FirstSize as FirstSize
from brim._estimate._largest import largest_size
from brim._estimate._report import Estimate, GivenUp

__all__ = ["Estimate", "EstimateError", "GivenUp", "estimate", "largest_size"]
