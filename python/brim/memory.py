"""Memory of the CPU and of accelerators: statistics, peaks, budgets, and what an error means.

Everything here is a thin face of the C++ core (`include/brim/memory`).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar

import torch

from brim import _C
from brim._arguments import check_decorated
from brim._C import Fragmentation, MemoryStats, OomCause, OomKind, PeakMeter
from brim._warn import warn

__all__ = [
    "Budget",
    "DeviceLike",
    "Fragmentation",
    "MemoryStats",
    "OomCause",
    "OomKind",
    "PeakMeter",
    "budget",
    "classify_error",
    "cpu_allocator_installed",
    "default_device",
    "format_bytes",
    "fragmentation",
    "install_cpu_allocator",
    "is_out_of_memory",
    "memory_stats",
    "parse_bytes",
    "release_cached",
    "reset_peak",
]

DeviceLike: TypeAlias = str | torch.device | int | None
"""A device: its name, a `torch.device`, an accelerator's index, or None for `default_device()`."""

P = ParamSpec("P")
R = TypeVar("R")


def memory_stats(device: DeviceLike = None) -> MemoryStats:
    """Memory of a device now, as this process sees it, in bytes.

    Returns:
        `allocated` (held by tensors), `peak` (the most of that so far), `reserved` (taken from the
        system: torch's cache on an accelerator, the resident set on the CPU), `limit` (the least of
        what the machine, the container, RLIMIT_AS and open budgets allow) and `free` (what can
        still be allocated). On the CPU, `allocated` and `peak` count from
        `install_cpu_allocator` on.

    Raises:
        ValueError: if the device does not exist or has no memory of its own.

    Example:
        >>> stats = memory_stats("cpu")
        >>> 0 < stats.free <= stats.limit
        True
    """
    return _C.memory_stats(device)


class Budget(_C.Budget):
    """A limit on the memory of a device; `brim.budget` makes one.

    A context manager, or a decorator that opens a new budget for each call. `limit` and `device`
    tell what it limits, `is_open` whether it does so now.

    Example:
        >>> with Budget("1GiB", device="cpu") as limited:
        ...     limited.limit
        1073741824
        >>> limited
        Budget('1GiB', device='cpu', closed)

    One that is dropped without ever having been entered, or having decorated a function, has
    limited nothing, and a UserWarning says so.
    """

    _unused = False  # until it is known to be valid

    def __init__(self, limit: int | str, device: DeviceLike = None) -> None:
        _C.Budget.__init__(self, limit, device)
        self._unused = True

    def __del__(self) -> None:
        """Tell of a limit that was never in force."""
        # No `warn` is left where the interpreter is nearly gone.
        if self._unused and not self._entered and warn is not None:
            warn(
                f"brim.budget({self._asked!r}, device={str(self.device)!r}) was never entered and "
                "limited nothing: open it with `with brim.budget(...):`, or decorate a function"
            )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call runs under a budget of its own.

        Raises:
            TypeError: if it is no function, or one that runs after its call has returned: a
                coroutine or a generator.
        """
        self._unused = False
        inside = "open the budget inside of it, in a `with` block"
        check_decorated("a budget", function, inside)

        @functools.wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            with Budget(self._asked, self.device):
                return function(*args, **kwargs)

        return limited

    def __repr__(self) -> str:
        """The limit, the device, and what is in use where it is open."""
        if self.is_open:
            held = format_bytes(memory_stats(self.device).allocated)
            now = f"{held} of {format_bytes(self.limit)} in use"
        else:
            now = "closed"
        return f"Budget({self._asked!r}, device={str(self.device)!r}, {now})"


# Where brim refuses oneDNN memory for a matrix product, torch warns, takes another kernel for it,
# and switches oneDNN off. Nobody need act on it: the product has its value, or runs out of memory.
# This hides that warning, which quotes brim's refusal, and no other.
_FALLBACK = r"mkldnn_\w+ failed, switching to [\w ]+: *CPU out of memory\. Tried to allocate"
_HIDDEN = ("ignore", re.compile(_FALLBACK, re.IGNORECASE), UserWarning, None, 0)


def _hide_fallback_warning() -> None:
    """Called whenever a budget is about to open."""
    if _HIDDEN not in warnings.filters:  # adding it again would repeat warnings already shown
        warnings.filterwarnings("ignore", _FALLBACK, UserWarning)


_C.provide(hide_fallback_warning=_hide_fallback_warning)


def budget(limit: int | str, device: DeviceLike = None) -> Budget:
    """Keep the memory of a device under a limit, in a `with` block or in a decorated function.

    Budgets nest and hold for the whole process; the tightest open one is in force. An allocation
    that would go over raises `torch.OutOfMemoryError`. If it was oneDNN's, torch takes another
    kernel instead and switches oneDNN off; closing the budget switches it on again. Alone, the call
    limits nothing: a budget that is dropped without having been entered is a UserWarning.

    Args:
        limit: bytes as an int, or `"512MiB"`, `"8GB"`, or `"50%"` of the limit in force when the
            block is entered.
        device: the CPU or a CUDA device.

    Raises:
        ValueError: if the limit is not positive or not understood.
        TypeError: if it is neither an int nor a string.

    Example:
        >>> with budget("1MiB", device="cpu"):
        ...     try:
        ...         torch.empty(2**20)
        ...     except torch.OutOfMemoryError:
        ...         print("does not fit")
        does not fit
        >>> @budget("1MiB", device="cpu")
        ... def work(size):
        ...     return torch.zeros(size).numel()
        >>> work(100)
        100
    """
    return Budget(limit, device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, so that a smaller size may succeed.

    Its type decides, and for a RuntimeError its text. A RuntimeError that was raised `from` such
    an exception counts too, as frameworks wrap what fails inside them, and so do the SystemError
    that the interpreter makes of one that arrives at a bad moment, and an exception group of
    nothing else. Other types do not, whatever they were raised from: a program that raises a
    ValueError, or an error of its own, means that. Nor does an exception that a program raised
    while another was handled, without `from`.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(ValueError("CUDA error: out of memory"))
        False
    """
    return bool(_C.classify_error(error))


