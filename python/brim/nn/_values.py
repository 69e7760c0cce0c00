"""Which values a forward pass computes, and which of them are cheap to compute again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Place", "Value", "Values", "bytes_of", "identity"]

Place: TypeAlias = tuple[str, str]
"""Where something happens: the name of a module, and the operation that it calls."""

_StorageWeakRef: Any = reductions.StorageWeakRef  # has no types


@dataclass
class Value:
    """What a storage holds, until it is written to again.

    Attributes:
        bytes: of keeping it.
        made_from: the values that its operation read.
        rerun: whether that operation is cheap and gives the same again.
        operation: its name, such as "aten::mul".
        place: where it ran.
        readers: the values that are made from this one, in order.
    """

    bytes: int
    made_from: list[int] = field(default_factory=list)
    rerun: bool = True
    operation: str = ""
    place: Place = ("", "")
    readers: list[int] = field(default_factory=list)


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, every operation below autograd adds the values that it makes to `list`.

    Whatever was there before, such as parameters and inputs, is made from nothing and costs
    nothing. Views are the value of their storage.

    Args:
        place: tells where an operation runs.
    """

    def __init__(self, place: Callable[[], Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.list: list[Value] = []
        self._place = place
        # By storage. The weak references keep its identity from being used again.
        self._now: dict[int, tuple[Any, int]] = {}
        self._derived: dict[tuple[Any, ...], int] = {}

    def of(self, tensor: Tensor) -> int:
        """The value that a tensor's storage has now."""
        key, reference = identity(tensor)
        if key not in self._now:
            self._now[key] = (reference, self._add(Value(0)))
        return self._now[key][1]

    def derived(self, value: int, size: int, place: Place, *key: Any) -> int:
        """A value of `size` bytes that is cheap to make from another, such as a part of it."""
        key = (value, size, *key)
        if key not in self._derived:
            self._derived[key] = self._add(Value(size, [value], place=place))
        return self._derived[key]

    def part(self, tensor: Tensor, place: Place) -> int:
        """The value of a tensor: a copy of its elements where its storage has more."""
        value = self.of(tensor)
        size = tensor.numel() * tensor.element_size()
        if size >= bytes_of(tensor) or self.list[value].bytes <= size:
            return value
        return self.derived(value, size, place, tensor.storage_offset())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note what it read and made."""
        kwargs = dict(kwargs or {})
        read = {identity(tensor)[0]: self.of(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        written = [] if not func._schema.is_mutable else _written(func, args, kwargs)
        self._note(func, read, written, _tensors(result))
        return result

    def _note(
        self, func: Any, read: dict[int, int], written: list[Tensor], made: list[Tensor]
    ) -> None:
        name = func._schema.name
        free = name.endswith("_like") or name.startswith("aten::new_")  # read a shape alone
        made_from = [] if free else list(dict.fromkeys(read.values()))
        rerun = _is_cheap(func)
        seen: set[int] = set()
        for tensor in (*written, *made):
            key, reference = identity(tensor)
            if key in seen or (key in read and not any(tensor is each for each in written)):
                continue  # a view
            seen.add(key)
            size = bytes_of(tensor)
            if tensor.dtype is torch.bool:
                size = (size + 7) // 8  # could be kept as bits
            elif name in ("aten::bernoulli", "aten::bernoulli_"):
                size = (tensor.numel() + 7) // 8
            value = Value(size, made_from, rerun, name, self._place())
            self._now[key] = (reference, self._add(value))
        if name == "aten::native_dropout" and len(made) == 2:
            result, mask = (self.of(tensor) for tensor in made)
            # The random numbers are in the mask: the result can be made from it.
            self.list[result].made_from = [*made_from, mask]
            self.list[result].rerun = True
            self.list[mask].readers.append(result)

    def _add(self, value: Value) -> int:
        place = len(self.list)
        self.list.append(value)
        for each in value.made_from:
            self.list[each].readers.append(place)
        return place


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            written += _tensors(given)
    return written


def identity(tensor: Tensor) -> tuple[int, Any]:
    """What identifies a storage, and what must be held so that nothing else gets it."""
    try:
        reference = _StorageWeakRef(tensor.untyped_storage())
        return reference.cdata, reference
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have no storage
        return id(tensor), tensor


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor's storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


# -- What is cheap ---------------------------------------------------------------------------------


def _is_cheap(func: Any) -> bool:
    """Whether an operation reads and writes each element a few times, and gives the same again."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    return (
        torch.Tag.pointwise in func.tags
        or func.namespace == "brim"  # its own kernels pack bits, normalise and pool
        or name in _CHEAP
        or name.startswith(("new_", "upsample_", "reflection_pad", "replication_pad"))
        or name.endswith(("_like", "_copy", "_scatter"))
        or not any("Tensor" in str(each.type) for each in func._schema.arguments)  # zeros, arange
    )


_CHEAP = {
    name
    for names in (
        # copies
        "_to_copy clone copy cat stack index index_select gather embedding index_put fill zero",
        "constant_pad_nd pad roll flip repeat repeat_interleave pixel_shuffle pixel_unshuffle",
        "channel_shuffle tril triu masked_select one_hot scatter index_add index_copy",
        # normalisations
        "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm",
        "_native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update",
        "_batch_norm_no_update _fused_rms_norm _softmax _log_softmax _safe_softmax",
        # reductions
        "sum mean amax amin max min var var_mean std std_mean linalg_vector_norm norm logsumexp",
        "cumsum any all argmax argmin prod",
        # pooling
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool2d_with_indices",
        "max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d",
        # activations and losses that have no tag
        "_prelu_kernel glu nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss",
        "binary_cross_entropy binary_cross_entropy_with_logits leaky_relu",
    )
    for name in names.split()
}
