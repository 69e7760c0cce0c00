"""Sizes of samples in the forms that users have, as the tensors that the C++ core takes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from brim import _C
from brim._arguments import shown, whole

if TYPE_CHECKING:
    import numpy as np

Real: TypeAlias = int | float
Sizes: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]"
Cost: TypeAlias = "str | _C.MemoryModel | Callable[[int, Any], Any]"
Budget: TypeAlias = "Real | str | Sequence[Real | str]"


def is_array(value: object) -> bool:
    """Whether a value is a tensor or a NumPy array."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")


def at_once(values: object) -> object:
    """A container that can be read at once, as a tensor, an array or a list; others unchanged.

    NumPy reads columns of pandas and Arrow. A column of Hugging Face's `datasets` returns all its
    values for `[:]`, in its own format; reading them one by one takes many times as long.
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
    """Hides from torch that an array is read-only, which it would warn of; brim only reads."""

    def __init__(self, array: Any) -> None:
        self.array = array  # stays alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def one_column(name: str, sizes: object) -> torch.Tensor:
    """Sizes as an int64 or float64 tensor with one dimension."""
    return _widened(size_column(name, sizes))


def size_column(name: str, sizes: object) -> torch.Tensor:
    """The same in their own width, without a copy."""
    tensor = as_tensor(name, sizes)
    if tensor.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    return tensor.contiguous()


def _widened(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.float64 if numbers.is_floating_point() else torch.int64)


def as_tensor(name: str, sizes: object) -> torch.Tensor:
    """Numbers as a tensor on the CPU. Their type is checked, not their range.

    Raises:
        TypeError: if they are not numbers.
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
            f"{name} must be a tensor, an array or a sequence of numbers, got {shown(sizes)}"
        )
    return _C.sizes_tensor(sizes, name)


def index_tensor(name: str, indices: object) -> torch.Tensor:
    """Indices of samples as an int64 tensor, from an array or any iterable of ints.

    Raises:
        TypeError: if they are not ints in one dimension. Masks are not.
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
        raise TypeError(f"{name} must be an iterable of indices, got {shown(indices)}")
    return _C.indices_tensor(indices)


def _checked_tensor(name: str, sizes: torch.Tensor) -> torch.Tensor:
    if sizes.dtype == torch.uint64:
        wrapped = sizes.cpu().view(torch.int64)
        for place in (wrapped < 0).nonzero()[:1].tolist():
            value = int(wrapped[tuple(place)]) + 2**64
            index = ", ".join(map(str, place))
            raise ValueError(f"{name} must fit 64 bits with a sign, got {value} at index {index}")
        return wrapped
    if sizes.is_complex() or sizes.dtype == torch.bool:
        raise TypeError(f"{name} must be ints or floats, got a tensor of {sizes.dtype}")
    if sizes.is_floating_point() and sizes.dtype != torch.float32:
        return sizes.to("cpu", torch.float64)
    return sizes.cpu()


@dataclass(frozen=True)
class Limits:
    """Budgets, each with its cost."""

    costs: list[Any] = field(default_factory=list)
    maxima: list[Any] = field(default_factory=list)
    several: bool = False  # whether sizes have one column per budget
    measured: int = 0  # budgets that sizes are given for; one more may limit the count

    @classmethod
    def read(
        cls, cost: Cost | Sequence[Cost], maximum: Budget | None, max_batch_size: int | None = None
    ) -> Limits:
        """Check `cost`, `max_total_size` and `max_batch_size`; see `BatchSamplerBase`."""
        if is_array(maximum):
            maximum = as_tensor("max_total_size", maximum).tolist()
        several = isinstance(maximum, (list, tuple))
        maxima: list[Any] = list(maximum) if isinstance(maximum, (list, tuple)) else [maximum]
        if not maxima:
            raise ValueError("max_total_size is empty: there must be at least one budget")
        costs = list(cost) if isinstance(cost, (list, tuple)) else [cost] * len(maxima)
        if len(costs) != len(maxima):
            raise ValueError(
                f"cost has {len(costs)} entries and max_total_size {len(maxima)}: "
                "there must be one cost for each budget, or one for all"
            )
        maxima = [_in_bytes(*pair) for pair in zip(costs, maxima, strict=True)]
        measured = len(costs)
        if max_batch_size is not None:
            costs.append("count")
            maxima.append(whole("max_batch_size", max_batch_size, 1))
        _C.check_limits(costs, maxima)
        return cls(costs, maxima, several, measured)

    def settings(self) -> dict[str, Any]:
        """Costs and budgets as plain values, to compare with others."""
        if not self.costs:
            return {}
        return {
            "max_total_size": [m if type(m) is int else float(m) for m in self.maxima],
            "cost": [_cost_name(cost) for cost in self.costs],
        }

    def columns(self, sizes: object) -> list[torch.Tensor]:
        """The sizes as one tensor per budget, all of ints or all of floats.

        Several sizes for one budget are one tensor each, which all count against it.
        """
        sizes = at_once(sizes)
        joint = not self.several and has_columns(sizes)
        if not self.several and not joint:
            return [size_column("sizes", sizes)] * len(self.costs)
        if is_array(sizes):
            columns = list(as_tensor("sizes", sizes).unbind(1)) if has_columns(sizes) else []
            if joint and not columns:
                raise ValueError("sizes must have a number for each sample, got shape (n, 0)")
            if not joint and len(columns) != self.measured:
                raise ValueError(
                    f"sizes must have shape (samples, {self.measured}), one column for each "
                    f"budget, got {tuple(sizes.shape)}"  # type: ignore[attr-defined]
                )
        else:
            columns = self._columns_of_rows(sizes, joint)
        if any(column.is_floating_point() for column in columns):
            columns = [column.double() for column in columns]
        columns = [column.contiguous() for column in columns]
        return columns + columns[:1] * (len(self.costs) - self.measured)

    def _columns_of_rows(self, sizes: object, joint: bool) -> list[torch.Tensor]:
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
            raise TypeError(f"sizes must be an array or a sequence of tuples, got {shown(sizes)}")
        count = max(len(sizes[0]), 1) if joint else self.measured
        what = "as for the first one" if joint else "one for each budget"
        for index, row in enumerate(sizes):
            if not isinstance(row, Sized) or isinstance(row, str) or len(row) != count:
                raise ValueError(
                    f"sizes must have {count} numbers for each sample, {what}, got {shown(row)} "
                    f"at index {index}"
                )
        rows = [tuple(row) for row in sizes]
        return [_C.sizes_tensor([row[k] for row in rows]) for k in range(count)]

    def columns_of(self, sizeof: Callable[[int], Any], indices: torch.Tensor) -> list[torch.Tensor]:
        """The sizes that a function gives for these indices, asked once for each; 0 elsewhere."""
        distinct = torch.unique(indices)
        columns = []
        for sizes in self.columns([sizeof(index) for index in distinct.tolist()]):
            column = torch.zeros(int(distinct[-1]) + 1 if len(distinct) else 0, dtype=sizes.dtype)
            column[distinct] = sizes
            columns.append(column)
        return columns


def has_columns(sizes: object) -> bool:
    """Whether there are several sizes per sample: a matrix, or a sequence of rows."""
    sizes = at_once(sizes)
    if is_array(sizes):
        return sizes.ndim == 2  # type: ignore[attr-defined, no-any-return]
    first = sizes[0] if isinstance(sizes, Sequence) and len(sizes) > 0 else None
    return isinstance(first, Sized) and getattr(first, "ndim", 1) > 0


def _cost_name(cost: Any) -> str:
    """What tells a cost from others, to compare states of samplers."""
    if isinstance(cost, str):
        return cost
    if isinstance(cost, _C.MemoryModel):
        return f"MemoryModel {zlib.crc32(repr(cost._state()).encode())}"
    if isinstance(cost, _C.PaddedNeed):
        return f"PaddedNeed {zlib.crc32(repr(cost.weights).encode())}"
    return f"function {getattr(cost, '__qualname__', type(cost).__qualname__)}"


def _in_bytes(cost: object, maximum: object) -> object:
    """`"8GiB"` as a number, if the budget is in bytes; the core checks everything else."""
    if isinstance(maximum, str):
        if not isinstance(cost, (_C.MemoryModel, _C.PaddedNeed)):
            raise TypeError(
                f"max_total_size must be a positive number, got {maximum!r}; "
                "text is for a budget in bytes, with a memory model as cost, as fit makes them"
            )
        return _C.parse_bytes(maximum, name="max_total_size")
    return maximum


def size_function(sizeof: object) -> Callable[[Any], Any] | None:
    """The function that gives the size of one sample; None if `sizeof` holds the sizes.

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
        f"got {shown(sizeof)}"
    )


