"""Sizes of samples as people have them, turned into what the C++ core takes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from brim import _C

if TYPE_CHECKING:
    import numpy as np

Real: TypeAlias = int | float
Sizes: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]"
Cost: TypeAlias = "str | _C.MemoryModel"
Budget: TypeAlias = "Real | str | Sequence[Real | str]"

_WHOLE = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
}


def is_array(value: object) -> bool:
    """Whether a value is a tensor or a NumPy array."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")


def at_once(values: object) -> object:
    """What holds many values, as a tensor, an array or a list where it can be read at once.

    Columns of pandas and Arrow are arrays to NumPy; one of Hugging Face's `datasets` gives all its
    values for `[:]`, in whatever format it has, and takes many times as long one by one.
    """
    if is_array(values) or isinstance(values, (list, tuple, range, str, bytes, type)):
        return values
    if hasattr(values, "__array__"):
        import numpy as np

        array = np.asarray(values)
        return array.tolist() if array.dtype.kind == "O" else array
    if isinstance(values, Sequence):
        try:
            part = values[:]
        except Exception:
            return values
        if type(part) is not type(values) and isinstance(part, Sized) and len(part) == len(values):
            return at_once(part)
    return values


class _Writable:
    """A NumPy array that must not be written to. torch warns of such; brim only reads."""

    def __init__(self, array: Any) -> None:
        self.kept = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def one_column(name: str, sizes: object) -> torch.Tensor:
    """Sizes as an int64 or float64 tensor with one dimension."""
    return _widened(size_column(name, sizes))


def size_column(name: str, sizes: object) -> torch.Tensor:
    """The same in the width that they have, without a copy."""
    tensor = as_tensor(name, sizes)
    if tensor.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    return tensor.contiguous()


def _widened(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.float64 if numbers.is_floating_point() else torch.int64)


def as_tensor(name: str, sizes: object) -> torch.Tensor:
    """Numbers as a tensor on the CPU; what they are is checked, not their range.

    Raises:
        TypeError: if they are no numbers.
        ValueError: if an int does not fit 64 bits.
    """
    sizes = at_once(sizes)
    if isinstance(sizes, torch.Tensor):
        return _checked_tensor(name, sizes.detach())
    if is_array(sizes):
        import numpy as np

        array: Any = sizes
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{name} must be ints or floats, got an array of {array.dtype}")
        native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
        return _checked_tensor(
            name,
            torch.as_tensor(native if native.flags.writeable else np.asarray(_Writable(native))),
        )
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise TypeError(
            f"{name} must be a tensor, an array or a sequence of numbers, got {sizes!r:.100}"
        )
    return _C.sizes_tensor(sizes, name)


