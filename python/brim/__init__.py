"""brim makes PyTorch programs fit the memory they have: fill memory to the brim, never over it.

Example:
    >>> import brim, torch
    >>> with brim.budget("1GiB", device="cpu"), brim.PeakMeter("cpu") as meter:
    ...     x = torch.zeros(1024, 1024)
    >>> meter.peak
    4194304
"""

import os

from brim import _torch_version

_torch_version.check()

from brim import _C, adapt, data, foresee, memory, nn, predict, testing  # noqa: E402  the check comes before anything loads the C++ core
from brim._C import __version__  # noqa: E402
from brim.adapt import *  # noqa: E402, F403
from brim.foresee import *  # noqa: E402, F403
from brim.memory import *  # noqa: E402, F403
from brim.nn import Audit, ConversionReport, assert_saved, audit, convert, restore, saving  # noqa: E402
from brim.predict import *  # noqa: E402, F403

cmake_prefix_path: str = os.path.join(os.path.dirname(_C.__file__), "lib", "cmake", "brim")
"""What CMAKE_PREFIX_PATH needs for `find_package(brim)`: the directory of brimConfig.cmake."""

__all__ = [
    "Audit",
    "ConversionReport",
    "__version__",
    "assert_saved",
    "audit",
    "cmake_prefix_path",
    "convert",
    "data",
    "nn",
    "restore",
    "saving",
    "testing",
]
__all__ += adapt.__all__
__all__ += foresee.__all__
__all__ += memory.__all__
__all__ += predict.__all__
