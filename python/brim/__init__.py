"""brim makes PyTorch programs fit the memory they have: fill memory to the brim, never over it.

Example:
    >>> import brim, torch
    >>> @brim.maximize("batch_size")  # 4096, or as much of it as fits
    ... def norms(x, batch_size=4096):
    ...     return torch.cat([part.norm(dim=1) for part in x.split(batch_size)])
    >>> norms(torch.ones(10_000, 4)).shape
    torch.Size([10000])

A function whose batch size should fit:
    `maximize` lowers an argument until the call fits, and remembers it. `batch`, `range` and
    `chunked` pass a size, the ends of a part, or a piece of a tensor; `run_batch`, `run_range` and
    `run_chunked` do so at once. Decorators return an `AdaptiveFunction`. All take `Options`, tell
    of each `Attempt` (`record` returns `Attempts`) and learn (`SizeMemory`). Ranks that disagree
    get a `RankError`.

A training step:
    `Microbatches` runs a batch in parts that fit, with the gradients of the whole. `estimate` tells
    the peak without running (`Estimate`, `GivenUp`, `EstimateError`), `largest_size` the size that
    fits.

A model that keeps too much for backward:
    `audit` measures it layer by layer (`Audit`), `convert` changes the layers in place
    (`ConversionReport`), `restore` changes them back, `saving` does it for a block of code, and
    `assert_saved` checks it in a test. `brim.nn` has the layers, `brim.nn.functional` the same as
    functions.

Memory that ran out:
    `explain` (`Explaining`, `Explanation`) says why, who holds it, and what would help (`Remedy`);
    `explain_uncaught` does so for errors that end the program.

Samples of different sizes:
    `brim.data` has the samplers, under a budget in tokens or, by their method `fit`, in bytes.

Below all of them:
    memory: `memory_stats` (`MemoryStats`), `PeakMeter`, `budget` (`Budget`), `reset_peak`,
    `release_cached`, `fragmentation` (`Fragmentation`), `default_device`, `DeviceLike`,
    `install_cpu_allocator`, `cpu_allocator_installed`, `format_bytes`, `parse_bytes`.
    errors: `is_out_of_memory`, `classify_error` (`OomCause`, `OomKind`).
    models of memory: `MemoryModel` (`MemorySample`, `ModelError`), `PolynomialRegression`,
    `collect_peaks` (`Peaks`, `PeakSample`).

Also:
    `.plot()` of reports, models and records draws a picture (`pip install 'brim[plot]'`).
    `brim.testing` makes memory run out in your tests. `brim.integrations` is for Lightning,
    accelerate, transformers, PyTorch Geometric and datasets. `brim.compat` has the faces of
    torch_max_mem, toma, memsave_torch and bionemo. `cmake_prefix_path` is for C++ programs. On the
    command line: `brim --help`.
"""

import os

from brim import _torch_version

_torch_version.check()

from brim import _C, _estimate, _explain, adapt, data, memory, nn, predict, testing  # noqa: E402  the check comes before anything loads the C++ core
from brim._C import __version__  # noqa: E402
from brim._estimate import *  # noqa: E402, F403
from brim._explain import *  # noqa: E402, F403
from brim.adapt import *  # noqa: E402, F403
from brim.adapt import range as range  # noqa: A004, E402  left out of __all__, which star imports take
from brim.memory import *  # noqa: E402, F403
from brim.nn import Audit, ConversionReport, assert_saved, audit, convert, restore, saving  # noqa: E402
from brim.predict import *  # noqa: E402, F403

cmake_prefix_path: str = os.path.join(os.path.dirname(_C.__file__), "lib", "cmake", "brim")
"""What CMAKE_PREFIX_PATH needs for `find_package(brim)`: the directory of brimConfig.cmake."""

# In the order of the docstring.
__all__ = [
    *adapt.__all__,
    *_estimate.__all__,
    "Audit",
    "ConversionReport",
    "assert_saved",
    "audit",
    "convert",
    "restore",
    "saving",
    *_explain.__all__,
    *memory.__all__,
    *predict.__all__,
    "nn",
    "data",
    "testing",
    "cmake_prefix_path",
    "__version__",
]
