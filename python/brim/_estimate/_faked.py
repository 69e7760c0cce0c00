"""Tensors that stand for others on a device, for code that looks at them and runs no kernel."""

from __future__ import annotations

import torch

from brim._estimate._cuda import choose_cuda
from brim._estimate._surroundings import keep_thread
from brim._estimate._swap import Swap
from brim._estimate._target import target_device
from brim._estimate._temporaries import tensors_in
from brim._estimate._threads import OneThread
from brim._state.undoing import Undoing
from brim.memory import DeviceLike


def make_fake(undo: Undoing, model: torch.nn.Module, inputs: object, device: DeviceLike) -> None:
    """Until the block ends, a model that has no values or is not on the device is a fake one there.

    Args:
        undo: the block.
        model: any module.
        inputs: of its call; tensors in any nesting.
        device: None for that of a model that has values. It need not be there.
    """
    own = [*model.parameters(), *model.buffers()]
    kinds = {tensor.device.type for tensor in own}
    target = target_device(device)
    if "meta" not in kinds and (device is None or kinds <= {target.type}):
        return
    mode = OneThread()
    swap = Swap(undo, mode, target, target.type != "cpu", [])
    torch.clear_autocast_cache()
    for tensor in (*own, *tensors_in(inputs)):
        swap.swap(tensor)
    keep_thread(undo)  # put back ahead of the tensors
    if target.type == "cuda":
        choose_cuda(undo, True, mode.is_here, lambda: None)
    mode.__enter__()  # the block leaves it
