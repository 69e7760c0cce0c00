"""Parameters that are not copied, watched for changes: the frozen, and those of unknown modules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_SAMPLE = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Watched:
    """Tells which parameters a piece of work changed although nothing puts them back.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> watched = Watched({"weight": layer.weight}, known=list(layer.parameters()))
        >>> _ = layer.weight.data.zero_()
        >>> watched.changed()
        ['weight']
    """

    def __init__(self, named: dict[str, torch.Tensor], known: Iterable[torch.Tensor]) -> None:
        """Note how parameters are now.

        Args:
            named: parameters with the names to tell.
            known: parameters that are in `named` or put back; all others of the process are watched
                for training: for gradients and for writes that autograd sees.
        """
        self._named = [(name, tensor, _mark(tensor)) for name, tensor in named.items()]
        ids = {id(tensor) for tensor in known}
        # By type(), since objects may pretend another class. Weakly: the work may drop them.
        self._others = [
            (weakref.ref(found), _trained(found))
            for found in gc.get_objects()
            if issubclass(type(found), torch.nn.Parameter)
            and id(found) not in ids
            and not is_lazy(found)
        ]

    def changed(self) -> list[str]:
        """What changed since, in words; nothing is watched any more."""
        names = [name for name, tensor, before in self._named if _mark(tensor) != before]
        living = [(found(), before) for found, before in self._others]
        count = sum(found is not None and _trained(found) != before for found, before in living)
        self._named, self._others = [], []
        return names + ([f"{count} of modules that were not found"] if count else [])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _trained(parameter: torch.Tensor) -> Any:
    gradient = parameter.grad
    return _version(parameter), None if gradient is None else (id(gradient), _version(gradient))


def _mark(tensor: torch.Tensor) -> Any:
    """The version, and the bits of a few values: writes to `.data` do not change the version."""
    plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_meta
    bits = _BITS.get(tensor.element_size())
    if not plain or bits is None or tensor.numel() == 0:
        return _version(tensor)
    values = tensor.detach().flatten()[:: -(-tensor.numel() // _SAMPLE)].contiguous()
    return _version(tensor), hash(tuple(values.view(bits).tolist()))
