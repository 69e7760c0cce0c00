"""The least that backward needs of each layer if nothing is recomputed.

The rules follow from the derivatives: see the table in docs/nn.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _MaxPoolNd

from brim.nn._derived import original_of
from brim.nn._numbers import each
from brim.nn.convert import COUNTERPARTS, ORIGINALS, STAND_INS, own_base, same_work
from brim.nn.modules.activation import Activation

__all__ = ["Need", "needs_of", "with_torchs_work"]

_StorageWeakRef: Any = reductions.StorageWeakRef  # has no types


class Need:
    """Bytes that backward needs.

    Attributes:
        size: in bytes.
        key: identifies them, so that they count once; None if no other layer can need them.
        part: which part of the storage they are.
        most: all parts together, in bytes.
        instead: the identity of a storage that will do as well if it is kept anyway.
    """

    def __init__(
        self, tensor: Tensor | None, size: int, *, dtype: Any = None, instead: Tensor | None = None
    ) -> None:
        self.size = size
        # Weak: the memory may be freed, but no other storage gets the same identity.
        self._references = [_reference(each) for each in (tensor, instead)]
        self.identity = _number(self._references[0])
        self.key = None if tensor is None else (self.identity, dtype)
        self.part: Any = None
        self.most = size
        if isinstance(self._references[0], _StorageWeakRef) and tensor is not None:
            self.part = (tensor.storage_offset(), tensor.shape)
            self.most = max(size, tensor.untyped_storage().nbytes())
        self.instead = _number(self._references[1]) if instead is not None else None
        if dtype is not None:
            self.instead = self.identity  # the tensor that was cast


def _reference(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    try:
        return _StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have no storage
        return tensor


def _number(reference: Any) -> int:
    return reference.cdata if isinstance(reference, _StorageWeakRef) else id(reference)


def needs_of(module: nn.Module, given: Any = None, output: Any = None) -> Sequence[Need] | None:
    """What backward needs of this call; None for an unknown layer."""
    kind = _original(type(module))
    if kind not in COUNTERPARTS:
        return None
    result = output[0] if isinstance(output, tuple) else output
    if not isinstance(given, Tensor) or not isinstance(result, Tensor) or not result.requires_grad:
        return []
    weight = getattr(module, "weight", None)
    trained = weight is not None and weight.requires_grad
    if issubclass(kind, (nn.Linear, _ConvNd)):
        return [_in_type_of_autocast(given)] if trained else []
    if issubclass(kind, _BatchNorm):
        of_batch = module.training or getattr(module, "running_mean", None) is None
        return [_whole(given)] if trained or (of_batch and given.requires_grad) else []
    if issubclass(kind, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return [_whole(given)] if trained or given.requires_grad else []
    bits = (result.numel() + 7) // 8
    own = COUNTERPARTS[kind]
    if issubclass(own, Activation):
        inplace = getattr(module, "inplace", False)
        needs = own.needs_in_place if inplace else own.needs
        if needs == "output":
            return [_whole(result)]
        if needs == "input":
            # In place the input is overwritten, so that a copy is needed.
            return [Need(None, result.nbytes) if inplace else _whole(given)]
        tells = own.output_tells and getattr(module, "negative_slope", 0.0) >= 0.0
        return [Need(None, bits, instead=result if tells else None)]
    if kind is nn.PReLU:
        return [_whole(given)] if trained else [Need(None, bits)]
    if kind is nn.Dropout:
        drops = module.training and 0.0 < getattr(module, "p", 0.0) < 1.0
        return [Need(None, bits)] if drops else []
    if issubclass(kind, _MaxPoolNd):
        dimensions = int(kind.__name__[-2])
        kernel_size: Any = module.kernel_size
        places = math.prod(each("kernel_size", kernel_size, dimensions))  # in a window
        return [Need(None, result.numel() * (1 if places <= 2**8 else 2 if places <= 2**16 else 4))]
    return []


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of torch.nn where this one does the same; else this one."""
    own = own_base(kind)
    original = None if own is None else ORIGINALS.get(own)
    if own is None or original is None:
        return kind
    return original if same_work(kind, own) or same_work(kind, original) else kind


def _whole(tensor: Tensor) -> Need:
    size = tensor.numel() * tensor.element_size()  # a copy, if the storage is larger
    try:
        return Need(tensor, min(size, tensor.untyped_storage().nbytes()))
    except (NotImplementedError, RuntimeError):
        return Need(tensor, size)


def _in_type_of_autocast(tensor: Tensor) -> Need:
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return _whole(tensor)
    low = torch.get_autocast_dtype(device)
    if low.itemsize >= tensor.element_size() or tensor.dtype is torch.float64:
        return _whole(tensor)
    return Need(tensor, tensor.numel() * low.itemsize, dtype=low)


# -- Classes that derive from a layer --------------------------------------------------------------

_WORK = ("forward", "_conv_forward")  # what brim's layers override


def with_torchs_work(kind: type[nn.Module]) -> type[nn.Module] | None:
    """This class with the forward of torch.nn; None for an unknown class.

    Example:
        >>> import brim
        >>> class Mine(brim.nn.ReLU): ...
        >>> with_torchs_work(Mine).forward is nn.ReLU.forward
        True
    """
    made_of = original_of(kind)
    if made_of is not None:
        return made_of
    own = own_base(kind)
    if own is None or not same_work(kind, own):
        return None
    if kind in ORIGINALS:
        return ORIGINALS[kind]
    original = ORIGINALS.get(own) or STAND_INS[own]
    work = {name: getattr(original, name) for name in _WORK if hasattr(original, name)}
    return type(kind.__name__, (kind,), work)
