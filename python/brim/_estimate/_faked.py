"""Tensors that stand for others on a device, for code that looks at them and runs no kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from brim._estimate._cuda import choose_cuda
from brim._estimate._estimate import target_device
from brim._estimate._journal import Journal
from brim._estimate._surroundings import keep_thread
from brim._estimate._swap import Swap
from brim._estimate._temporaries import tensors_in
from brim._estimate._threads import OneThread
from brim.memory import DeviceLike


def placed(
    model: torch.nn.Module, inputs: object, device: DeviceLike
) -> contextlib.AbstractContextManager[None]:
    """Within, a model without values, or one that is not on the device, is a fake one there.

    Args:
        model: any module.
        inputs: of its call; tensors in any nesting.
        device: None for that of a model that has values.
    """
    own = [*model.parameters(), *model.buffers()]
    kinds = {tensor.device.type for tensor in own}
    target = target_device(device)
    if "meta" not in kinds and (device is None or kinds <= {target.type}):
        return contextlib.nullcontext()
    return faked([*own, *tensors_in(inputs)], target)


@contextlib.contextmanager
def faked(tensors: Iterable[torch.Tensor], target: torch.device) -> Iterator[None]:
    """Within, these tensors are fake ones on a device, which need not be there.

    Args:
        tensors: on the CPU or the meta device.
        target: the device.
    """
    mode, journal, swapped = OneThread(), Journal(), Journal()
    swap = Swap(swapped, mode, target, target.type != "cpu")
    try:  # twice: an interrupt may end the first one early
        try:
            journal.note(swapped.put_back)
            torch.clear_autocast_cache()
            keep_thread(journal)
            for tensor in tensors:
                swap.swap(tensor)
            if target.type == "cuda":
                choose_cuda(journal, True, mode.is_here, lambda: None)
            with mode:
                yield
        finally:
            journal.put_back()
    finally:
        journal.put_back()
