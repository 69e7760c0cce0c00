"""Memory foreseen: the peak of a call, and the largest size that fits, without running it.

Traces run on fake tensors; what an allocator makes of them is worked out by the C++ core
(`include/brim/predict/memory_trace.h`).
"""

from __future__ import annotations

from brim.foresee._errors import EstimateError
from brim.foresee._estimate import estimate
from brim.foresee._first_size import FirstSize as FirstSize
from brim.foresee._largest import largest_size
from brim.foresee._report import Estimate

__all__ = ["Estimate", "EstimateError", "estimate", "largest_size"]
