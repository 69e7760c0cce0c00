"""Two measures of what is kept for backward.

One is what autograd is asked to keep (saved-tensor hooks; each storage once, parameters and
buffers do not count), the other is what memory is really held once input and output are let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


class Held:
    """A tensor that autograd keeps; dies when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def asked_to_keep(call: Callable[[], torch.Tensor], layer: nn.Module) -> int:
    """Bytes of the storages that autograd keeps after the call."""
    held: list[weakref.ref[Held]] = []

    def pack(tensor: torch.Tensor) -> Held:
        packed = Held(tensor)
        held.append(weakref.ref(packed))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        loss = call()
    storages = [h.tensor.untyped_storage() for ref in held if (h := ref()) is not None]
    own = {t.untyped_storage().data_ptr() for t in [*layer.parameters(), *layer.buffers()]}
    sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}
    del loss
    return sum(sizes.values())


def really_held(call: Callable[[], torch.Tensor]) -> int:
    """Bytes that stay allocated after the call, without its result."""
    with brim.PeakMeter("cpu") as meter:
        loss = call()
    return meter.left - loss.nbytes
