"""Parts of a batch: how many items it has, and those from `start` to `stop`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from brim._arguments import check_callable
from brim.adapt._packed import is_packed, layout_of, part_of

Length: TypeAlias = Callable[[Any], int]
Split: TypeAlias = Callable[[Any, int, int], Any]

#: Belongs to no item: each part gets it as it is.
_SETTINGS = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def _is_array(value: object) -> bool:
    """A tensor or a NumPy array."""
    return isinstance(value, torch.Tensor) or (
        hasattr(value, "shape") and hasattr(value, "ndim") and hasattr(value, "__getitem__")
    )


def _is_setting(value: Any) -> bool:
    return isinstance(value, _SETTINGS) or (_is_array(value) and value.ndim == 0)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_column(value: object) -> bool:
    """A list or tuple of one setting (a text, a label) per item, which is cut itself."""
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_setting, value))


def members(value: Any) -> dict[str, Any] | None:
    """What is cut one by one, by how an error names it; None where `value` is no container."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{i}]": each for i, each in enumerate(value)}
    if _is_dataclass(value):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _lengths(value: Any, dim: int, path: str, found: dict[str, int]) -> None:
    if isinstance(value, PackedSequence):
        found[path] = int(value.batch_sizes[0])
    elif _is_setting(value):
        pass
    elif _is_column(value):
        found[path] = len(value)
    elif (inner := members(value)) is not None:
        for name, member in inner.items():
            _lengths(member, dim, path + name, found)
    elif _is_array(value):
        if getattr(value, "layout", torch.strided) not in (torch.strided, torch.jagged):
            raise TypeError(
                f"{path} is a tensor of {value.layout}, of which only split= knows parts"
            )
        if not -value.ndim <= dim < value.ndim:
            raise ValueError(f"dim is {dim}, but {path} has {value.ndim} dimension(s)")
        found[path] = value.shape[dim]
    else:
        raise TypeError(
            f"{path} is a {type(value).__name__}. A batch is a tensor, or a tuple, list, dict or "
            "dataclass of tensors, texts and numbers; pass split= and length= for others"
        )


def length(batch: Any, dim: int) -> int:
    """How many items a batch has; of a packed one, how many documents.

    Example:
        >>> length({"x": torch.zeros(4, 3), "name": ["a", "b", "c", "d"], "k": 5}, 0)
        4
    """
    if is_packed(batch):
        return len(layout_of(batch).lengths)
    found: dict[str, int] = {}
    _lengths(batch, dim, "batch", found)
    if not found:
        raise ValueError("the batch has nothing that could be cut into parts")
    if len(set(found.values())) > 1:
        different = ", ".join(f"{path} {count}" for path, count in found.items())
        raise ValueError(
            f"the members of a batch must have the same length, got {different}. Pass split= and "
            "length= if they have not (split='slice' for a list of samples)"
        )
    return next(iter(found.values()))


def part(value: Any, dim: int, start: int, stop: int) -> Any:
    """The items from `start` to `stop` of a batch that has a `length`.

    Example:
        >>> part((torch.arange(4), ["a", "b", "c", "d"], 5), 0, 1, 3)
        (tensor([1, 2]), ['b', 'c'], 5)
    """
    if is_packed(value):
        return part_of(value, start, stop)
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        if value.is_nested:
            samples = list(value.unbind()[start:stop])
            return torch.nested.as_nested_tensor(samples, layout=value.layout)
        return value.narrow(dim, start, stop - start)
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        lengths = lengths[start:stop]
        longest = int(lengths.max())
        return pack_padded_sequence(
            padded[start:stop, :longest], lengths, batch_first=True, enforce_sorted=False
        )
    if _is_setting(value):
        return value
    if _is_column(value):
        return value[start:stop]
    if members(value) is not None:
        return rebuilt(value, lambda each: part(each, dim, start, stop))
    return value[(slice(None),) * (dim % value.ndim) + (slice(start, stop),)]  # NumPy's


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with its members changed."""
    if isinstance(value, Mapping):
        changed = {key: change(each) for key, each in value.items()}
        if type(value) is dict:
            return changed
        own: Any = copy.copy(value)  # its class may know more than the items
        for key, each in changed.items():
            own[key] = each
        return own
    if isinstance(value, (list, tuple)):
        inner = [change(each) for each in value]
        return type(value)._make(inner) if hasattr(value, "_make") else type(value)(inner)
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **{name: change(getattr(value, name)) for name in fields})


def splitting(split: Any, length_of: Any, dim: int) -> tuple[Split, Length]:
    """How batches are cut, and how long they are, by the arguments `split` and `length`."""
    if split is None:
        if length_of is not None:
            raise ValueError("length is for batches with a split of their own: pass split= too")
        return (
            lambda batch, start, stop: part(batch, dim, start, stop),
            lambda batch: length(batch, dim),
        )
    length_of = length_of or len
    check_callable("length", length_of)
    if split == "slice":
        return lambda batch, start, stop: batch[start:stop], length_of
    check_callable("split", split)
    return split, length_of