def index_tensor(name: str, indices: object) -> torch.Tensor:
    """Indices of samples as an int64 tensor: of an array, or of any iterable of ints.

    Raises:
        TypeError: if they are no ints in one dimension; a mask is none.
    """
    indices = at_once(indices)
    if is_array(indices):
        tensor = _widened(as_tensor(name, indices))
        if tensor.ndim != 1 or tensor.is_floating_point():
            raise TypeError(
                f"{name} must be whole numbers in one dimension, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        return tensor.contiguous()
    if isinstance(indices, (str, bytes)) or not isinstance(indices, Iterable):
        raise TypeError(f"{name} must be an iterable of indices, got {indices!r:.100}")
    return _C.indices_tensor(indices)


def _checked_tensor(name: str, sizes: torch.Tensor) -> torch.Tensor:
    if sizes.dtype == torch.uint64:
        # As int64 the values beyond it are negative.
        wrapped = sizes.cpu().view(torch.int64)
        beyond = (wrapped < 0).nonzero()
        if len(beyond) > 0:
            place = beyond[0].tolist()
            value = int(wrapped[tuple(place)]) + 2**64
            index = ", ".join(map(str, place))
            raise ValueError(f"{name} must fit 64 bits with a sign, got {value} at index {index}")
        return wrapped
    if sizes.dtype in _WHOLE or sizes.dtype == torch.float32:
        return sizes.cpu()
    if sizes.is_floating_point():
        return sizes.to("cpu", torch.float64)
    raise TypeError(f"{name} must be ints or floats, got a tensor of {sizes.dtype}")


class Limits:
    """One budget or several, each with its cost.

    Args:
        cost: `"sum"`, `"count"`, `"padded"`, `"padded_squared"` or a fitted memory model; for
            several budgets one for all, or one for each.
        maximum: a positive number, for a memory model also text such as `"8GiB"`; a list or tuple
            of them for several budgets.
    """

    def __init__(self, cost: Cost | Sequence[Cost], maximum: Budget) -> None:
        if is_array(maximum):
            maximum = as_tensor("max_total_size", maximum).tolist()
        self.several = isinstance(maximum, (list, tuple))
        maxima: list[Any] = list(maximum) if isinstance(maximum, (list, tuple)) else [maximum]
        if not maxima:
            raise ValueError("max_total_size is empty: there must be at least one budget")
        if isinstance(cost, (list, tuple)):
            self.costs: list[Any] = list(cost)
            if len(self.costs) != len(maxima):
                raise ValueError(
                    f"cost has {len(self.costs)} entries and max_total_size {len(maxima)}: "
                    "there must be one cost for each budget, or one for all"
                )
        else:
            self.costs = [cost] * len(maxima)
        self.maxima: list[Any] = [
            _number_of_bytes(name, value) for name, value in zip(self.costs, maxima, strict=True)
        ]
        _C.check_limits(self.costs, self.maxima)

    def settings(self) -> dict[str, Any]:
        """Costs and budgets as plain values, to tell whether others are the same."""
        return {
            "max_total_size": [m if type(m) is int else float(m) for m in self.maxima],
            "cost": [
                c if isinstance(c, str) else f"MemoryModel {zlib.crc32(repr(c._state()).encode())}"
                for c in self.costs
            ],
        }

    def columns(self, sizes: object) -> list[torch.Tensor]:
        """The sizes as one tensor a budget, all of ints or all of floats."""
        sizes = at_once(sizes)
        if not self.several:
            return [size_column("sizes", sizes)]
        if is_array(sizes):
            columns = list(as_tensor("sizes", sizes).unbind(1)) if _dimensions(sizes) == 2 else []
            if len(columns) != len(self.maxima):
                raise ValueError(
                    f"sizes must have shape (samples, {len(self.maxima)}), one column for each "
                    f"budget, got {tuple(sizes.shape)}"  # type: ignore[attr-defined]
                )
        else:
            columns = self._columns_of_rows(sizes)
        if any(column.is_floating_point() for column in columns):
            columns = [column.double() for column in columns]
        return [column.contiguous() for column in columns]

    def _columns_of_rows(self, sizes: object) -> list[torch.Tensor]:
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
            raise TypeError(f"sizes must be an array or a sequence of tuples, got {sizes!r:.100}")
        for index, row in enumerate(sizes):
            if not isinstance(row, Sized) or isinstance(row, str) or len(row) != len(self.maxima):
                raise ValueError(
                    f"sizes must have {len(self.maxima)} numbers for each sample, one for each "
                    f"budget, got {row!r:.100} at index {index}"
                )
        rows = [tuple(row) for row in sizes]
        return [_C.sizes_tensor([row[k] for row in rows]) for k in range(len(self.maxima))]


def _dimensions(sizes: Any) -> int:
    return int(sizes.ndim)


def _number_of_bytes(cost: object, maximum: object) -> object:
    """`"8GiB"` as a number, where bytes are meant; everything else is checked by the core."""
    if isinstance(maximum, str):
        if isinstance(cost, str):
            raise TypeError(
                f"max_total_size must be a positive number, got {maximum!r}; "
                "text is for a budget in bytes, with a memory model as cost"
            )
        return _C.parse_bytes(maximum)
    return maximum


def size_function(sizeof: object) -> Callable[[Any], Any] | None:
    """What gives the size of one sample; None where `sizeof` holds the sizes themselves.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(sizeof, Mapping):
        return sizeof.__getitem__
    if isinstance(sizeof, Sequence) and not isinstance(sizeof, (str, bytes)):
        return None
    if is_array(sizeof) or (hasattr(sizeof, "__array__") and not isinstance(sizeof, type)):
        return None
    if callable(sizeof):
        return sizeof
    raise TypeError(
        "sizeof must be a callable, a mapping, or the sizes as a tensor, an array or a sequence, "
        f"got {sizeof!r:.100}"
    )


def oversize_is_error(oversize: object) -> bool:
    """Whether `oversize` asks for an error."""
    if oversize not in ("leave_out", "error"):
        raise ValueError(f'oversize must be "leave_out" or "error", got {oversize!r:.100}')
    return oversize == "error"


def sizes_of(function: Callable[[Any], Any], indices: Iterable[int]) -> list[Any]:
    """Ask for the size of each sample: a number, or several where there are several budgets."""
    return [function(index) for index in indices]
