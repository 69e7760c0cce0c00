"""Parameters that are not copied, watched for changes: the frozen, and those of unknown modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from brim import _C

_SAMPLE = 256
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
        self._named = named
        self._marks = _marks(named.values())
        ids = {id(tensor) for tensor in known}
        # By type(), since objects may pretend another class. Weakly: the work may drop them.
        self._others = [
            (weakref.ref(found), _trained(found))
            for found in _C.live_objects(torch.nn.Parameter)
            if id(found) not in ids and not is_lazy(found)
        ]

    def changed(self) -> list[str]:
        """What changed since, in words; nothing is watched any more."""
        now = zip(self._named, self._marks, _marks(self._named.values()), strict=True)
        names = [name for name, before, after in now if before != after]
        living = [(found(), before) for found, before in self._others]
        count = sum(found is not None and _trained(found) != before for found, before in living)
        self._named, self._marks, self._others = {}, [], []
        return names + ([f"{count} of modules that were not found"] if count else [])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _trained(parameter: torch.Tensor) -> Any:
    gradient = parameter.grad
    return _version(parameter), None if gradient is None else (id(gradient), _version(gradient))


def _marks(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Of each the version, and the bytes of a few values: writes to `.data` keep the version.

    One transfer per device, since each waits for the device.
    """
    tensors = list(tensors)
    samples: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, tensor in enumerate(tensors):
        plain = type(tensor) in _PLAIN and tensor.layout == torch.strided
        if plain and not (tensor.is_meta or tensor.is_quantized) and tensor.numel() > 0:
            samples.setdefault(tensor.device, {})[i] = _sample(tensor)
    values = [b""] * len(tensors)
    for of_device in samples.values():
        together = bytes(torch.cat(list(of_device.values())).tolist())
        start = 0
        for i, sample in of_device.items():
            values[i] = together[start : start + len(sample)]
            start += len(sample)
    return [(_version(tensor), value) for tensor, value in zip(tensors, values, strict=True)]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of at most `_SAMPLE` values. Steps along each dimension copy nothing else."""
    values = tensor.detach().resolve_conj().resolve_neg()
    left = _SAMPLE
    for dim, length in enumerate(tensor.shape):
        step = -(-length // left)
        values = values[(slice(None),) * dim + (slice(None, None, step),)]
        left //= values.shape[dim]
    return values.reshape(-1).contiguous().view(torch.uint8)
