"""Classes as torch.nn and other libraries have them, where `convert` or brim.nn changed them."""

from __future__ import annotations

from torch import nn

from brim.nn._derived import original_of
from brim.nn.convert import ORIGINALS, STAND_INS, WORK, own_base, same_work

__all__ = ["with_torchs_work"]


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
    work = {name: getattr(original, name) for name in WORK if hasattr(original, name)}
    return type(kind.__name__, (kind,), work)
