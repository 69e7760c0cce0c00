"""Classes that derive from a layer: which of them compute as it does, and as torch.nn's does."""

from __future__ import annotations

from torch import nn

from brim.nn.convert import ORIGINALS, STAND_INS, own_base

__all__ = ["same_work", "with_torchs_work"]

_WORK = ("forward", "_conv_forward")  # what brim's layers override


def same_work(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether a class computes by the same functions as another.

    Example:
        >>> class Mine(nn.ReLU): ...
        >>> class Other(nn.ReLU):
        ...     def forward(self, x): return x
        >>> same_work(Mine, nn.ReLU), same_work(Other, nn.ReLU)
        (True, False)
    """
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in _WORK)


def with_torchs_work(kind: type[nn.Module]) -> type[nn.Module] | None:
    """This class with the forward of torch.nn; None for an unknown class.

    Example:
        >>> import brim
        >>> class Mine(brim.nn.ReLU): ...
        >>> with_torchs_work(Mine).forward is nn.ReLU.forward
        True
    """
    own = own_base(kind)
    if own is None or not same_work(kind, own):
        return None
    if kind in ORIGINALS:
        return ORIGINALS[kind]
    original = ORIGINALS.get(own) or STAND_INS[own]
    work = {name: getattr(original, name) for name in _WORK if hasattr(original, name)}
    return type(kind.__name__, (kind,), work)