def classify_error(error: BaseException) -> OomCause:
    """What an exception says about memory: its `kind`, the `device`, and the bytes `requested`.

    The result is false where the exception is not about memory.

    Example:
        >>> text = "MPS backend out of memory. Tried to allocate 1.00 GiB"
        >>> classify_error(RuntimeError(text))
        OomCause(device memory, mps, requested 1.00 GiB)
    """
    return _C.classify_error(error)


def release_cached(device: DeviceLike = None) -> int:
    """Give unused memory back to the system; returns by how many bytes `reserved` fell.

    Example:
        >>> release_cached("cpu") >= 0
        True
    """
    return _C.release_cached(device)


def fragmentation(device: DeviceLike = None) -> Fragmentation:
    """How much memory torch's cache holds without a tensor in it, and how much cannot be released.

    Example:
        >>> fragmentation("cpu").stuck
        0
    """
    return _C.fragmentation(device)


def reset_peak(device: DeviceLike = None) -> None:
    """Start `memory_stats(device).peak` again from the bytes held now. Open meters keep theirs.

    Example:
        >>> reset_peak("cpu")
    """
    _C.reset_peak(device)


def default_device() -> torch.device:
    """The device used when none is named: the current accelerator, else the CPU.

    Example:
        >>> default_device().type in {"cpu", "cuda", "xpu", "mps"}
        True
    """
    return _C.default_device()


def install_cpu_allocator() -> None:
    """Count every CPU tensor's bytes from now on.

    Budgets, meters and injectors on the CPU call this themselves.

    Example:
        >>> install_cpu_allocator()
        >>> cpu_allocator_installed()
        True
    """
    _C.install_cpu_allocator()


def cpu_allocator_installed() -> bool:
    """Whether CPU tensors are being counted. Importing brim does not start that.

    Example:
        >>> with PeakMeter("cpu"):  # this does
        ...     cpu_allocator_installed()
        True
    """
    return _C.cpu_allocator_installed()


def format_bytes(bytes: int) -> str:  # noqa: A002  the name that C++ has
    """A number of bytes as text for people.

    Example:
        >>> format_bytes(1536 * 2**20)
        '1.50 GiB'
    """
    return _C.format_bytes(bytes)


def parse_bytes(limit: int | str, of: int | None = None) -> int:
    """The bytes that a limit such as `"512MiB"` means; for a percentage, `of` is the whole.

    Raises:
        ValueError: if it is not understood, not positive, or a percentage without `of`.

    Example:
        >>> parse_bytes("1.5GiB"), parse_bytes("50%", of=1000)
        (1610612736, 500)
    """
    return _C.parse_bytes(limit, of)
