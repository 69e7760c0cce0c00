"""The face of `memsave_torch`: layers that save only what backward needs.

`memsave_torch.util`, the scripts of its experiments, is not included; `brim.audit` measures.

Example:
    >>> import torch
    >>> from brim.compat import memsave_torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> memsave_torch.nn.convert_to_memory_saving(model)
    Sequential(
      (0): MemSaveConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): MemSaveReLU()
    )
"""

from brim.compat.memsave_torch import nn

__all__ = ["nn"]
