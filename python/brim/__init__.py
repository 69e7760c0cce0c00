"""brim makes PyTorch programs fit the memory they have: fill memory to the brim, never over it.

Example:
    >>> import brim, torch
    >>> with brim.budget("1GiB", device="cpu"), brim.PeakMeter("cpu") as meter:
    ...     x = torch.zeros(1024, 1024)
    >>> meter.peak
    4194304
"""

from brim import _torch_version

_torch_version.check()

from brim import data, nn, testing  # noqa: E402  the check above must come before anything loads the C++ core
from brim._C import (  # noqa: E402
    Budget,
    Fragmentation,
    MemoryStats,
    OomCause,
    OomKind,
    PeakMeter,
    __version__,
)
from brim.adapt import (  # noqa: E402
    AdaptiveFunction,
    Attempt,
    SizeMemory,
    batch,
    chunked,
    maximize,
    range,  # noqa: A004  the public name
    run_batch,
    run_chunked,
    run_range,
)
from brim.memory import (  # noqa: E402
    budget,
    classify_error,
    cpu_allocator_installed,
    default_device,
    format_bytes,
    fragmentation,
    install_cpu_allocator,
    is_out_of_memory,
    memory_stats,
    parse_bytes,
    release_cached,
    reset_peak,
)
from brim.nn import (  # noqa: E402
    Audit,
    ConversionReport,
    assert_saved,
    audit,
    convert,
    restore,
    saving,
)
from brim.predict import (  # noqa: E402
    MemoryModel,
    MemorySample,
    ModelError,
    Peaks,
    PeakSample,
    PolynomialRegression,
    collect_peaks,
)

__all__ = [
    "AdaptiveFunction",
    "Attempt",
    "Audit",
    "Budget",
    "ConversionReport",
    "Fragmentation",
    "MemoryModel",
    "MemorySample",
    "MemoryStats",
    "ModelError",
    "OomCause",
    "OomKind",
    "PeakMeter",
    "PeakSample",
    "Peaks",
    "PolynomialRegression",
    "SizeMemory",
    "__version__",
    "assert_saved",
    "audit",
    "batch",
    "budget",
    "chunked",
    "classify_error",
    "collect_peaks",
    "convert",
    "cpu_allocator_installed",
    "data",
    "default_device",
    "format_bytes",
    "fragmentation",
    "install_cpu_allocator",
    "is_out_of_memory",
    "maximize",
    "memory_stats",
    "nn",
    "parse_bytes",
    "range",
    "release_cached",
    "reset_peak",
    "restore",
    "run_batch",
    "run_chunked",
    "run_range",
    "saving",
    "testing",
]