def check_oversize(oversize: object, *, splits: bool = False) -> str:
    """Check the argument `oversize` of a sampler; `"skip"` is another name for leaving out."""
    if oversize == "skip":
        return "leave_out"
    if oversize == "split":
        if splits:
            return "split"
        raise ValueError(
            'oversize="split" is for pack_stream: a sampler knows samples by their index. Wrap the '
            "data set in brim.data.SplitDocuments, and give the sampler its sizes"
        )
    if oversize not in ("leave_out", "error", "alone", "truncate"):
        raise ValueError(
            f'oversize must be "leave_out", "error", "alone" or "truncate", got {shown(oversize)}'
        )
    return str(oversize)


def sorted_boundaries(given: object) -> torch.Tensor:
    """Boundaries of buckets, as the argument `bucket_boundaries` gives them."""
    boundaries = one_column("bucket_boundaries", given)
    if boundaries.dtype == torch.int64 and not torch.equal(boundaries.double().long(), boundaries):
        raise ValueError("bucket_boundaries must not exceed 2**53")
    return boundaries.double().sort().values  # NaN last, for the core to refuse


class _Stored(NamedTuple):
    """A tensor whose type torch can pickle but not read back."""

    array: Any


def stored(sizes: Any, made: dict[int, Any]) -> Any:
    """Sizes as they are pickled. `made` has what was made before: a column may be there twice."""
    if isinstance(sizes, torch.Tensor) and sizes.dtype in (torch.uint16, torch.uint32):
        return made.setdefault(id(sizes), _Stored(sizes.numpy()))
    if isinstance(sizes, list) and sizes and isinstance(sizes[0], torch.Tensor):
        return [stored(column, made) for column in sizes]
    return sizes


def loaded(sizes: Any, made: dict[int, Any]) -> Any:
    """The sizes of which `stored` made this; the same column is the same tensor again."""
    if isinstance(sizes, _Stored):
        return made.setdefault(id(sizes), torch.from_numpy(sizes.array))
    if isinstance(sizes, list) and sizes and isinstance(sizes[0], _Stored):
        return [loaded(column, made) for column in sizes]
    return sizes
