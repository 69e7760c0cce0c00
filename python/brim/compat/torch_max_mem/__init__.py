"""The face of `torch_max_mem` 0.1.6: halve a parameter until the call fits, and remember it.

Example:
    >>> import torch
    >>> from brim.compat.torch_max_mem import maximize_memory_utilization
    >>> @maximize_memory_utilization(safe_devices=("cpu", "cuda"))
    ... def nearest(x, y, batch_size):
    ...     return torch.cat([torch.cdist(part, y).argmin(dim=1) for part in x.split(batch_size)])
    >>> nearest(torch.eye(3), torch.eye(3), batch_size=3)
    tensor([0, 1, 2])
"""

from brim.compat.torch_max_mem.api import (
    MemoryUtilizationMaximizer,
    infer_maximum_batch_size,
    maximize_memory_utilization,
    set_memory_budget,
)

__all__ = [
    "MemoryUtilizationMaximizer",
    "infer_maximum_batch_size",
    "maximize_memory_utilization",
    "set_memory_budget",
]
